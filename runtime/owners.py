"""The parameters of a generated module and the modules that own them: read at every call, each checked."""

import itertools
import sys
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the compiler with this package

from .checks import ALIGNMENT, PLAIN, not_dense, wrong_tensor
from .children import Child, check_child, run_pre_hooks
from .errors import CallError
from .launch import dtype_named
from .original import children_of_model
from .package import Package


class ParameterOwners(nn.Module):
    """A module that finds the manifest's parameters in itself and in its children; ``_define_owners`` says where they are."""

    _package: Package

    def __new__(cls, *given: Any, **named: Any):
        made = super().__new__(cls)
        _ALIVE[id(made)] = made
        return made

    def _define_owners(self, package: Package) -> None:
        """The paths of the parameters with their shapes and types, and the same by the module that holds them."""
        self._parameter_table = tuple(
            (*_split(entry.name), torch.Size(entry.shape), dtype_named(entry.dtype)) for entry in package.manifest.parameters
        )
        children = {child.path: child for child in children_of_model(type(self), package)}
        groups = itertools.groupby(self._parameter_table, key=lambda entry: entry[0])
        owners = [(path, tuple(entry[1:] for entry in group), children.pop(path, None)) for path, group in groups]
        owners += ((path, (), child) for path, child in children.items())
        # Behind those that hold parameters come modules that hold none; of a child also what each call compares.
        self._owners = tuple((*owner, *((None,) * 3 if owner[2] is None else owner[2].compared)) for owner in owners)
        state = ((*_split(entry.name), torch.Size(entry.shape), dtype_named(entry.dtype)) for entry in package.manifest.state)
        groups = itertools.groupby(state, key=lambda entry: entry[0])
        self._state_owners = tuple((path, tuple(entry[1:] for entry in group)) for path, group in groups)

    def _collect(self, device: torch.device, direct: bool = False) -> tuple[list[torch.Tensor], list[int] | None]:
        """The parameters in the manifest's order, each checked; for a ``direct`` launch also their addresses, None in place of these unless
        all are plain tensors that kernels can read as they lie."""
        try:
            return self._read(device, direct)
        except (AttributeError, KeyError, RuntimeError, TypeError):
            refuse(self)  # what is known to have no shape, memory or module there
            raise

    def _read(self, device: torch.device, direct: bool) -> tuple[list[torch.Tensor], list[int] | None]:
        collected, addresses, together = [], [], 0
        for path, entries, child, kind, pick, values in self._owners:
            owner = self
            for part in path:
                owner = owner._modules[part]
            state = owner.__dict__
            if kind is not None and (
                type(owner) is not kind
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or "forward" in state
                or (pick is not None and pick(state) != values)
            ):
                self._settle(child, owner)
            held = state["_parameters"]
            for name, shape, dtype in entries:
                parameter = held.get(name)
                if parameter is None:
                    parameter = getattr(owner, name, None)  # a parametrization or a pre-hook computes it
                plain = type(parameter) in PLAIN
                if (
                    not (plain or isinstance(parameter, torch.Tensor))
                    or parameter.shape != shape
                    or parameter.dtype is not dtype
                    or parameter.device != device
                ):
                    key = ".".join((*path, name))
                    self._refuse_not_dense(key, parameter)
                    raise wrong_tensor(self._package.manifest, key, parameter, device, shape, dtype)
                collected.append(parameter)
                if direct and plain:
                    if parameter.is_contiguous() and not parameter.is_neg() and (address := parameter.data_ptr()):
                        addresses.append(address)
                        together |= address
                    else:
                        self._refuse_not_dense(".".join((*path, name)), parameter)
        return collected, addresses if direct and len(addresses) == len(collected) and not together % ALIGNMENT else None

    @_disable_dynamo
    def _settle(self, child: Child, owner: nn.Module) -> None:
        """Lets take effect what a child does that is more than holding parameters, or refuses it."""
        manifest = self._package.manifest
        try:
            check_child(child, owner, manifest.name, manifest.regenerate)
        except CallError:
            refuse_sharded([(".".join((*child.path, name)), tensor) for name, tensor in owner._parameters.items()])
            raise
        run_pre_hooks(owner)

    def _gather(self) -> list[torch.Tensor]:
        """The parameters in the manifest's order, by statements that a compiler can follow; the operator checks them.

        The numbers of children are compared for the compiler's guards: a change after the capture brings it back here.
        """
        collected = []
        for path, entries, child, *_ in self._owners:
            owner = self
            for part in path:
                owner = getattr(owner, part)
            if child is not None:
                for name, value in child.numbers:
                    if getattr(owner, name) != value:
                        raise CallError(fault_of(id(self)))
                for hook in owner._forward_pre_hooks.values():
                    hook(owner, ())
            for name, _, _ in entries:
                collected.append(getattr(owner, name))
        return collected

    def _collect_state(self, device: torch.device) -> list[torch.Tensor]:
        """The buffers of the manifest's state, in its order, each checked."""
        collected = []
        for path, entries in self._state_owners:
            owner = self
            for part in path:
                owner = owner._modules[part]
            held = owner._buffers
            for name, shape, dtype in entries:
                buffer = held.get(name)
                if not isinstance(buffer, torch.Tensor) or buffer.shape != shape or buffer.dtype is not dtype or buffer.device != device:
                    raise wrong_tensor(self._package.manifest, ".".join((*path, name)), buffer, device, shape, dtype)
                collected.append(buffer)
        return collected

    def _gather_state(self) -> list[torch.Tensor]:
        """The same by statements that a compiler can follow; the operator checks them."""
        return [self.get_buffer(entry.name) for entry in self._package.manifest.state]

    def _trains(self) -> bool:
        """Is the module in training mode, and with it every child that holds state?"""
        for path, _ in self._state_owners:
            owner = self
            for part in path:
                owner = owner._modules[part]
            if owner.training != self.training:
                modes = ("evaluation", "training") if self.training else ("training", "evaluation")
                name = self._package.manifest.name
                raise CallError(
                    f"{'.'.join(path)} is in {modes[0]} mode while {name} is in {modes[1]} mode, and one program serves a call; "
                    "call train() or eval() on the whole model."
                )
        return self.training

    def _keep_state(self, made: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """y of a training step's results; the running statistics among them are written to the buffers."""
        manifest = self._package.manifest
        if not manifest.reference.results:
            return made
        y, *further = made
        state = dict(zip((entry.name for entry in manifest.state), self._gather_state()))
        with torch.no_grad():
            for name, tensor in zip(manifest.reference.results, further):
                if name.startswith("state:"):
                    state[name.removeprefix("state:")].copy_(tensor)
            for key, buffer in state.items():
                if key.endswith("num_batches_tracked"):
                    buffer.add_(1)
        return y

    def _refuse_fault(self) -> None:
        """Raises CallError for a child that does more than holding parameters, by statements that a compiler can follow."""
        fault = fault_of(id(self))
        if fault:
            raise CallError(fault)

    @staticmethod
    @_disable_dynamo
    def _refuse_not_dense(key: str, tensor: Any, is_input: bool = False) -> None:
        fault = not_dense(key, tensor, is_input) if isinstance(tensor, torch.Tensor) else None
        if fault is not None:
            raise fault


_ALIVE: WeakValueDictionary[int, ParameterOwners] = WeakValueDictionary()  # modules by id, copies and unpickled ones among them


def fault_of(number: int) -> str:
    """What a forward cannot keep of the children and parameters of the module of this id, as a sentence; empty where there is nothing.

    A compiler runs it while it captures, as it cannot put such a sentence together itself. To such a function it passes numbers, and in torch 2.11 no module.
    No hook is run, no parameter computed.
    """
    model = _ALIVE[number]
    manifest = model._package.manifest
    for path, entries, child, *_ in model._owners:
        owner = model
        for part in path:
            owner = None if owner is None else owner._modules.get(part)
        try:
            if child is not None:
                check_child(child, owner, manifest.name, manifest.regenerate)
        except CallError as error:
            return str(error)
        for name, _, _ in entries if owner is not None else ():
            parameter = owner._parameters.get(name)
            fault = not_dense(".".join((*path, name)), parameter) if type(parameter) in PLAIN else None
            if fault is not None:
                return str(fault)
    return ""


# What torch.compiler.assume_constant_result sets; the decorator itself would import the compiler with this package.
fault_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@_disable_dynamo
def refuse(model: ParameterOwners) -> None:
    fault = fault_of(id(model))
    if fault:
        raise CallError(fault)


def refuse_sharded(tensors: list[tuple[str, Any]]) -> None:
    """FSDP2 puts a module's parameters together when that module is called, and nobody calls those inside a generated one."""
    distributed = sys.modules.get("torch.distributed.tensor")
    for name, tensor in tensors if distributed else ():
        if isinstance(tensor, distributed.DTensor):
            raise CallError(
                f"{name} is a DTensor, and the kernels need it whole; shard this model as one, with "
                "fully_shard(model), and none of the modules inside it."
            )


def _split(key: str) -> tuple[tuple[str, ...], str]:
    *path, name = key.split(".")
    return tuple(path), name
