"""Regions of a model: modules whose forward torch.fx can trace, with the arguments that the example hands them.

The whole model is one region where it can be traced. Where it cannot, the reason is kept and its children are tried, down to single modules of torch.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode

from codegen.from_module.calls import MODULES

from .tracing import ShapedTracer

CONSTANTS = (bool, int, float, str, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # of a module


@dataclass
class Call:
    """What a module was called with by the example: its arguments by name, tensors without their data, and how often."""

    arguments: dict[str, Any]
    times: int = 1
    plain: bool = True  # nothing but tensors and constants


@dataclass(eq=False)
class Region:
    """A traced module: its path in the model, its graph and the root of that, and what its tensors were in the example's run."""

    path: str
    module: nn.Module
    root: nn.Module
    graph: fx.Graph
    call: Call
    tensors: tuple[str, ...]  # the names of the arguments that are tensors
    facts: dict[fx.Node, torch.Tensor] = field(default_factory=dict)  # results without data; those alone that are tensors
    apart: frozenset[nn.Module] = frozenset()  # modules whose calls stay calls
    without_grad: bool = False  # a part of the forward runs without gradients, which the graph does not say


@dataclass(frozen=True)
class Untraced:
    """A module that stays as it is, and why."""

    path: str
    kind: str
    why: str


def path_of(path: str, kind: str = "") -> str:
    """A module's path for a report."""
    return path or f"({kind or 'the model'})"


def regions_of(model: nn.Module, example: tuple[Any, ...], apart: Sequence[nn.Module | type[nn.Module]] = ()) -> tuple[list[Region], list[Untraced]]:
    """The regions of a model, and what is none, in the order of `named_modules`.

    A module that is in `apart`, or of a class there, or that is no module of torch and has hooks, is a region of its own. The model runs on the example once
    without data, or with it where its course depends on data. Raises ValueError for a model that is wrapped or sharded already, or whose parameters have no
    shapes yet; what the model raises on the example.
    """
    _check(model)
    with kept_state(model), _shapes_alone(model):
        return _regions_of(model, example, apart_of(model, apart))


def _check(model: nn.Module) -> None:
    """Raises ValueError for a model that cannot be run on one process's example, without data, and be as before."""
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(f"{path_of(path)} is wrapped in DistributedDataParallel; optimise the model, then wrap what optimize gives")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            raise ValueError(f"{name} has no shape yet; call the model once")
        if type(tensor).__name__ == "DTensor":  # by its name: torch.distributed is not in every torch
            raise ValueError(f"{name} is a DTensor; optimise the model, then shard it")


def apart_of(model: nn.Module, named: Sequence[nn.Module | type[nn.Module]]) -> frozenset[nn.Module]:
    """The parts of a model whose calls stay calls: those named, and those with hooks. Raises ValueError for what is no part of it."""
    kinds, parts = tuple(one for one in named if isinstance(one, type)), [one for one in named if not isinstance(one, type)]
    inside = list(model.modules())[1:]
    if wrong := [one for one in parts if not any(one is part for part in inside)] + [kind for kind in kinds if not any(isinstance(part, kind) for part in inside)]:
        raise ValueError(f"apart: {type(wrong[0]).__name__ if isinstance(wrong[0], nn.Module) else wrong[0]} is no part of the model; expected modules inside it, or classes of such")
    leaf = fx.Tracer().is_leaf_module
    return frozenset(part for part in inside if isinstance(part, kinds) or any(part is one for one in parts) or (hooked(part) and not leaf(part, "")))


def hooked(module: nn.Module) -> bool:
    """Has a module hooks of its own?"""
    state = vars(module)
    return any(state[name] for name in HOOKS)


def _regions_of(model: nn.Module, example: tuple[Any, ...], apart: frozenset[nn.Module]) -> tuple[list[Region], list[Untraced]]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with kept_attributes(model):  # parts are traced as the example found them
        calls = _record(model, example, mode)
    found: list[Region] = []
    left: list[Untraced] = []
    met: set[nn.Module] = set()

    def scan(path: str, module: nn.Module) -> None:
        if module in met:
            return
        met.add(module)
        call = calls.get(module)
        if call is None:
            if type(module) in MODULES:
                left.append(Untraced(path, type(module).__name__, "never called by the example"))
            for name, child in module.named_children():
                scan(f"{path}.{name}" if path else name, child)
            return
        why = _refused(module, call)
        region = None
        if why is None:
            try:
                region = _traced(path, module, call, mode, apart)
            except Exception as error:  # whatever a user's forward raises under tracing
                why = _reason(error)
        if region is not None:
            found.append(region)
            belong(path, module)
            return
        parts = list(module.named_children())
        left.append(Untraced(path, type(module).__name__, f"{why}; its parts are looked at by themselves" if parts else why))
        for name, child in parts:
            scan(f"{path}.{name}" if path else name, child)

    def belong(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            if child in apart:
                scan(inner, child)
            elif child not in met:
                met.add(child)
                belong(inner, child)

    scan("", model)
    return found, left


def _record(model: nn.Module, example: tuple[Any, ...], mode: FakeTensorMode) -> dict[nn.Module, Call]:
    """The first call of every module while the model runs on the example. Raises what the model raises."""
    calls: dict[nn.Module, Call] = {}
    faked = lambda value: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value  # noqa: E731

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in calls:
            calls[module].times += 1
            return
        try:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            kinds = inspect.signature(module.forward).parameters
            plain = all(kinds[name].kind not in (kinds[name].VAR_POSITIONAL, kinds[name].VAR_KEYWORD) or not value for name, value in arguments.items())
            arguments = {name: faked(value) for name, value in arguments.items() if kinds[name].kind not in (kinds[name].VAR_POSITIONAL, kinds[name].VAR_KEYWORD)}
        except (TypeError, ValueError):
            arguments, plain = {}, False
        calls[module] = Call(arguments, 1, plain and all(isinstance(value, (torch.Tensor, *CONSTANTS)) for value in arguments.values()))

    handles = [module.register_forward_pre_hook(seen, with_kwargs=True) for module in model.modules()]
    try:
        with torch.no_grad(), mode:
            model(*map(faked, example))
    except Exception:  # its course depends on data, or an operator has no rule for results without it; what is wrong itself is wrong again
        calls.clear()
        with torch.no_grad(), torch.random.fork_rng():
            model(*example)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def _shapes_alone(model: nn.Module) -> Iterator[None]:
    """Let recurrent modules give results of the right shapes for tensors without data, which would else go through thousands of steps."""
    changed = [(module, vars(module).get("forward"), module.forward) for module in model.modules() if isinstance(module, nn.RNNBase)]

    def shaped(module: nn.RNNBase, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Any, hx: Any = None) -> Any:
            if not isinstance(x, FakeTensor) or type(module) not in (nn.RNN, nn.GRU, nn.LSTM):
                return original(x, hx)
            width, ways = getattr(module, "proj_size", 0) or module.hidden_size, 2 if module.bidirectional else 1
            batch = x.shape[:0] if x.dim() == 2 else x.shape[:1] if module.batch_first else x.shape[1:2]
            last = x.new_empty((module.num_layers * ways, *batch, width))
            state = (last, x.new_empty((module.num_layers * ways, *batch, module.hidden_size))) if isinstance(module, nn.LSTM) else last
            return x.new_empty((*x.shape[:-1], ways * width)), state

        return forward

    for module, _, original in changed:
        module.forward = shaped(module, original)
    try:
        yield
    finally:
        for module, before, _ in changed:
            del module.forward
            if before is not None:
                module.forward = before


@contextmanager
def kept_state(model: nn.Module) -> Iterator[None]:
    """Give the model's buffers back what they hold now, at the end of the block."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Give the attributes of a model's modules back what they are now, at the end of the block; inside it, the names of those that changed."""
    before = [(path, module, {name: (value, _items(value)) for name, value in vars(module).items()}) for path, module in model.named_modules()]

    def added(module: nn.Module, known: dict[str, Any]) -> list[str]:
        return [name for name in vars(module) if name not in known and not name.startswith("_tensor_constant")]  # those are torch.fx's own, and its graphs read them

    def changed() -> list[str]:
        found = []
        for path, module, known in before:
            others = [name for name, (value, held) in known.items() if vars(module).get(name) is not value or not _same_items(held, _items(value))]
            found += [f"{path}.{name}" if path else name for name in (*added(module, known), *others)]
        return found

    try:
        yield changed
    finally:
        for _, module, known in before:
            for name in added(module, known):
                del vars(module)[name]
            for name, (value, held) in known.items():
                vars(module)[name] = value
                if not _same_items(held, _items(value)):
                    value.clear()
                    (value.extend if isinstance(value, (list, deque)) else value.update)(held if isinstance(value, dict) else [item for _, item in held])


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """The items of a container, None of whatever else."""
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, (list, set, deque)) else None


def _same_items(one: list[tuple[Any, Any]] | None, other: list[tuple[Any, Any]] | None) -> bool:
    return one is other if one is None or other is None else len(one) == len(other) and all(a is c and b is d or (a == c and b is d) for (a, b), (c, d) in zip(one, other, strict=True))


def _refused(module: nn.Module, call: Call) -> str | None:
    """Why a module is no region, before it is traced; None where it may be one."""
    if call.times > 1:
        return f"called {call.times} times in one run of the model"
    if not call.plain:
        return "called with something that is neither a tensor nor a number, a word or None"
    tensors = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
    if not tensors:
        return "called without a tensor"
    devices = {tensor.device for tensor in (*tensors, *module.parameters(), *module.buffers())}
    if len(devices) > 1:
        return f"its tensors are on {' and '.join(sorted(map(str, devices)))}"
    return None


def _traced(path: str, module: nn.Module, call: Call, mode: FakeTensorMode, apart: frozenset[nn.Module]) -> Region:
    """Trace a module for the constants that it was called with. Raises what its forward raises."""
    tensors = tuple(name for name, value in call.arguments.items() if isinstance(value, torch.Tensor))
    root = module
    facts: dict[fx.Node, Any] = {}
    without_grad = False
    if fx.Tracer().is_leaf_module(module, ""):
        if len(tensors) != 1:
            raise TypeError("a module of torch with several inputs")
        graph, root = fx.Graph(), _Alone(module)
        graph.output(graph.call_module(ITSELF, (graph.placeholder(tensors[0]),)))
        with torch.no_grad(), mode:
            Watched(root, graph, after=facts.__setitem__).run(call.arguments[tensors[0]])
    else:
        tracer = ShapedTracer({name: call.arguments[name] for name in tensors}, mode, apart)
        with kept_attributes(module) as changed:
            graph = tracer.trace(module, concrete_args={name: value for name, value in call.arguments.items() if name not in tensors} or None)
            if names := changed():
                raise TypeError(f"its forward sets {', '.join(names[:3])}")
        facts, without_grad = tracer.facts, tracer.without_grad
        checks = [node for node in graph.nodes if node.op == "placeholder" and node.target not in tensors]  # of constants: fx compares them in the graph
        for node in checks:
            checks += [user for user in node.users if user not in checks]
        for node in reversed(checks):
            if not node.users and node.op != "output":
                graph.erase_node(node)
        given = [node.target for node in graph.nodes if node.op == "placeholder"]
        if tuple(given) != tensors:
            raise TypeError(f"its forward takes {', '.join(given)}, and the example gives {', '.join(tensors)}")
    return Region(path, module, root, graph, call, tensors, {node: value for node, value in facts.items() if isinstance(value, torch.Tensor)}, apart, without_grad)


ITSELF = "itself"  # the target of a region that is one module of torch


class _Alone(nn.Module):
    """The root of such a region's graph."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        setattr(self, ITSELF, module)


def submodule(region: Region, target: str) -> nn.Module:
    """The module that a node calls."""
    return region.root.get_submodule(target)


class Watched(fx.Interpreter):
    """Runs a graph on tensors, and tells of each node before it runs and of its result behind it."""

    def __init__(self, root: nn.Module, graph: fx.Graph, before: Callable[[fx.Node], None] = lambda node: None, after: Callable[[fx.Node, Any], None] = lambda node, value: None) -> None:
        super().__init__(root, graph=graph)
        self.before, self.after = before, after

    def run_node(self, n: fx.Node) -> Any:
        self.before(n)
        value = super().run_node(n)
        self.after(n, value)
        return value


def _reason(error: Exception) -> str:
    said = str(error).strip().split("\n", 1)[0][:160]
    if isinstance(error, fx.proxy.TraceError):
        return f"its course depends on what its tensors hold ({said})"
    return f"it cannot be traced: {type(error).__name__}: {said}"
