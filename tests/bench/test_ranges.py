"""A range of batches in the bench: every size is verified, timed and recorded for itself."""

import json

import pytest
import torch
from click.testing import CliRunner

from bench import run, verify
from bench.evidence import wanted_jobs
from bench.records import find, present_keys, state_of
from bench.subject import Subject, built_target, construct, emit
from bench.tables import state_today
from codegen.spec import load_spec

SPEC = """\
name: ranged_bench
batch: [2, 6]
chain:
  - linear: {name: gemm, in_features: 16, out_features: 32}
  - group_norm: {name: norm, num_groups: 4}
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """The spec's path, in a folder of its own where packages go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "spec.yaml").write_text(SPEC)
    return "spec.yaml"


def test_a_size_has_its_own_spec_inputs_and_manifest(spec):
    emitted = emit(spec, target="cpu")
    device = torch.device("cpu")
    ours = construct(emitted, device, "cpu")
    assert [size.label for size in emitted.sizes] == ["ranged_bench, batch 2", "ranged_bench, batch 6"]
    for size in emitted.sizes:
        (x,) = size.module.get_inputs()
        assert x.shape == (size.batch, 16) == size.spec.input_shape
        assert size.key("cpu") == present_keys(spec, "fp32", batch=size.batch)["cpu"]
        assert size.floor("cpu")["flop"] == 2 * size.batch * 16 * 32
        assert built_target(ours, size.batch) == "cpu"
        assert Subject(size, ours, device).run_ours((x,)).shape == size.spec.output_shape
    assert len({size.key("cpu") for size in emitted.sizes}) == 2


def test_one_batch_is_its_own_only_size():
    emitted = emit("specs/gemm_groupnorm_hardtanh_small.yaml", target="cpu")
    assert emitted.sizes == (emitted,) and emitted.batch is None and emitted.at(7) is emitted


def test_verify_examines_every_size(spec, tmp_path):
    result = CliRunner().invoke(verify.main, [spec, "--device", "cpu", "--family", "benchmark", "--family", "nonfinite", "--json", str(tmp_path / "found.json")])
    assert result.exit_code == 0, result.output
    assert list(json.loads((tmp_path / "found.json").read_text())) == ["ranged_bench, batch 2", "ranged_bench, batch 6"]


def test_bench_records_every_size_under_its_own_name(spec, tmp_path):
    results = tmp_path / "results"
    done = CliRunner().invoke(run.main, [spec, "--device", "cpu", "--peers", "eager", "--seconds", "0.05", "--results", str(results)])
    assert done.exit_code == 0, done.output
    for batch in (2, 6):
        record = find(results, "cpu", "ranged_bench", "fp32", batch=batch)
        assert (record["spec"], record["batch"]) == (f"ranged_bench, batch {batch}", batch)
        assert state_of(record, present_keys(spec, "fp32", batch=batch)) == "unverified", "it was timed alone"
        assert state_today(record) == "unverified" and state_today({**record, "batch": 5}) == "changed"


def test_evidence_takes_the_spec_as_one_job(spec):
    assert wanted_jobs((spec,), ()) == [(load_spec(spec).path, "fp32")]
