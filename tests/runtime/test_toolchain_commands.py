"""Commands that the environment names: launchers, the compiler, flags; each of them reaches the build and its key."""

import shlex
import shutil
from pathlib import Path

import pytest

from runtime import ToolchainError, toolchain
from runtime.build import NINJA_FILE, ensure_built, write_build_folder
from runtime.commands import split_command, split_host_option
from tests.fsk import words

GXX = shutil.which("g++")


def commands(build, folder: Path) -> list[list[str]]:
    """The compile and the link command of a build."""
    folder.mkdir()
    write_build_folder(build, folder)
    lines = (folder / NINJA_FILE).read_text().splitlines()
    return [shlex.split(line.partition("=")[2]) for line in lines if line.startswith("  command")]


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


@pytest.fixture
def launcher(tmp_path) -> Path:
    """A program that writes down what it is called with, and calls it."""
    return script(tmp_path / "tools" / "launch", f'echo "$*" >> "{tmp_path}/launched"\nexec "$@"\n')


@pytest.mark.parametrize(
    ("text", "launchers", "flags"),
    [
        ("g++", (), ()),
        ("  g++  ", (), ()),
        ("g++ -pthread", (), ("-pthread",)),
        ("env g++ -O1 -DA='b c'", ("env",), ("-O1", "-DA=b c")),
        ("env CPATH=x-gcc nice -n 5 g++ -B /usr/bin/gcc -pthread", ("env", "CPATH=x-gcc", "nice", "-n", "5"), ("-B", "/usr/bin/gcc", "-pthread")),
        (f"{GXX} -m64", (), ("-m64",)),
    ],
)
def test_a_command_is_launchers_compiler_flags(text, launchers, flags):
    command = split_command("CXX", text)
    found = tuple(shutil.which(launchers[0]) if index == 0 else word for index, word in enumerate(launchers))
    assert (command.launcher, command.path, command.flags) == (found, GXX, flags)


@pytest.mark.parametrize("text", ["", " ", "\t\n"])
def test_blank_names_nothing(text):
    assert split_command("CXX", text) is None


@pytest.mark.parametrize("variable", ["CXX", "NVCC", "CUDAHOSTCXX"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g++'", "cannot be split into words .no closing quotation"),
        ('nvcc "-O2', "cannot be split into words .no closing quotation"),
        ("g++ \\", "cannot be split into words .no escaped character"),
        ("-pthread", "names no compiler"),
        ("no-such-launcher g++ -pthread", "names 'no-such-launcher' in front of 'g\\+\\+', which was not found"),
        ("A=1 g++", "names 'A=1' in front of 'g\\+\\+', which was not found"),
        ("no-such-g++ -pthread", "names 'no-such-g\\+\\+', which was not found"),
    ],
)
def test_what_is_no_command_is_a_sentence(tiny, monkeypatch, variable, text, message):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ToolchainError, match=f"^{variable} .*{message}"):
        tiny.plan("cpu" if variable == "CXX" else "sm_80")
    output = words("doctor")
    assert variable in output


def test_flags_of_cxx_are_used_in_compiling_and_linking(tiny, monkeypatch, tmp_path):
    before = tiny.plan().key
    monkeypatch.setenv("CXX", "g++ -pthread -DNOTE='a b'")
    build = tiny.plan()
    for command in commands(build, tmp_path / "folder"):
        assert command[:3] == [GXX, "-pthread", "-DNOTE=a b"]
    assert build.key != before and "-pthread" in build.flags
    assert ensure_built(build).exists()
    monkeypatch.setenv("CXX", "g++ -pthread -DNOTE='a c'")
    assert tiny.plan().key not in (before, build.key)


def test_flags_of_the_host_compiler_reach_it_through_nvcc(tiny, monkeypatch, tmp_path):
    before = tiny.plan("sm_80").key
    monkeypatch.setenv("CXX", "g++ -DUNUSED")
    of_cxx = tiny.plan("sm_80").key
    monkeypatch.setenv("CUDAHOSTCXX", "g++ -pthread -Wl,-O1,--hash-style=gnu")
    monkeypatch.setenv("NVCC", "nvcc -lineinfo")
    build = tiny.plan("sm_80")
    for command in commands(build, tmp_path / "folder"):
        assert command[1:3] == ["-ccbin", GXX] and "-lineinfo" in command and "-DUNUSED" not in command
        assert command[command.index("-pthread") - 1] == "-Xcompiler"
    assert len({before, of_cxx, build.key}) == 3
    assert ensure_built(build).exists()


def test_launchers_are_called_and_are_no_part_of_the_key(tiny, monkeypatch, tmp_path, launcher):
    before = tiny.plan().key, tiny.plan("sm_80").key
    monkeypatch.setenv("CXX", f"{launcher} g++")
    monkeypatch.setenv("NVCC", f"{launcher} nvcc")
    assert (tiny.plan().key, tiny.plan("sm_80").key) == before
    ensure_built(tiny.plan())
    compiled = (tmp_path / "launched").read_text().splitlines()
    assert any(" -c cpu.cpp" in line and line.startswith(GXX) for line in compiled)
    for command in commands(tiny.plan("sm_80"), tmp_path / "folder"):
        assert command[:2] == [str(launcher), shutil.which("nvcc")] and command[2:4] == ["-ccbin", GXX]


def test_settings_that_a_launcher_makes_are_part_of_the_key(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "env CPATH=/one g++")
    one = tiny.plan().key
    monkeypatch.setenv("CXX", "env CPATH=/two g++")
    assert tiny.plan().key != one


@pytest.mark.parametrize("installed", [False, True])
def test_an_accelerator_is_used_where_it_is_installed(tiny, monkeypatch, tmp_path, launcher, installed):
    if installed:
        launcher.rename(launcher.with_name("ccache"))
    monkeypatch.setenv("PATH", f"{launcher.parent}:{Path(GXX).parent}:{Path(toolchain.find_ninja().path).parent}")
    monkeypatch.setenv("CXX", "ccache g++ -pthread")
    build = tiny.plan()
    assert build.tools.gxx.path == GXX and build.tools.gxx.flags == ("-pthread",)
    assert build.tools.gxx.launcher == ((str(launcher.with_name("ccache")),) if installed else ())
    ensure_built(build)
    assert (tmp_path / "launched").exists() == installed
    output = words("doctor")
    assert ("without ccache, which is not installed" in output) != installed


def test_a_path_that_holds_blanks_is_one_word(tmp_path, monkeypatch):
    compiler = script(tmp_path / "my tools" / "g++", f'exec {GXX} "$@"\n')
    for text in (str(compiler), f"'{compiler}' -pthread"):
        monkeypatch.setenv("CXX", text)
        assert toolchain.find_gxx().path == str(compiler)


def test_relative_programs_are_found_from_where_the_build_runs(tiny, tmp_path, monkeypatch):
    script(tmp_path / "bin" / "g++", f'exec {GXX} "$@"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "bin/g++")
    assert ensure_built(tiny.plan()).exists()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", f"bin:{Path(GXX).parent}:{Path(toolchain.find_ninja().path).parent}")
    assert toolchain.find_gxx().path == str(tmp_path / "bin" / "g++")
    script(tmp_path / "cuda" / "bin" / "nvcc", "exit 0")
    monkeypatch.setenv("CUDA_HOME", "cuda")
    assert toolchain._locate_nvcc()[0].path == str(tmp_path / "cuda" / "bin" / "nvcc")


def test_the_order_of_the_host_compilers(tmp_path, monkeypatch):
    named = [script(tmp_path / str(number) / "g++", f'exec {GXX} "$@"\n') for number in range(4)]
    expected = [GXX]
    assert toolchain.find_host_compiler().path == expected[-1]
    for variable, text, compiler in (
        ("CXX", str(named[0]), named[0]),
        ("NVCC_CCBIN", str(named[1].parent), named[1]),  # nvcc takes a folder there
        ("CUDAHOSTCXX", f"{named[2]} -pthread", named[2]),
        ("NVCC", f"nvcc -ccbin {named[3]} -lineinfo", named[3]),
    ):
        monkeypatch.setenv(variable, text)
        assert toolchain.find_host_compiler().path == str(compiler), variable
    assert toolchain.find_nvcc().flags == ("-lineinfo",)  # nvcc refuses a second -ccbin
    assert toolchain.find_gxx().path == str(named[0])


@pytest.mark.parametrize("options", [("-ccbin", "x", "-g"), ("-ccbin=x", "-g"), ("-g", "--compiler-bindir=x"), ("-ccbin", "y", "-g", "-ccbin", "x")])
def test_nvccs_own_option_for_the_host_compiler(options):
    assert split_host_option(options) == (("-g",), "x")


def test_a_portable_build_takes_no_native_flag_from_a_command(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "g++ -march=native")
    build = tiny.plan(portable=True)
    assert "-march=native" not in build.flags
    assert not any("-march=native" in command for command in commands(build, tmp_path / "folder"))


def test_the_doctor_shows_the_whole_command(monkeypatch, launcher):
    monkeypatch.setenv("CXX", f"{launcher} g++ -pthread")
    monkeypatch.setenv("CUDAHOSTCXX", "g++ -O2")
    output = words("doctor")
    assert "(from CXX), with -pthread, behind" in output
    assert "g++ for CUDA" in output and "(from CUDAHOSTCXX), with -O2" in output
