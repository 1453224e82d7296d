"""Wheels: what is in one, what it needs, and how it behaves in a bare environment and when it is damaged."""

import ast
import base64
import csv
import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fixed_shape_kernels
from codegen.folder import write_if_different
from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec
from runtime import Package, PackageError, ToolchainError, UnsupportedDeviceError, load, prebuilt, wheel
from runtime.load import choose_targets, load_functions
from runtime.wheel import distribution_name, make_wheel

from .tiny_package import ROOT, unpack, write_tiny_package

GEMM, CONV = "gemm_groupnorm_hardtanh_small", "conv2d_groupnorm_scale_maxpool_clamp_small"


@dataclass
class Bare:
    """A fresh environment with torch and the wheels, and with neither a compiler nor this repository in sight."""

    folder: Path

    def run(self, code: str) -> str:
        environment = {"PATH": str(self.folder / "empty"), "HOME": str(self.folder / "no-home"), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([self.folder / "bin" / "python", "-c", textwrap.dedent(code)], env=environment, cwd=self.folder,
                              capture_output=True, text=True, timeout=120)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def gemm_wheel(tmp_path_factory) -> Path:
    """``make package`` for the GPU and the CPU, on a machine that may have no GPU."""
    folder = tmp_path_factory.mktemp("dist")
    environment = {**os.environ, "CODEGEN_CACHE": str(folder / "cache"), "PYTHON": sys.executable, "MAX_JOBS": "1"}
    command = ["make", "package", f"SPEC=specs/{GEMM}.yaml", "TARGETS=sm_80 cpu", f"OUT={folder}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    assert str(path) in done.stdout
    return path


@pytest.fixture(scope="module")
def conv_wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("conv")
    made = make_package(load_spec(f"specs/{CONV}.yaml"), ("cpu",))
    write_if_different(folder / CONV, render(made))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CODEGEN_CACHE", str(folder / "cache"))
        return make_wheel(Package(folder / CONV), folder / "dist", "2.0.1")


@pytest.fixture(scope="module")
def bare(tmp_path_factory, gemm_wheel, conv_wheel) -> Bare:
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, gemm_wheel, conv_wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return Bare(folder)


# ---- in a bare environment -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_runs_without_compilers_and_gives_the_references_values(bare):
    output = bare.run(f"""
        import sys, torch
        started = []
        watched = ("subprocess.Popen", "os.mkdir", "os.fork", "os.exec", "os.posix_spawn")
        sys.addaudithook(lambda event, args: started.append((event, args)) if event in watched else None)
        from {GEMM} import Model, ModelNew, get_init_inputs, get_inputs
        reference, (x,) = Model(*get_init_inputs()), get_inputs()
        model = ModelNew(*get_init_inputs())
        model.load_state_dict(reference.state_dict())
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)
        assert started == [], started
        ours = [name for name in sys.modules if name.split(".")[0] in ("runtime", "codegen", "filelock", "click", "rich")]
        assert ours == [], ours
        print(model)
    """)
    assert "built=cpu" in output


@pytest.mark.slow
@pytest.mark.parametrize("name", [GEMM, CONV])
def test_it_trains_without_compilers(bare, name):
    """The backward is a library of its own, opened at the first forward that asks for gradients: it came with the wheel too.

    How exact gradients are is tested elsewhere. Here one window whose largest value is another in float64 than in fp32 is allowed.
    """
    bare.run(f"""
        import copy, sys, torch
        started = []
        watched = ("subprocess.Popen", "os.mkdir", "os.fork", "os.exec", "os.posix_spawn")
        sys.addaudithook(lambda event, args: started.append((event, args)) if event in watched else None)
        from {name} import Model, ModelNew, get_init_inputs, get_inputs
        torch.manual_seed(3)
        reference, (x,) = Model(*get_init_inputs()), get_inputs()
        model = ModelNew(*get_init_inputs())
        model.load_state_dict(reference.state_dict())
        exact = copy.deepcopy(reference).double()
        for _ in range(2):
            seen = x.clone().requires_grad_()
            model(seen).square().mean().backward()
            seen64 = x.double().requires_grad_()
            exact.load_state_dict(model.state_dict())
            exact.zero_grad()
            exact(seen64).square().mean().backward()
            pairs = [(seen, seen64), *zip(model.parameters(), exact.parameters())]
            for got, want in pairs:
                error = (got.grad.double() - want.grad).norm() / want.grad.norm()
                assert error < 1e-2, error
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            model.zero_grad()
        assert started == [], started
    """)


@pytest.mark.slow
def test_two_wheels_live_side_by_side(bare):
    bare.run(f"""
        import torch
        import {GEMM} as gemm, {CONV} as conv
        for package in (gemm, conv):
            reference, (x,) = package.Model(*package.get_init_inputs()), package.get_inputs()
            model = package.ModelNew(*package.get_init_inputs())
            model.load_state_dict(reference.state_dict())
            with torch.no_grad():
                torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-4)
        bases = [package.ModelNew.__mro__[1].__module__ for package in (gemm, conv)]
        assert bases == ["{GEMM}._runtime.module", "{CONV}._runtime.module"], bases
    """)


@pytest.mark.slow
def test_pip_knows_name_version_and_what_it_needs(bare):
    output = bare.run(f"""
        from importlib.metadata import metadata, packages_distributions, requires, version
        print(version("{GEMM}"), version("{CONV}"), requires("{GEMM}"), packages_distributions()["{GEMM}"])
        print(metadata("{GEMM}")["Summary"])
    """)
    assert output.splitlines() == [
        f"0.1.0+cpu.sm80 2.0.1 ['torch>=2.11,<3'] ['{GEMM.replace('_', '-')}']",
        f"{GEMM}: linear -> group_norm -> hardtanh, fp32",
    ]


@pytest.mark.slow
def test_a_call_that_does_not_fit_names_the_command_that_makes_another_wheel(bare):
    output = bare.run(f"""
        import torch
        from {GEMM} import ModelNew, get_init_inputs
        try:
            ModelNew(*get_init_inputs())(torch.zeros(64, 1024))
        except ValueError as error:
            print(error)
    """)
    assert f"set batch: 64 and run make package SPEC=specs/{GEMM}.yaml" in output


# ---- what is in it ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_file_says_what_it_is_for(gemm_wheel, conv_wheel):
    assert gemm_wheel.name == f"{GEMM}-0.1.0+cpu.sm80-py3-none-linux_x86_64.whl"
    assert conv_wheel.name == f"{CONV}-2.0.1-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(gemm_wheel) as archive:
        names = archive.namelist()
        assert f"{GEMM}-0.1.0+cpu.sm80.dist-info/LICENSE" in names
        assert {name.partition("/")[0] for name in names} == {GEMM, f"{GEMM}-0.1.0+cpu.sm80.dist-info"}
        assert not [name for name in names if name.endswith((".cu", ".cpp", "standalone.py"))]


@pytest.mark.slow
def test_the_record_lists_every_file_with_its_digest(gemm_wheel):
    with zipfile.ZipFile(gemm_wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert [row[0] for row in rows] == archive.namelist() and rows[-1] == [record, "", ""]
        for name, digest, size in rows[:-1]:
            content = archive.read(name)
            assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert int(size) == len(content)


@pytest.mark.slow
def test_its_modules_import_only_python_torch_and_each_other(gemm_wheel):
    with zipfile.ZipFile(gemm_wheel) as archive:
        modules = {name: ast.parse(archive.read(name)) for name in archive.namelist() if name.endswith(".py")}
    for name, tree in modules.items():
        absolute = wheel.imported_modules(ast.unparse(tree))
        assert {module.partition(".")[0] for module in absolute} <= {"torch", *sys.stdlib_module_names}, name
        for node in tree.body:  # what is imported inside a function is a builder's, for packages that are not packed
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                for module in [node.module] if node.module else [alias.name for alias in node.names]:
                    wanted = f"{Path(name).parent}/{module}"
                    assert f"{wanted}.py" in modules or f"{wanted}/__init__.py" in modules, (name, module)


@pytest.mark.slow
def test_the_gpu_library_holds_machine_code_and_ptx_and_no_path_of_the_builder(gemm_wheel):
    with zipfile.ZipFile(gemm_wheel) as archive:
        library = archive.read(f"{GEMM}/libraries/sm_80.so")
        index = json.loads(archive.read(f"{GEMM}/prebuilt.json"))
    assert index["libraries"]["sm_80"]["code"] == ["sm_80", "compute_80"]
    assert b"libcudart.so" not in library
    assert str(gemm_wheel.parent).encode() not in library


@pytest.mark.slow
def test_the_cpu_library_is_for_a_processor_level_and_uses_torchs_openmp(gemm_wheel):
    with zipfile.ZipFile(gemm_wheel) as archive:
        library = archive.read(f"{GEMM}/libraries/cpu.so")
        manifest = json.loads(archive.read(f"{GEMM}/manifest.json"))
    assert b"GOMP_parallel" in library and b"libgomp" not in library
    assert "-march=x86-64-v3" in manifest["targets"]["cpu"]["flags"] and "-march=native" not in manifest["targets"]["cpu"]["flags"]


def test_a_backward_of_its_own_is_packed_too(tiny, tmp_path, monkeypatch):
    tiny.add_backward()
    tiny.edit(lambda data: [data[part].pop("sm_80") for part in ("targets", "backward")])
    package = Package(unpack(make_wheel(tiny.package, tmp_path / "dist"), tmp_path))
    assert sorted(package.prebuilt.index["libraries"]) == ["cpu", "cpu-backward"]
    assert package.manifest.backward["cpu"].target.flags == ("-O1", "-march=x86-64-v3")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load.load_backward(package, torch.device("cpu")) is not None


@pytest.mark.slow
def test_the_wheel_of_a_gpu_target_holds_its_backward(gemm_wheel):
    with zipfile.ZipFile(gemm_wheel) as archive:
        index = json.loads(archive.read(f"{GEMM}/prebuilt.json"))["libraries"]
        assert sorted(index) == ["cpu", "cpu-backward", "sm_80", "sm_80-backward"]
        for entry in index.values():
            assert hashlib.sha256(archive.read(f"{GEMM}/{entry['file']}")).hexdigest() == entry["sha256"]
    assert index["sm_80-backward"]["code"] == ["sm_80", "compute_80"]


def test_the_same_package_gives_the_same_bytes(tiny, tmp_path):
    first = make_wheel(tiny.package, tmp_path / "first")
    tiny.path = tiny.path.rename(tmp_path / "moved")
    assert make_wheel(tiny.package, tmp_path / "second").read_bytes() == first.read_bytes()


def test_version_and_requirements_are_the_products():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (wheel.PRODUCT, wheel.VERSION, wheel.REQUIRES_PYTHON) == (project["name"], fixed_shape_kernels.__version__, project["requires-python"])
    assert project["dynamic"] == ["version"], "pyproject.toml takes the version from fixed_shape_kernels"
    assert set(wheel.REQUIRES) <= set(project["dependencies"])


# ---- on another machine ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_missing_target_is_named_with_the_command_that_adds_it(gemm_wheel, tmp_path):
    folder = unpack(gemm_wheel, tmp_path)
    without_cpu(folder)
    command = re.escape(f'make package SPEC=specs/{GEMM}.yaml TARGETS="sm_80 cpu"')
    with pytest.raises(PackageError, match=f"has no target 'cpu'.*generated for sm_80; make a wheel that has it: {command}"):
        choose_targets(Package(folder), [], "")
    with pytest.raises(UnsupportedDeviceError, match=r"7.5\); emitted: sm_80 .*8.0 or later.*the wheel holds no other"):
        choose_targets(Package(folder), [(7, 5)], "")
    with pytest.raises(UnsupportedDeviceError, match="TARGETS is 'sm_90a'.*generated for sm_80.*make a wheel that has it"):
        choose_targets(Package(folder), [(9, 0)], "sm_90a")


def without_cpu(folder: Path) -> None:
    """Makes the unpacked wheel one for ``sm_80`` alone."""
    data = json.loads((folder / "manifest.json").read_text())
    data["targets"].pop("cpu")
    data.pop("backward", None)
    (folder / "manifest.json").write_text(json.dumps(data))
    index = json.loads((folder / "prebuilt.json").read_text())
    index["manifest"] = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    (folder / "prebuilt.json").write_text(json.dumps(index))


@pytest.mark.slow
def test_a_gpu_gets_the_packed_library(gemm_wheel, tmp_path, monkeypatch):
    package = Package(unpack(gemm_wheel, tmp_path))
    monkeypatch.setattr(prebuilt, "driver_version", lambda: (99, 0))
    ((target, capability),) = choose_targets(package, [(8, 6)], "")
    assert target.name == "sm_80" and capability == (8, 6)
    assert set(load_functions(package, target, capability)) == set(target.functions)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_names_that_pip_takes_for_one_stay_apart():
    names = ["a_b", "a__b", "A_b", "_a_b", "a_b_", "ab"]
    assert len({distribution_name(name) for name in names}) == len(names)
    assert distribution_name("gemm_groupnorm_bf16") == "gemm-groupnorm-bf16"
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", distribution_name(name)) for name in [*names, "_", "__"])


def test_a_name_that_hides_a_module_is_refused(tmp_path):
    with pytest.raises(PackageError, match="would hide Python's or torch's own json"):
        make_wheel(write_tiny_package(tmp_path / "json", "json").package, tmp_path)


@pytest.mark.parametrize("version", ["1.0 beta", "", "v/../1", "1.0+Cpu_x"])
def test_an_impossible_version_is_refused(tiny, tmp_path, version):
    with pytest.raises(PackageError, match="is not a version"):
        make_wheel(tiny.package, tmp_path, version)


def test_a_wheel_cannot_be_packed_again(tiny_wheel, tmp_path):
    with pytest.raises(PackageError, match="comes from a wheel"):
        make_wheel(Package(tiny_wheel), tmp_path)


def test_a_module_that_needs_the_generator_is_refused(tiny, tmp_path):
    (tiny.path / "extra.py").write_text("def f():\n    import codegen.ops\n")
    with pytest.raises(PackageError, match="extra.py imports codegen.ops"):
        make_wheel(tiny.package, tmp_path)


def test_a_gxx_that_does_not_know_the_processor_level(tiny, tmp_path, monkeypatch):
    tiny.edit(lambda data: data["targets"]["cpu"]["flags"].append("-march=native"))
    monkeypatch.setattr(wheel, "MIN_GXX_FOR_PROCESSOR", (99,))
    with pytest.raises(ToolchainError, match="needs g[+][+] 99 or later.*leave cpu out of TARGETS"):
        make_wheel(tiny.package, tmp_path)


def test_a_wheel_that_cannot_be_written_is_told_by_its_cause(tiny, tmp_path, monkeypatch):
    tiny.edit(lambda data: data["targets"].pop("sm_80"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PackageError, match=r"cannot be written to .*a file stands where a folder is needed.*--out"):
        make_wheel(tiny.package, tmp_path / "file" / "dist")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PackageError, match="the disk is full .*free some space, or name another folder"):
        make_wheel(tiny.package, tmp_path / "dist")
    assert list((tmp_path / "dist").iterdir()) == []
