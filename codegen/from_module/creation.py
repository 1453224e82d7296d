"""Model's constructor: which arguments go where, in which order parameters are created, and how they are filled."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from codegen.from_module import calls
from codegen.from_module.entries import Entry
from codegen.from_module.faults import Fault, Refused, Unfit, first_line, line_here, line_of
from codegen.ops import PARAMETER, Kind
from codegen.spec.reader import HOLDERS

SEED = 42
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
          "_load_state_dict_post_hooks")  # fmt: skip
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
Arguments = list[tuple[str, Any]]


class TaggedInt(int):
    """An integer that knows which constructor argument it is; arithmetic on it gives plain integers."""

    source: str


class TaggedFloat(float):
    """The same for a floating-point number."""

    source: str


def tagged(name: str, value: Any) -> Any:
    """`value`, marked as the constructor's argument `name` where its type allows that."""
    kind = TaggedInt if type(value) is int else TaggedFloat if type(value) is float else None
    if kind is None:
        return value
    marked = kind(value)
    marked.source = name
    return marked


def source_of(value: Any) -> str | None:
    """The argument that `value` is; of a pair, the argument that both of its values are."""
    if isinstance(value, tuple):
        sources = {source_of(item) for item in value}
        return sources.pop() if len(sources) == 1 else None
    return getattr(value, "source", None)


@dataclass(frozen=True)
class Record:
    """An attribute as it was created: its module's id, its name, the line, and the generator's state right after."""

    owner: int
    name: str
    line: int
    state: torch.Tensor


def bind(model: type, init: Any, path: str) -> Arguments:
    """get_init_inputs' values by the names of Model.__init__'s arguments, in order. Raises Refused."""
    line = line_of_init(model, path)
    if not isinstance(init, (list, tuple)):
        raise Refused([Fault(0, f"get_init_inputs must return a list of the constructor's arguments, not {type(init).__name__}")])
    signature = inspect.signature(model)
    try:
        signature.bind(*init)
    except TypeError as error:
        raise Refused([Fault(line, f"Model takes {signature}, get_init_inputs gives {len(init)} values: {error}")]) from None
    names = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(init) > len(names):
        raise Refused([Fault(line, f"Model takes {signature}; a spec names every argument, *args has no names")])
    faults, arguments = [], []
    for name, value in zip(names, init, strict=False):
        if _is_argument(value):
            arguments.append((name, tuple(value) if isinstance(value, list) else value))
        else:
            faults.append(Fault(line, f"{name} = {value!r}: arguments of a spec are numbers, true or false, and lists of sizes"))
    if faults:
        raise Refused(faults)
    return arguments


def defaults_of(model: type, given: Arguments) -> Arguments:
    """The arguments of Model.__init__ that get_init_inputs leaves at their defaults, as far as a spec can hold those."""
    listed = list(inspect.signature(model).parameters.values())[len(given) :]
    return [(p.name, tuple(p.default) if isinstance(p.default, list) else p.default) for p in listed if p.kind is not p.POSITIONAL_ONLY and _is_argument(p.default)]


def _is_argument(value: Any) -> bool:
    """Can a spec's args hold it?"""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    return isinstance(value, (bool, int, float))


def line_of_init(model: type, path: str) -> int:
    """The line on which Model.__init__ is defined in the file at `path`; 0 where it is not defined there."""
    code = getattr(model.__init__, "__code__", None)
    return code.co_firstlineno if code is not None and code.co_filename == path else 0


def construct_for_tracing(model: type, init: list[Any], arguments: Arguments, defaults: Arguments, path: str) -> nn.Module:
    """Model with marked arguments and defaults, without memory for its parameters where it allows that. Raises Refused."""
    marked = [tagged(name, value) if type(value) in (int, float) else value for (name, _), value in zip(arguments, init, strict=True)]
    marked_defaults = {name: tagged(name, value) for name, value in defaults}
    for device in ("meta", "cpu"):
        with contextlib.suppress(Exception), torch.device(device):
            return model(*marked, **marked_defaults)
    return construct(model, init, path)[0]


def construct(model: type, init: list[Any], path: str) -> tuple[nn.Module, list[Record]]:
    """Model under SEED, and what was created in which order. Raises Refused when its constructor fails."""
    torch.manual_seed(SEED)
    with _recording(path) as records:
        try:
            return model(*init), records
        except Exception as error:  # whatever the file's constructor raises is a fault of the file
            raise Refused([Fault(line_of(error, path), f"Model(*get_init_inputs()) failed: {first_line(error)}")]) from None


@contextlib.contextmanager
def _recording(path: str) -> Iterator[list[Record]]:
    records: list[Record] = []

    def note(owner: nn.Module, name: str, value: Any) -> None:
        records.append(Record(id(owner), name, line_here(path), torch.get_rng_state()))

    handles = [torch_module.register_module_parameter_registration_hook(note), torch_module.register_module_module_registration_hook(note)]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def initialiser(model: nn.Module, name: str, records: list[Record]) -> str | float:
    """How the nn.Parameter `name` of Model is filled: "randn", "rand" or the number that all of it is. Raises Refused for anything else.

    A random one is drawn again, from the generator's state before the parameter was created or, for torch.nn.init, right after.
    """
    value = getattr(model, name).detach()
    index = max(i for i, record in enumerate(records) if record.owner == id(model) and record.name == name)
    first = float(value.flatten()[0])
    constant = bool((value == first).all())
    if constant and value.numel() > 1:
        return first
    before = records[index - 1].state if index else torch.Generator().manual_seed(SEED).get_state()
    for state in (before, records[index].state):
        for word, draw in (("randn", torch.randn), ("rand", torch.rand)):
            if torch.equal(value, draw(value.shape, generator=torch.Generator().set_state(state))):
                return word
    if constant:
        return first
    span = f"values from {value.min():.4g} to {value.max():.4g}"
    said = f"self.{name} is filled in a way the grammar has no word for ({span}); it has randn, rand and one number, unscaled"
    raise Refused([Fault(records[index].line, said)])


def filled(model: nn.Module, entries: list[Entry], records: list[Record]) -> tuple[list[Entry], list[Fault]]:
    """The entries with the way in which each bare parameter is filled, and what is wrong with that."""
    done, faults = [], []
    for entry in entries:
        if entry.holds_parameter:
            try:
                entry = replace(entry, values=entry.values | {"init": initialiser(model, entry.name, records)})
            except Refused as refused:
                faults += refused.faults
        done.append(entry)
    return done, faults


def unused(model: nn.Module, used: set[str], records: list[Record]) -> tuple[list[Entry], list[Fault]]:
    """Entries for the parameters of Model that forward never uses, in the order of creation, and what the grammar has no word for."""
    created = lines_of(model, records)
    holders = dict.fromkeys(key.split(".")[0] for key in model.state_dict())
    entries, faults = [], []
    for name in sorted((name for name in holders if name not in used), key=list(created).index if created else None):
        line, held = created.get(name, 0), getattr(model, name)
        try:
            entries.append(_dead(name, held, line))
        except Unfit as unfit:
            faults.append(Fault(line, f"self.{name} is never used by forward, and {unfit}; remove it"))
    return entries, faults


def _dead(name: str, held: Any, line: int) -> Entry:
    if isinstance(held, nn.Parameter):
        return Entry("parameter", line, name, {"shape": tuple(held.shape)})
    operator, values = calls.module_values(held) if isinstance(held, nn.Module) and type(held) in calls.MODULES else ("", {})
    row = HOLDERS.get(operator)
    if row is None:
        raise Unfit(f"the grammar has no word for what it holds ({type(held).__name__})")
    takes: dict[str, Any] = {}
    if row.kind is Kind.NORM:
        rank = int(type(held).__name__[-2]) if type(held).__name__.endswith("d") else 0
        channels = getattr(held, "num_channels", getattr(held, "num_features", None))
        takes = {"takes": tuple(held.normalized_shape) if channels is None else (channels, *(2,) * rank)}
    return Entry(operator, line, name, values | takes)


def order_of(model: nn.Module, entries: list[Entry], records: list[Record]) -> list[str]:
    """The names of what holds parameters in the order of creation, where that gives other random numbers or another state_dict than the order of `entries`."""
    created = {r.name: i for i, r in enumerate(records) if r.owner == id(model)}
    owners = [entry for entry in entries if entry.name in created and (entry.holds_parameter or entry.has_module)]
    drawing = [e for e in owners if HOLDERS.get(e.operator, PARAMETER).kind is Kind.PRODUCER or e.values.get("init") in ("rand", "randn")]
    bare, modules = [e for e in owners if e.holds_parameter], [e for e in owners if not e.holds_parameter]
    places = [[created[entry.name] for entry in group] for group in (drawing, bare, modules)]
    return sorted((entry.name for entry in owners), key=created.get) if any(group != sorted(group) for group in places) else []


def behaviour_faults(model: nn.Module, records: list[Record], init_line: int) -> list[Fault]:
    """What Model does beside computing its forward, which the generated layer would not do: hooks, frozen parameters, eval mode."""
    lines = lines_of(model, records)
    faults = []

    def line(name: str) -> int:
        return lines.get(name.split(".")[0], init_line)

    for path, module in model.named_modules():
        who = f"self.{path}" if path else "Model"
        if any(getattr(module, kind, None) for kind in _HOOKS):
            faults.append(Fault(line(path), f"{who} has hooks, which the generated layer does not run; remove them, and register them on ModelNew if they must be"))
        if not module.training and (not path or module._parameters):
            faults.append(Fault(line(path), f"{who} is left in eval mode by the constructor, and the generated layer is in training mode; call eval() on the model that is made"))
            break
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            faults.append(Fault(line(key), f"{key} does not require gradients here and would in the generated layer; call requires_grad_(False) on ModelNew's parameter instead"))
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            faults.append(Fault(line(key), f"{key} has hooks of its own, which the generated layer does not have; register them on ModelNew's parameter"))
    if any(getattr(torch_module, kind, None) for kind in _GLOBAL_HOOKS):
        faults.append(Fault(0, "the file registers hooks for all modules, which the generated layer does not run; remove them"))
    return faults


def lines_of(model: nn.Module, records: list[Record]) -> dict[str, int]:
    """Where each parameter and module of Model itself is created."""
    return {record.name: record.line for record in records if record.owner == id(model)}
