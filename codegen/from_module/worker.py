"""The child process of `fsk from-module`: imports the problem file and answers with its spec, or with everything wrong with it.

    python -m codegen.from_module.worker REQUEST ANSWER        both JSON files; see command.py
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from codegen.from_module import creation, equality, graph, scale
from codegen.from_module.entries import is_name
from codegen.from_module.faults import Fault, Refused, first_line, line_of
from codegen.from_module.text import Given, Layer, Text, references, spec_text
from codegen.spec import Spec, SpecError, load_spec

WEIGHTS = 1 << 30  # bytes of parameters that are constructed at their own sizes


@dataclass(frozen=True)
class Answer:
    """A spec's text and what the user should know about it; or the reasons why there is none."""

    yaml: str = ""
    notes: tuple[Fault, ...] = ()
    faults: tuple[Fault, ...] = ()
    checked: str = ""


def answer(path: str, model: str, name: str, precision: str | None, check: bool, algebra: bool = True) -> Answer:
    """The spec of the class `model` in the file at `path`, under `name`; without `algebra` it says so. Seeds torch's generator and puts it back."""
    with torch.random.fork_rng(devices=[]):
        try:
            return _Reading(path, model, name, precision, algebra).answer(check)
        except Refused as refused:
            return Answer(faults=tuple(refused.faults))


class _Reading:
    """One file on its way to a spec."""

    def __init__(self, path: str, model: str, name: str, precision: str | None, algebra: bool) -> None:
        self.path, self.name, self.precision, self.algebra = path, name, precision, algebra
        self.source = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        self.model, self.get_inputs, get_init_inputs = members(import_file(path), model)
        self.init = call(get_init_inputs, path)
        self.arguments = creation.bind(self.model, self.init, path)
        self.defaults = creation.defaults_of(self.model, self.arguments)
        self.init_line = creation.line_of_init(self.model, path)

    def answer(self, check: bool) -> Answer:
        drawn, notes = inputs(self.get_inputs, self.path)
        arguments = _named(self.model, drawn)
        notes += [Fault(0, f"forward's argument {name} has a meaning of its own in the generated code; the layer calls it x") for name, given in arguments if name != given.name]
        drawn = [given for _, given in arguments]
        layer, traced, meta = self.traced(self.init, drawn)
        full = None if traced.faults else self.sketch(layer)
        weights = sum(parameter.numel() * 4 for parameter in meta.parameters())
        if weights <= WEIGHTS:
            original, records = creation.construct(self.model, self.init, self.path)
            small = None
        else:  # what holds for its state at its own sizes is read at smaller ones
            if full is None:
                raise Refused(traced.faults)
            small = scale.reduced(scale.Sizes(tuple(self.init), tuple(drawn), full), self.sketched)
            original, records = creation.construct(self.model, list(small.init), self.path)
        layer, faults = self.completed(layer, traced, original, records)
        if faults:
            raise Refused(faults)
        text = spec_text(layer, self.init_line)
        spec = read_back(text, self.name)
        notes += self.notes(layer, traced)
        if not check:
            return Answer(text.yaml, tuple(notes))
        if small is None:
            faults = equality.weight_faults(equality.prints(original), equality.prints(equality.reference(spec)), creation.lines_of(original, records))
            small = scale.reduced(scale.Sizes(tuple(self.init), tuple(drawn), spec), self.sketched)
        del original
        if not faults:
            faults = self.compared(layer, small, weights)
        if faults:
            raise Refused(faults)
        return Answer(text.yaml, tuple(notes), checked=self.checked(drawn, small, weights))

    def traced(self, init: Any, drawn: list[Given]) -> tuple[Layer, graph.Traced, nn.Module]:
        """The layer as forward makes it for these arguments and inputs, without what only its state can tell."""
        arguments = [(name, tuple(value) if isinstance(value, list) else value) for (name, _), value in zip(self.arguments, init, strict=True)]
        meta = creation.construct_for_tracing(self.model, list(init), arguments, self.defaults, self.path)
        found = graph.trace(meta, self.path, self.source, [given.shape for given in drawn])
        if not found.entries and not found.faults:
            found.faults.append(Fault(0, "forward applies no operator"))
        layer = Layer(self.name, Path(self.path).name, self.precision, tuple(drawn), tuple(arguments), tuple(self.defaults), tuple(found.entries), algebra=self.algebra)
        return layer, found, meta

    def sketch(self, layer: Layer) -> Spec | None:
        """The spec of a layer of which the state is not known."""
        chain = tuple(replace(entry, values=entry.values | {"init": "randn"}) if entry.holds_parameter else entry for entry in layer.chain)
        try:
            return read_back(spec_text(self.settled(replace(layer, chain=chain)), self.init_line), self.name)
        except Refused:
            return None

    def sketched(self, init: tuple[Any, ...], drawn: tuple[Given, ...]) -> Spec | None:
        """The same for other arguments and inputs."""
        try:
            layer, found, _ = self.traced(init, list(drawn))
        except Refused:
            return None
        return None if found.faults else self.sketch(layer)

    def settled(self, layer: Layer) -> Layer:
        """The layer with the arguments that reach nothing set apart, and without such defaults."""
        found = references([*layer.chain, *layer.unused], layer.arguments, layer.defaults).values()
        ignored = tuple(name for name, _ in layer.arguments if name not in found)
        return replace(layer, ignored=ignored, defaults=tuple((key, value) for key, value in layer.defaults if key in found))

    def completed(self, layer: Layer, traced: graph.Traced, original: nn.Module, records: list[creation.Record]) -> tuple[Layer, list[Fault]]:
        """The layer with what its state tells, and everything wrong with it."""
        dead, faults = creation.unused(original, traced.used, records) if traced.whole else ([], [])
        faults = traced.faults + faults + creation.behaviour_faults(original, records, self.init_line)
        chain, wrong = creation.filled(original, list(layer.chain), records)
        dead, also = creation.filled(original, dead, records)
        layer = replace(layer, chain=tuple(chain), unused=tuple(dead), created=tuple(creation.order_of(original, [*chain, *dead], records)))
        return self.settled(layer), faults + wrong + also

    def notes(self, layer: Layer, traced: graph.Traced) -> list[Fault]:
        kept = {key for key, _ in layer.defaults}
        said = [Fault(self.init_line, f"{key} = {value!r}: this default reaches no operator, so ModelNew has no such argument") for key, value in self.defaults if key not in kept]
        said += [Fault(self.init_line, f"{name}: this argument reaches no operator as it is (it is unused, or part of a computation); ModelNew takes it at this value") for name in layer.ignored]
        said += [Fault(entry.line, f"self.{entry.name} is never used by forward; it stays in state_dict and gets no gradient") for entry in layer.unused]
        return [*said, *traced.notes]

    def compared(self, layer: Layer, small: scale.Sizes, weights: int) -> list[Fault]:
        """Differences at the sizes of the check. Raises Refused."""
        twin, found, _ = self.traced(small.init, list(small.inputs))
        original, records = creation.construct(self.model, list(small.init), self.path)
        twin, faults = self.completed(twin, found, original, records)
        if faults:
            return faults
        text = spec_text(twin, self.init_line)
        spec = read_back(text, self.name)
        if [entry.operator for entry in twin.chain] != [entry.operator for entry in layer.chain] or twin.created != layer.created:
            return [Fault(0, "forward makes another chain of smaller inputs, and the layer is too large to be checked at its own sizes")]
        ours = equality.reference(spec)
        if weights > WEIGHTS:
            faults = equality.weight_faults(equality.prints(original), equality.prints(ours), creation.lines_of(original, records))
        del original
        if faults:
            return faults
        faults, self.gradients = equality.result_faults(self.model, list(small.init), self.path, ours, equality.draw(small.inputs, scale.samples_of(small.spec)), spec)
        return faults

    def checked(self, drawn: list[Given], small: scale.Sizes, weights: int) -> str:
        """The check in words."""
        smaller = [f"{name} = {value}" for (name, _), value, whole in zip(self.arguments, small.init, self.init, strict=True) if value != whole]
        at = f" (with {', '.join(smaller)})" if smaller else ""
        first = "initial weights bit for bit those of the file's Model" + (at if weights > WEIGHTS else "")
        shapes = " and ".join(str(tuple(x.shape)) for x in equality.draw(small.inputs, scale.samples_of(small.spec)))
        what = "results, gradients and state" if self.gradients else "results and state (not gradients: forward overwrites in place what torch's backward needs)"
        return f"{first}; {what} equal in float64 in training and evaluation, with ties and on bounds, on {shapes}{at}"


def _named(model: type, drawn: list[Given]) -> list[tuple[str, Given]]:
    """forward's names of the inputs, each with the input under the name that the spec can give it. Raises Refused."""
    parameters = list(inspect.signature(model.forward).parameters.values())[1:]
    words = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    line = model.forward.__code__.co_firstlineno if hasattr(model.forward, "__code__") else 0
    if len(words) < len(drawn):
        raise Refused([Fault(line, f"get_inputs gives {len(drawn)} tensors, and forward takes {len(words)} by name")])
    able = [word if is_name(word) or word in ("x", "y") else "x" for word in words[: len(drawn)]]
    if len(set(able)) < len(able):
        raise Refused([Fault(line, f"forward's arguments {', '.join(words)}: names with a meaning of their own in the generated code; choose others")])
    return [(word, replace(given, name=name)) for word, name, given in zip(words, able, drawn, strict=False)]


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


class _Draws(TorchFunctionMode):
    """Notes what torch.rand and torch.randn give, on the meta device: shapes cost no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.words: dict[int, str] = {}
        self.kept: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        word = {torch.rand: "rand", torch.randn: "randn"}.get(func)
        if word:
            self.words[id(made)] = word
            self.kept.append(made)  # so that no other tensor gets its id
        return made


def inputs(get_inputs: Any, path: str) -> tuple[list[Given], list[Fault]]:
    """The inputs, whose names are yet to be found, and notes. Raises Refused when get_inputs gives anything but float32 tensors with a batch first."""
    line = get_inputs.__code__.co_firstlineno if hasattr(get_inputs, "__code__") else 0
    draws = _Draws()
    try:
        with torch.device("meta"), draws:
            given = get_inputs()
    except Exception:  # it needs values: as it is, then
        torch.manual_seed(creation.SEED)
        given = call(get_inputs, path)
    given = [given] if isinstance(given, torch.Tensor) else given
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(x, torch.Tensor) for x in given):
        raise Refused([Fault(line, f"get_inputs gives {type(given).__name__}; expected a list of the tensors that forward takes, such as return [x]")])
    found, notes = [], []
    for x in given:
        if x.dtype != torch.float32:
            raise Refused([Fault(line, f"an input is {x.dtype}; write the file in float32 and choose the kernels' type with --precision")])
        if not 1 <= x.dim() <= 6 or not x.numel():
            raise Refused([Fault(line, f"an input has the shape {tuple(x.shape)}; a layer takes one to six axes, the batch first")])
        word = draws.words.get(id(x))
        if word is None:
            word = "rand" if "rand" in draws.words.values() or (not x.is_meta and 0 <= float(x.min()) and float(x.max()) < 1) else "randn"
            notes.append(Fault(line, f"an input is not drawn by torch.rand or torch.randn alone; the spec fills it with {word}"))
        found.append(Given("", tuple(x.shape), word))
    if found[0].shape[:1] == () or len(found[0].shape) < 2:
        raise Refused([Fault(line, f"the first input has the shape {found[0].shape}; a chain takes a batch of samples of at least one axis")])
    return found, notes


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
    torch.set_num_threads(1)  # a check is small, and several may run at once
    found = answer(**json.loads(request.read_text(encoding="utf-8")))
    result.write_text(json.dumps(asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
