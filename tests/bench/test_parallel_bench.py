"""The bench of divided chains: one record a package, with the error and time of each way to compute it, the same from all ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_package_is_divided_timed_and_recorded(tmp_path):
    options = ["--device", "cpu", "--precision", "fp32", "--trials", "3", "--results", str(tmp_path / "results"), "--out", str(tmp_path / "packages")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fixed_shape_kernels", "parallel"]
    specs = ["specs/gemm_groupnorm_hardtanh_small.yaml", "specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml"]
    done = subprocess.run([*command, *specs, *options], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TOP)}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    conv, gemm = map(json.loads, (tmp_path / "results" / "cpu-x2" / "parallel.jsonl").read_text().splitlines())
    for record in (conv, gemm):
        calls = record["calls"]
        assert record["ranks"] == 2 and record["same_bits"] and record["collectives"] == [] and 0 <= record["communication_share"] < 1
        assert {"ours", "ours without the gather", "the gather alone", "ours, undivided", "eager, undivided", "eager on local shards, gathered"} <= set(calls)
        assert all(row["ms"] > 0 and row["trials"] == 3 for row in calls.values()) and calls["ours"]["rel_error"] <= max(3e-7, 1.1 * calls["eager, undivided"]["rel_error"])
    assert "ColwiseParallel + GroupNorm" in gemm["calls"] and "nn.Linear" in conv["failed"]["ColwiseParallel + GroupNorm"]
