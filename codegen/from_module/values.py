"""What the nodes of a traced graph hold: a value, a copy of an earlier one, or a parameter of Model."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from codegen.from_module import calls
from codegen.from_module.entries import Traced
from codegen.from_module.faults import Fault, Unfit
from codegen.from_module.tracer import attribute


class Values:
    """The nodes that have been met, and what is found at them."""

    def __init__(self, model: nn.Module, source: list[str]) -> None:
        self.model, self.source = model, source
        self.traced = Traced()
        self.overwritten: dict[fx.Node, fx.Node] = {}  # a value -> the in-place operator that has replaced it since
        self.copies: dict[fx.Node, fx.Node] = {}  # a copy -> the value that it holds
        self.detached: set[fx.Node] = set()  # copies without gradients
        self.views: dict[fx.Node, fx.Node] = {}  # a parameter under another shape -> the parameter
        self.turned: dict[fx.Node, fx.Node] = {}  # a transposed parameter -> the parameter

    def line(self, node: fx.Node) -> int:
        return node.meta.get("line", 0)

    def text(self, node: fx.Node) -> str:
        """The source line of a node, for messages."""
        line = self.line(node)
        return f"`{self.source[line - 1].strip()[:120]}`" if 0 < line <= len(self.source) else str(node)

    def fault(self, node: fx.Node, message: str) -> None:
        self.traced.faults.append(Fault(node.meta.get("line", 0), message))

    def drop(self, node: fx.Node, note: str) -> None:
        self.traced.notes.append(Fault(self.line(node), note))

    def is_in_place(self, node: fx.Node) -> bool:
        """Does the node write its result over its input?"""
        return calls.is_in_place(node, self.model.get_submodule)

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

    def constant(self, value: Any, what: str) -> Any:
        """A value known before x is. Lists become tuples. Raises Unfit for a traced one."""
        if isinstance(value, (list, tuple)):
            return tuple(self.constant(item, what) for item in value)
        value = self.number_of(value)
        if isinstance(value, (fx.Node, torch.Tensor)):
            raise Unfit(f"{what} is a tensor; the grammar takes numbers known beforehand")
        return value
