"""The example, as its text says that it is run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_the_example_divides_its_layer(count, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(TOP / "examples" / "tensor_parallel.py")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TOP)}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"'conv.weight': ({64 // count}, 64, 3, 3)" in done.stdout and float(done.stdout.split()[-1]) < 1e-6, done.stdout
