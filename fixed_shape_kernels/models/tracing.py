"""A trace of a module for one call: torch.fx's, with the shapes of the example in the place of unknown ones.

Kernels are for fixed shapes, so a forward that asks for sizes, counts them or compares them gets numbers, and its course follows from them. What tensors
hold stays unknown. What a forward creates or draws it creates and draws at each call.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.amp.autocast_mode import is_autocast_available
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property
from torch.utils._pytree import tree_leaves, tree_map_only

_TORCH = str(Path(torch.__file__).parent)
UNKNOWN = object()  # the fact of what is computed from what nobody knows
PROPERTIES = ("shape", "dtype", "device", "ndim", "is_cuda", "itemsize", "is_sparse", "layout", "is_quantized", "is_nested")
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}  # what torch takes Python's types for
METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex")


class _Known(fx.Proxy):
    """A value of the trace whose fact, a tensor without data or a tuple of such, answers what does not depend on data."""

    _is_buffer = False  # what `isinstance(value, nn.Buffer)` asks of a tensor

    @property
    def _is_param(self) -> bool:
        """What `isinstance(value, nn.Parameter)` asks of a tensor."""
        return self.node.op == "get_attr" and self.node.target in self.tracer.named_parameters

    def __len__(self) -> int:
        fact = self.tracer.facts.get(self.node, UNKNOWN)
        return len(fact) if isinstance(fact, (torch.Tensor, tuple, list)) else super().__len__()


@contextmanager
def _kinds_known() -> Iterator[None]:
    """Let `isinstance` say of a value of the trace what it says of the tensor.

    A class that claims to be Tensor's would not do: torch's C++ asks the same way, and then reads a tensor's memory.
    """
    plain = builtins.isinstance

    def told(value: Any, kinds: Any) -> bool:
        if type(value) is _Known and plain(value.tracer.facts.get(value.node, UNKNOWN), torch.Tensor):
            return plain(value, kinds) or issubclass(torch.Tensor, kinds)
        return plain(value, kinds)

    builtins.isinstance = told
    try:
        yield
    finally:
        builtins.isinstance = plain


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


def _number(proxy: _Known) -> Any:
    raise fx.proxy.TraceError("a number is taken out of a tensor")


for _name in ("__float__", "__int__", "__index__", "__complex__"):
    setattr(_Known, _name, _number)
for _name in PROPERTIES:
    setattr(_Known, _name, _property(_name))
for _name in METHODS:
    setattr(_Known, _name, _method(_name))


class _Created(TorchFunctionMode):
    """The mode of a trace in which calls that take none of its values are nodes, too, where they give tensors: new ones, at each call."""

    def __init__(self, tracer: ShapedTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.tracer.computing or func.__name__ == "__get__" or any(isinstance(one, fx.Proxy) for one in tree_leaves((args, kwargs))) or not self.tracer.gives_tensors(func, args, kwargs):
            return func(*args, **kwargs)
        method = is_tensor_method_or_property(func)
        return self.tracer.create_proxy("call_method" if method else "call_function", func.__name__ if method else func, args, kwargs)


class ShapedTracer(fx.Tracer):
    """The tracer of one call; `given` are the tensors without data that it is called with, by name.

    Modules of torch and those in `apart` are nodes; containers are followed. `facts` has the result of each node without data. A node's `where` is the line of the user's code
    that it comes from. `without_grad` tells that a part of the forward runs without gradients, which the graph does not say.
    """

    proxy_buffer_attributes = True  # a buffer is read at each call, as it may have changed

    def __init__(self, given: Mapping[str, torch.Tensor], mode: FakeTensorMode, apart: Collection[nn.Module] = ()) -> None:
        super().__init__()
        self.given, self.mode, self.apart = given, mode, apart
        self.facts: dict[fx.Node, Any] = {}
        self.computing = self.without_grad = False
        self.named_parameters: frozenset[str] = frozenset()
        self._kinds: list[str] = []  # of devices that know autocast
        self._autocast: list[bool] = []

    def trace(self, root: nn.Module, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """The graph of a module's forward. Raises what the forward raises under tracing, TypeError where the graph could not say what it does."""
        self.named_parameters = frozenset(name for name, _ in root.named_parameters())
        self._kinds = [kind for kind in {value.device.type for value in self.given.values()} if is_autocast_available(kind)]
        self._autocast = [torch.is_autocast_enabled(kind) for kind in self._kinds]
        with torch.enable_grad(), _Created(self), _kinds_known():
            return super().trace(root, concrete_args)

    def gives_tensors(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Does a call give a tensor? It is made without data, and one whose result follows from data gives numbers."""
        faked = tree_map_only(torch.Tensor, self.mode.from_tensor, (args, kwargs))
        self.computing = True
        try:
            with torch.no_grad(), self.mode:
                return any(isinstance(one, torch.Tensor) for one in tree_leaves(func(*faked[0], **faked[1])))
        except (DataDependentOutputException, DynamicOutputShapeException):
            return False
        finally:
            self.computing = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.apart or super().is_leaf_module(m, module_qualified_name)

    def create_arg(self, a: Any) -> Any:
        return a.node if isinstance(a, fx.Proxy) else super().create_arg(NUMBERS.get(a, a) if type(a) is type else a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.without_grad |= not torch.is_grad_enabled()
        if [torch.is_autocast_enabled(kind) for kind in self._kinds] != self._autocast:
            raise TypeError("it switches autocast on or off in a part of it")
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise TypeError("it keeps what its backward needs in a way of its own, as checkpoints do")
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
        return forward(*args, **kwargs) if self.computing else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _fact(self, node: fx.Node) -> Any:
        """The result of a node without data. Raises what the operator raises."""
        if node.op == "placeholder":
            return self.given.get(node.target, UNKNOWN)
        if any(self.facts[one] is UNKNOWN for one in node.all_input_nodes):
            return UNKNOWN
        args, kwargs = map_arg(node.args, self.facts.__getitem__), map_arg(node.kwargs, self.facts.__getitem__)
        self.computing = True
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
            self.computing = False
