"""`make tune`, as far as a CPU goes: candidates measured, recorded once, wrong ones rejected."""

from pathlib import Path

import pytest

from bench.machine import Machine
from bench.tune import command as tune
from codegen.plan import tuned
from codegen.plan.route import Choice
from codegen.spec import load_spec, resolve
from tests.fsk import fsk

SPEC = "specs/gemm_groupnorm_hardtanh_small.yaml"


def test_a_measured_spec_is_recorded_and_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    command = [SPEC, "--device", "cpu", "--seconds", "0.1", "--work", str(tmp_path / "work")]
    done = fsk("tune", *command)
    assert done.exit_code == 0 and "recorded" in done.output, done.output
    (record,) = tuned.records("host").values()
    (row,) = record["candidates"]
    assert row["target"] == "cpu" and row["ms"] > 0 and 0 < row["error"] < 3e-7
    again = fsk("tune", *command)
    assert again.exit_code == 0 and "up to date" in again.output


WRONG = {"verified": False, "verification": [{"family": "normal", "ok": False, "problems": ["relative error 1 > 0"]}]}


CRASHED = {"failure": "ended its process with code -11"}


def test_a_wrong_candidate_is_recorded_as_rejected_and_one_that_crashed_not_at_all():
    spec = load_spec(SPEC)
    right = {"verified": True, "verification": [{"family": "benchmark", "rel_error": 2e-7, "ok": True, "problems": []}]}
    tries = [tune.Try(spec, "sm_80", Choice("library"), Path(name), name) for name in ("a", "b", "c")]
    verdicts = {"a": WRONG, "b": right, "c": CRASHED}
    rows = tune.record_of(spec, tries, Machine("card", "h100", "2.11.0", None, None), verdicts, {"b": 0.5})["candidates"]
    assert len(rows) == 2 and rows[0] == {"target": "sm_80", "route": "library", "key": "b", "ms": 0.5, "error": 2e-7}
    assert "ms" not in rows[1] and rows[1]["rejected"] == "normal: relative error 1 > 0"


@pytest.mark.slow
def test_a_spec_elsewhere_is_measured(tmp_path, monkeypatch):
    """Its name for messages (`.../mine.yaml`) is no path: the children need the file's."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    file = tmp_path / "mine.yaml"
    file.write_text(resolve(SPEC)[0].read_text())
    done = fsk("tune", file, "--device", "cpu", "--seconds", "0.1", "--work", tmp_path / "work")
    assert done.exit_code == 0 and f"SPEC={file}" in " ".join(done.output.split()), done.output
    assert all("ms" in row for record in tuned.records("host").values() for row in record["candidates"])


@pytest.mark.parametrize("verdict", [WRONG, CRASHED])
def test_a_spec_without_a_right_candidate_is_not_recorded_and_fails(verdict, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    monkeypatch.setattr(tune.Tuner, "run", lambda self, module, jobs, setting, what: dict.fromkeys(jobs, verdict))
    monkeypatch.setattr(tune.Tuner, "build", lambda self, tries: None)
    done = fsk("tune", SPEC, "--device", "cpu", "--work", tmp_path / "work")
    assert done.exit_code == 1 and "all candidates rejected" in done.output
    assert not (tmp_path / "tuned").exists()


def test_every_candidate_of_a_gpu_spec_is_generated_apart(tmp_path):
    tries = tune.generate(load_spec(SPEC, "bf16"), "h100", tmp_path)
    assert len({t.key for t in tries}) == len(tries) > 2
    assert {t.choice.route for t in tries if t.target == "sm_80"} == {"library", "gemm"}
