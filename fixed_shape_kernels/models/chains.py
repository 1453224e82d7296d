"""Chains of a region: runs of its operators that are a spec, each as long as it can be."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from codegen.from_module import calls, graph
from codegen.from_module.entries import Entry, is_name
from codegen.from_module.faults import Refused
from codegen.from_module.text import Given, Layer, spec_text
from codegen.from_module.worker import read_back
from codegen.ops import OPERATORS, Kind
from codegen.spec import Spec

from .regions import ITSELF, Region, hooked, submodule

MODAL = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)  # compute something else in training
LONGEST = 24  # operators of a chain
LABEL = 64  # characters of a spec's name
PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
WORTH = (Kind.PRODUCER, Kind.NORM, Kind.REDUCTION, Kind.POOL)  # kinds of which one operator alone may be worth a kernel


@dataclass
class Chain:
    """Operators of a region that are a spec: the nodes, what they take from outside in the order of the spec's inputs, and the last one's value.

    `place` tells it from the model's others. `text` is the spec's YAML, the same for chains that compute the same wherever they stand; `modules` and
    `parameters` are the region's own, by the names that the spec gives them.
    """

    place: str
    region: Region
    nodes: tuple[fx.Node, ...]
    takes: tuple[fx.Node, ...]
    spec: Spec
    text: str
    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]
    eager: fx.GraphModule  # the same operators with the region's own modules

    def holder_of(self, name: str) -> tuple[dict[str, nn.Parameter], str]:
        """The dictionary of the model's module that has a bare parameter, and the name there."""
        found = next(
            (module._parameters, last) for module in self.region.module.modules() for last, value in module._parameters.items() if value is self.parameters[name]
        )  # fmt: skip
        return found

    @property
    def gives(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def path(self) -> str:
        """The path of the first module that it calls, or of the region."""
        first = next((node.target for node in self.nodes if node.op == "call_module"), "")
        inner = "" if first == ITSELF else first
        return ".".join(filter(None, (self.region.path, inner)))

    @property
    def words(self) -> str:
        return " -> ".join(step.operator.name for step in self.spec.chain)

    @property
    def where(self) -> str:
        return next((node.meta["where"] for node in self.nodes if node.meta.get("where")), "")


@dataclass(frozen=True)
class Left:
    """An operator that starts no chain although kernels know its kind: where it is, and why it stays."""

    path: str
    operator: str
    node: fx.Node
    why: str

    @property
    def where(self) -> str:
        return self.node.meta.get("where", "")


def chains_of(region: Region, name: str) -> tuple[list[Chain], list[Left]]:
    """The chains of a region from its front, none sharing an operator, and what was left. Their places are `name` and a number."""
    found: list[Chain] = []
    left: list[Left] = []
    taken: set[fx.Node] = set()
    for node in region.graph.nodes:
        if node in taken or not _known(region, node):
            continue
        chain, why = _longest(region, node, taken, f"{name}_{len(found)}")
        if chain is not None:
            found.append(chain)
            taken.update(chain.nodes)
        elif why is not None:
            inner = node.target if node.op == "call_module" and node.target != ITSELF else ""
            left.append(Left(".".join(filter(None, (region.path, inner))), _word(region, node), node, why))
    return found, left + _foreign(region)


def _foreign(region: Region) -> list[Left]:
    """Operators that the grammar does not have and that compute something, each once with the number of its calls."""
    met: dict[str, list[fx.Node]] = {}
    for node in region.graph.nodes:
        if node.op == "call_module" and not _known(region, node):
            module = submodule(region, node.target)
            if module not in region.apart and (not isinstance(module, (nn.Identity, nn.modules.dropout._DropoutNd)) or module.training):
                met.setdefault(type(module).__name__, []).append(node)
        elif node.op in ("call_function", "call_method") and not _known(region, node) and node in region.facts:
            memory = region.facts[node].untyped_storage()._cdata
            if all(region.facts[used].untyped_storage()._cdata != memory for used in node.all_input_nodes if used in region.facts):  # a view computes nothing
                met.setdefault(calls.function_name(node), []).append(node)
    return [
        Left(".".join(filter(None, (region.path, nodes[0].target if nodes[0].op == "call_module" and nodes[0].target != ITSELF else ""))), word, nodes[0],
             f"the grammar has no such operator{f', {len(nodes)} calls' if len(nodes) > 1 else ''}")
        for word, nodes in met.items()
    ]  # fmt: skip


def _known(region: Region, node: fx.Node) -> bool:
    """Is the node of a kind that the grammar has an operator for?"""
    if node.op == "call_module":
        return type(submodule(region, node.target)) in calls.MODULES and (node.target == ITSELF or submodule(region, node.target) not in region.apart)
    if node.op not in ("call_function", "call_method"):
        return False
    word = calls.function_name(node)
    return word in calls.FUNCTIONS or word in calls.ARITHMETIC or word in calls.PRODUCTS or word in calls.VIEWS or word in calls.SAME or word == "getitem"


def _word(region: Region, node: fx.Node) -> str:
    return calls.MODULES.get(type(submodule(region, node.target)), "") if node.op == "call_module" else calls.function_name(node)


def _longest(region: Region, first: fx.Node, taken: set[fx.Node], name: str) -> tuple[Chain | None, str | None]:
    """The longest chain that begins with a node; without one the reason, where the operator alone would be worth a kernel."""
    nodes, best, why = [first], None, None
    order = {node: place for place, node in enumerate(region.graph.nodes)}
    while True:
        inside = set(nodes)
        if all(set(node.users) <= inside for node in nodes[:-1]):
            chain, reason = _chain(region, tuple(nodes), order, name)
            best = chain or best
            why = reason if len(nodes) == 1 else why
        users = sorted((user for node in nodes for user in node.users if user not in inside), key=order.__getitem__)
        following = users[0] if users else None
        if following is None or following in taken or following.op == "output" or not _known(region, following) or len(nodes) == LONGEST:
            break
        if _kind(region, following) is Kind.PRODUCER and any(_kind(region, node) is Kind.PRODUCER for node in nodes):
            break  # no kernel spans two products, and each half may be worth it alone
        nodes.append(following)
    if best is not None and len(best.spec.chain) == 1 and best.spec.chain[0].operator.kind not in WORTH:
        return None, None
    return best, why if _kind(region, first) in WORTH else None


def _kind(region: Region, node: fx.Node) -> Kind | None:
    """The kind of the operator that a node stands for; None where the table has none."""
    word = _word(region, node)
    row = OPERATORS.get(calls.PRODUCTS.get(word, word))
    return row and row.kind


def _chain(region: Region, nodes: tuple[fx.Node, ...], order: dict[fx.Node, int], name: str) -> tuple[Chain | None, str | None]:
    """The nodes as a chain, or why they are none."""
    inside = set(nodes)
    takes = tuple(dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside and used.op != "get_attr"))
    if any(used not in region.facts for used in takes) or not takes:
        return None, "it takes something that is no tensor of a fixed shape"
    if any(order[used] > order[nodes[0]] for used in takes):
        return None, "it takes a value that is computed in between"
    if nodes[-1] not in region.facts:
        return None, "its result is no single tensor of a fixed shape"
    facts = [region.facts[used] for used in takes]
    kinds = {fact.dtype for fact in (*facts, region.facts[nodes[-1]])}
    kinds |= {parameter.dtype for node in nodes if node.op == "call_module" for parameter in submodule(region, node.target).parameters()}
    if len(kinds) > 1 or not kinds <= set(PRECISIONS):
        return None, f"its tensors are {' and '.join(sorted(str(kind).removeprefix('torch.') for kind in kinds))}"
    held = {type(parameter) for node in nodes if node.op == "call_module" for parameter in submodule(region, node.target).parameters()}
    if foreign := sorted(kind.__name__ for kind in held if kind is not nn.Parameter):
        return None, f"its parameters are {' and '.join(foreign)}"
    between = [node for node in order if order[nodes[0]] < order[node] < order[nodes[-1]] and node not in inside]
    if any(_reaches(region, node, nodes, takes) for node in between):
        return None, "an operator in place runs in between"
    if any(node.target is torch._C._set_grad_enabled for node in between):
        return None, "gradients are switched on or off in between"
    for node in nodes:
        source = _overwritten(region, node)
        if source is not None and source not in inside and (source.op == "placeholder" or not set(source.users) <= inside):
            return None, "it writes over a value that others may read"
        if node.op == "call_module" and hooked(submodule(region, node.target)):
            return None, "the module has hooks, which kernels do not call"
    called = [submodule(region, node.target) for node in nodes if node.op == "call_module"]
    if any(module.training != region.module.training for module in called if isinstance(module, MODAL)):
        return None, "the module is in another mode than the one that calls it"
    run, modules, parameters = _as_model(region, nodes, takes)
    with torch.enable_grad():  # whether gradients are wanted is asked at each call
        traced = graph.trace(_without_data(run), "", [], [tuple(fact.shape) for fact in facts])
    if traced.faults or not traced.entries:
        return None, "; ".join(fault.message for fault in traced.faults) or "it computes nothing"
    if any(entry.operator == "dropout" for entry in traced.entries):
        return None, "dropout draws its mask anew at each call, so nothing can be compared"
    given = tuple(Given(word, tuple(fact.shape), "randn") for word, fact in zip(traced.inputs, facts, strict=True))
    entries = tuple(entry if not entry.holds_parameter else _filled(entry) for entry in traced.entries)
    label = "_".join(("chain", *(entry.operator for entry in entries)))[:LABEL].rstrip("_")
    (kind,) = kinds
    try:
        text = spec_text(Layer(label, "a model", PRECISIONS[kind], given, (), (), entries), 0)
        spec = read_back(text, label)
    except Refused as refused:
        return None, "; ".join(fault.message for fault in refused.faults)
    if spec.output_shape != tuple(region.facts[nodes[-1]].shape):
        return None, "its result has another shape than the spec's"
    return Chain(name, region, nodes, takes, spec, text.yaml, modules, parameters, run), None


def _filled(entry: Entry) -> Entry:
    """A bare parameter as the spec writes it: how it starts makes no difference here."""
    return replace(entry, values=entry.values | {"init": "randn"})


def _overwritten(region: Region, node: fx.Node) -> fx.Node | None:
    """The value that a node writes its result over; None where it writes over none."""
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) and calls.is_in_place(node, lambda target: submodule(region, target)) else None


def _reaches(region: Region, node: fx.Node, nodes: tuple[fx.Node, ...], takes: tuple[fx.Node, ...]) -> bool:
    """Does a node in between write over what the chain's operators read? One whose memory is not known may."""
    state = {id(buffer) for module in _modal(region, (node,)) for buffer in module.buffers()}
    if any(id(buffer) in state for module in _modal(region, nodes) for buffer in module.buffers()):
        return True  # both renew the same running statistics
    source = _overwritten(region, node)
    if source is None:
        return False
    if source not in region.facts or source.op == "get_attr":
        return True
    memory = region.facts[source].untyped_storage()._cdata
    return any(used not in region.facts or region.facts[used].untyped_storage()._cdata == memory for used in (*takes, *nodes))


def _modal(region: Region, nodes: tuple[fx.Node, ...]) -> list[nn.Module]:
    """The modules in training that renew running statistics, of those that nodes call."""
    called = [submodule(region, node.target) for node in nodes if node.op == "call_module"]
    return [module for module in called if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training]


def _as_model(region: Region, nodes: tuple[fx.Node, ...], takes: tuple[fx.Node, ...]) -> tuple[fx.GraphModule, dict[str, nn.Module], dict[str, nn.Parameter]]:
    """The nodes as a module of their own, whose parts are the region's under names that a spec can give: what they are, not where."""
    part, copies, root = fx.Graph(), {}, nn.Module()
    words: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    parameters: dict[str, nn.Parameter] = {}

    def word(target: str, what: object) -> str:
        if target not in words:
            stem = calls.MODULES.get(type(what), "module") if isinstance(what, nn.Module) else "own"
            names = (name for number in itertools.count() if is_name(name := f"{stem}_{number}") and name not in words.values())
            words[target] = next(names)
        return words[target]

    for place, used in enumerate(takes):
        copies[used] = part.placeholder("x" if not place else f"other_{place}")
    for node in nodes:
        for used in node.all_input_nodes:
            if used.op == "get_attr" and used not in copies:
                path, _, last = used.target.rpartition(".")
                holder = region.module.get_submodule(path)
                if path and last in holder._parameters and calls.function_name(node) in (*calls.NORMS, *calls.PRODUCTS):  # of a module whose function is called with it
                    name = word(path, holder)
                    modules[name] = holder
                    setattr(root, name, holder)
                    copies[used] = part.get_attr(f"{name}.{last}")
                    continue
                value = getattr(holder, last)
                name = word(used.target, value)
                setattr(root, name, value)
                if isinstance(value, nn.Parameter):
                    parameters[name] = value
                copies[used] = part.get_attr(name)
        made = part.node_copy(node, copies.__getitem__)
        if node.op == "call_module":
            made.target = word(node.target, submodule(region, node.target))
            modules[made.target] = submodule(region, node.target)
            setattr(root, made.target, modules[made.target])
        copies[node] = made
    part.output(copies[nodes[-1]])
    run = fx.GraphModule(root, part)
    run.training = region.module.training
    return run, modules, parameters


def _without_data(run: nn.Module) -> nn.Module:
    """A copy of a module on the meta device, which shares nothing and holds no data."""
    memo = {id(tensor): nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad) for tensor in run.parameters()}
    memo |= {id(tensor): tensor.to("meta") for tensor in run.buffers()}
    return copy.deepcopy(run, memo)
