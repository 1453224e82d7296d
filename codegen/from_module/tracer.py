"""torch.fx's tracer with the shapes of these inputs: what forward asks about sizes are numbers, as in a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from codegen.from_module.faults import line_here

_DEVICE = torch.device("cpu")


class Sized(fx.Proxy):
    """A traced value that knows its shape and type."""

    @property
    def _known(self) -> Any:
        return self.node.meta.get("value")

    @property
    def shape(self) -> Any:
        return self._known.shape if isinstance(self._known, torch.Tensor) else fx.proxy.Attribute(self, "shape")

    @property
    def ndim(self) -> Any:
        return self._known.dim() if isinstance(self._known, torch.Tensor) else fx.proxy.Attribute(self, "ndim")

    @property
    def dtype(self) -> Any:
        return self._known.dtype if isinstance(self._known, torch.Tensor) else fx.proxy.Attribute(self, "dtype")

    @property
    def device(self) -> torch.device:
        return _DEVICE

    @property
    def is_cuda(self) -> bool:
        return False

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> Any:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]


class Tracer(fx.Tracer):
    """Notes for each node the line of the file at `path` and its value without data, from inputs of `shapes`."""

    def __init__(self, path: str, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.path = path
        self.given = [torch.empty(shape, device="meta") for shape in shapes]
        self.inside = False  # a module of torch runs to learn its result's shape

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Sized(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["line"] = line_here(self.path)
        if not torch.is_grad_enabled():
            node.meta["mode"] = "computed without gradients (torch.no_grad or the like)"
        elif any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            node.meta["mode"] = "computed under autocast"
        node.meta["value"] = self.value(node)
        return node

    def value(self, node: fx.Node) -> Any:
        """The node's result on the meta device; None where torch has no such kernel there."""
        if node.op == "placeholder":
            place = sum(other.op == "placeholder" for other in self.graph.nodes) - 1
            return self.given[place] if place < len(self.given) else None
        if node.op == "output":
            return None
        args, kwargs = (fx.node.map_arg(given, lambda other: other.meta["value"]) for given in (node.args, node.kwargs))
        if any(other.meta["value"] is None for other in node.all_input_nodes):
            return None
        self.inside = True
        try:
            if node.op == "get_attr":
                return attribute(self.root, node.target).to("meta")
            if node.op == "call_module":
                return self.root.get_submodule(node.target)(*args, **kwargs)
            if node.op == "call_method":
                return getattr(args[0], node.target)(*args[1:], **kwargs)
            return node.target(*args, **kwargs)
        except NotImplementedError:  # torch has no shape rule for it: no chain knows the operator either, and its line is refused
            return None
        finally:
            self.inside = False

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.inside else super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return forward(*args, **kwargs) if self.inside else super().call_module(m, forward, args, kwargs)


def attribute(model: nn.Module, target: str) -> Any:
    """The attribute of `model` at a dotted path."""
    value = model
    for part in target.split("."):
        value = getattr(value, part)
    return value
