"""Measured records decide where a plan names their device class, and nowhere else."""

from dataclasses import replace

import pytest

from codegen.index import entries
from codegen.package import make_package
from codegen.plan import Refusal, plan, tuned
from codegen.plan.planner import choices, planned
from codegen.plan.route import Request
from codegen.render import render
from codegen.report import explain
from codegen.spec import load_spec
from codegen.targets import DEVICES, TARGETS

LIBRARY = {"target": "sm_80", "route": "library", "key": "b"}
HOPPER = {"target": "sm_90a", "route": "gemm_sm90a", "key": "c"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of records in the place of codegen/tuned/."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path / "tuned")
    return tmp_path / "tuned"


@pytest.fixture
def spec():
    return load_spec("specs/default.yaml", "fp16")


def tile_of(spec, index: int) -> dict:
    """The index-th of the sm_80 GEMMs that the planner would measure on an H100, as a record's row."""
    found = [(target, choice) for target, choice in choices(spec, DEVICES["h100"]) if choice.route == "gemm"]
    return {**tuned.row_of(*found[index]), "key": "a"}


def record(spec, *rows: tuple[dict, float]) -> None:
    """Write rows (candidate, ms) for the H100."""
    listed = [{**row, "ms": ms, "error": 1e-4} for row, ms in sorted(rows, key=lambda item: item[1])]
    tuned.write("h100", {tuned.signature(spec): {"spec": tuned.signature(spec), "gpu": "NVIDIA H100", "torch": "2.11.0", "candidates": listed}})


def test_a_record_decides_for_its_class_alone(folder, spec):
    """The least expected of the candidates wins because it was measured so; plans that name no class, or another, stay as they are."""
    other = tile_of(spec, 2)
    before = {device: render(make_package(spec, ("sm_80",), device)) for device in (None, "a100")}
    record(spec, (other, 0.2), (LIBRARY, 0.3))
    found = plan(spec, "sm_80", "h100")
    assert any(f"tiles of {other['knobs']['tile']}" in line for line in found.why)
    assert "tuned/h100.yaml, measured on NVIDIA H100" in found.why[0] and "0.2000 ms, the next best 0.3000 ms" in found.why[0]
    assert found.why[0] in explain(found)
    assert {device: render(make_package(spec, ("sm_80",), device)) for device in (None, "a100")} == before


def test_without_a_record_the_planner_decides(folder, spec):
    record(replace(spec, batch=spec.batch), (LIBRARY, 0.2))
    other = load_spec("specs/gemm_groupnorm_hardtanh_small.yaml", "fp16")
    assert plan(other, "sm_80", "h100").why == planned(Request(other, TARGETS["sm_80"], DEVICES["h100"])).why


def test_hopper_is_left_to_a_faster_target(folder, spec):
    record(spec, (LIBRARY, 0.2), (HOPPER, 0.25))
    package = make_package(spec, device="h100")
    assert [p.target.name for p in package.plans] == ["cpu", "sm_80"]
    assert dict(package.skipped)["sm_90a"].startswith("sm_80 takes 0.2000 ms and this target 0.2500 ms")
    record(spec, (LIBRARY, 0.25), (HOPPER, 0.2))
    assert [p.target.name for p in make_package(spec, device="h100").plans] == ["cpu", "sm_80", "sm_90a"]


def test_a_candidate_that_was_rejected_decides_nothing(folder, spec):
    signature = tuned.signature(spec)
    row = {**LIBRARY, "rejected": "normal: relative error"}
    tuned.write("h100", {signature: {"spec": signature, "gpu": "NVIDIA H100", "torch": "2.11.0", "candidates": [row]}})
    assert tuned.decide(spec, "sm_80", "h100") is None


def test_a_record_of_a_tile_that_is_gone_says_what_to_do(folder, spec):
    row = tile_of(spec, 0)
    record(spec, ({**row, "knobs": {**row["knobs"], "tile": "48x48"}}, 0.2))
    with pytest.raises(Refusal, match="has no sm_80_gemm_fp16_48x48_.* any more; measure again"):
        plan(spec, "sm_80", "h100")


def test_the_signature_holds_sizes_and_no_names_or_bounds(spec):
    text = tuned.signature(spec)
    assert text == "fp16 1024x8192: linear(in_features=8192 out_features=8192 bias=true) group_norm(num_groups=16 affine=true) hardtanh()"
    assert tuned.signature(replace(spec, name="other", path="other.yaml")) == text
    assert len({tuned.signature(s) for s in (spec, replace(spec, math="fp16"), replace(spec, gemm="library"), spec.with_precision("bf16"))}) == 4


@pytest.mark.parametrize("device", [name for name in DEVICES])
def test_every_choice_is_planned_and_has_a_name_of_its_own(device):
    for path, precision in entries_of_all():
        spec = load_spec(path, precision)
        found = choices(spec, DEVICES[device])
        assert len({(target, choice.label) for target, choice in found}) == len(found)
        for target, choice in found:
            row = tuned.row_of(target, choice)
            assert tuned.choice_of(row) == choice and plan(spec, target, device, forced=choice)


def test_shipped_records_are_readable():
    for path in tuned.FOLDER.glob("*.yaml"):
        assert path.stem in DEVICES
        for record in tuned.records(path.stem).values():
            times = [row["ms"] for row in record["candidates"] if "ms" in row]
            assert times == sorted(times) and all(row["target"] in DEVICES[path.stem].targets for row in record["candidates"])


def entries_of_all():
    from pathlib import Path

    return entries(Path("generated"))
