"""The child process of `fsk from-module`: imports the problem file and answers with its spec, or with everything wrong with it.

    python -m codegen.from_module.worker REQUEST ANSWER        both JSON files; see command.py
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from codegen.from_module import creation, equality, graph
from codegen.from_module.faults import Fault, Refused, first_line, line_of
from codegen.from_module.text import Text, references, spec_text, unreached
from codegen.spec import Spec, SpecError, load_spec


@dataclass(frozen=True)
class Answer:
    """A spec's text and what the user should know about it; or the reasons why there is none."""

    yaml: str = ""
    notes: tuple[Fault, ...] = ()
    faults: tuple[Fault, ...] = ()


def answer(path: str, model: str, name: str, precision: str | None, check: bool) -> Answer:
    """The spec of the class `model` in the file at `path`, under `name`. Seeds torch's generator and puts it back."""
    with torch.random.fork_rng(devices=[]):
        try:
            return _answer(path, model, name, precision, check)
        except Refused as refused:
            return Answer(faults=tuple(refused.faults))


def _answer(path: str, model_name: str, name: str, precision: str | None, check: bool) -> Answer:
    source = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    module = import_file(path)
    model, get_inputs, get_init_inputs = members(module, model_name)
    init = call(get_init_inputs, path)
    arguments = creation.bind(model, init, path)
    defaults = creation.defaults_of(model, arguments)
    init_line = creation.line_of_init(model, path)

    traced = graph.trace(creation.construct_for_tracing(model, init, arguments, defaults, path), path, source)
    original, records = creation.construct(model, init, path)
    faults = traced.faults + (creation.unused_faults(original, traced.used, records) if traced.whole else [])
    faults += creation.behaviour_faults(original, records, init_line)
    try:
        x, values, notes = inputs(get_inputs, path)
    except Refused as refused:
        faults += refused.faults
    entries = []
    for entry in traced.entries:
        if entry.values.get("shape") is not None:
            try:
                entry = graph.with_init(entry, creation.initialiser(original, entry.name, records))
            except Refused as refused:
                faults += refused.faults
        entries.append(entry)
    faults += creation.order_faults(original, entries, records)
    if not entries and not faults:
        faults.append(Fault(0, "forward applies no operator"))
    if faults:
        raise Refused(faults)
    found = references(entries, arguments, defaults)
    unreached_arguments = unreached(arguments, found, init_line)
    if unreached_arguments:
        raise Refused(unreached_arguments)
    kept = [(key, value) for key, value in defaults if key in found.values()]
    notes += [Fault(init_line, f"{key} = {value!r}: this default reaches no operator, so ModelNew has no such argument") for key, value in defaults if (key, value) not in kept]

    text = spec_text(name, Path(path).name, precision, tuple(x.shape), values, arguments, kept, entries, init_line)
    spec = read_back(text, name)
    if spec.input_shape != tuple(x.shape):
        raise Refused([Fault(entries[0].line, f"get_inputs gives x of {tuple(x.shape)}; the chain takes {spec.input_shape}")])
    if check:
        ours = equality.reference(spec)
        faults = equality.weight_faults(original, ours, creation.lines_of(original, records))
        del original
        faults = faults or equality.result_faults(model, init, path, ours, x, spec)
        if faults:
            raise Refused(faults)
    return Answer(text.yaml, (*notes, *traced.notes))


class AsItIs(importlib.machinery.SourceFileLoader):
    """Compiles the file as it is now. Bytecode is known by the file's size and second, so a change soon after would be missed; and none is left beside
    a user's file."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: str) -> ModuleType:
    """Run the file as a module; its folder is importable while it does. Raises Refused."""
    specification = importlib.util.spec_from_file_location("problem", path, loader=AsItIs("problem", path))
    module = importlib.util.module_from_spec(specification)
    sys.modules["problem"] = module
    sys.path.insert(0, str(Path(path).parent))
    try:
        specification.loader.exec_module(module)
    except SyntaxError as error:
        raise Refused([Fault(error.lineno or 0, f"not valid Python: {error.msg}")]) from None
    except Exception as error:  # whatever the file raises is a fault of the file
        raise Refused([Fault(line_of(error, path), f"importing the file failed: {first_line(error)}")]) from None
    finally:
        sys.path.remove(str(Path(path).parent))
    return module


def members(module: ModuleType, model_name: str) -> tuple[type, Any, Any]:
    """Model, get_inputs and get_init_inputs of the file. Raises Refused with all that are missing."""
    faults = []
    model = getattr(module, model_name, None)
    if not (isinstance(model, type) and issubclass(model, nn.Module)):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, nn.Module) and v.__module__ == module.__name__]
        found = f"; it has {', '.join(classes)}: name one as FILE.py:{classes[0]}" if classes else ""
        faults.append(Fault(0, f"the file defines no nn.Module named {model_name}{found}"))
    for function, what in (("get_inputs", "a list with x"), ("get_init_inputs", "the list of Model's arguments")):
        if not callable(getattr(module, function, None)):
            faults.append(Fault(0, f"the file defines no function {function}(), which returns {what}"))
    if faults:
        raise Refused(faults)
    return model, module.get_inputs, module.get_init_inputs


def call(function: Any, path: str) -> Any:
    """What one of the file's functions returns. Raises Refused."""
    try:
        return function()
    except Exception as error:  # whatever the file raises is a fault of the file
        raise Refused([Fault(line_of(error, path), f"{function.__name__}() failed: {first_line(error)} (no GPU is visible here)")]) from None


def inputs(get_inputs: Any, path: str) -> tuple[torch.Tensor, str, list[Fault]]:
    """(x, "rand" or "randn", notes). Raises Refused when get_inputs gives anything but one float32 tensor of 2 or 4 dimensions."""
    torch.manual_seed(creation.SEED)
    given = call(get_inputs, path)
    line = get_inputs.__code__.co_firstlineno if hasattr(get_inputs, "__code__") else 0
    if not isinstance(given, (list, tuple)) or len(given) != 1 or not isinstance(given[0], torch.Tensor):
        count = f"{len(given)} values" if isinstance(given, (list, tuple)) else type(given).__name__
        raise Refused([Fault(line, f"get_inputs gives {count}; a chain has one input: return [x]")])
    x = given[0]
    if x.dtype != torch.float32:
        raise Refused([Fault(line, f"x is {x.dtype}; write the file in float32 and choose the kernels' type with --precision")])
    if x.dim() not in (2, 4) or not x.numel():
        raise Refused([Fault(line, f"x has the shape {tuple(x.shape)}; a chain takes (batch, features) or (batch, channels, height, width)")])
    for word, draw in (("rand", torch.rand), ("randn", torch.randn)):
        if torch.equal(x, draw(x.shape, generator=torch.Generator().manual_seed(creation.SEED))):
            return x, word, []
    word = "rand" if 0 <= float(x.min()) and float(x.max()) < 1 else "randn"
    return x, word, [Fault(line, f"x is not drawn by torch.rand or torch.randn alone; by its range, the spec fills it with {word}")]


def read_back(text: Text, name: str) -> Spec:
    """Load the text as the spec it is. Raises Refused with the reader's faults at the problem file's lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.yaml"
        path.write_text(text.yaml, encoding="utf-8")
        try:
            return load_spec(path)
        except SpecError as error:
            raise Refused([Fault(text.origin.get(p.line, 0), p.message) for p in error.problems]) from None


def main() -> None:
    request, result = map(Path, sys.argv[1:3])
    found = answer(**json.loads(request.read_text(encoding="utf-8")))
    result.write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
