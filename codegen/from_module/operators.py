"""A node of a traced graph as an operator of the grammar, with its arguments as the file has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from codegen.from_module import calls
from codegen.from_module.entries import Entry, is_name
from codegen.from_module.faults import Unfit
from codegen.from_module.tracer import attribute
from codegen.from_module.values import Values
from codegen.ops import OPERATORS

DETACH = "the grammar has detach for the value that arithmetic takes beside the chain's, as in v + earlier.detach()"


class Property(Unfit):
    """forward asks for a size, a type or the like: no operator at all."""


class NoOperator(Unfit):
    """The grammar has no such operator, whatever it is applied to."""


class Operators(Values):
    """The chain's one value so far, and the entries that later operators can name."""

    def __init__(self, model: nn.Module, source: list[str]) -> None:
        super().__init__(model, source)
        self.current: fx.Node | None = None
        self.faulty: set[fx.Node] = set()
        self.excused: set[fx.Node] = set()  # values before a faulty operator: whoever goes on from them has the same fault
        self.silu: dict[fx.Node, fx.Node] = {}
        self.pairs: set[fx.Node] = set()  # of values and their indices, of which the values are yet to be taken
        self.places: dict[fx.Node, int] = {}  # a value -> the place of the entry that gives it
        self.inputs: dict[fx.Node, str] = {}

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
            raise Property(f"forward asks for a property of the value ({node.args[1]}): {self.text(node)}; a chain has operators only")
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
        if owner := self.norm_owner(name, node):
            _, values = calls.function_values(name, node, self.constant, of_module=True)
            return Entry(name, self.line(node), owner, values)
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
                raise Unfit(f"detach cuts off the gradient of the chain's value: {self.text(node)}; {DETACH}")

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
        others = calls.TRANSPOSED if OPERATORS[calls.PRODUCTS[name]].transposed else calls.CONVOLUTION
        names = ("weight",) if name in ("matmul", "mm") else ("weight", "bias") if name == "linear" else others
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

    def norm_owner(self, name: str, node: fx.Node) -> str | None:
        """The path of the module that all parameters of a norm's function are of; None where it has none. Raises Unfit."""
        if name not in calls.NORMS:
            return None
        given = calls.bind(name, node, calls.FUNCTIONS[name][1])
        weight, bias = (given.get(key) for key in ("weight", "bias"))
        held = [one for one in (weight, bias, given.get("running_mean"), given.get("running_var")) if one is not None]
        if not held or not all(isinstance(one, fx.Node) and one.op == "get_attr" and "." in one.target for one in held):
            return None
        paths, words = {one.target.rpartition(".")[0] for one in held}, [one.target.rpartition(".")[2] for one in held]
        if len(paths) > 1 or words != (["weight"] if name == "rms_norm" else ["weight", "bias"]):
            raise Unfit(f"{name} with tensors of its own: its parameters must be the weight{'' if name == 'rms_norm' else ' and the bias'} of one module, such as {calls.NORMS[name]}")
        (path,) = paths
        self.check_owner(path)
        return path

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

    def free_name(self, stem: str) -> str:
        """A name for an operator that must have one and has no attribute in the file."""
        taken = {entry.name for entry in self.traced.entries} | set(dir(self.model)) | set(self.traced.inputs)
        return next(name for name in (stem, *(f"{stem}_{i}" for i in range(2, 1000))) if name not in taken)


def _last_word(target: str) -> str:
    words = [part for part in target.split(".") if not part.isdigit()]
    return words[-1] if words else target
