"""The whole checkout in a folder with an awkward name: generated, built and run there, with the cache beside it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
NAME = "gemm_groupnorm_hardtanh_small"

RUN = f"""
import torch
from generated.{NAME} import Model, ModelNew, get_init_inputs, get_inputs
reference, (x,) = Model(*get_init_inputs()), get_inputs()
model = ModelNew(*get_init_inputs())
model.load_state_dict(reference.state_dict())
with torch.no_grad():
    torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)
model(x).sum().backward()
"""


@pytest.mark.slow
def test_a_checkout_in_a_folder_with_spaces_and_commas(tmp_path):
    checkout = tmp_path / "my work, v2 (arch)"
    for name in ("bench", "codegen", "fixed_shape_kernels", "runtime", ".ci"):
        shutil.copytree(TOP / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(TOP / name, checkout)
    cache = checkout / "the cache"
    environment = {**os.environ, "PYTHON": sys.executable, "CODEGEN_CACHE": str(cache), "TARGETS": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}

    def run(*command):
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("make", "generate", f"SPEC=specs/{NAME}.yaml")
    run(sys.executable, "-m", "fixed_shape_kernels", "build", f"generated/{NAME}", "--target", "sm_80", "--capability", "8.6")
    run(sys.executable, "-c", RUN)
    assert len(list((cache / "v1" / "entries").glob("*/library.so"))) == 4  # sm_80 and cpu, forward and backward
    assert not list((cache / "v1").glob("failed/*"))
