"""Model.forward, traced by torch.fx, as the entries of a chain."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from codegen.from_module import calls
from codegen.from_module.faults import Fault, Unfit, first_line, line_of
from codegen.from_module.tracer import Tracer, attribute
from codegen.ops import OPERATORS
from codegen.spec.reserved import RESERVED


_DETACH = "the grammar has detach for the value that arithmetic takes beside the chain's, as in v + earlier.detach()"


@dataclass(frozen=True)
class Entry:
    """One operator of the chain: its argument values as the file has them (left out where PyTorch's default holds), and its line."""

    operator: str
    line: int
    name: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def holds_parameter(self) -> bool:
        """Is it a parameter without a module, or has it one?"""
        return self.values.get("shape") is not None or ("init" in self.values and self.operator == "linear")

    @property
    def has_module(self) -> bool:
        return not self.holds_parameter and self.operator in OPERATORS and OPERATORS[self.operator].requires_name


@dataclass
class Traced:
    """What a forward turned out to be. `used`: attributes of Model that hold the parameters its operators take; `whole`: forward was
    followed to its end.
    """

    entries: list[Entry] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    inputs: list[str] = field(default_factory=list)
    whole: bool = True


class _Property(Unfit):
    """forward asks for a size, a type or the like: no operator at all."""


class NoOperator(Unfit):
    """The grammar has no such operator, whatever it is applied to."""


def trace(model: nn.Module, path: str, source: list[str], shapes: list[tuple[int, ...]]) -> Traced:
    """Trace `model` (whose class is defined in the file at `path` with the lines `source`) for inputs of `shapes` and read its graph as a chain."""
    tracer = Tracer(path, shapes)
    failure = None
    try:
        graph = tracer.trace(model)
    except Exception as error:  # whatever the file's forward raises is a fault of the file
        graph = getattr(tracer, "graph", fx.Graph())
        if isinstance(error, fx.proxy.TraceError):
            said = "forward's course depends on what x holds; a chain does the same for every input"
        else:
            said = f"forward cannot be traced: {first_line(error)}"
        failure = Fault(line_of(error, path), said)
    walk = _Walk(model, source, len(shapes))
    walk.graph(graph)
    walk.traced.faults = list(dict.fromkeys(walk.traced.faults))
    if failure:
        walk.traced.faults.append(failure)
        walk.traced.whole = False
    return walk.traced


def _write_numbers(graph: fx.Graph) -> None:
    """Puts the number in the place of `v.new_full((), number)`, which is how a forward hands one to an operator that takes tensors only."""
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "new_full" and len(node.args) == 3 and node.args[1] == () and isinstance(node.args[2], (int, float)):
            for user in list(node.users):
                user.args, user.kwargs = (map_arg(held, lambda n, node=node: node.args[2] if n is node else n) for held in (user.args, user.kwargs))
            graph.erase_node(node)


class _Walk:
    """Follows the one value from operator to operator. Faults are collected and the walk goes on behind them."""

    def __init__(self, model: nn.Module, source: list[str], given: int) -> None:
        self.model, self.source, self.given = model, source, given
        self.traced = Traced()
        self.current: fx.Node | None = None
        self.faulty: set[fx.Node] = set()
        self.properties: set[fx.Node] = set()  # what is no tensor, and what is computed from it: told where it is asked for
        self.excused: set[fx.Node] = set()  # values before a faulty operator: whoever goes on from them has the same fault
        self.silu: dict[fx.Node, fx.Node] = {}
        self.overwritten: dict[fx.Node, fx.Node] = {}  # a value -> the in-place operator that has replaced it since
        self.pairs: set[fx.Node] = set()  # of values and their indices, of which the values are yet to be taken
        self.places: dict[fx.Node, int] = {}  # a value -> the place of the entry that gives it
        self.inputs: dict[fx.Node, str] = {}
        self.copies: dict[fx.Node, fx.Node] = {}  # a copy -> the value that it holds
        self.detached: set[fx.Node] = set()  # copies without gradients
        self.views: dict[fx.Node, fx.Node] = {}  # a parameter under another shape -> the parameter
        self.turned: dict[fx.Node, fx.Node] = {}  # a transposed parameter -> the parameter

    def graph(self, graph: fx.Graph) -> None:
        _write_numbers(graph)
        absorbed = self.find_silu(graph)
        live = self.live(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.placeholder(node)
            elif node.op == "output":
                self.output(node)
            elif node in live and node.op != "get_attr" and node not in absorbed:
                self.operator(node)

    def placeholder(self, node: fx.Node) -> None:
        if len(self.inputs) == self.given:
            self.faulty.add(node)
            self.fault(node, f"forward takes {node.target}, and get_inputs gives {self.given} {'input' if self.given == 1 else 'inputs'}")
            return
        self.current = self.current or node
        self.inputs[node] = node.target
        self.traced.inputs.append(node.target)

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
        while node in self.overwritten or node in self.copies:
            node = self.overwritten.get(node) or self.copies[node]
        return node

    def keeps_gradients(self, node: fx.Node) -> bool:
        """Does the gradient reach the value of which `node` is a copy?"""
        while node in self.overwritten or node in self.copies:
            if node in self.detached and node not in self.overwritten:
                return False
            node = self.overwritten.get(node) or self.copies[node]
        return True

    def output(self, node: fx.Node) -> None:
        returned = node.args[0]
        if returned in self.pairs:
            self.fault(returned, f"gives indices beside values: {self.text(returned)}; return the values alone, by [0] or .values")
            return
        if isinstance(returned, fx.Node) and not self.keeps_gradients(returned):
            self.traced.faults.append(Fault(self.line(returned), f"detach cuts off the gradient of the result: {self.text(returned)}; {_DETACH}"))
        elif not isinstance(returned, fx.Node) or (self.now(returned) is not self.current and not self.faulty):
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
        inputs = [self.silu[node]] if node in self.silu else [n for n in node.all_input_nodes if not self.is_parameter(n)]
        before = self.current
        self.traced.used.update(self.owner_of(n).split(".")[0] for n in node.all_input_nodes if self.is_parameter(n))
        if "mode" in node.meta:
            self.fault(node, f"{node.meta['mode']}, which the kernels cannot keep: {self.text(node)}")
        if node.op == "call_function" and calls.function_name(node) == "getitem" and node.args[0] in self.faulty:
            self.faulty.add(node)  # one result out of a refused operator's tuple: no fault of its own
            self.current = node
            return
        if (inputs and self.properties.issuperset(inputs)) or (not inputs and self.is_of_parameter(node)):
            if inputs:
                self.properties.add(node)
            return
        if self.is_copy(node, inputs):
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
            else:
                self.inputs[node] = self.inputs[before]
        if self.is_in_place(node):
            self.overwritten[node.args[0] if node.args and node.args[0] in self.copies else before] = node
        self.current = node

    def is_copy(self, node: fx.Node, inputs: list[fx.Node]) -> bool:
        """Does the node give the values of another, with or without their gradients? It is noted as that."""
        if node.op == "call_module" and isinstance(self.model.get_submodule(node.target), nn.Identity) and len(inputs) == 1:
            self.drop(node, f"self.{node.target} (Identity) does nothing and is left out")
        elif node.op not in ("call_function", "call_method") or calls.function_name(node) not in calls.SAME or len(inputs) != 1 or inputs[0] in self.pairs:
            return False
        elif calls.function_name(node) == "detach":
            self.detached.add(node)
        self.copies[node] = self.now(inputs[0]) if calls.function_name(node) == "clone" else inputs[0]
        if not self.keeps_gradients(inputs[0]):
            self.detached.add(node)
        return True

    # ---- parameters ----------------------------------------------------------------------------------------------------

    def is_parameter(self, node: fx.Node) -> bool:
        return node.op == "get_attr" or node in self.views or node in self.turned

    def owner_of(self, node: fx.Node) -> str:
        """The path of the attribute that a parameter, or what is made of one, comes from."""
        node = self.views.get(node) or self.turned.get(node) or node
        return node.target

    def is_of_parameter(self, node: fx.Node) -> bool:
        """Is the node a parameter under another shape, or a transposed one? It is noted as that."""
        if len(node.all_input_nodes) != 1 or node.op not in ("call_function", "call_method"):
            return False
        (parameter,) = node.all_input_nodes
        name = calls.function_name(node)
        if parameter.op == "get_attr" and parameter.meta["value"].dim() == 2:
            if name in ("t", "adjoint") or (name == "getattr" and node.args[1] in ("T", "mT")) or (name == "transpose" and {a % 2 for a in node.args[1:]} == {0, 1}):
                self.turned[node] = parameter
                return True
        if name in (*calls.VIEWS, "unsqueeze", "squeeze", "flatten") and parameter not in self.turned:
            self.views[node] = self.views.get(parameter, parameter)
            return True
        return False

    def number_of(self, value: Any) -> Any:
        """The number that a constant tensor of one value holds; whatever else `value` is as it is."""
        if isinstance(value, fx.Node) and value.op == "get_attr":
            value = attribute(self.model, value.target)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.dim() and not value.is_meta:
                return value.item()
        return value

    # ---- entries -------------------------------------------------------------------------------------------------------

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
        if name == "getattr":
            raise _Property(f"forward asks for a property of the value ({node.args[1]}): {self.text(node)}; a chain has operators only")
        kind = calls.ARITHMETIC.get(name)
        operands = [*node.args, *(node.kwargs[key] for key in ("input", "other") if key in node.kwargs)]
        if name in ("min", "max") and len(operands) == 2 and not isinstance(operands[1], (int, tuple)):
            kind = "minimum" if name == "min" else "maximum"
        if name in calls.PRODUCTS:
            self.follow(node, inputs)
            return self.product(name, node)
        if kind is None and name not in calls.FUNCTIONS and name not in calls.VIEWS:
            if name in calls.RANDOM_FUNCTIONS:
                raise NoOperator(f"{name} draws random numbers in another way than dropout, which is all that the grammar has: {self.text(node)}")
            raise NoOperator(f"{name} is no operator of the grammar: {self.text(node)}")
        if kind is not None and kind != "neg" and sum(isinstance(o, fx.Node) and not self.is_parameter(o) for o in operands) == 2:
            return self.of_two(kind, operands, node)
        self.follow(node, inputs)
        if kind is not None:
            return self.arithmetic(kind, operands, node)
        if not node.args or node.args[0] not in inputs:
            if "input" not in node.kwargs:
                raise Unfit(f"{name}'s input is not the chain's value: {self.text(node)}")
            node.args = (node.kwargs["input"], *node.args)
        if name in calls.VIEWS:
            return self.view(node)
        operator, values = calls.function_values(name, node, self.constant)
        if operator == "dropout" and values.get("p", 0.5) == 0:
            return self.drop(node, f"{name} does nothing at p = 0 or in eval mode and is left out")
        if name in calls.PAIRS and values["dim"] is not None:
            self.pairs.add(node)
        return Entry(operator, self.line(node), self.free_name(operator) if OPERATORS[operator].requires_name else None, values)

    def follow(self, node: fx.Node, inputs: list[fx.Node]) -> None:
        """Refuse an operator that does not take the value of the one before it, and no other."""
        if self.current in self.pairs and self.current in inputs:
            raise Unfit(f"takes indices beside values: {self.text(node)}; take the values first, by [0] or .values")
        if not inputs:
            raise Unfit(f"computed from parameters or constants alone: {self.text(node)}; every operator of a chain takes the value before it")
        for other in inputs:
            if self.now(other) is not self.current and self.now(other) not in self.excused:
                where = f"the value of line {self.line(other)}" if other.op != "placeholder" else f"{other.target} itself"
                raise Unfit(f"takes {where} once more: {self.text(node)}; in a chain each operator takes the value before it (arithmetic an earlier one too)")
            if not self.keeps_gradients(other):
                raise Unfit(f"detach cuts off the gradient of the chain's value: {self.text(node)}; {_DETACH}")

    def view(self, node: fx.Node) -> Entry | None:
        """A view by its result's sizes; the leading ones that stay are those of the value, and the one left over follows."""
        before, after = (tuple(given.meta["value"].shape) for given in (node.args[0], node))
        if before == after:
            return None
        kept = next((i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), min(len(before), len(after)))
        sizes = (0,) * kept + ((-1,) if len(after) == kept + 1 else after[kept:])
        return Entry("view", self.line(node), None, {"sizes": sizes})

    def module(self, node: fx.Node, inputs: list[fx.Node]) -> Entry | None:
        module = self.model.get_submodule(node.target)
        kind = type(module).__name__
        own = list(module.state_dict())
        self.traced.used.add(node.target.split(".")[0])
        if isinstance(module, calls.RANDOM_MODULES):
            raise NoOperator(f"self.{node.target} ({kind}) draws random numbers in another way than Dropout, which is all that the grammar has: {self.text(node)}")
        if isinstance(module, nn.Dropout) and (module.p == 0 or not module.training):
            self.follow(node, inputs)
            return self.drop(node, f"self.{node.target} ({kind}) does nothing {'at p = 0' if module.p == 0 else 'in eval mode'} and is left out")
        if type(module) not in calls.MODULES:
            raise Unfit(f"{kind} (self.{node.target}) is no operator of the grammar: {self.text(node)}")
        self.follow(node, inputs)
        if len(node.args) != 1 or node.kwargs:
            raise Unfit(f"self.{node.target} must be called with the value alone: {self.text(node)}")
        if own:
            self.check_owner(node.target)
        operator, values = calls.module_values(module)
        taken = {entry.name for entry in self.traced.entries}
        name = node.target if OPERATORS[operator].requires_name or (is_name(node.target) and node.target not in taken) else None
        return Entry(operator, self.line(node), name, {key: self.constant(value, key) for key, value in values.items()})

    def check_owner(self, target: str) -> None:
        """Refuse a module with parameters that is not Model's own, or not met for the first time."""
        if "." in target:
            better = f"self.{_last_word(target)} = ..."
            raise Unfit(f"self.{target}: parameters must be attributes of Model itself, not of a module inside it; write {better}")
        if any(entry.name == target for entry in self.traced.entries):
            raise Unfit(f"self.{target} is applied twice; a chain uses the parameters of a module once")

    def product(self, name: str, node: fx.Node) -> Entry:
        """A linear or convolution of the value and a weight of Model: that of a module, or for a linear one of its own."""
        names = ("weight",) if name in ("matmul", "mm") else ("weight", "bias") if name == "linear" else calls.TRANSPOSED if "transpose" in name else calls.CONVOLUTION
        given = calls.bind(name, node, names) if name not in ("matmul", "mm") else {"weight": [*node.args, *node.kwargs.values()][1]}
        weight, bias = given.pop("weight", None), given.pop("bias", None)
        if isinstance(weight, fx.Node) and name in ("matmul", "mm"):
            weight = self.turned.get(weight, None)
        if not isinstance(weight, fx.Node) or weight.op != "get_attr" or (bias is not None and (not isinstance(bias, fx.Node) or bias.op != "get_attr")):
            raise Unfit(f"{name} with a tensor that is no weight (out, in) of Model: {self.text(node)}; the weight is an nn.Parameter or a module's")
        operator, (path, _, word) = calls.PRODUCTS[name], weight.target.rpartition(".")
        if not path:
            return self.bare_product(operator, weight, bias, node)
        module = self.model.get_submodule(path)
        if word != "weight" or calls.MODULES.get(type(module)) != operator or (None if bias is None else bias.target) != (f"{path}.bias" if module.bias is not None else None):
            raise Unfit(f"{name} with tensors of its own: its parameters must be all of those of one module, such as self.{operator}.weight and self.{operator}.bias")
        self.check_owner(path)
        _, values = calls.module_values(module)
        if operator != "linear":
            defaults = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}
            values |= {key: self.constant(given.get(key, value), key) for key, value in defaults.items() if key in values}
            values["padding"] = calls.padding(operator, values["padding"], module.kernel_size, module.dilation)
        return Entry(operator, self.line(node), path, {key: self.constant(value, key) for key, value in values.items()})

    def bare_product(self, operator: str, weight: fx.Node, bias: fx.Node | None, node: fx.Node) -> Entry:
        value = attribute(self.model, weight.target)
        if operator != "linear" or bias is not None or not isinstance(value, nn.Parameter):
            raise Unfit(f"{operator} with a bare weight{' and bias' if bias is not None else ''}: {self.text(node)}; the grammar has that of linear alone, make it a module")
        self.check_owner(weight.target)
        return Entry(operator, self.line(node), weight.target, {"in_features": value.shape[1], "out_features": value.shape[0], "bias": False, "init": None})

    def arithmetic(self, kind: str, operands: list[Any], node: fx.Node) -> Entry:
        """Arithmetic of the value and a parameter or a number. Raises Unfit."""
        self.check_alpha(kind, node)
        if kind == "neg":
            return Entry("mul", self.line(node), None, {"value": -1.0})
        if len(operands) != 2:
            raise Unfit(f"{kind} of {len(operands)} values: {self.text(node)}; the grammar has {kind} of two")
        first = not self.is_parameter(operands[0]) if isinstance(operands[0], fx.Node) else False
        operand = self.number_of(operands[1] if first else operands[0])
        kind = kind if first else calls.REVERSED.get(kind, kind)
        if isinstance(operand, (fx.Node, torch.Tensor)):
            return self.parameter(kind, operands[1] if first else operands[0], node)
        if isinstance(operand, bool) or not isinstance(operand, (int, float)):
            raise Unfit(f"{kind} with {operand!r}: {self.text(node)}; the grammar has {kind} with a parameter or a number only")
        return Entry(kind, self.line(node), None, {"value": operand})

    def check_alpha(self, kind: str, node: fx.Node) -> None:
        left = {key: value for key, value in node.kwargs.items() if key not in ("input", "other", "alpha")}
        if left or node.kwargs.get("alpha", 1) != 1:
            raise Unfit(f"{kind} with {', '.join(left or ['alpha'])}, which the grammar has no word for: {self.text(node)}")

    def of_two(self, kind: str, operands: list[fx.Node], node: fx.Node) -> Entry:
        """Arithmetic of the chain's value and an earlier one, or an input. Raises Unfit."""
        self.check_alpha(kind, node)
        if self.current in self.pairs and self.current in operands:
            raise Unfit(f"takes indices beside values: {self.text(node)}; take the values first, by [0] or .values")
        able = [self.now(operand) is self.current and self.keeps_gradients(operand) for operand in operands]
        if not any(able):
            raise Unfit(f"{kind} of two values, neither of them that before it: {self.text(node)}; in a chain each operator takes the value before it and one more")
        other = operands[1] if able[0] else operands[0]
        source = self.now(other)
        if source in self.faulty or (source not in self.places and source not in self.inputs):
            raise Unfit(f"{kind} with a value that no operator of the chain gives: {self.text(node)}")
        values: dict[str, Any] = {"from": self.name_of(source)}
        if not self.keeps_gradients(other):
            values["detach"] = True
        return Entry(kind if able[0] else calls.REVERSED.get(kind, kind), self.line(node), None, values)

    def name_of(self, value: fx.Node) -> str:
        """The name under which a later operator takes the value; the operator that gives it gets one where it has none."""
        if value not in self.places:
            return self.inputs[value]
        place = self.places[value]
        entry = self.traced.entries[place]
        if entry.name is None:
            entry = replace(entry, name=self.free_name(entry.operator))
            self.traced.entries[place] = entry
        return entry.name

    def parameter(self, kind: str, operand: fx.Node, node: fx.Node) -> Entry:
        target = self.owner_of(operand)
        value = attribute(self.model, target)
        if not isinstance(value, nn.Parameter) or operand in self.turned:
            raise Unfit(f"{kind} with a tensor that is no nn.Parameter of Model: {self.text(node)}")
        if "." in target:
            raise Unfit(f"self.{target}: a parameter must be an attribute of Model itself, not of a module inside it")
        shape, met = tuple(value.shape), tuple(operand.meta["value"].shape)
        values: dict[str, Any] = {} if met == shape else {"view": tuple(-1 if size != 1 and met.count(1) == len(met) - 1 else size for size in met)}
        owner = next((entry for entry in self.traced.entries if entry.name == target), None)
        if owner is None:
            return Entry(kind, self.line(node), target, {"shape": shape} | values)
        if owner.values.get("shape") is None:
            raise Unfit(f"self.{target} is the weight of {owner.operator} already; a chain uses that once")
        return Entry(kind, self.line(node), None, {"parameter": target} | values)

    def drop(self, node: fx.Node, note: str) -> None:
        self.traced.notes.append(Fault(self.line(node), note))

    def constant(self, value: Any, what: str) -> Any:
        """A value known before x is. Lists become tuples. Raises Unfit for a traced one."""
        if isinstance(value, (list, tuple)):
            return tuple(self.constant(item, what) for item in value)
        value = self.number_of(value)
        if isinstance(value, (fx.Node, torch.Tensor)):
            raise Unfit(f"{what} is a tensor; the grammar takes numbers known beforehand")
        return value

    def free_name(self, stem: str) -> str:
        """A name for an operator that must have one and has no attribute in the file."""
        taken = {entry.name for entry in self.traced.entries} | set(dir(self.model)) | set(self.traced.inputs)
        return next(name for name in (stem, *(f"{stem}_{i}" for i in range(2, 1000))) if name not in taken)

    def text(self, node: fx.Node) -> str:
        """The source line of a node, for messages."""
        line = self.line(node)
        return f"`{self.source[line - 1].strip()[:120]}`" if 0 < line <= len(self.source) else str(node)


def is_name(text: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,79}", text)) and not keyword.iskeyword(text) and text not in RESERVED


def _last_word(target: str) -> str:
    words = [part for part in target.split(".") if not part.isdigit()]
    return words[-1] if words else target
