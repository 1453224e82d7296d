"""The tiers of tests hold: dear work without a marker fails with a sentence, a collection plans nothing, the kept compiler gives what g++ would."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compiler, tiers
from tests.codegen.emulated import SOON, compile_text

TOP = Path(__file__).parents[1]
SOURCE = '#include "part.h"\n// one\nextern "C" int answer() { return PART + 1; }\n'


class Marked:
    """A test with these markers, as far as the tiers look at one."""

    nodeid = "tests/test_any.py::test_any"

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_closest_marker(self, name: str) -> bool:
        return name in self.names


@pytest.fixture
def running(monkeypatch):
    return lambda item: monkeypatch.setattr(tiers, "_running", item)


@pytest.mark.parametrize("marker", tiers.RULES)
def test_dear_work_needs_a_marker(running, marker):
    for allowed in (None, Marked(marker), Marked("representative"), Marked("gpu")):
        running(allowed)
        tiers.claim(marker)
    running(Marked("slow"))
    with pytest.raises(pytest.fail.Exception, match=rf"tests/test_any.py::test_any .*mark it with @pytest.mark.{marker}, .*make test-all"):
        tiers.claim(marker)


def test_the_emulation_claims_its_marker(tmp_path):
    """This test has none."""
    with pytest.raises(pytest.fail.Exception, match="runs a kernel in the emulation"):
        compile_text(tmp_path, "int x;", SOON)


@pytest.mark.parametrize(("names", "said"), [
    (("two_gpus",), "is marked two_gpus and not gpu"), (("representative", "slow"), "is marked representative and slow"), (("gpu", "two_gpus", "slow"), None), ((), None),
])  # fmt: skip
def test_markers_that_contradict_each_other(names, said):
    found = tiers.complaints(Marked(*names))
    assert (not found) if said is None else said in "".join(found)


def test_parameters_of_the_emulation_are_split():
    found = tiers.emulated([("a", 1), ("b", 2)], ("b", 2))
    assert [(param.values, param.marks[0].name) for param in found] == [(("a", 1), "emulated"), (("b", 2), "representative")]
    with pytest.raises(ValueError, match="not among the values"):
        tiers.emulated("ab", "c")
    found = tiers.quick("abc", "b")
    assert [[mark.name for mark in param.marks] for param in found] == [["slow"], [], ["slow"]]


@pytest.mark.parametrize("count", [1, 3, 4, 12, 18])
def test_some_cases_of_each_parameter_run_in_make_test_and_others_for_the_next(count):
    cases = list(range(count))
    shares = [tiers.share_of("some", "abcde", name, cases) for name in "abcde"]
    assert all(shares) and set().union(*shares) == set(cases) and max(map(len, shares)) <= -(-count // tiers.SHARE)
    assert tiers.share_of("all", "abcde", "d", cases) == cases


COLLECT = """
import sys
import pytest
import codegen.emit

def refuse(*args, **kwargs):
    raise AssertionError("a test module plans or renders while it is collected")

for module in [module for name, module in sys.modules.items() if name.startswith("codegen")]:
    for name in ("plan", "planned", "plan_backward", "plan_backward_cuda", "make_package", "render", "render_kernel"):
        if callable(getattr(module, name, None)):
            setattr(module, name, refuse)
sys.exit(pytest.main(["--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_collection_plans_and_renders_nothing(tmp_path):
    """Every worker collects, and so does whoever runs one test."""
    hasty = tmp_path / "test_hasty.py"
    hasty.write_text('from codegen.package import make_package\nfrom codegen.spec import load_spec\nPACKAGE = make_package(load_spec("specs/default.yaml"))\n')
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"PYTHONPATH": str(TOP)}
    for paths, said in ((["tests"], None), ([str(hasty)], "plans or renders while it is collected")):
        done = subprocess.run([sys.executable, "-c", COLLECT, *paths], cwd=TOP, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) if said is None else said in done.stdout, done.stdout + done.stderr


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A function that compiles SOURCE, changed as it is told; the value that the library returns, and whether g++ compiled."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    calls = tmp_path / "calls"
    counting = tmp_path / "counting-g++"
    counting.write_text(f'#!/bin/sh\ncase " $* " in *" -E "*) ;; *) echo x >> "{calls}";; esac\nexec {shutil.which("g++")} "$@"\n')
    counting.chmod(0o755)
    monkeypatch.setattr(os, "environ", {**os.environ})
    compiler.set_up(tmp_path / "kept")
    environment = os.environ | {compiler.REAL: str(counting)}

    def compile_it(text: str = SOURCE, part: str = "1", flags: tuple[str, ...] = ("-O1",)) -> tuple[int, bool]:
        calls.unlink(missing_ok=True)
        (tmp_path / "part.h").write_text(f"#define PART {part}\n")
        (tmp_path / "a.cpp").write_text(text)
        command = [compiler.gxx(), *flags, "-I.", "-shared", "-fPIC", "-o", "a.so", "a.cpp"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        code = "import ctypes; print(ctypes.CDLL('./a.so').answer())"
        said = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        return int(said), calls.exists()

    return compile_it


def test_the_compiler_keeps_what_it_made(compiled):
    assert compiled() == (2, True) and compiled() == (2, False)
    assert compiled(SOURCE.replace("// one", "// another\n// comment")) == (2, False)
    assert compiled(part="4") == (5, True), "an included file has changed"
    assert compiled(SOURCE.replace("+ 1", "+ 7")) == (8, True)
    assert compiled(flags=("-O1", "-DANY")) == (2, True)
    assert compiled() == (2, False)


def test_the_compiler_keeps_nothing_with_a_message(compiled):
    warned = SOURCE.replace("{ return", "{ int unused = 0; return")
    for _ in range(2):
        assert compiled(warned, flags=("-O1", "-Wall")) == (2, True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nothing"):
            compiled(SOURCE.replace("PART", "nothing"))


def test_what_nobody_used_for_days_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})
    objects = tmp_path / "objects"
    objects.mkdir()
    for name, age in (("old", compiler.KEPT_DAYS + 1), ("new", compiler.KEPT_DAYS - 1)):
        (objects / name).touch()
        then = (objects / name).stat().st_mtime - age * 86400
        os.utime(objects / name, (then, then))
    compiler.set_up(tmp_path)
    assert [path.name for path in objects.iterdir()] == ["new"]
