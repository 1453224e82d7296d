"""The command `fsk`: commands are listed, have examples that are valid calls, load when called, fail in sentences."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from codegen.emit import write_package
from fixed_shape_kernels import __version__, cli
from fixed_shape_kernels.cli import COMMANDS, Row
from runtime import errors
from runtime.wheel import VERSION
from tests.fsk import fsk

TOP = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TOP)}


def test_help_lists_every_command_and_imports_none():
    code = (
        "import sys, click.testing, fixed_shape_kernels.cli as cli;"
        "done = click.testing.CliRunner().invoke(cli.main, ['--help']); print(done.output);"
        "sys.exit('torch' in sys.modules or 'fixed_shape_kernels.emitting' in sys.modules or done.exit_code)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, row in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(row.summary)}$", done.stdout, re.MULTILINE), name
    assert "_FSK_COMPLETE=bash_source" in done.stdout and "Exit codes" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_shows_its_examples_and_they_are_valid_calls(name, tmp_path, monkeypatch):
    done = fsk(name, "--help")
    assert done.exit_code == 0 and "Example" in done.output, done.output
    monkeypatch.chdir(tmp_path)
    Path("KernelBench").mkdir()
    command = cli.main.get_command(click.Context(cli.main, info_name="fsk"), name)
    for example in COMMANDS[name].examples:
        assert f"  fsk {example}\n" in done.output
        first, *words = shlex.split(example)
        assert first == name
        command.make_context(name, words)  # raises UsageError where click would


def test_make_calls_commands_that_exist():
    called = re.findall(r"\$\(call fsk,(emit|run|bench)\) ([a-z-]+)", (TOP / "Makefile").read_text())
    assert len(called) > 10 and {name for _, name in called} <= set(COMMANDS)
    assert not re.search(r"-m (codegen|bench|runtime)\b(?!\.checked_in)", (TOP / "Makefile").read_text())


def test_the_version_stands_in_one_place():
    assert fsk("--version").output == f"fsk, version {__version__}\n" and VERSION == __version__
    assert 'dynamic = ["version"]' in (TOP / "pyproject.toml").read_text()


def test_an_unknown_command_names_the_nearest():
    done = fsk("expalin", "x.yaml")
    assert done.exit_code == 2 and "'expalin' is no command; did you mean explain?" in done.output


def test_a_library_that_is_missing_is_named(monkeypatch):
    """An import of what is not installed ends in a sentence; a module of ours that is missing is a fault of ours."""
    monkeypatch.setitem(COMMANDS, "report", Row("", "runtime.not_there:main", "", ()))
    with pytest.raises(ModuleNotFoundError):
        COMMANDS["report"].load("report", "fsk")
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: __import__("not_a_library_at_all.part"))
    done = fsk("report")
    assert (
        done.exit_code == 1
        and "fsk report needs not_a_library_at_all, which is not installed here: pip install not_a_library_at_all"
        in done.output
    )


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (PermissionError(13, "Permission denied", "/somewhere"), "Error: /somewhere: Permission denied"),
        (OSError(28, "No space left on device"), "Error: [Errno 28] No space left on device"),
        (RuntimeError("out of memory"), "Error: out of memory"),
        (errors.ToolchainError("g++ is missing; install it"), "Error: g++ is missing; install it"),
    ],
)  # fmt: skip
def test_failures_are_sentences_with_exit_code_1(error, sentence, monkeypatch):
    def fail():
        raise error

    monkeypatch.setitem(COMMANDS, "doctor", Row("", "", "", ()))
    monkeypatch.setattr(Row, "load", lambda self, name, program: click.Command(name, callback=fail))
    done = fsk("doctor")
    assert done.exit_code == 1 and done.output == f"{sentence}\n"


def test_a_reader_that_goes_away_ends_it_quietly():
    specs = "specs/default.yaml specs/default.yaml"
    command = f"{shlex.quote(sys.executable)} -m fixed_shape_kernels explain {specs} | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], env=ENVIRONMENT, cwd=TOP, capture_output=True, text=True, check=False
    )
    assert done.stderr == "" and done.stdout.startswith("gemm_groupnorm_hardtanh for cpu")


def complete(words: str) -> list[str]:
    """What bash would offer behind `words`, and whether torch was imported for it, which must not be."""
    environment = {
        **ENVIRONMENT,
        "_FSK_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    code = (
        "import sys, atexit; from fixed_shape_kernels.cli import main;"
        "atexit.register(lambda: print('torch' in sys.modules)); main(prog_name='fsk')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    *found, torch_came = done.stdout.splitlines()
    assert torch_came == "False", done.stderr
    return [line.split(",", 1)[1] for line in found]


def test_shells_complete_commands_and_options():
    assert complete("fsk e") == ["explain", "evidence"]
    assert complete("fsk explain --dev") == ["--device-class"]
    assert complete("fsk --ver") == ["--version"]


def test_what_is_emitted_says_how_to_replace_it(tmp_path):
    """`fsk generate` and `write_package` refuse alike."""
    (tmp_path / "generated" / "gemm_groupnorm_hardtanh").mkdir(parents=True)
    (tmp_path / "generated" / "gemm_groupnorm_hardtanh" / "mine").write_text("")
    done = fsk("generate", "specs/default.yaml", "--target", "cpu", "--out", tmp_path / "generated")
    assert done.exit_code == 1 and "--force" in done.output and "--out" in done.output
    assert (
        write_package.__doc__
        and fsk(
            "generate", "specs/default.yaml", "--target", "cpu", "--out", tmp_path / "generated", "--force"
        ).exit_code
        == 0
    )


def test_a_wheel_is_made_of_a_spec_or_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "cache"))
    spec = "specs/gemm_groupnorm_hardtanh_small.yaml"
    assert fsk("package", spec, "--target", "cpu", "--out", tmp_path / "a", "--version", "1.0").exit_code == 0
    assert fsk("generate", spec, "--target", "cpu", "--out", tmp_path / "made").exit_code == 0
    folder = tmp_path / "made" / "gemm_groupnorm_hardtanh_small"
    assert fsk("package", folder, "--out", tmp_path / "b", "--version", "1.0").exit_code == 0
    first, second = next((tmp_path / "a").glob("*.whl")), next((tmp_path / "b").glob("*.whl"))
    assert first.name == second.name and first.read_bytes() == second.read_bytes()
    done = fsk("package", folder, "--target", "cpu", "--out", tmp_path / "c")
    assert done.exit_code == 2 and "is generated already" in done.output and not (tmp_path / "c").exists()
