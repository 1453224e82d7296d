"""A trace of a module for one call: torch.fx's, with the shapes of the example in the place of unknown ones.

Kernels are for fixed shapes, so a forward that asks for sizes, counts them or compares them gets numbers, and its course follows from them. What tensors
hold stays unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg

_TORCH = str(Path(torch.__file__).parent)
UNKNOWN = object()  # the fact of what is computed from what nobody knows
PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "itemsize", "is_sparse", "layout", "is_quantized", "is_nested")
METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex")


class _Known(fx.Proxy):
    """A value of the trace whose fact, a tensor without data or a tuple of such, answers what does not depend on data."""

    def __len__(self) -> int:
        fact = self.tracer.facts.get(self.node, UNKNOWN)
        return len(fact) if isinstance(fact, (torch.Tensor, tuple, list)) else super().__len__()


def _property(name: str) -> property:
    def of(proxy: _Known) -> Any:
        fact = proxy.tracer.facts.get(proxy.node, UNKNOWN)
        return getattr(fact, name) if isinstance(fact, torch.Tensor) else fx.proxy.Attribute(proxy, name)

    return property(of)


def _method(name: str) -> Callable[..., Any]:
    def of(proxy: _Known, *args: Any, **kwargs: Any) -> Any:
        fact = proxy.tracer.facts.get(proxy.node, UNKNOWN)
        return getattr(fact, name)(*args, **kwargs) if isinstance(fact, torch.Tensor) else fx.proxy.Attribute(proxy, name)(*args, **kwargs)

    return of


for _name in PROPERTIES:
    setattr(_Known, _name, _property(_name))
for _name in METHODS:
    setattr(_Known, _name, _method(_name))


class ShapedTracer(fx.Tracer):
    """The tracer of one call; `given` are the tensors without data that it is called with, by name.

    Modules of torch are nodes; containers are followed. `facts` has the result of each node without data. A node's `where` is the line of the user's code
    that it comes from.
    """

    def __init__(self, given: Mapping[str, torch.Tensor], mode: FakeTensorMode) -> None:
        super().__init__()
        self.given, self.mode = given, mode
        self.facts: dict[fx.Node, Any] = {}
        self._computing = False

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe(1)
        while frame is not None and (frame.f_code.co_filename.startswith((_TORCH, "<")) or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        node.meta["where"] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
        if node.op != "output":
            self.facts[node] = self._fact(node)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Known(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """What a loop over a value goes through, where its length is known."""
        fact = self.facts.get(obj.node, UNKNOWN)
        return (obj[place] for place in range(len(fact))) if isinstance(fact, (torch.Tensor, tuple, list)) else super().iter(obj)

    def create_args_for_root(self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None) -> tuple[Callable[..., Any], list[Any]]:
        """The arguments of the traced forward; what it takes beyond named ones (`*args`, `**kwargs`) is empty, as in the call."""
        function, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        for place, one in enumerate(args):
            if isinstance(one, fx.Proxy) and str(one.node.target).startswith("*"):
                args[place] = {} if str(one.node.target).startswith("**") else ()
                self.graph.erase_node(one.node)
        return function, args

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs) if self._computing else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _fact(self, node: fx.Node) -> Any:
        """The result of a node without data. Raises what the operator raises."""
        if node.op == "placeholder":
            return self.given.get(node.target, UNKNOWN)
        if any(self.facts[one] is UNKNOWN for one in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = map_arg(node.args, self.facts.__getitem__), map_arg(node.kwargs, self.facts.__getitem__)
        self._computing = True
        try:
            with torch.no_grad(), self.mode:
                if node.op == "get_attr":
                    value = self.root
                    for word in node.target.split("."):
                        value = getattr(value, word)
                    return self.mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
                if node.op == "call_module":
                    return self.root.get_submodule(node.target)(*args, **kwargs)
                if node.op == "call_method":
                    return getattr(args[0], node.target)(*args[1:], **kwargs)
                return node.target(*args, **kwargs)
        finally:
            self._computing = False
