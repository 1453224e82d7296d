"""Generated chains in a model: forwards of its modules that run them while the optimised module is at work, and the model's own otherwise."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import fx, nn

from codegen.from_module.calls import MODULES
from runtime import GeneratedModule

from .chains import MODAL, Chain
from .regions import HOOKS, Region
from .report import Report

Built = tuple[Chain, GeneratedModule]


@dataclass(frozen=True)
class Call:
    """A call that kernels were made for: the model's arguments, and the folders of the packages that were put in place, by the chain's place."""

    arguments: tuple[Any, ...]
    packages: dict[str, Path]


class Optimized(nn.Module):
    """A model with generated kernels in the place of chains; its parameters, buffers, children and `state_dict` are the model's own.

    `report` says what became of each chain, `fallbacks` how often and why the model's own modules ran instead. `restore()` takes everything back; inside
    `with opt.disabled():` the model runs as it was. Calling the model itself does so always. `add_shape` makes kernels for another call, too.
    """

    def __init__(self, model: nn.Module, report: Report, training: bool, precision: str | None, widen: Callable[..., Report] | None) -> None:
        super().__init__()
        self.__dict__.update(_model=model, _at_work=threading.local(), _enabled=True, report=report, fallbacks=Counter(), training=model.training)
        self.__dict__.update(_places={}, trains=training, precision=precision, calls=[], apart=[], _widen=widen)
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[held] = model.__dict__[held]

    def install(self, chosen: Sequence[Built]) -> None:
        """Put generated chains into the forwards of their regions' modules."""
        regions: dict[Region, list[Built]] = {}
        for chain, made in chosen:
            regions.setdefault(chain.region, []).append((chain, made))
        for region, found in regions.items():
            place = self._places.get(region.module)
            if place is None:
                place = self._places[region.module] = _Place(self, region)
            place.ways.append(_Way(region, found, self.trains))
            place.put()

    def add_shape(self, *example: Any) -> Report:
        """Make kernels for a call like `example` beside those that there are; its report. Raises what `optimize` raises, RuntimeError for a loaded one."""
        if self._widen is None:
            raise RuntimeError("this model was loaded, not optimised here; optimise it again for further shapes")
        for place in self._places.values():  # what is looked for are the model's own forwards
            place.remove()
        try:
            return self._widen(*example)
        finally:
            for place in self._places.values():
                place.put()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with the generated chains."""
        at_work, before = self._at_work, getattr(self._at_work, "value", False)
        at_work.value = self._enabled
        try:
            return self._model(*args, **kwargs)
        finally:
            at_work.value = before

    def train(self, mode: bool = True) -> Optimized:
        self._model.train(mode)
        self.training = mode
        return self

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the model's own modules for the length of a block."""
        before, self.__dict__["_enabled"] = self._enabled, False
        try:
            yield
        finally:
            self.__dict__["_enabled"] = before

    def restore(self) -> nn.Module:
        """Take all forwards back and return the model, which is as it was."""
        for place in self._places.values():
            place.remove()
        self.__dict__["_places"] = {}
        return self._model

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("an optimised module is neither copied nor pickled; copy the model, or write its kernels with fsk.save_optimized")

    def extra_repr(self) -> str:
        return self.report.summary

    def fallen_back(self, path: str, why: str) -> None:
        """Count a call that ran the model's own modules, and warn of the first of its kind."""
        self.fallbacks[path, why] += 1
        if self.fallbacks[path, why] == 1:
            warnings.warn(f"{path}: {why}; the model's own modules run instead", stacklevel=3)


class _Way:
    """A region with its chains for one call: what that call must be like, and the function that runs it."""

    def __init__(self, region: Region, chains: Sequence[Built], trains: bool) -> None:
        self.root, self.mode, self.trains, self.without_grad = region.root, region.module.training, trains, region.without_grad
        self.made = [made for _, made in chains]
        self.expected = [(name, value.shape, value.dtype, value.device) for name in region.tensors if isinstance(value := region.call.arguments[name], torch.Tensor)]
        self.constants = [(name, value) for name, value in region.call.arguments.items() if name not in region.tensors]
        self.run = _compiled(region, chains)
        inner = _held_in(region, chains)
        self.links = [(parent._modules, name, child) for parent, name, child in inner]
        self.hooks = [vars(child)[name] for _, _, child in inner for name in HOOKS]
        parts = dict.fromkeys((*(child for *_, child in inner), *(part for chain, _ in chains for part in chain.modules.values())))
        self.modes = [(part, part.training) for part in (region.module, *parts) if isinstance(part, MODAL) or type(part) not in MODULES]
        self.parts = [_Part(part) for part in parts]
        self.tied = _tied(region.module)

    def _asked(self, given: Mapping[str, Any]) -> bool:
        """Does a tensor of the call, or a parameter of a chain, ask for gradients?"""
        return any(given[name].requires_grad for name, *_ in self.expected) or any(one.requires_grad for made in self.made for one in made.parameters())

    def unlike(self, given: Mapping[str, Any]) -> str | None:
        """Why the chains do not serve a call with these arguments; None where they do."""
        for name, shape, dtype, device in self.expected:
            value = given.get(name)
            if not isinstance(value, torch.Tensor):
                return f"{name} is no tensor"
            if value.shape != shape:
                return f"{name} is {tuple(value.shape)}, the kernels are for {tuple(shape)}"
            if value.dtype is not dtype or value.device != device:
                return f"{name} is {value.dtype} on {value.device}, the kernels are for {dtype} on {device}"
        if changed := [name for name, value in self.constants if not _equal(given.get(name), value)]:
            return f"{', '.join(changed)} differ from the example's"
        if any(module.training != mode for module, mode in self.modes):
            return f"the module is in {'evaluation' if self.mode else 'training'}, or a part of it, and the kernels are for {'training' if self.mode else 'evaluation'}"
        if torch.is_autocast_enabled(self.expected[0][3].type):
            return "autocast is on"
        if any(self.hooks):
            return "a part of it has hooks by now; name such parts in `apart`"
        if any(held.get(name) is not child for held, name, child in self.links):
            return "a part of it is another module by now; name such parts in `apart`"
        if any(held.get(name) is not first[last] for (first, last), *others in self.tied for held, name in others):
            return "parameters that were one are several by now"
        if not all(part.unchanged() for part in self.parts):
            return "a part of it has other numbers, another class or another forward by now; name such parts in `apart`"
        if self.without_grad and torch.is_grad_enabled():
            return "gradients are asked for, and a part of its forward runs without them"
        if not self.trains and torch.is_grad_enabled() and self._asked(given):
            return "gradients are asked for, and training=True was not"
        return None


def _held_in(region: Region, chains: Sequence[Built]) -> list[tuple[nn.Module, str, nn.Module]]:
    """The modules that the graph with the chains does not call but holds the operators of: parent, name and the module itself."""
    ours = {node for chain, _ in chains for node in chain.nodes}
    called = {region.root.get_submodule(node.target) for node in region.graph.nodes if node.op == "call_module" and node not in ours} | region.apart
    found, parents = [], [region.module]
    for parent in parents:
        children = [(parent, name, child) for name, child in parent._modules.items() if child is not None and child not in called]
        parents += [child for *_, child in children if not any(child is known for *_, known in found)]
        found += children
    return found


def _tied(module: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Where each tensor lies that a module has in several places: a trace says one of them."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, value in held.items():
                if value is not None:
                    places.setdefault(id(value), []).append((held, name))
    return [found for found in places.values() if len(found) > 1]


def _equal(value: Any, example: Any) -> bool:
    """Is an argument the example's? 1, 1.0 and True are three: a forward may treat them differently."""
    return value is example or type(value) is type(example) and value == example


class _Part:
    """A module whose operators a chain or a trace has: what it was when that was made."""

    def __init__(self, module: nn.Module) -> None:
        state = vars(module)
        self.module, self.kind, self.forward = module, type(module), state.get("forward")
        names = [name for name, value in state.items() if name != "training" and not name.startswith("_") and _is_number(value)]
        self.of = itemgetter(*names) if names else lambda state: ()
        self.numbers = self.of(state)

    def unchanged(self) -> bool:
        """Has it the same class, numbers and forward, where that is no place of ours?"""
        module, state = self.module, vars(self.module)
        try:
            same = type(module) is self.kind and self.of(state) == self.numbers
        except KeyError:  # deleted
            return False
        forward = state.get("forward")
        return same and (forward is None or forward == self.forward or isinstance(getattr(forward, "__self__", None), _Place))


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) or isinstance(value, tuple) and all(map(_is_number, value))


class _Place:
    """The forward of a region's module, put on the module itself: the first of its ways that serves a call, its own forward elsewhere."""

    def __init__(self, owner: Optimized, region: Region) -> None:
        self.owner, self.module, self.ways, self.worked = owner, region.module, [], False
        self.original, self.before = region.module.forward, region.module.__dict__.get("forward")
        self.path = region.path or type(region.module).__name__
        self.signature = inspect.signature(self.original)
        self.further = [name for name, of in self.signature.parameters.items() if of.kind in (of.VAR_POSITIONAL, of.VAR_KEYWORD)]
        self.names = [name for name, of in self.signature.parameters.items() if of.kind in (of.POSITIONAL_ONLY, of.POSITIONAL_OR_KEYWORD)]

    def __reduce__(self) -> tuple[Callable[..., _Place], tuple[nn.Module]]:
        """Of a copy of the module, which runs its own forward: the kernels are this one's."""
        return _without_ways, (self.module,)

    def put(self) -> None:
        self.module.forward = self.forward

    def remove(self) -> None:
        if self.module.__dict__.get("forward") == self.forward:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def _at_work(self) -> bool:
        """Is this a call of the optimised module, or one in the backward of such, which computes again what a checkpoint did not keep?"""
        if torch._C._current_graph_task_id() < 0:
            self.worked = getattr(self.owner._at_work, "value", False)
        return self.worked

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._at_work():
            return self.original(*args, **kwargs)
        if kwargs or len(args) != len(self.names):
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = bound.arguments
            if any(given.get(name) for name in self.further):  # the example gave none, and the trace knows of none
                self.owner.fallen_back(self.path, "it is given further arguments than the example's")
                return self.original(*args, **kwargs)
        else:
            given = dict(zip(self.names, args, strict=True))
        why = None
        for way in self.ways:
            unlike = way.unlike(given)
            if unlike is None:
                return way.run(way.root, *(given[name] for name, *_ in way.expected))
            why = why or unlike
        self.owner.fallen_back(self.path, why)
        return self.original(*args, **kwargs)


def _without_ways(module: nn.Module) -> _Place:
    """The place of a copied module, whose forward is that of its class."""
    made = object.__new__(_Place)
    made.owner, made.module, made.ways, made.worked = SimpleNamespace(_at_work=None), module, [], False
    made.original, made.before = MethodType(type(module).forward, module), None
    return made


def _compiled(region: Region, chains: Sequence[Built]) -> Callable[..., Any]:
    """The region's forward as a function of its root and its tensors, with calls of the generated modules in it."""
    graph, copies = fx.Graph(), {}
    last = {chain.gives: (number, chain, made) for number, (chain, made) in enumerate(chains)}
    inner = {node for chain, _ in chains for node in chain.nodes}
    for node in region.graph.nodes:
        if node in last:
            number, chain, made = last[node]
            copies[node] = graph.call_function(_named(made, chain, f"chain_{number}"), tuple(copies[used] for used in chain.takes))
        elif node not in inner:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    code = graph.python_code("self")
    scope = dict(code.globals)
    exec(compile(code.src, f"<{region.path or 'model'} with generated chains>", "exec"), scope)  # noqa: S102 - torch.fx's own text of a traced graph
    return scope["forward"]


def _named(made: GeneratedModule, chain: Chain, name: str) -> Callable[..., torch.Tensor]:
    """A function of its own name, as torch.fx's text needs it. Its bare parameters are those that the model has at the call."""
    bare = [(own, made._parameters, *chain.holder_of(own)) for own in chain.parameters if own in made._parameters]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        for own, held, holder, last in bare:
            held[own] = holder[last]
        return made(*tensors)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "generated"
    return call
