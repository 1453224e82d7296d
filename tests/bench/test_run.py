"""`fsk bench`: what its records say of a verification that was not asked for, that was, and that failed."""

from dataclasses import replace

import pytest

from bench import run, verify
from bench.records import find, keep, present_keys, state_of
from bench.timing import Ceilings
from tests.fsk import fsk

SPEC, NAME = "specs/gemm_groupnorm_hardtanh_small.yaml", "gemm_groupnorm_hardtanh_small"


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Calls the command on a CPU in an empty folder, its records in `results`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bench.run.measure_ceilings", lambda where: Ceilings(10.0, 0.1, 0.1, 0.1, 0.1))
    return lambda *more: fsk("bench", SPEC, "--device", "cpu", "--peers", "none", "--seconds", "0.05", "--results", "results", *more)


def recorded(tmp_path):
    return find(tmp_path / "results", "cpu", NAME, "fp32")


def test_what_was_not_examined_is_neither_right_nor_wrong(bench, tmp_path):
    assert bench().exit_code == 0
    assert state_of(recorded(tmp_path), present_keys(SPEC, "fp32")) == "unverified"


@pytest.mark.parametrize("right", [True, False])
def test_times_alone_leave_the_verdict_on_the_same_sources(bench, tmp_path, right):
    bench()
    said = {"verified": right, "verification": [{"family": "normal", "ok": right}], "same_code_as": "older"}
    keep(tmp_path / "results", "cpu", recorded(tmp_path) | said)
    bench()
    assert said.items() <= recorded(tmp_path).items()
    keep(tmp_path / "results", "cpu", recorded(tmp_path) | {"key": "of other sources"})
    bench()
    assert state_of(recorded(tmp_path), present_keys(SPEC, "fp32")) == "unverified" and not said.keys() & recorded(tmp_path).keys() - {"verified"}


@pytest.fixture
def judged(monkeypatch):
    """Verification on ordinary data alone; called with a problem, it finds that from then on. The number of verifications until now, as a list's length."""
    real, problems, done = verify.verify, [], []

    def found(subject):
        done.append(subject)
        return [replace(one, problems=tuple(problems)) for one in real(subject, families=("benchmark",), repeats=0)]

    monkeypatch.setattr(run, "verify", found)
    return lambda *more: problems.extend(more) or done


@pytest.mark.parametrize("more", [(), ("--backward",)])
def test_a_wrong_result_is_said_recorded_and_a_failure(bench, judged, tmp_path, more):
    done = bench("--verify", *more)
    assert done.exit_code == 0 and "right" in done.output and recorded(tmp_path)["verified"] is True
    judged("its third digit is wrong")
    done = bench("--verify", *more)
    assert len(judged()) == 2, "a current record does not spare the verification that was asked for"
    assert done.exit_code == 1 and "its third digit is wrong" in " ".join(done.output.split()) and f"wrong: {NAME}" in done.output
    assert recorded(tmp_path)["verified"] is False and state_of(recorded(tmp_path), present_keys(SPEC, "fp32")) == "wrong"
    assert not more or "backward" in recorded(tmp_path)


def test_without_records_a_backward_is_verified_too(bench, judged):
    judged("off by one")
    assert fsk("bench", SPEC, "--device", "cpu", "--peers", "none", "--seconds", "0.05", "--verify", "--backward").exit_code == 1
