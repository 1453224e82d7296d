"""Packages for several batches as folders: what their manifests may say, wheels, and prepared weights that sizes share."""

import copy
import json
import sys
import zipfile

import pytest
import torch

from runtime import Package, PackageError, doctor
from runtime.load import libraries_for
from runtime.wheel import make_wheel

from .generated_packages import CHAINS, generate, import_from
from .prepared_package import write_prepared_package
from .test_ranges import BATCHES, assert_same, gradients, pair, x_of

pytestmark = pytest.mark.usefixtures("kept_builds")

# ---- prepared weights ------------------------------------------------------------------------------------------------


def prepared_range(tmp_path, layouts):
    """Two sizes of the package with prepared weights, for batches 2 and 4, with these layouts."""
    tiny = write_prepared_package(tmp_path / "prepared")
    text = (tiny.path / "cpu.cpp").read_text()
    sizes = []

    def change(data):
        data["targets"].pop("sm_80")
        for batch, layout in zip((2, 4), layouts, strict=True):
            own = text.replace("double_launch", f"double_b{batch}_launch").replace("scale_launch", f"scale_b{batch}_launch").replace("< 32", f"< {8 * batch}")
            (tiny.path / f"cpu_b{batch}.cpp").write_text(own)
            entry = copy.deepcopy({key: data[key] for key in ("input", "output", "targets")})
            entry["batch"] = entry["input"]["shape"][0] = entry["output"]["shape"][0] = batch
            target = entry["targets"]["cpu"]
            target["sources"] = [f"cpu_b{batch}.cpp"]
            target["prepare"] |= {"layout": layout, "steps": [{"launch": f"double_b{batch}_launch", "args": ["scale", "doubled"]}]}
            target["steps"] = [{"launch": f"scale_b{batch}_launch", "args": ["x", "doubled", "y"]}]
            sizes.append(entry)
        for key in ("batch", "input", "output", "targets", "plan"):
            del data[key]
        data.update(format=2, pad_batch=True, sizes=sizes)

    tiny.edit(change)
    return tiny.model()


@pytest.mark.parametrize(("layouts", "copies"), [(("one", "one"), 1), (("one", "other"), 2)])
def test_sizes_of_one_layout_share_their_copy(tmp_path, layouts, copies):
    model = prepared_range(tmp_path, layouts)
    xs = [torch.randn(batch, 8) for batch in (2, 4, 3)]
    with torch.no_grad():
        for _ in range(2):
            for x in xs:
                assert torch.equal(model(x), x * (2 * model.scale))
        assert model._prepared.count == copies and model.prepared_bytes == copies * 32
        model.scale.mul_(3)
        for x in xs:
            assert torch.equal(model(x), x * (2 * model.scale))
        assert model._prepared.count == 2 * copies
        model.prepare()
        assert model._prepared.count == 3 * copies and model.prepared_bytes == copies * 32


# ---- manifests and wheels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data.update(sizes=[]), "each has to be there once"),
        (lambda data: data["sizes"].append(data["sizes"][0]), "each has to be there once"),
        (lambda data: data["sizes"][0].update(batch=5), "the size for batch 5 takes an input of"),
        (lambda data: data["sizes"][0]["input"]["shape"].append(2), "the size for batch 1 takes an input of"),
        (lambda data: data["sizes"][0]["output"].update(shape=[7, 24]), "the rows of its result (7, 24) are not samples"),
        (lambda data: data["sizes"][0]["targets"]["cpu"].update(flags=["-O1"]), "its sizes compile cpu in different ways"),
        (lambda data: data["sizes"][0]["targets"]["cpu"].update(steps=data["sizes"][1]["targets"]["cpu"]["steps"]), "a launcher of one name for cpu"),
        (lambda data: data.pop("sizes"), "it lacks 'sizes'"),
        (lambda data: data.pop("pad_batch"), "it lacks 'pad_batch'"),
        (lambda data: data.update(sizes=[1, 2]), "not a mapping"),
    ],
)
def test_a_manifest_that_cannot_be(tmp_path, change, problem):
    path = generate(tmp_path, CHAINS["linear"], batch=list(BATCHES), pad_batch=True).ModelNew()._package.path
    data = json.loads((path / "manifest.json").read_text())
    change(data)
    (path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(PackageError, match="is not a valid manifest") as caught:
        assert Package(path).manifest
    assert problem in str(caught.value)


def test_a_wheel_holds_every_size(tmp_path):
    package = generate(tmp_path / "packages", CHAINS["linear"], batch=list(BATCHES), pad_batch=True, name="ranged_wheel")
    model, _ = pair(package)
    wheel = make_wheel(model._package, tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        (description,) = [archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA")]
    assert "at 3 shapes" in description and "Another batch up to 8 runs the next larger one." in description
    assert "-march=native" not in (tmp_path / "installed" / "ranged_wheel" / "manifest.json").read_text()
    sys.modules.pop("ranged_wheel", None)
    installed = import_from(tmp_path / "installed" / "ranged_wheel", "ranged_wheel_installed")
    other = installed.ModelNew()
    other.load_state_dict(model.state_dict())
    for batch in (1, 3, 5, 8):
        x = x_of(package, batch)
        with torch.no_grad():
            assert_same(other(x), model(x))
        assert_same(gradients(other, x, model(x).detach()), gradients(model, x, model(x).detach()))


def test_the_doctor_names_every_library_that_some_size_needs(tmp_path, monkeypatch):
    """On an H100 the small batch runs sm_80's kernels, the large one sm_90a's."""
    wide = [{"linear": {"name": "gemm", "in_features": 4096, "out_features": 4096}}, {"group_norm": {"name": "norm", "num_groups": 16}}]
    model_class = generate(tmp_path, wide, batch=[1, 1024], targets=("cpu", "sm_80", "sm_90a")).ModelNew
    package = sys.modules[model_class.__module__].PACKAGE
    found = libraries_for(package, [(9, 0)], "")
    assert [(target.name, capability) for target, capability in found] == [("sm_90a", (9, 0)), ("sm_80", (9, 0))]
    assert all(target is package.target(target.name) for target, _ in found)
    monkeypatch.setattr(doctor, "visible_capabilities", list)
    assert [finding.what.split()[-1] for finding in doctor.examine_package(package)] == ["cpu", "cpu-backward"]
