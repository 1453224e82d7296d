"""`make tune`, as far as a CPU goes: candidates measured, recorded once, wrong ones rejected."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.machine import Machine
from bench.tune import __main__ as tune
from codegen.plan import tuned
from codegen.plan.candidates import Candidate
from codegen.spec import load_spec

SPEC = "specs/gemm_groupnorm_hardtanh_small.yaml"


def test_a_measured_spec_is_recorded_and_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    command = [SPEC, "--device", "cpu", "--seconds", "0.1", "--work", str(tmp_path / "work")]
    done = CliRunner().invoke(tune.main, command)
    assert done.exit_code == 0 and "recorded" in done.output, done.output
    (record,) = tuned.records("host").values()
    (row,) = record["candidates"]
    assert row["target"] == "cpu" and row["ms"] > 0 and 0 < row["error"] < 3e-7
    again = CliRunner().invoke(tune.main, command)
    assert again.exit_code == 0 and "up to date" in again.output


WRONG = {"verified": False, "verification": [{"family": "normal", "ok": False, "problems": ["relative error 1 > 0"]}]}


@pytest.mark.parametrize("verdict", [WRONG, {"failure": "ended its process with code -11"}])
def test_a_wrong_candidate_is_recorded_as_rejected(verdict):
    spec = load_spec(SPEC)
    right = {"verified": True, "verification": [{"family": "benchmark", "rel_error": 2e-7, "ok": True, "problems": []}]}
    tries = [tune.Try(spec, Candidate("sm_80", "library"), Path(name), name) for name in ("a", "b")]
    rows = tune.record_of(spec, tries, Machine("card", "h100", "2.11.0", None, None), {"a": verdict, "b": right}, {"b": 0.5})["candidates"]
    assert rows[0] == {"target": "sm_80", "gemm": "library", "key": "b", "ms": 0.5, "error": 2e-7}
    assert "ms" not in rows[1] and rows[1]["rejected"] in ("normal: relative error 1 > 0", "ended its process with code -11")


def test_every_candidate_of_a_gpu_spec_is_generated_apart(tmp_path):
    tries = tune.generate(load_spec(SPEC, "bf16"), "h100", tmp_path)
    assert len({t.key for t in tries}) == len(tries) > 2
    assert {t.candidate.gemm for t in tries if t.candidate.target == "sm_80"} == {"library", "generated"}
