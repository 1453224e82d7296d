"""`make evidence` on the CPU: a record for each package, kept until its sources change, and a package that fails beside one that does not."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.evidence import wanted_jobs
from bench.records import find, keep
from bench.store import EVIDENCE, read
from bench.timing import Ceilings
from codegen import index
from tests.fsk import fsk

ROOT = Path(__file__).parents[2]
SPEC = "specs/gemm_groupnorm_hardtanh_small.yaml"
SMALL_94 = "specs/gemm_biasadd_hardtanh_mish_groupnorm_small.yaml"


def evidence(folder, *arguments):
    command = [sys.executable, "-m", "fixed_shape_kernels", "evidence", *arguments, "--device", "cpu", "--seconds", "0.2", "--results", folder / "results", "--out", folder / "packages"]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def recorded(folder):
    return find(folder / "results", "cpu", "gemm_groupnorm_hardtanh_small", "fp32")


def test_every_shipped_package_is_wanted_checked_in_or_not(monkeypatch):
    monkeypatch.chdir(ROOT)
    every = wanted_jobs((), ())
    assert every == index.entries(ROOT / "generated") and len(every) == 39 > len(index.exemplars(ROOT / "generated"))
    assert wanted_jobs((), (), prepack=True) == index.prepared(ROOT / "generated")
    assert wanted_jobs((SPEC,), (), prepack=True) == [(SPEC, "fp32")], "what is named is tried"


def test_a_broken_line_is_named_and_stays(tmp_path):
    at = tmp_path / "results" / "cpu" / "evidence.jsonl"
    at.parent.mkdir(parents=True)
    at.write_text("<<<<<<< mine\n")
    done = evidence(tmp_path, SPEC)
    assert done.returncode == 1 and "evidence.jsonl:1: is no JSON" in (done.stdout + done.stderr).replace("\n", " ") and "Traceback" not in done.stderr
    assert at.read_text() == "<<<<<<< mine\n"


@pytest.mark.slow
def test_a_package_is_verified_timed_recorded_and_not_done_twice(tmp_path):
    done = evidence(tmp_path, SPEC, "--bundle", tmp_path / "all.tar")
    assert done.returncode == 0, done.stdout + done.stderr
    record = recorded(tmp_path)
    assert record["verified"] and record["target"] == "cpu" and all(family["ok"] for family in record["verification"])
    assert record["ours"]["ms"] > 0 and {"eager", "compile"} <= set(record["peers"]) and record["asked"]
    with tarfile.open(tmp_path / "all.tar") as archive:
        assert archive.getnames() == ["cpu/evidence.jsonl", "cpu/machine.jsonl"]
    again = evidence(tmp_path, SPEC)
    assert again.returncode == 0 and "up to date" in again.stdout


@pytest.mark.slow
def test_times_again_keep_the_verdict(tmp_path):
    assert evidence(tmp_path, SPEC).returncode == 0
    record = recorded(tmp_path)
    record["verification"][0]["told by"] = "the first run"
    record["ours"]["ms"] = 1e6
    keep(tmp_path / "results", "cpu", record)
    done = evidence(tmp_path, SPEC, "--times-again")
    assert done.returncode == 0, done.stdout + done.stderr
    again = recorded(tmp_path)
    assert again["ours"]["ms"] < 1e6 and again["verification"] == record["verification"] and again["verified"]
    keep(tmp_path / "results", "cpu", again | {"autotuned": True})
    done = evidence(tmp_path, SPEC, "--times-again")
    assert done.returncode == 0 and "add --autotuned" in done.stdout and recorded(tmp_path) == again | {"autotuned": True}


def test_a_package_short_of_memory_beside_others_is_examined_again_alone(tmp_path, monkeypatch):
    """The first answer of each is torch's for a full card; one of them finds no room alone either, and that is said."""
    asked = []

    def run_jobs(command, setting, jobs, workers, limit_s, deadline, on_result, cards=()):
        asked.append((setting["work"], list(jobs), workers))
        for name in jobs:
            full = setting["work"] == "examine" and (workers > 1 or name == "001")
            on_result(name, {"failure": "OutOfMemoryError: CUDA out of memory."} if full else {"failure": "not timed in this test"})
        return True

    monkeypatch.setattr("bench.evidence.run_jobs", run_jobs)
    monkeypatch.setattr("bench.evidence.usable_cores", lambda: 8)
    monkeypatch.setattr("bench.evidence.measure_ceilings", lambda device: Ceilings(1.0, 1.0, 1.0, 1.0, 1.0))
    done = fsk("evidence", SPEC, SMALL_94, "--device", "cpu", "--results", tmp_path / "results", "--out", tmp_path / "packages")
    assert asked[:2] == [("examine", ["000", "001"], 4), ("examine", ["000", "001"], 1)]
    assert done.exit_code == 1 and "OutOfMemoryError: CUDA out of memory" in done.output and done.output.count("OutOfMemoryError") == 1


@pytest.mark.slow
def test_a_package_that_takes_too_long_is_given_up_and_said(tmp_path):
    done = evidence(tmp_path, SPEC, "--limit-s", "0.01")
    assert done.returncode == 1 and "gemm_groupnorm_hardtanh_small could not be measured: took longer than" in done.stdout.replace("\n", " ")
    assert not read(EVIDENCE, tmp_path / "results", "cpu")


@pytest.mark.slow
def test_prepared_weights_are_measured_only_where_a_target_has_them(tmp_path):
    done = evidence(tmp_path, SPEC, "--prepack")
    assert done.returncode == 0 and "this target prepares no weights" in done.stdout
    assert not list((tmp_path / "results").glob("*/evidence.jsonl"))
