"""A module whose chain is divided among ranks: the class that its own class gives way to, and the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from codegen.ir.layout import Layout, part_of
from codegen.ir.sharding import FIRST, Kernels, Sharding, work_on
from codegen.spec import Spec
from runtime import GeneratedModule

from .collectives import ParallelError, Ranks
from .merging import laid_out, merged

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class Divided:
    """What a module needs to run its part of a chain.

    `pieces` are the modules of the sharding's kernels, whose parameters are the local parts of the module's own DTensors; `output` is the layout of the result that
    is asked for, `local` whether as a plain tensor.
    """

    spec: Spec
    sharding: Sharding
    mesh: DeviceMesh
    ranks: Ranks
    pieces: Sequence[GeneratedModule]
    output: Layout
    local: bool
    children: dict[str, tuple[type, dict[str, Any]]]
    held: dict[str, torch.Tensor] = field(default_factory=dict)  # local parts by key
    known: dict[str, DTensor] = field(default_factory=dict)  # whose local parts those are
    work: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        pieces = iter(self.pieces)
        self.work = [(part, next(pieces) if isinstance(part, Kernels) else None, spent) for part, spent in work_on(self.sharding)]

    def bind(self, key: str, local: torch.Tensor) -> None:
        """Put the local part of a parameter or of running statistics into the kernels that read it."""
        self.held[key] = local
        path, _, name = key.rpartition(".")
        for kernels, piece in zip(self.sharding.kernels, self.pieces, strict=True):
            if key in kernels.parameters:
                owner = piece.get_submodule(path)
                if name in owner._parameters:
                    owner._parameters[name] = nn.Parameter(local, requires_grad=False)
                else:
                    owner._buffers[name] = local

    def run(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """The result on this rank, in the sharding's layout, from the inputs by their names among values."""
        values = dict(given)
        for part, piece, spent in self.work:
            if piece is not None:
                taken = [self.held[read.value].reshape(read.of) if read.parameter else self._taken(read, values) for read in part.reads]
                values[part.gives] = piece(*taken).reshape(part.shape)
            else:
                scale, bias = (None if key is None else self.held[key] for key in (part.scale, part.bias))
                values[part.gives] = merged(part, self._taken(part.read, values), scale, bias, self.ranks)
            for name in spent:
                del values[name]
        (result,) = values.values()
        return result

    def _taken(self, read: Any, values: dict[str, torch.Tensor]) -> torch.Tensor:
        taken = laid_out(values[read.value], read.held, read.wanted, self.ranks, read.value)
        return taken if taken.dim() else taken.reshape(1)


class Parallel(nn.Module):
    """A module that computes its part of a chain; parallelize_module puts it in front of the module's own class.

    Parameters are DTensors under their own names. Forward takes x and the other inputs as plain tensors in the layouts that the style names, or as DTensors of any,
    and gives what the style asks for. It has no gradients: call it under torch.no_grad().
    """

    _divided: Divided

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """The rank's result. Raises ParallelError for wrong inputs, parameters or modes, and where another rank fails."""
        divided = self._divided
        spec, sharding = divided.spec, divided.sharding
        if not torch.compiler.is_compiling():
            self._refuse_changes()
            self._renew()
        given = _inputs(divided, inputs, named)
        if torch.is_grad_enabled() and any(value.requires_grad for value in (*given.values(), *self.parameters())):
            raise ParallelError(f"{spec.name}: a chain that is divided among ranks has no gradients yet; call it under torch.no_grad()")
        if spec.has_modes and self.training:
            raise ParallelError(f"{spec.name}: what is divided is the chain in evaluation, and the module is in training; call eval()")
        result = laid_out(divided.run(given), sharding.output, divided.output, divided.ranks, "the result")
        return result if divided.local else DTensor.from_local(result, divided.mesh, [placement_of(divided.output)], run_check=False)

    def extra_repr(self) -> str:
        divided = self._divided
        return f"{divided.spec.name}, {divided.spec.precision.name}, rank {divided.ranks.rank} of {divided.ranks.size}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a module that is divided among ranks is neither copied nor pickled; copy it before it is divided, or keep its state_dict with torch.distributed.checkpoint")

    def gathered(self, result: torch.Tensor) -> torch.Tensor:
        """A result that forward left in parts, whole on each rank."""
        return laid_out(result, self._divided.sharding.output, None, self._divided.ranks, "the result")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What moves or converts parameters may leave the tensors and exchange what they hold."""
        self._divided.known.clear()
        return super()._apply(fn, recurse)

    def _renew(self) -> None:
        """Give the kernels the local parts of parameters that were put in the place of others, or moved. Writes into them need nothing: memory is shared."""
        divided = self._divided
        for key, layout in divided.sharding.parameters.items():
            tensor = _found(self, key)
            if tensor is divided.known.get(key, self):
                continue
            if not isinstance(tensor, DTensor) or tuple(tensor.placements) != (placement_of(layout),):
                found = f"a DTensor laid out as {tensor.placements}" if isinstance(tensor, DTensor) else f"a {type(tensor).__name__}"
                raise ParallelError(f"{key} is {found}, and expected is a DTensor {told(layout)}; load weights with load_state_dict, which keeps that")
            with torch.no_grad():
                divided.bind(key, tensor.to_local().detach())
            divided.known[key] = tensor

    def _refuse_changes(self) -> None:
        """Refuse what would change the meaning of a child, whose forward nobody calls."""
        for path, child in self.named_modules():
            if child is self:
                continue
            known = self._divided.children.get(path)
            if known is None or known != (type(child), settings(child)) or "forward" in vars(child) or any(getattr(child, hooks) for hooks in _HOOKS):
                raise ParallelError(
                    f"{path}: a child was added or changed, or has hooks, and the kernels of {self._divided.spec.name} compute what it was when it was divided; "
                    "put it back, or divide the changed module anew"
                )


def settings(child: nn.Module) -> dict[str, Any]:
    """The attributes of a child that say what it computes."""
    return {name: value for name, value in vars(child).items() if not name.startswith("_") and name != "training"}


def told(layout: Layout) -> str:
    """A layout in words."""
    return "whole on each rank" if layout is None else f"in parts of dimension {layout}"


def placement_of(layout: Layout) -> Placement:
    """A layout as torch.distributed.tensor has it."""
    return Replicate() if layout is None else Shard(layout)


def layout_of(placement: Placement, rank: int, what: str) -> Layout:
    """A placement of a tensor of `rank` axes as a layout. Raises ParallelError for partial sums."""
    if isinstance(placement, Replicate):
        return None
    if type(placement) is not Shard or not -rank <= placement.dim < rank:
        raise ParallelError(f"{what}: {placement} is none of Replicate() and Shard(dim) with dim in {-rank} to {rank - 1}")
    return placement.dim % rank


def _found(module: nn.Module, key: str) -> Any:
    *path, name = key.split(".")
    owner = module
    for part in path:
        owner = owner._modules[part]
    return owner._parameters.get(name) if name in owner._parameters else owner._buffers.get(name)


def _inputs(divided: Divided, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs by their names among values, each in the layout that it is given in, checked."""
    spec, sharding = divided.spec, divided.sharding
    names = [entry.name for entry in spec.inputs]
    if len(inputs) + len(named) != len(names) or any(name not in names[len(inputs) :] for name in named):
        raise ParallelError(f"{spec.name} takes {', '.join(names)}; {len(inputs)} tensors and {', '.join(named) or 'none by name'} were given")
    given = dict(zip(names, inputs, strict=False)) | named
    found = {}
    for entry in spec.inputs:
        key = FIRST if entry is spec.inputs[0] else f"input:{entry.name}"
        layout, value = sharding.inputs[key], given[entry.name]
        if isinstance(value, DTensor):
            value = value.redistribute(divided.mesh, [placement_of(layout)]).to_local()
        shape, dtype = part_of(entry.shape, layout, sharding.tp), getattr(torch, spec.precision.dtype)
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise ParallelError(f"{entry.name}: expected {shape} {dtype} ({entry.shape} {told(layout)}), got {tuple(value.shape)} {value.dtype}")
        found[key] = value
    return found
