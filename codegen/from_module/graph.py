"""Model.forward, traced by torch.fx, as the entries of a chain."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from codegen.from_module import calls
from codegen.from_module.faults import Fault, Unfit, first_line, line_here, line_of
from codegen.ops import OPERATORS
from codegen.spec.reserved import RESERVED


@dataclass(frozen=True)
class Entry:
    """One operator of the chain: its argument values as the file has them (left out where PyTorch's default holds), and its line."""

    operator: str
    line: int
    name: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def has_parameters(self) -> bool:
        return OPERATORS[self.operator].requires_name or self.values.get("shape") is not None


@dataclass
class Traced:
    """What a forward turned out to be. `used`: attributes of Model that hold the parameters its operators take; `whole`: forward was
    followed to its end.
    """

    entries: list[Entry] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    whole: bool = True


class _Property(Unfit):
    """forward asks for a size, a type or the like: no operator at all."""


class NoOperator(Unfit):
    """The grammar has no such operator, whatever it is applied to."""


class _Tracer(fx.Tracer):
    """torch.fx's tracer, noting the line of the file for each node."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = line_here(self.path)
        if not torch.is_grad_enabled():
            node.meta["mode"] = "computed without gradients (torch.no_grad or the like)"
        elif any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            node.meta["mode"] = "computed under autocast"
        return node


def trace(model: nn.Module, path: str, source: list[str]) -> Traced:
    """Trace `model` (whose class is defined in the file at `path` with the lines `source`) and read its graph as a chain."""
    tracer = _Tracer(path)
    failure = None
    try:
        graph = tracer.trace(model)
    except Exception as error:  # whatever the file's forward raises is a fault of the file
        graph = getattr(tracer, "graph", fx.Graph())
        if isinstance(error, fx.proxy.TraceError):
            said = "forward's course depends on what x holds or on its size; a chain does the same for every input"
        else:
            said = f"forward cannot be traced: {first_line(error)}"
        failure = Fault(line_of(error, path), said)
    walk = _Walk(model, source)
    walk.graph(graph)
    walk.traced.faults = list(dict.fromkeys(walk.traced.faults))
    if failure:
        walk.traced.faults.append(failure)
        walk.traced.whole = False
    return walk.traced


class _Walk:
    """Follows the one value from operator to operator. Faults are collected and the walk goes on behind them."""

    def __init__(self, model: nn.Module, source: list[str]) -> None:
        self.model, self.source = model, source
        self.traced = Traced()
        self.current: fx.Node | None = None
        self.faulty: set[fx.Node] = set()
        self.properties: set[fx.Node] = set()  # sizes and the like, and what is computed from them: told where they are asked for
        self.excused: set[fx.Node] = set()  # values before a faulty operator: whoever goes on from them has the same fault
        self.silu: dict[fx.Node, fx.Node] = {}
        self.overwritten: dict[fx.Node, fx.Node] = {}  # a value -> the in-place operator that has replaced it since
        self.pairs: set[fx.Node] = set()  # of values and their indices, of which the values are yet to be taken
        self.places: dict[fx.Node, int] = {}  # a value -> the place of the entry that gives it

    def graph(self, graph: fx.Graph) -> None:
        absorbed = self.find_silu(graph)
        live = self.live(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                if self.current is None:
                    self.current = node
                else:
                    self.faulty.add(node)
                    self.fault(node, f"forward takes {node.target} beside x; a chain has one input")
            elif node.op == "output":
                self.output(node)
            elif node in live and node.op != "get_attr" and node not in absorbed:
                self.operator(node)

    def fault(self, node: fx.Node, message: str) -> None:
        self.traced.faults.append(Fault(node.meta.get("line", 0), message))

    def line(self, node: fx.Node) -> int:
        return node.meta.get("line", 0)

    def live(self, graph: fx.Graph) -> set[fx.Node]:
        """Nodes that the result depends on; the others compute something that nobody reads. All of them where tracing stopped early."""
        nodes = list(graph.nodes)
        if not any(node.op == "output" for node in nodes):
            return set(nodes)
        found: set[fx.Node] = set()
        for node in reversed(nodes):
            if node.op == "output" or self.is_in_place(node) or any(user in found for user in node.users):
                found.add(node)
        return found

    def is_in_place(self, node: fx.Node) -> bool:
        """Does the node write its result over its input?"""
        if node.op == "call_module":
            return getattr(self.model.get_submodule(node.target), "inplace", False) is True
        if node.op not in ("call_function", "call_method"):
            return False
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        return (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace", False) is True

    def now(self, node: fx.Node) -> fx.Node:
        """The value that the tensor of `node` holds by now."""
        while node in self.overwritten:
            node = self.overwritten[node]
        return node

    def output(self, node: fx.Node) -> None:
        returned = node.args[0]
        if returned in self.pairs:
            self.fault(returned, f"gives indices beside values: {self.text(returned)}; return the values alone, by [0] or .values")
            return
        if not isinstance(returned, fx.Node) or (self.now(returned) is not self.current and not self.faulty):
            self.traced.faults.append(Fault(self.line(node) or self.line(self.current), "forward must return the last operator's result and nothing else"))

    def find_silu(self, graph: fx.Graph) -> set[fx.Node]:
        """Products v * sigmoid(v); returns the sigmoids that are part of one."""
        absorbed = set()
        for node in graph.nodes:
            if node.op in ("call_function", "call_method") and calls.ARITHMETIC.get(calls.function_name(node)) == "mul" and len(node.args) == 2:
                for v, gate in (node.args, node.args[::-1]):
                    if isinstance(v, fx.Node) and isinstance(gate, fx.Node) and self.is_sigmoid(gate) and gate.args[:1] == (v,) and len(gate.users) == 1:
                        self.silu[node] = v
                        absorbed.add(gate)
                        break
        return absorbed

    def is_sigmoid(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return type(self.model.get_submodule(node.target)) is nn.Sigmoid
        if self.is_in_place(node):
            return False
        return node.op in ("call_function", "call_method") and calls.FUNCTIONS.get(calls.function_name(node), ("",))[0] == "sigmoid"

    def operator(self, node: fx.Node) -> None:
        inputs = [self.silu[node]] if node in self.silu else [n for n in node.all_input_nodes if n.op != "get_attr"]
        before = self.current
        self.traced.used.update(n.target.split(".")[0] for n in node.all_input_nodes if n.op == "get_attr")
        if "mode" in node.meta:
            self.fault(node, f"{node.meta['mode']}, which the kernels cannot keep: {self.text(node)}")
        if node.op == "call_function" and calls.function_name(node) == "getitem" and node.args[0] in self.faulty:
            self.faulty.add(node)  # one result out of a refused operator's tuple: no fault of its own
            self.current = node
            return
        if inputs and self.properties.issuperset(inputs):
            self.properties.add(node)
            return
        try:
            entry = self.entry(node, inputs)
        except Unfit as unfit:
            told = [n for n in inputs if n is not before and (n in self.faulty or n in self.properties)]
            if not told or isinstance(unfit, NoOperator):  # else it only follows from what is wrong with its operand
                self.fault(node, str(unfit))
            if isinstance(unfit, _Property):
                self.properties.add(node)
                return
            self.faulty.add(node)
            self.excused.add(before)
            if not inputs:
                return
        else:
            if entry is not None:
                self.traced.entries.append(entry)
            if self.traced.entries:
                self.places[node] = len(self.traced.entries) - 1
        if self.is_in_place(node):
            self.overwritten[before] = node
        self.current = node

    def entry(self, node: fx.Node, inputs: list[fx.Node]) -> Entry | None:
        """The chain's entry for a node, None for one that does nothing. Raises Unfit."""
        if node in self.silu:
            self.follow(node, inputs)
            return Entry("silu", self.line(node))
        if node.op == "call_module":
            return self.module(node, inputs)
        name = calls.function_name(node)
        if node.args and node.args[0] in self.pairs and ((name == "getitem" and node.args[1] in (0, -2)) or (name == "getattr" and node.args[1] == "values")):
            self.pairs.discard(node.args[0])
            return None
        if name in ("getattr", "size", "dim", "numel"):
            asked = node.args[1] if name == "getattr" else name
            raise _Property(f"forward asks for a property of the value ({asked}): {self.text(node)}; a chain has operators only, and its sizes are fixed")
        kind = calls.ARITHMETIC.get(name)
        if kind is None and name not in (*calls.FUNCTIONS, *calls.NEEDS_MODULE, *calls.RANDOM_FUNCTIONS, "contiguous"):
            if name in calls.OTHER_GRADIENTS:
                raise NoOperator(f"{calls.OTHER_GRADIENTS[name]}: {self.text(node)}")
            raise NoOperator(f"{name} is no operator of the grammar: {self.text(node)}")
        if kind is not None and (tapped := self.tapped(kind, node)):
            return Entry(kind, self.line(node), None, {"from": tapped})
        self.follow(node, inputs)
        if kind is not None:
            return self.arithmetic(kind, node)
        if not node.args or node.args[0] not in inputs:
            if "input" not in node.kwargs:
                raise Unfit(f"{name}'s input is not the chain's value: {self.text(node)}")
            node.args = (node.kwargs["input"], *node.args)
        if name == "contiguous":
            return None
        if name in calls.RANDOM_FUNCTIONS:
            given = calls.bind(name, node, ("p", "training", "inplace"))
            return self.dropout(node, name, given.get("p", 0.5), given.get("training", True))
        operator, values = calls.function_values(name, node, self.constant)
        if name in calls.PAIRS:
            self.pairs.add(node)
        return Entry(operator, self.line(node), self.free_name(operator) if OPERATORS[operator].requires_name else None, values)

    def follow(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        """Refuse an operator that does not take the value of the one before it, and no other."""
        if self.current in self.pairs and self.current in inputs:
            raise Unfit(f"takes indices beside values: {self.text(node)}; take the values first, by [0] or .values")
        if not inputs:
            raise Unfit(f"computed from parameters or constants alone: {self.text(node)}; every operator of a chain takes the value before it")
        for other in inputs:
            if self.now(other) is not self.current and other not in self.excused:
                where = f"the value of line {self.line(other)}" if other.op != "placeholder" else "x itself"
                raise Unfit(f"takes {where} once more: {self.text(node)}; in a chain each operator takes the value before it (add and mul an earlier one too)")

    def module(self, node: fx.Node, inputs: list[fx.Node]) -> Entry | None:
        module = self.model.get_submodule(node.target)
        kind = type(module).__name__
        own = list(module.state_dict())
        self.traced.used.add(node.target.split(".")[0])
        if isinstance(module, nn.Identity):
            self.follow(node, inputs)
            return self.drop(node, f"self.{node.target} (Identity) does nothing and is left out")
        if isinstance(module, calls.RANDOM_MODULES):
            self.follow(node, inputs)
            return self.dropout(node, f"self.{node.target} ({kind})", module.p, module.training)
        if type(module) not in calls.MODULES:
            raise Unfit(f"{kind} (self.{node.target}) is no operator of the grammar: {self.text(node)}")
        self.follow(node, inputs)
        if len(node.args) != 1 or node.kwargs:
            raise Unfit(f"self.{node.target} must be called with the value alone: {self.text(node)}")
        if own and "." in node.target:
            better = f"self.{_last_word(node.target)} = ..."
            raise Unfit(f"self.{node.target}: parameters must be attributes of Model itself, not of a module inside it; write {better}")
        if own and any(entry.name == node.target for entry in self.traced.entries):
            raise Unfit(f"self.{node.target} is applied twice; a chain uses each parameter once")
        operator, values = calls.module_values(module)
        taken = {entry.name for entry in self.traced.entries}
        name = node.target if OPERATORS[operator].requires_name or (_is_name(node.target) and node.target not in taken) else None
        return Entry(operator, self.line(node), name, {key: self.constant(value, key) for key, value in values.items()})

    def arithmetic(self, kind: str, node: fx.Node) -> Entry:
        operands = list(node.args) + [node.kwargs[key] for key in ("input", "other") if key in node.kwargs]
        alpha = node.kwargs.get("alpha", 1)
        left = {key: value for key, value in node.kwargs.items() if key not in ("input", "other", "alpha")}
        if left or alpha != 1:
            raise Unfit(f"{kind} with {', '.join(left or ['alpha'])}, which the grammar has no word for: {self.text(node)}")
        if kind == "neg":
            return Entry("mul", self.line(node), None, {"value": -1.0})
        values = [o for o in operands if isinstance(o, fx.Node) and o.op != "get_attr"]
        if len(operands) != 2 or len(values) != 1:
            raise Unfit(f"{kind} of two values: {self.text(node)}; the grammar has {kind} with a parameter or a number only")
        operand = operands[1] if operands[0] is values[0] else operands[0]
        if isinstance(operand, fx.Node):
            return self.parameter(kind, operand, node, reversed_=operands[0] is operand)
        if isinstance(operand, bool) or not isinstance(operand, (int, float)):
            raise Unfit(f"{kind} with {operand!r}: {self.text(node)}; the grammar has {kind} with a parameter or a number only")
        operator, value = calls.scalar(kind, operand, reversed_=operands[0] is operand)
        return Entry(operator, self.line(node), None, {"value": value})

    def tapped(self, kind: str, node: fx.Node) -> str | None:
        """The name of the entry whose result a sum or product of two values takes beside the chain's value; None for other arithmetic. Raises Unfit."""
        operands = [*node.args, *(node.kwargs[key] for key in ("input", "other") if key in node.kwargs)]
        values = [self.now(operand) for operand in operands if isinstance(operand, fx.Node) and operand.op != "get_attr"]
        if kind not in ("add", "mul") or node.kwargs.get("alpha", 1) != 1 or len(operands) != 2 or len(values) != 2 or self.current not in values:
            return None
        other = values[1] if values[0] is self.current else values[0]
        if other in self.faulty or other not in self.places:
            return None
        place = self.places[other]
        entry = self.traced.entries[place]
        if entry.name is None:
            entry = replace(entry, name=self.free_name(entry.operator))
            self.traced.entries[place] = entry
        return entry.name

    def parameter(self, kind: str, operand: fx.Node, node: fx.Node, reversed_: bool) -> Entry:
        target = operand.target
        self.traced.used.add(target.split(".")[0])
        value = self.model
        for part in target.split("."):
            value = getattr(value, part)
        if not isinstance(value, nn.Parameter):
            raise Unfit(f"{kind} with a tensor that is no nn.Parameter of Model: {self.text(node)}")
        if "." in target:
            raise Unfit(f"self.{target}: a parameter must be an attribute of Model itself, not of a module inside it")
        if kind in ("sub", "div") and reversed_:
            raise Unfit(f"{kind} with the parameter {target} in front: {self.text(node)}; the grammar has the chain's value in front")
        if not value.dim():
            raise Unfit(f"self.{target} has no dimensions; give it the shape (1,)")
        if any(entry.name == target for entry in self.traced.entries):
            raise Unfit(f"self.{target} is used twice; a chain uses each parameter once")
        return Entry(kind, self.line(node), target, {"shape": tuple(value.shape)})

    def dropout(self, node: fx.Node, what: str, p: float, training: bool) -> None:
        if p == 0 or not training:
            return self.drop(node, f"{what} does nothing {'at p = 0' if p == 0 else 'in eval mode'} and is left out")
        raise Unfit(f"{what} with p = {p} in training mode draws random numbers at every call; set p = 0 or its eval() in the constructor to leave it out")

    def drop(self, node: fx.Node, note: str) -> None:
        self.traced.notes.append(Fault(self.line(node), note))

    def constant(self, value: Any, what: str) -> Any:
        """A value known before x is. Lists become tuples. Raises Unfit for a traced one."""
        if isinstance(value, (list, tuple)):
            return tuple(self.constant(item, what) for item in value)
        if isinstance(value, (fx.Node, torch.Tensor)):
            raise Unfit(f"{what} is a tensor; the grammar takes numbers known beforehand")
        return value

    def free_name(self, stem: str) -> str:
        """A name for an operator that must have one and has no attribute in the file."""
        taken = {entry.name for entry in self.traced.entries} | set(dir(self.model))
        return next(name for name in (stem, *(f"{stem}_{i}" for i in range(2, 1000))) if name not in taken)

    def text(self, node: fx.Node) -> str:
        """The source line of a node, for messages."""
        line = self.line(node)
        return f"`{self.source[line - 1].strip()[:120]}`" if 0 < line <= len(self.source) else str(node)


def _is_name(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,79}", text)) and not keyword.iskeyword(text) and text not in RESERVED


def _last_word(target: str) -> str:
    words = [part for part in target.split(".") if not part.isdigit()]
    return words[-1] if words else target


def with_init(entry: Entry, init: str) -> Entry:
    """The entry with the way its parameter is filled."""
    return replace(entry, values=entry.values | {"init": init})
