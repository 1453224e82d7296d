"""Finding the compilers, and saying what is wrong with them before anything is compiled."""

import os
import shutil
from pathlib import Path

import pytest

from runtime import ToolchainError, compiler_flags, toolchain, tools
from runtime.build import ensure_built


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def only(monkeypatch, *folders) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, folders)))


@pytest.fixture
def toolkit(tmp_path) -> Path:
    """A copy of the installed CUDA toolkit (hard links), laid out as the wheels do: ``lib``, no ``lib64``."""
    settings = tools.nvcc_settings(shutil.which("nvcc"))
    copy = tmp_path / "with space, ünïcode and arch" / "site" / "nvidia" / "cu13"
    for folder in ("bin", "include", "lib", "nvvm", "targets"):
        source = Path(os.path.normpath(settings["TOP"])) / folder
        if source.exists():
            shutil.copytree(source, copy / folder, copy_function=link_or_copy, symlinks=True)
    return copy


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def test_order_is_cuda_home_then_path_then_wheels(toolkit, tmp_path, monkeypatch):
    on_path = Path(shutil.which("nvcc"))
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    assert toolchain.find_nvcc().path == str(toolkit / "bin" / "nvcc")
    monkeypatch.delenv("CUDA_HOME")
    assert toolchain.find_nvcc().path == str(on_path)
    monkeypatch.syspath_prepend(str(toolkit.parents[1]))
    assert toolchain.find_nvcc().origin == "PATH"
    script(tmp_path / "bin" / "uname", "exit 0")
    only(monkeypatch, tmp_path / "bin")
    assert toolchain.find_nvcc().origin == "Python packages"


def test_wheels_in_a_folder_with_spaces_compile_and_link(toolkit, tiny, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(toolkit.parents[1]))
    for tool in ("g++", "gcc", "ninja", "sh", "as", "ld", "rm", "cat"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    only(monkeypatch, tmp_path / "bin")
    build = tiny.plan("sm_80")
    assert build.tools.nvcc.path.startswith(str(toolkit))
    assert ensure_built(build).exists()


def test_half_installed_wheels_name_the_missing_one(toolkit, tmp_path, monkeypatch):
    shutil.rmtree(toolkit / "nvvm")
    monkeypatch.syspath_prepend(str(toolkit.parents[1]))
    only(monkeypatch, tmp_path)
    with pytest.raises(ToolchainError, match="nvidia-nvvm is missing: pip install"):
        toolchain.find_nvcc()


def test_wheels_of_two_cuda_versions_are_refused(toolkit, tmp_path, monkeypatch):
    for wheel, version in (("nvidia_cuda_nvcc", "13.5.37"), ("nvidia_cuda_runtime", "13.0.96")):
        info = toolkit.parents[1] / f"{wheel}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(toolkit.parents[1]))
    only(monkeypatch, tmp_path)
    with pytest.raises(ToolchainError, match="different CUDA versions.*nvidia-cuda-nvcc==13.0.*"):
        toolchain.find_nvcc()


def test_half_installed_toolkit_is_found_out(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    shutil.rmtree(toolkit / "nvvm")
    with pytest.raises(ToolchainError, match="no cicc.*half installed"):
        toolchain.find_nvcc()


def test_toolkit_without_headers_is_found_out(toolkit, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    (toolkit / "include" / "cuda_runtime.h").unlink()
    with pytest.raises(ToolchainError, match="no cuda_runtime.h.*nvidia-cuda-runtime"):
        toolchain.find_nvcc()


def test_cuda_home_with_a_colon(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda:")
    with pytest.raises(ToolchainError, match="CUDA_HOME is '/usr/local/cuda:'.*one folder.*colon"):
        toolchain.find_nvcc()


def test_cuda_home_without_nvcc_is_not_skipped(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ToolchainError, match="CUDA_HOME is .* is not a program.*12.4 or later"):
        toolchain.find_nvcc()


def test_missing_tools_are_named_with_what_to_install(tmp_path, monkeypatch):
    only(monkeypatch, tmp_path)
    monkeypatch.setattr(toolchain, "_wheel_prefixes", lambda: [])
    with pytest.raises(ToolchainError, match="nvcc was not found.*12.4.*pip install nvidia-cuda-nvcc.*TARGETS=cpu"):
        toolchain.find_nvcc()
    with pytest.raises(ToolchainError, match=r"g\+\+ was not found on PATH; g\+\+ 9.0 or later"):
        toolchain.find_gxx()


def test_ninja_of_the_python_package_is_found(tmp_path, monkeypatch):
    only(monkeypatch, tmp_path)
    assert toolchain.find_ninja().version >= tools.MIN_NINJA


def test_too_old_nvcc_says_found_and_needed(tmp_path, monkeypatch):
    script(tmp_path / "cuda" / "bin" / "nvcc", 'echo "Cuda compilation tools, release 11.8, V11.8.89"')
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(tools, "check_nvcc_is_whole", lambda path: None)
    with pytest.raises(ToolchainError, match="nvcc 11.8.89 was found at .*CUDA_HOME.*nvcc 12.4 or later is needed"):
        toolchain.find_nvcc()


def test_too_old_gxx_says_found_and_needed(tmp_path, monkeypatch):
    old = script(tmp_path / "old-g++", "case $1 in --version) echo 'g++ (GCC) 7.5.0';; *) echo 7.5.0;; esac")
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(ToolchainError, match=r"g\+\+ 7.5.0 was found at .*CXX.*g\+\+ 9.0 or later is needed"):
        toolchain.find_gxx()


def test_another_compiler_is_not_taken_for_gxx(tmp_path, monkeypatch):
    other = script(tmp_path / "clang++", "case $1 in --version) echo 'clang version 17.0.0';; *) echo 17.0.0;; esac")
    monkeypatch.setenv("CXX", str(other))
    with pytest.raises(ToolchainError, match=r"is not g\+\+"):
        toolchain.find_gxx()


def test_a_launcher_before_the_compiler_is_left_out(monkeypatch):
    monkeypatch.setenv("CXX", "ccache g++")
    assert toolchain.find_gxx().path == shutil.which("g++")


def test_a_tool_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "PROBE_SECONDS", 0.5)
    monkeypatch.setenv("CXX", str(script(tmp_path / "g++", "sleep 100 & sleep 100\n")))
    with pytest.raises(ToolchainError, match="did not end within 0.5 seconds"):
        toolchain.find_gxx()


def test_a_broken_tool_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path / "broken", "echo no libisl; exit 1")))
    with pytest.raises(ToolchainError, match="broken --version failed with status 1.*no libisl"):
        toolchain.find_gxx()


@pytest.mark.parametrize(
    "arch, least, capability, expected",
    [
        ("sm_90a", (9, 0), (9, 0), ["-gencode=arch=compute_90a,code=sm_90a"]),
        ("sm_90a", (9, 0), None, ["-gencode=arch=compute_90a,code=sm_90a"]),
        ("native", (8, 0), (8, 6), ["-gencode=arch=compute_86,code=sm_86"]),
        ("native", (8, 0), None, ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_80,code=compute_80"]),
    ],
)
def test_arch_flags(arch, least, capability, expected):
    assert list(compiler_flags.arch_flags(arch, least, capability)) == expected


def test_a_device_newer_than_nvcc_gets_ptx():
    (flag,) = compiler_flags.arch_flags("native", (8, 0), (99, 0))
    assert "code=compute_" in flag


def test_the_arch_reaches_the_built_file(tiny):
    built = ensure_built(tiny.plan("sm_80", (8, 9))).read_bytes()
    assert b"sm_89" in built and b"sm_80" not in built
