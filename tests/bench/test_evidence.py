"""`make evidence` on the CPU: a record for each package, kept until its sources change, and a package that fails beside one that does not."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = "specs/gemm_groupnorm_hardtanh_small.yaml"


def evidence(folder, *arguments):
    command = [sys.executable, "-m", "bench.evidence", *arguments, "--device", "cpu", "--seconds", "0.2", "--results", folder / "results", "--out", folder / "packages"]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_package_is_verified_timed_recorded_and_not_done_twice(tmp_path):
    done = evidence(tmp_path, SPEC, "--bundle", tmp_path / "all.tar")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "results" / "cpu" / "gemm_groupnorm_hardtanh_small.fp32.json").read_text())
    assert record["verified"] and record["target"] == "cpu" and all(family["ok"] for family in record["verification"])
    assert record["ours"]["ms"] > 0 and {"eager", "compile"} <= set(record["peers"]) and record["asked"]
    with tarfile.open(tmp_path / "all.tar") as archive:
        assert "cpu/gemm_groupnorm_hardtanh_small.fp32.json" in archive.getnames()
    again = evidence(tmp_path, SPEC)
    assert again.returncode == 0 and "up to date" in again.stdout


def test_a_package_that_takes_too_long_is_given_up_and_said(tmp_path):
    done = evidence(tmp_path, SPEC, "--limit-s", "0.01")
    assert done.returncode == 1 and "gemm_groupnorm_hardtanh_small could not be measured: took longer than" in done.stdout.replace("\n", " ")
    assert not list((tmp_path / "results" / "cpu").glob("gemm*"))


def test_prepared_weights_are_measured_only_where_a_target_has_them(tmp_path):
    done = evidence(tmp_path, SPEC, "--prepack")
    assert done.returncode == 0 and "this target prepares no weights" in done.stdout
    assert not list((tmp_path / "results").glob("*/gemm*"))
