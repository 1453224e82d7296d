"""FLOP formulas of a package's operators, for ``torch.utils.flop_counter.FlopCounterMode``.

They count as torch does: two for each multiplication of a matrix product or convolution, nothing for element-wise operators and
statistics. So a model counts as many as its reference, and where a backward computes the producer again, those once more.
"""

import math

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .manifest import LibraryStep, Manifest


def register_formulas(namespace: str, manifest: Manifest, names: list[str]) -> None:
    """Gives each operator of ``names`` in ``namespace`` its formula, unless another size of the package has done so."""
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
