"""The forward of layers beyond one fused plan: several inputs, state that runs, training beside evaluation.

It goes through the package's operators, so eager calls, compilers and exporters take the same way.
"""

from typing import Any

import torch
from torch.nn import functional

from .checks import expected
from .errors import CallError
from .gradients import refuse_tangents
from .manifest import Manifest, TensorSpec


def forward(module, x: torch.Tensor, others: tuple, named: dict[str, Any]) -> torch.Tensor:
    """y of a ``GeneratedModule``. Raises CallError for wrong inputs."""
    manifest = module._package.manifest
    others = _bound(manifest, others, named)
    size = _size_for(module, x)
    rows = x.shape[0] if x.shape != size.shape else None
    if rows is not None:
        x, *others = (_padded(given, spec, rows, size.batch) for given, spec in zip((x, *others), (manifest.input, *manifest.others)))
    parameters, state = module._gather(), module._gather_state()
    operands = (*others, *parameters, *state)
    if not torch.compiler.is_compiling():
        refuse_tangents(manifest.name, [x, *operands])
    if not (manifest.reference.training and _trains(module, manifest)):
        y = size.operators.forward(x, *operands)
    else:
        y = _trained(manifest, size.operators.forward_training(x, *operands), dict(zip((entry.name for entry in manifest.state), state)))
    return y if rows is None else y[:rows].clone()


def _trained(manifest: Manifest, made, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """y of a training step's results; the running statistics among them are written to the module's buffers."""
    if not manifest.reference.results:
        return made
    y, *further = made
    with torch.no_grad():
        for name, tensor in zip(manifest.reference.results, further):
            if name.startswith("state:"):
                state[name.removeprefix("state:")].copy_(tensor)
        for key, buffer in state.items():
            if key.endswith("num_batches_tracked"):
                buffer.add_(1)
    return y


def _trains(module, manifest: Manifest) -> bool:
    """Is the module in training mode, and with it every child that holds state?"""
    for entry in manifest.state:
        path, _, _ = entry.name.rpartition(".")
        if module.get_submodule(path).training != module.training:
            modes = ("evaluation", "training") if module.training else ("training", "evaluation")
            raise CallError(
                f"{path} is in {modes[0]} mode while {manifest.name} is in {modes[1]} mode, and one program serves a call; "
                "call train() or eval() on the whole model."
            )
    return module.training


def _size_for(module, x):
    """The size that computes ``x``."""
    if not isinstance(x, torch.Tensor):
        raise CallError(f"{expected(module._package.manifest, module._places())}, got {type(x).__name__}; pass a torch.Tensor.")
    for size in module._sizes:
        if x.shape == size.shape:
            return size
    if module._pads:
        for size in module._sizes:
            if x.dim() and x.shape[1:] == size.shape[1:] and x.shape[0] <= size.batch:
                return size
    return module._sizes[-1]  # whose operator says what is wrong


def _padded(given: torch.Tensor, spec: TensorSpec, rows: int, batch: int) -> torch.Tensor:
    """An input with rows of zeros behind its samples; one without samples as it is."""
    if given.shape[:1] != (rows,) or not spec.batched:
        return given
    return functional.pad(given, [0, 0] * (given.dim() - 1) + [0, batch - rows])


def _bound(manifest: Manifest, others: tuple, named: dict[str, Any]) -> list:
    """The inputs behind the first, by place or by name."""
    names = manifest.arguments[1:]
    if len(others) + len(named) != len(names) or any(name not in names[len(others) :] for name in named):
        raise too_many(manifest, others, named)
    return [*others, *(named[name] for name in names[len(others) :])]


def too_many(manifest: Manifest, others: tuple, named: dict[str, Any]) -> CallError:
    """The refusal of a call with other inputs than the layer has."""
    got = ", ".join([f"{1 + len(others)} by place", *(f"{name}=" for name in named)])
    return CallError(f"{manifest.name} takes the inputs {', '.join(manifest.arguments)}; got {got}.")
