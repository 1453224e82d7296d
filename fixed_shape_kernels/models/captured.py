"""Graphs of torch.compile as regions: functions with a model's parameters become modules again, so that chains are found in them as anywhere.

Dynamo hands a graph whose inputs are the parameters, too. `Captured` keeps which of its nodes each node of the region stands for, and puts operators of
generated packages in the place of chains there.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from codegen.from_module import calls
from codegen.from_module.faults import Unfit
from runtime import GeneratedModule

from .chains import Chain
from .regions import Call, Region

_NORM = ("running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")  # of F.batch_norm, behind its input
_TORCH = str(Path(torch.__file__).parent)
_ITEM = operator.getitem
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_ROOT = re.compile(r"^(getattr\()?L\['\w+'\]")  # the model itself, at the beginning of a path as Dynamo writes it
_OWN = "fixed_shape_kernels"  # the key under which a node says that an operator of ours was put there


class Captured:
    """A graph of torch.compile as a region; `inputs` are the graph's, in the order of its placeholders: tensors and sizes.

    The graph itself stays as it is until `put` is called. A placeholder without an input (None) gets random values in the place of a parameter.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.gm = gm
        self.origin: dict[fx.Node, fx.Node] = {}  # a node of the region -> the node that it stands for
        self.holders: dict[int, fx.Node] = {}  # a parameter or a buffer, by identity -> the placeholder that it comes in by
        root, graph = nn.Module(), fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._values: dict[fx.Node, torch.Tensor] = {}
        given, arguments = iter(inputs), {}
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                value = next(given)
                value = _stand_in(node.meta.get("example_value")) if value is None else value
                if isinstance(value, torch.Tensor):
                    self._values[node] = value
                    self.holders[id(value)] = node
                if type(value) is nn.Parameter:
                    name = f"held_{len(self.origin)}"
                    setattr(root, name, value)
                    made = graph.get_attr(name)
                else:
                    made = graph.placeholder(node.name)
                    arguments[node.name] = value
            else:
                made = self._module(node, root, graph) or graph.node_copy(node, self._copies.__getitem__)
                if made.op in ("call_module", "get_attr") and node.op == made.op and not hasattr(root, head := str(node.target).split(".")[0]):
                    setattr(root, head, getattr(gm, head))
            made.meta = {"where": _where(node)}
            self._copies[node], self.origin[made] = made, node
        root.training = any(module.training for module in root.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
        self.region = Region("", root, root, graph, Call(arguments), tuple(arguments))
        for made, node in self.origin.items():
            fact = node.meta.get("example_value")
            if isinstance(fact, torch.Tensor) and all(isinstance(size, int) for size in fact.shape):  # of a size that changes there are no kernels
                self.region.facts[made] = fact

    def _module(self, node: fx.Node, root: nn.Module, graph: fx.Graph) -> fx.Node | None:
        """A call of a module in the place of a function with parameters; None where the node is none, or its parameters are computed."""
        if node.op != "call_function":
            return None
        name = calls.function_name(node)
        made = _MAKERS.get(name)
        if made is None:
            return None
        names, make = made
        try:
            first, given = _bound(name, node, names)
        except Unfit:
            return None
        tensors = {key: given[key] for key in ("weight", "bias", "running_mean", "running_var") if isinstance(given.get(key), fx.Node)}
        rest = [value for key, value in given.items() if key not in tensors]
        if not isinstance(first, fx.Node) or _holds_nodes(rest):
            return None
        held = {key: self._values.get(one) for key, one in tensors.items()}
        if any(value is None or (key in ("weight", "bias") and type(value) is not nn.Parameter) for key, value in held.items()):
            return None
        fact = first.meta.get("example_value")
        if name == "batch_norm" and not isinstance(fact, torch.Tensor):
            return None
        try:
            with torch.device("meta"):
                module = make(name, fact, {key: value for key, value in given.items() if key not in tensors}, held)
        except (TypeError, ValueError, KeyError, AttributeError):  # arguments that the module's class refuses: the function stays
            return None
        for key, value in held.items():
            (module._parameters if key in ("weight", "bias") else module._buffers)[key] = value
        if "num_batches_tracked" in module._buffers and module.num_batches_tracked is not None:
            module.num_batches_tracked = torch.zeros((), dtype=torch.long, device=held["running_mean"].device)  # the graph counts by itself
        target = _free(root, _path(node) or name)
        parent = root
        *above, last = target.split(".")
        for word in above:
            if word not in parent._modules:
                parent.add_module(word, nn.Module())
            parent = parent._modules[word]
        parent.add_module(last, module)
        return graph.call_module(target, (self._copies[first],))

    def put(self, chosen: Sequence[tuple[Chain, GeneratedModule]]) -> None:
        """Put the operators of generated packages into the graph, each where the last operator of its chain stands."""
        graph = self.gm.graph
        for chain, made in chosen:
            last = self.origin[chain.gives]
            with graph.inserting_before(last):
                result = self._operator(graph, chain, made)
            result.meta = {key: value for key, value in last.meta.items() if key in ("example_value", "nn_module_stack", "stack_trace", "source_fn_stack")} | {_OWN: chain.words}
            last.replace_all_uses_with(result)
            for node in reversed(chain.nodes):
                graph.erase_node(self.origin[node])
            self.origin[chain.gives] = result
        graph.lint()
        self.gm.recompile()

    def _operator(self, graph: fx.Graph, chain: Chain, made: GeneratedModule) -> fx.Node:
        """The node that gives the chain's result, behind those that renew running statistics."""
        manifest, operators = made._package.manifest, made._operators
        takes = [self.origin[used] for used in chain.takes]
        state = {entry.name: self._state(graph, made, entry.name) for entry in manifest.state}
        operands = (*takes, *(self.holders[id(_held(made, entry.name))] for entry in manifest.parameters), *state.values())
        trains = chain.region.module.training and manifest.reference is not None and bool(manifest.reference.training)
        if not trains:
            return graph.call_function(operators.forward, operands)
        results = graph.call_function(operators.forward_training, operands)
        if not manifest.reference.results:
            return results
        for place, name in enumerate(manifest.reference.results, 1):
            if name.startswith("state:"):
                buffer = state[name.removeprefix("state:")]
                taken = graph.call_function(_ITEM, (results, place))
                renewed = graph.call_method("detach", (taken,))
                taken.meta = renewed.meta = {"example_value": buffer.meta["example_value"]}  # without it AOTAutograd caches no graph with methods
                graph.call_method("copy_", (buffer, renewed))
        return graph.call_function(_ITEM, (results, 0))

    def _state(self, graph: fx.Graph, made: GeneratedModule, name: str) -> fx.Node:
        value = _held(made, name)
        if id(value) in self.holders:
            return self.holders[id(value)]
        return graph.call_function(torch.zeros, ((),), {"dtype": torch.long, "device": value.device})  # num_batches_tracked, which the graph counts itself


def _held(made: GeneratedModule, name: str) -> torch.Tensor:
    """A parameter or a buffer of a module by its path."""
    path, _, last = name.rpartition(".")
    owner = made.get_submodule(path)
    return owner._parameters[last] if last in owner._parameters else owner._buffers[last]


def _stand_in(fact: Any) -> Any:
    """Random values for a parameter, and for a buffer such as may be a variance; whatever else as it is."""
    if not isinstance(fact, torch.Tensor) or not fact.is_floating_point() or not all(isinstance(size, int) for size in fact.shape):
        return fact
    if isinstance(fact, nn.Parameter):
        spread = 1.0 / max(1, fact[0].numel() if fact.dim() > 1 else 1) ** 0.5
        return nn.Parameter(torch.randn(fact.shape, dtype=fact.dtype, device=fact.device) * spread, fact.requires_grad)
    return torch.rand(fact.shape, dtype=fact.dtype, device=fact.device) + 0.5


def _bound(name: str, node: fx.Node, names: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    """(input, further arguments by name) of a call. Raises Unfit."""
    given = calls.bind(name, node, names)
    return (node.args[0] if node.args else node.kwargs.get("input")), given


def _holds_nodes(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(map(_holds_nodes, values))
    return isinstance(values, fx.Node) or (isinstance(values, torch.SymInt))


def _where(node: fx.Node) -> str:
    """The last line of the user's code that led to a node."""
    found = [(path, line) for path, line in _PLACE.findall(node.meta.get("stack_trace") or "") if not path.startswith(_TORCH)]
    return f"{found[-1][0].rsplit('/', 1)[-1]}:{found[-1][1]}" if found else ""


def _path(node: fx.Node) -> str:
    """The path of the module that a node is in, as the model's `named_modules` has it."""
    stack = node.meta.get("nn_module_stack") or {}
    text = next(reversed(stack.values()), ("",))[0]
    return ".".join(word for word in re.findall(r"\w+", _ROOT.sub("", text)) if word not in ("_modules", "getattr"))


def _free(root: nn.Module, path: str) -> str:
    """The path, or one like it that nothing stands at."""
    number, found = 1, path
    while True:
        part: Any = root
        for word in found.split("."):
            part = getattr(part, word, None) if part is not None else None
        if part is None:
            return found
        number += 1
        found = f"{path}_{number}"


Made = Callable[[str, "torch.Tensor | None", dict[str, Any], dict[str, torch.Tensor]], nn.Module]


def _linear(name: str, fact: torch.Tensor | None, given: dict[str, Any], held: dict[str, torch.Tensor]) -> nn.Module:
    return nn.Linear(held["weight"].shape[1], held["weight"].shape[0], bias="bias" in held)


def _convolution(name: str, fact: torch.Tensor | None, given: dict[str, Any], held: dict[str, torch.Tensor]) -> nn.Module:
    weight, turned, groups = held["weight"], "transpose" in name, given.get("groups", 1)
    options = {key: given[key] for key in ("stride", "padding", "output_padding", "dilation") if key in given}
    inputs, outputs = (weight.shape[0], weight.shape[1] * groups) if turned else (weight.shape[1] * groups, weight.shape[0])
    kind = getattr(nn, f"Conv{'Transpose' if turned else ''}{name[-2]}d")
    return kind(inputs, outputs, tuple(weight.shape[2:]), groups=groups, bias="bias" in held, **{key: value if isinstance(value, (int, str)) else tuple(value) for key, value in options.items()})


def _group_norm(name: str, fact: torch.Tensor | None, given: dict[str, Any], held: dict[str, torch.Tensor]) -> nn.Module:
    return nn.GroupNorm(given["num_groups"], held["weight"].shape[0], given.get("eps", 1e-5))


def _layer_norm(name: str, fact: torch.Tensor | None, given: dict[str, Any], held: dict[str, torch.Tensor]) -> nn.Module:
    return nn.LayerNorm(tuple(given["normalized_shape"]), given.get("eps", 1e-5), "weight" in held, "bias" in held)


def _rms_norm(name: str, fact: torch.Tensor | None, given: dict[str, Any], held: dict[str, torch.Tensor]) -> nn.Module:
    return nn.RMSNorm(tuple(given["normalized_shape"]), given.get("eps"), "weight" in held)


def _batch_norm(name: str, fact: torch.Tensor | None, given: dict[str, Any], held: dict[str, torch.Tensor]) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[fact.dim()]
    tracks = "running_mean" in held
    module = kind(fact.shape[1], given.get("eps", 1e-5), given.get("momentum", 0.1), "weight" in held, tracks)
    return module.train(bool(given.get("training", False)))


_MAKERS: dict[str, tuple[tuple[str, ...], Made]] = {
    "linear": (("weight", "bias"), _linear),
    **{f"conv{rank}d": (calls.CONVOLUTION, _convolution) for rank in calls.RANKS},
    **{f"conv_transpose{rank}d": (calls.TRANSPOSED, _convolution) for rank in calls.RANKS},
    "group_norm": (calls.FUNCTIONS["group_norm"][1], _group_norm),
    "layer_norm": (calls.FUNCTIONS["layer_norm"][1], _layer_norm),
    "rms_norm": (calls.FUNCTIONS["rms_norm"][1], _rms_norm),
    "batch_norm": (_NORM, _batch_norm),
}  # fmt: skip
