"""A spec's file name reaches comments, strings and commands of five languages, and changes the code of none."""

import ast
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codegen.emit import read_spec_or_package
from codegen.package import make_package
from codegen.render import render
from codegen.source_text import is_source_text, printable, source_text
from codegen.spec import SpecError, load_spec
from codegen.standalone import render_standalone

TOP = Path(__file__).resolve().parents[2]
TEXT = """\
name: layer
batch: [4, 8]
args: {in_features: 8, groups: 2}
chain:
  - linear: {name: gemm, in_features: in_features, out_features: 8}
  - group_norm: {name: norm, num_groups: groups}
  - hardtanh
"""
PIECES = ['"', "'", '"""', "'''", "\\", "\\\n", "\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "*/", "/*", "//", "??/", "??/\n", "??<", "#", "#define x", "%", "%22",
          "\u202e", "\u2066", "\ufeff", "\x1b[2J", "\x7f", "$(touch pwned)", "`touch pwned`", "{{ spec }}", "{% raw %}", "{#", ")", ");", "import os", "-", "é", "漢字", "𝒜", "\udcff",
          "R\"x(", "\\u0022", "\\N{QUOTATION MARK}", "--", "; do not edit.", "!!python", ": ", "a", " ", "$", "!", "&", "|", "<", ">"]  # fmt: skip
names = st.lists(st.one_of(st.sampled_from(PIECES), st.characters(exclude_characters="/\0", codec="utf-8")), min_size=1, max_size=6).map("".join)


def files_of(path: Path) -> dict[str, str]:
    package = make_package(load_spec(str(path)))
    files = render(package)
    return {**files, "standalone.py": render_standalone(package, files)}


def bare(source: str) -> str:
    """C++ without comments, as a compiler sees it: trigraphs, joined lines, then comments."""
    for trigraph, sign in (("??/", "\\"), ("??=", "#"), ("??'", "^"), ("??(", "["), ("??)", "]"), ("??!", "|"), ("??<", "{"), ("??>", "}"), ("??-", "~")):
        source = source.replace(trigraph, sign)
    source = re.sub(r"\\[ \t]*(\r\n|[\r\n])", "", source)
    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n\r]*|/\*.*?\*/', lambda m: m[0] if m[0].startswith('"') else " ", source, flags=re.DOTALL)


def code(text: str) -> str:
    """A Python file's tree without docstrings, CUDA text in strings without its comments, and what its messages say to run."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = "a command" if node.value.startswith("make generate ") else bare(node.value)
    return ast.dump(tree)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "layer.yaml"
    path.write_text(TEXT)
    return files_of(path)


@settings(max_examples=40, deadline=None)
@example(name='a"""+__import__("os").system("touch pwned")+"""')
@example(name="a\u2028#error")
@example(name="x\n#error x")
@example(name="ends in \\")
@given(name=names)
def test_no_file_name_changes_the_code_of_what_is_emitted(name, plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    path = folder / f"{name[:60].replace('/', '')}.yaml"  # a slash would name another folder
    try:
        path.write_text(TEXT)
    except (OSError, UnicodeEncodeError):  # the file system has no such name
        return
    for where, found in (("elsewhere", files_of(path)), ("here", _from(folder, path.name))):
        assert set(found) == set(plain), where
        for file, text in found.items():
            assert all(c.isprintable() or c == "\n" for c in text), (file, where)
            if file.endswith(".py"):
                assert code(text) == code(plain[file]), (file, where)
            elif file.endswith(".json"):
                ours, theirs = json.loads(text), json.loads(plain[file])
                *make, target = shlex.split(ours["regenerate"])
                assert make == ["make", "generate"] and target.startswith("SPEC=") and ours | {"spec": "", "regenerate": ""} == theirs | {"spec": "", "regenerate": ""}
            elif file.endswith(".yaml"):
                assert yaml.safe_load(text) == yaml.safe_load(plain[file])
            else:
                assert bare(text) == bare(plain[file]), (file, where)


def _from(folder: Path, name: str) -> dict[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return files_of(Path(name))


def test_the_command_leads_to_the_spec_or_to_the_packages_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, leads_to in (("it's.yaml", "generated/layer/spec.yaml"), ("my layer (2).yaml", "my layer (2).yaml"), ("-x.yaml", "generated/layer/spec.yaml"), ("größe.yaml", "größe.yaml")):
        Path(name).write_text(TEXT)
        command = make_package(load_spec(f"./{name}" if name.startswith("-") else name)).regenerate
        assert shlex.split(command) == ["make", "generate", f"SPEC={leads_to}"]


@settings(max_examples=300, deadline=None)
@given(st.text(), st.text())
def test_the_texts_are_harmless_and_told_apart(one, other):
    text = source_text(one)
    assert is_source_text(text) and text.isprintable() and not set(text) & set("\"'\\`$*?!;&|<>{}#^")
    assert (text == source_text(other)) == (one == other)
    assert "\n" not in printable(one).replace("\n", "") and all(c.isprintable() or c == "\n" for c in printable(one))


def test_a_spec_takes_no_other_path_and_no_manifest_brings_one(tmp_path):
    path = tmp_path / "layer.yaml"
    path.write_text(TEXT)
    spec = load_spec(path)
    with pytest.raises(ValueError, match="source_text"):
        replace(spec, path='a"""')
    folder = tmp_path / "layer"
    folder.mkdir()
    files = render(make_package(spec))
    for spec_path in ('a"""+evil+"""', "x\n#error"):
        record = json.loads(files["manifest.json"]) | {"spec": spec_path, "regenerate": "make generate SPEC=x DEVICE=nowhere"}
        for name, text in (files | {"manifest.json": json.dumps(record)}).items():
            (folder / name).write_text(text)
        assert read_spec_or_package(str(folder / "spec.yaml")).path == ".../spec.yaml"


def test_what_a_terminal_shows_moves_nothing_on_it(tmp_path):
    path = tmp_path / "a\x1b[2J\u202e.yaml"
    path.write_text(TEXT + '"k\\e[31m\\n\u202e": 1\n')
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value).isprintable()
    run = subprocess.run([sys.executable, "-m", "fixed_shape_kernels", "generate", str(path)], cwd=TOP, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and all(c.isprintable() or c == "\n" for c in run.stderr)


def test_the_names_of_the_issue_run_nothing(tmp_path):
    name = 'a"""+__import__("os").system("touch pwned")+""".yaml'
    (tmp_path / name).write_text(TEXT)
    run = subprocess.run([sys.executable, "-m", "fixed_shape_kernels", "generate", name, "--target", "cpu"], cwd=tmp_path, env={"PYTHONPATH": str(TOP)}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    subprocess.run([sys.executable, "-c", "import generated.layer"], cwd=tmp_path, env={"PYTHONPATH": f"{TOP}:{tmp_path}"}, capture_output=True, check=False)
    assert not (tmp_path / "pwned").exists()
    for source in (tmp_path / "generated" / "layer").glob("*.py"):
        ast.parse(source.read_text())
