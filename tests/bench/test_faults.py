"""A fault of the user's gets a sentence and an exit code, the same from every command."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

from bench import run, subject, timing
from bench.machine import Machine
from tests.fsk import fsk

TOP = Path(__file__).parents[2]
CHAIN = """
name: mine
batch: 2
args: {i: 16, o: 8}
chain:
  - linear: {name: fc, in_features: i, out_features: o}
  - layer_norm: {name: norm, normalized_shape: o}
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """Writes a spec into the current folder, which is empty but for it, on a machine without a GPU; its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def write(text: str) -> str:
        Path("mine.yaml").write_text(text)
        return "mine.yaml"

    return write


@pytest.mark.parametrize("command", ["generate", "explain", "standalone", "package", "demo", "verify", "bench", "evidence", "tune", "sanitize"])
@pytest.mark.parametrize("text", [None, CHAIN.replace("linear", "linnear")])
def test_a_fault_of_the_spec_is_one_of_the_call(command, text, spec):
    done = fsk(command, "nope.yaml" if text is None else spec(text))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert "no such file" in done.output or "mine.yaml:6:5" in done.output, done.output


@pytest.mark.parametrize("command", ["verify", "bench", "evidence"])
def test_a_target_that_the_spec_excludes_is_not_measured(command, spec):
    done = fsk(command, spec(CHAIN + "targets: [sm_90a]\n"))
    assert done.exit_code == 1 and "is for sm_90a alone" in done.output, done.output


def test_what_has_no_backward_is_said_before_anything_is_measured(spec, monkeypatch):
    def without_backward(*arguments):
        emitted = subject.emit(*arguments)
        (emitted.folder / "manifest.json").write_text(json.dumps(emitted.manifest | {"backward": {}}))
        return emitted

    monkeypatch.setattr(run, "emit", without_backward)
    monkeypatch.setattr(run, "measure_ceilings", lambda device: pytest.fail("measured"))
    done = fsk("bench", spec(CHAIN), "--backward")
    assert done.exit_code == 1 and "no backward is generated" in done.output, done.output


def test_the_sanitizer_asks_for_a_gpu(spec):
    done = fsk("sanitize")
    assert done.exit_code == 1 and "CUDA GPU" in done.output and "--device" not in done.output


def test_an_empty_sweep_is_refused():
    assert fsk("sweep", "--count", "0").exit_code == 2


@pytest.mark.parametrize("command", ["verify", "bench", "evidence"])
def test_one_target_is_measured_or_none(command):
    """make hands on all of TARGETS, and two are no target."""
    said = subprocess.run(["make", "-n", command, "SPEC=a.yaml", "TARGETS=cpu sm_80"], cwd=TOP, capture_output=True, text=True, check=True).stdout
    assert '--target "cpu sm_80"' in said
    done = fsk(command, "a.yaml", "--target", "cpu sm_80")
    assert done.exit_code == 2 and "is not one of" in done.output


def test_a_cpu_has_one_rate():
    rates = timing.Ceilings(30.0, 0.1, 0.1, 0.1, 0.1)
    said = run.ceilings_line(rates, Machine("CPU", "cpu", "2.11.0", None, None))
    assert said.count("0.1") == 1 and run.ceilings_line(rates, Machine("card", "h100", "2.11.0", "12.8", None)).count("0.1") == 4
