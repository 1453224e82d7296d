"""Reading a generated folder, and refusing what is not one."""

import shlex

import pytest

from runtime import Package, PackageError


def test_creating_a_package_reads_nothing(tmp_path):
    Package(tmp_path / "absent")


def test_manifest(tiny):
    manifest = tiny.package.manifest
    assert manifest.init_args == (("features", 8), ("scale_shape", (8,)))
    assert manifest.input.shape == (4, 8)
    assert [parameter.name for parameter in manifest.parameters] == ["scale"]
    assert manifest.targets["sm_80"].functions == {"scale_launch": 4}


def test_a_folder_without_manifest(tmp_path):
    with pytest.raises(PackageError, match="is not a generated package.*make generate"):
        Package(tmp_path).manifest


def test_a_half_written_manifest(tiny):
    text = (tiny.path / "manifest.json").read_text()
    (tiny.path / "manifest.json").write_text(text[:100])
    with pytest.raises(PackageError, match="cannot be read"):
        tiny.package.manifest


def test_another_format(tiny):
    package = tiny.edit(lambda data: data.update(format=3))
    with pytest.raises(PackageError, match="has format 3 and this runtime reads formats 1 and 2"):
        package.manifest


def backward(saved="t", gradients=("scale",), args=("t", "scale", "grad:y", "grad:t", "grad:scale")) -> dict:
    """The entry of a backward; the forward's library step is added where it saves ``t``."""
    steps = [{"launch": "back_launch", "args": list(args)}]
    described = {"name": saved, "shape": [4, 8], "dtype": "float32"}
    return {"sources": ["back.cpp"], "flags": [], "source_key": "", "steps": steps, "saved": [described], "gradients": list(gradients)}


def recompute(first: str) -> dict:
    return {"library": "linear", "args": [first, "scale", None], "out": "t"}


def add_library_step(data: dict) -> None:
    data["targets"]["cpu"]["steps"].insert(0, {"library": "linear", "args": ["x", "scale", None], "out": "t"})


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda data: data.pop("batch"), "lacks 'batch'"),
        (lambda data: data.update(name="../tiny"), "name is '../tiny'"),
        (lambda data: data["targets"]["cpu"]["sources"].append("../secret.cpp"), "source of cpu is '../secret.cpp'"),
        (lambda data: data["targets"]["cpu"]["steps"][-1]["args"].append("gamma"), "uses 'gamma', which nothing defines"),
        (lambda data: data["targets"]["cpu"]["steps"][-1].update(launch="f; g"), "launch is 'f; g'"),
        (lambda data: data["targets"]["sm_80"].update(arch="sm_80 -v"), "arch of sm_80"),
        (lambda data: data["targets"]["cpu"]["steps"].append({"library": "einsum", "args": [], "out": "y"}), "einsum"),
        (lambda data: data.update(backward={"gpu": {}}), "lacks 'gpu'"),
        (lambda data: data.update(backward={"cpu": backward(saved="t0")}), "saves 't0', which no library step of the forward gives"),
        (lambda data: data.update(backward={"cpu": {**backward(), "saved": backward()["saved"][0]}}), "made by another version, and has to be made again"),
        (lambda data: data.update(backward={"cpu": {**backward(), "saved": [*backward()["saved"], *backward("s0")["saved"]]}}), "saves 's0', which the forward does not keep"),
        (lambda data: data.update(backward={"cpu": backward(gradients=["bias"])}), "lacks 'bias'"),
        (lambda data: data.update(backward={"cpu": backward(args=["t", "grad:x"])}), "the backward of cpu uses 'grad:x', which nothing defines"),
        (lambda data: data.update(backward={"sm_80": {**backward(), "recompute": {"launch": "f", "args": []}}}), "computes 't' again by a step that does not"),
        (lambda data: data.update(backward={"sm_80": {**backward(), "recompute": recompute("y")}}), "computes 't' again from 'y', which nothing defines"),
    ],
)
def test_an_invalid_manifest_is_named(tiny, change, problem):
    tiny.edit(add_library_step)
    package = tiny.edit(change)
    with pytest.raises(PackageError, match="not a valid manifest") as caught:
        package.manifest
    assert problem in str(caught.value)


def test_a_backward_is_read(tiny):
    tiny.edit(add_library_step)
    read = tiny.edit(lambda data: data.update(backward={"cpu": backward()})).manifest.backward["cpu"]
    assert [entry.name for entry in read.gradients] == ["t", "scale"] and read.target.functions == {"back_launch": 5}
    assert read.target.name == "cpu-backward" and read.target.arch is None and read.saved[0].shape == (4, 8)


def test_a_backward_may_need_several_values_of_the_forward(tiny):
    tiny.edit(add_library_step)
    saved = [*backward()["saved"], {"name": "workspace", "shape": [4, 8], "dtype": "float32"}]
    read = tiny.edit(lambda data: data.update(backward={"cpu": {**backward(args=["t", "workspace", "grad:y", "grad:t"]), "saved": saved}}))
    assert [entry.name for entry in read.manifest.backward["cpu"].saved] == ["t", "workspace"]


def test_a_backward_that_computes_the_producer_again_is_read(tiny):
    """The forward need not give what it starts from."""
    read = tiny.edit(lambda data: data.update(backward={"sm_80": {**backward(), "recompute": recompute("x")}})).manifest.backward["sm_80"]
    assert read.recomputes and read.producer.call == "linear" and read.producer.args == ("x", "scale", None)
    assert read.target.name == "sm_80-backward" and read.target.arch == "native" and read.target.least_capability == (8, 0)


def test_an_absent_target_lists_those_there_are(tiny):
    with pytest.raises(PackageError, match="no target 'sm_90a'; it was generated for cpu, sm_80"):
        tiny.package.target("sm_90a")


def test_an_absent_target_says_why_or_how_to_get_it(tiny):
    """Why the generator left it out, where it did; the command that adds it, where it can; what there is, where it is none."""
    with pytest.raises(PackageError, match='make it again: make generate SPEC=specs/tiny.yaml TARGETS="cpu sm_80 sm_90a"'):
        tiny.package.target("sm_90a")
    with pytest.raises(PackageError, match="sm_70 is no target, there are cpu, sm_80, sm_90a"):
        tiny.package.target("sm_70")
    package = tiny.edit(lambda data: data.update(skipped={"sm_90a": "rows are too short"}))
    with pytest.raises(PackageError, match="left out sm_90a, which cannot serve it: rows are too short"):
        package.target("sm_90a")


def test_a_spec_elsewhere_is_made_again_from_the_packages_own(tiny):
    """Sources do not say where such a spec lies, and a command has to."""
    own = tiny.path / "spec.yaml"
    own.write_text("")
    manifest = tiny.edit(lambda data: data.update(spec=".../tiny.yaml", regenerate="make generate SPEC=.../tiny.yaml PRECISION=bf16")).manifest
    assert manifest.spec == str(own.resolve())
    assert shlex.split(manifest.regenerate) == ["make", "generate", f"SPEC={own.resolve()}", f"OUT={tiny.path.resolve().parent}", "PRECISION=bf16"]


def test_an_absent_source_says_how_to_get_it_back(tiny):
    (tiny.path / "cpu.cpp").unlink()
    with pytest.raises(PackageError, match="cpu.cpp cannot be read.*make generate SPEC=specs/tiny.yaml"):
        tiny.package.read_sources(tiny.package.target("cpu"))
