"""Names of a spec that the emitted Python gives another meaning are refused; with any other, a package can be constructed."""

import ast
import builtins
import importlib
import inspect
import keyword
import re
import sys

import pytest
import torch
import yaml

from codegen.folder import write_if_different
from codegen.ops import OPERATORS, Kind
from codegen.package import make_package
from codegen.render import render
from codegen.spec import SpecError, load_spec, shipped
from codegen.spec.reserved import CONSTRUCTOR, FORWARD, RESERVED
from codegen.standalone import render_standalone
from runtime import GeneratedModule

CHAIN = """\
name: {name}
batch: 2
args: {{width: 8{args}}}
chain:
  - linear: {{name: gemm, in_features: width, out_features: 4}}
  - group_norm: {{name: norm, num_groups: 2}}
{adds}"""


def with_arguments(names: list[str], name: str = "layer") -> str:
    """A spec whose constructor takes `names`, each used in the chain."""
    return CHAIN.format(name=name, args="".join(f", {word}: 2.0" for word in names), adds="".join(f"  - add: {{value: {word}}}\n" for word in names))


def texts(spec) -> dict[str, str]:
    package = make_package(spec)
    files = render(package)
    return {"model.py": files["model.py"], "standalone.py": render_standalone(package, files)}


def read_in_constructors(text: str) -> set[str]:
    """The names that the constructors in `text` read and do not make themselves."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            words = [item for item in ast.walk(node) if isinstance(item, ast.Name)]
            own = {argument.arg for argument in node.args.args} | {word.id for word in words if isinstance(word.ctx, ast.Store)}
            found |= {word.id for word in words} - own
    return found


@pytest.mark.parametrize("path", shipped())
def test_what_the_emitted_constructors_read_is_reserved(path):
    made = texts(load_spec(path))
    taken = {name for text in made.values() for name in read_in_constructors(text)}
    taken |= {p.name for p in inspect.signature(GeneratedModule.__init__).parameters.values() if p.kind is not p.VAR_KEYWORD}
    names = {name for name in taken if re.fullmatch("[A-Za-z].*", name)}  # others are no names of a spec anyway
    assert names <= RESERVED, sorted(names - RESERVED)
    if any("tuple(" in text for text in made.values()):
        assert names >= CONSTRUCTOR, sorted(CONSTRUCTOR - names)  # nothing is refused without need
    read = {name for text in made.values() for name in read_in_forwards(text) if name[0].isalpha()}
    assert read <= RESERVED | FORWARD, sorted(read - RESERVED - FORWARD)


RANGE = """\
name: padded
batch: [2, 4]
pad_batch: true
inputs: {x: {shape: [8]}, other: {shape: [4]}}
chain:
  - linear: {name: gemm, in_features: 8, out_features: 4}
  - relu
  - add: {from: other}
  - softmax: {dim: 1}
"""


FOLDS = """\
name: folded
batch: 4
inputs: {x: {shape: [8]}, other: {shape: [1]}}
chain:
""" + "".join(f"  - {name}: {{dim: null, keepdim: true}}\n  - add: {{from: other}}\n" for name, row in OPERATORS.items() if row.kind is Kind.REDUCTION)


def read_in_forwards(text: str) -> set[str]:
    """The names that a file's forwards, of each target too, take from outside themselves."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (node.name == "forward" or node.name.startswith("_sm_")):
            names = [name for name in ast.walk(node) if isinstance(name, ast.Name)]
            own = {argument.arg for argument in node.args.args} | {name.id for name in names if isinstance(name.ctx, ast.Store)}
            found |= {name.id for name in names if isinstance(name.ctx, ast.Load)} - own
    return found


def test_inputs_hide_no_name_that_a_forward_reads(tmp_path):
    paths = [tmp_path / "padded.yaml", tmp_path / "exact.yaml", tmp_path / "folded.yaml"]
    paths[2].write_text(FOLDS)
    paths[0].write_text(RANGE)
    paths[1].write_text(RANGE.replace("pad_batch: true\n", ""))
    taken = {name for path in (*paths, "specs/default.yaml") for text in texts(load_spec(path)).values() for name in read_in_forwards(text)}
    names = {name for name in taken if re.fullmatch("[A-Za-z].*", name)}
    assert names <= RESERVED | FORWARD, sorted(names - RESERVED - FORWARD)
    assert names >= FORWARD, sorted(FORWARD - names)
    for word in FORWARD:
        paths[0].write_text(RANGE.replace("other", word))
        with pytest.raises(SpecError, match=f"inputs: {word} has a meaning of its own"):
            load_spec(paths[0])


def test_a_package_whose_arguments_have_any_name_that_is_taken_can_be_constructed(tmp_path, monkeypatch):
    path = tmp_path / "layer.yaml"
    path.write_text(with_arguments(["c0"]))
    words = {word for text in texts(load_spec(path)).values() for word in re.findall(r"[A-Za-z]\w*", text)}
    words |= {word for word in re.findall(r"[A-Za-z]\w*", inspect.getsource(GeneratedModule)) if len(word) <= 80}
    words |= set(dir(builtins)) | set(keyword.kwlist) | set(keyword.softkwlist) | {"F", "v", "y", "n", "on", "null", "PACKAGE", "package"}
    odd = {word for word in words if word in RESERVED or keyword.iskeyword(word) or not word[0].isalpha() or not isinstance(yaml.safe_load(word), str)}
    accepted = sorted(words - odd - {"width"})  # all at once, below
    for word in sorted(odd):
        path.write_text(with_arguments([word]))
        try:
            load_spec(path)
        except SpecError as error:
            assert word in RESERVED or keyword.iskeyword(word) or "is no identifier" in str(error), str(error)
        else:
            accepted.append(word)
    assert len(accepted) > 200 and not {"PACKAGE", "package", "tuple", "isinstance", "None"} & set(accepted)
    path.write_text(with_arguments(accepted, "many_arguments"))
    spec = load_spec(path)
    write_if_different(tmp_path / "many_arguments", {**render(make_package(spec)), **texts(spec)})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in ("many_arguments.model", "many_arguments.standalone"):
        made = importlib.import_module(module)
        with torch.device("meta"):
            model = made.ModelNew(*spec.init_values)
        assert list(model.state_dict()) == [key for key, _ in spec.parameters]
        with pytest.raises(Exception, match=r"generated for"):
            made.ModelNew(*spec.init_values[:-1], 3.5)
    for name in [name for name in sys.modules if name.startswith("many_arguments")]:
        del sys.modules[name]
