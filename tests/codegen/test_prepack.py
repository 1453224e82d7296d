"""`prepack`: what a plan marks as prepared, and how the package and its command say so."""

import json

import pytest

from codegen.package import make_package
from codegen.render import render
from codegen.report import explain
from codegen.spec import SpecError, load_spec
from tests.fsk import fsk

DEFAULT = "specs/default.yaml"


def manifest(spec):
    return json.loads(render(make_package(spec))["manifest.json"])


@pytest.mark.parametrize(("precision", "parts"), [("fp32", 2), ("tf32", 1)])
def test_steps_on_parameters_alone_stand_apart(precision, parts):
    found = manifest(load_spec(DEFAULT, precision, prepack=True))
    target, plan = found["targets"]["sm_90a"], found["plan"]["sm_90a"]
    assert found["prepack"] and target["prepare"] == {
        "buffers": ["weight_split", "weight_unscale"],
        "steps": [{"launch": "split_weight_sm90a_launch", "args": ["gemm.weight", "weight_split", "weight_unscale"]}],
    }
    assert [step["launch"] for step in target["steps"]] == ["split_x_sm90a_launch", "gemm_sm90a_launch"]
    assert plan["prepared_bytes"] == parts * 8192 * 8192 * 2 + 8192 * 4
    assert plan["workspace_bytes"] == parts * 1024 * 8192 * 2 + 1024 * 4
    for name in ("cpu", "sm_80"):
        assert "prepare" not in found["targets"][name] and "prepared_bytes" not in found["plan"][name]


def test_without_it_nothing_is_prepared():
    found = manifest(load_spec(DEFAULT))
    assert "prepack" not in found and not any("prepare" in target for target in found["targets"].values())


def test_halves_need_no_preparation():
    found = manifest(load_spec(DEFAULT, "bf16", prepack=True))
    assert found["prepack"] and "prepare" not in found["targets"]["sm_90a"]


def test_the_plan_is_explained():
    text = explain(make_package(load_spec(DEFAULT, prepack=True), ("sm_90a",)).plans[0])
    assert "once for given parameters" in text and "prepared: 268.47 MB (weight_split, weight_unscale), kept by each model on each device" in text


def test_the_package_is_another_one_and_can_be_made_again(tmp_path):
    result = fsk("generate", DEFAULT, "--prepack", "--target", "sm_90a", "--out", str(tmp_path))
    folder = tmp_path / "gemm_groupnorm_hardtanh_prepacked"
    assert result.exit_code == 0 and [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert json.loads((folder / "manifest.json").read_text())["regenerate"] == f"make generate SPEC={DEFAULT} PREPACK=1"
    again = load_spec(folder / "spec.yaml")
    assert again.prepack and again.package == folder.name
    assert manifest(load_spec(folder / "spec.yaml", prepack=True))["regenerate"].endswith("spec.yaml"), "the file itself says so"


def test_a_name_that_ends_like_one_is_refused(tmp_path):
    text = "name: layer_prepacked\nbatch: 4\nchain:\n  - linear: {name: gemm, in_features: 8, out_features: 8}\n  - group_norm: {name: norm, num_groups: 2}\n"
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(SpecError, match="layer_prepacked ends in _prepacked, which marks a package's prepared weights"):
        load_spec(tmp_path / "t.yaml")
