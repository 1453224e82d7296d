"""FLOP formulas of a package's operators, for ``torch.utils.flop_counter.FlopCounterMode``.

They count as torch does: two for each multiplication of a matrix product or convolution, nothing for element-wise operators and
statistics. So a model counts as many as its reference, and where a backward computes the producer again, those once more.
"""

import functools
import math

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from .manifest import LibraryStep, Manifest
from .reference import forward


def register_formulas(namespace: str, manifest: Manifest, names: list[str]) -> None:
    """Gives each operator of ``names`` in ``namespace`` its formula, unless another size of the package has done so."""
    if manifest.reference is not None:
        _register_of_reference(namespace, manifest, names)
        return
    each = flops_of_a_sample(manifest)

    def of_a_forward(x_shape, *args, **kwargs) -> int:
        return each * x_shape[0]

    def of_a_backward(*args, **kwargs) -> int:
        return 0

    def of_derivatives(grad_shape, x_shape, weight_shape, wanted, **kwargs) -> int:
        return each * x_shape[0] * sum(map(bool, wanted[:2]))  # each has the products of the forward

    formulas = {
        "forward": of_a_forward, "forward_saving": of_a_forward, "produce": of_a_forward, "backward": of_a_backward, "derive": of_derivatives,
    }  # fmt: skip
    for name in names:
        operator = getattr(getattr(torch.ops, namespace), name)
        if operator not in flop_registry:
            register_flop_formula(operator)(formulas[name])


def _register_of_reference(namespace: str, manifest: Manifest, names: list[str]) -> None:
    """The same for a package of a general chain: torch counts its reference, on tensors without memory."""
    counted = functools.cache(functools.partial(_count, manifest))

    def of_a_forward(*args, **kwargs) -> int:
        return counted(False)

    def of_gradients(*args, **kwargs) -> int:
        return counted(True)

    for name in names:
        operator = getattr(getattr(torch.ops, namespace), name)
        if operator not in flop_registry:
            register_flop_formula(operator)(of_gradients if name == "vector_jacobian" else of_a_forward)


def _count(manifest: Manifest, gradients: bool) -> int:
    """The FLOPs of the reference's forward, or of that and the gradients of every floating operand."""
    entries = (manifest.input, *manifest.operands)
    operands = [torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta") for entry in entries]
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(gradients):
        leaves = [tensor.requires_grad_(gradients and tensor.is_floating_point()) for tensor in operands]
        y = forward(manifest, leaves, [], False)
        if gradients:
            torch.autograd.grad(y.sum(), [leaf for leaf in leaves if leaf.requires_grad], allow_unused=True)
    return counter.get_total_flops()


def flops_of_a_sample(manifest: Manifest) -> int:
    """The FLOPs of the producer for one sample; 0 for a package that multiplies no matrices."""
    backward = next(iter(manifest.backward.values()), None)
    if backward is not None:
        return _flops(manifest, backward.producer, backward.saved[0].shape)
    for target in manifest.targets.values():
        shapes = {buffer.name: buffer.shape for buffer in target.buffers} | {"y": manifest.output.shape}
        for step in target.steps:
            if isinstance(step, LibraryStep) and shapes.get(step.out):
                return _flops(manifest, step, shapes[step.out])
    return 0


def _flops(manifest: Manifest, producer: LibraryStep, made: tuple[int, ...]) -> int:
    weight = next(parameter for parameter in manifest.parameters if parameter.name == producer.args[1])
    return 2 * math.prod(made[1:]) * math.prod(weight.shape[1:])
