"""Reading a generated folder, and refusing what is not one."""

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
    package = tiny.edit(lambda data: data.update(format=2))
    with pytest.raises(PackageError, match="has format 2 and this runtime reads format 1"):
        package.manifest


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda data: data.pop("batch"), "lacks 'batch'"),
        (lambda data: data.update(name="../tiny"), "name is '../tiny'"),
        (lambda data: data["targets"]["cpu"]["sources"].append("../secret.cpp"), "source of cpu is '../secret.cpp'"),
        (lambda data: data["targets"]["cpu"]["steps"][0]["args"].append("gamma"), "uses 'gamma', which nothing defines"),
        (lambda data: data["targets"]["cpu"]["steps"][0].update(launch="f; g"), "launch is 'f; g'"),
        (lambda data: data["targets"]["sm_80"].update(arch="sm_80 -v"), "arch of sm_80"),
        (lambda data: data["targets"]["cpu"]["steps"].append({"library": "einsum", "args": [], "out": "y"}), "einsum"),
    ],
)
def test_an_invalid_manifest_is_named(tiny, change, problem):
    package = tiny.edit(change)
    with pytest.raises(PackageError, match="not a valid manifest") as caught:
        package.manifest
    assert problem in str(caught.value)


def test_an_absent_target_lists_those_there_are(tiny):
    with pytest.raises(PackageError, match="no target 'sm_90a'; it was generated for cpu, sm_80"):
        tiny.package.target("sm_90a")


def test_an_absent_source_says_how_to_get_it_back(tiny):
    (tiny.path / "cpu.cpp").unlink()
    with pytest.raises(PackageError, match="cpu.cpp cannot be read.*make generate SPEC=specs/tiny.yaml"):
        tiny.package.read_sources(tiny.package.target("cpu"))
