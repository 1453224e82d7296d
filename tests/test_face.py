"""The package fixed_shape_kernels: what `generate`, `explain` and `load` take and give."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
import yaml

import fixed_shape_kernels as fsk

TOP = Path(__file__).parents[1]
LAYER = {
    "name": "layer", "batch": 4, "args": {"features": 16, "eps": 1e-5},
    "chain": [
        {"linear": {"name": "gemm", "in_features": 8, "out_features": "features"}},
        {"group_norm": {"name": "norm", "num_groups": 2, "eps": "eps"}},
        {"hardtanh": {"min_val": -1.0, "max_val": 1.0}}, "relu",
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """The current folder, which is empty, with a build cache beside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TARGETS", "cpu")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_path_text_and_mapping_are_the_same_spec():
    Path("layer.yaml").write_text(yaml.safe_dump(LAYER, sort_keys=False))
    elsewhere = Path("layer.yaml").rename(Path.cwd().parent / "layer.yaml")
    made = [
        fsk.generate(form, out=f"out{number}")
        for number, form in enumerate((elsewhere, str(elsewhere), elsewhere.read_text(), LAYER))
    ]
    assert all(folder.is_relative_to(f"out{number}") for number, folder in enumerate(made))
    assert all(files(folder) == files(made[0]) for folder in made) and len(files(made[0])) > 5
    assert fsk.explain(elsewhere) == fsk.explain(LAYER) and "why" in fsk.explain(LAYER)


def test_the_package_of_a_mapping_can_be_generated_again_from_its_own_spec():
    folder = fsk.generate(LAYER, targets="cpu")
    before = files(folder)
    assert folder == Path("generated/layer") and fsk.generate(folder / "spec.yaml", targets="cpu") == folder
    assert files(folder) == before


def test_a_list_may_stand_in_a_mapping_twice():
    size = [1, 1]
    text = {"name": "twice", "batch": (2, 4), "input": {"height": 8, "width": 8}}
    text["chain"] = [
        {
            "conv2d": {
                "name": "conv", "in_channels": 4, "out_channels": 8, "kernel_size": 3, "stride": size, "padding": size,
            }
        },
        {"group_norm": {"name": "norm", "num_groups": 2}},
    ]  # fmt: skip
    written = yaml.safe_load((fsk.generate(text, targets="cpu") / "spec.yaml").read_text())
    assert (
        written["batch"] == [2, 4]
        and written["chain"][0]["conv2d"]["stride"] == written["chain"][0]["conv2d"]["padding"] == size
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "<spec>:2:8: batch: 0"),
        ({"chain": ["relu"]}, "<spec>"),
        ({"name": "a\nb"}, "<spec>"),
        ({"name": "a\udcff"}, "<spec>"),
    ],
)
def test_a_wrong_mapping_is_a_spec_error_with_its_place(change, message):
    with pytest.raises(fsk.SpecError) as caught:
        fsk.generate({**LAYER, **change})
    assert message in str(caught.value) and "/tmp" not in str(caught.value) and not Path("generated").exists()


@pytest.mark.parametrize("value", [numpy.int64(4), object()])
def test_a_mapping_holds_what_yaml_holds(value):
    with pytest.raises(TypeError, match="a spec holds numbers, words, lists and mappings alone"):
        fsk.generate({**LAYER, "batch": value})
    endless = {**LAYER}
    endless["args"] = endless
    with pytest.raises(TypeError):
        fsk.generate(endless)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"targets": "sm_70"}, "'sm_70' is no target"), ({"device_class": "h1000"}, "is no device class")],
)
def test_unknown_names_say_which_there_are(options, message):
    for call in (fsk.generate, fsk.explain, fsk.load):
        with pytest.raises(ValueError, match=message) as caught:
            call(LAYER, **options)
        assert "h200" in str(caught.value) or "sm_90a" in str(caught.value)
    with pytest.raises(fsk.SpecError, match="precision 'fp8'"):
        fsk.generate(LAYER, precision="fp8")


def test_files_of_the_users_are_not_replaced():
    Path("generated/layer").mkdir(parents=True)
    Path("generated/layer/mine.py").write_text("mine")
    with pytest.raises(fsk.Refusal, match="holds no generated package"):
        fsk.generate(LAYER)
    assert (fsk.generate(LAYER, force=True) / "mine.py").read_text() == "mine"


def test_load_takes_a_spec_or_a_folder_and_its_model_is_right():
    module = fsk.load(LAYER, targets="cpu")
    assert fsk.load("generated/layer") is module and fsk.load(Path("generated/layer").resolve()) is module
    reference, (x,) = module.Model(*module.get_init_inputs()), module.get_inputs()
    model = module.ModelNew(*module.get_init_inputs())
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)


def test_a_changed_spec_is_loaded_anew_and_the_old_model_stays():
    first = fsk.load(LAYER, targets="cpu")
    old = first.ModelNew(*first.get_init_inputs())
    second = fsk.load({**LAYER, "batch": 6}, targets="cpu")
    assert second is not first and fsk.load({**LAYER, "batch": 6}, targets="cpu") is second
    new = second.ModelNew(*second.get_init_inputs())
    with torch.no_grad():
        assert new(second.get_inputs()[0]).shape == (6, 16) and old(torch.rand(4, 8)).shape == (4, 16)


def test_a_folder_without_a_package_and_options_beside_one_are_refused():
    Path("empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no generated package"):
        fsk.load("empty")
    folder = fsk.generate(LAYER, targets="cpu")
    with pytest.raises(ValueError, match="precision: options are for a spec"):
        fsk.load(folder, precision="bf16")


def test_importing_generating_and_explaining_need_no_torch():
    code = (
        f"import sys, fixed_shape_kernels as fsk; fsk.generate({LAYER!r}); fsk.explain({LAYER!r});"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(TOP)}, check=False).returncode
        == 0
    )
