"""Random inputs and parameters for one spec, which the families of families.py change in their ways."""

from __future__ import annotations

import math

import torch

from codegen.ir.fused_form import fused
from codegen.ops import Kind
from codegen.spec import Spec

Parameters = dict[str, torch.Tensor]


class Draw:
    """Random tensors for one spec on one device, in float32; `spec.precision`'s storage type comes last, in `finish`."""

    def __init__(self, spec: Spec, device: torch.device, seed: int):
        self.spec, self.device, self.precision = fused(spec) or spec, device, spec.precision.name
        self._generator = torch.Generator(device).manual_seed(seed)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def x(self, kind: str = "randn") -> torch.Tensor:
        return getattr(self, kind)(*self.spec.input_shape)

    def parameters(self) -> Parameters:
        """Random values for every parameter; the producer's like PyTorch's initial ones, about a tenth of the factors negative or zero."""
        found: Parameters = {}
        for step in self.spec.chain:
            for parameter in step.parameters:
                key, shape = step.key(parameter), parameter.shape
                if step.operator.kind is Kind.PRODUCER:
                    bound = 1 / math.sqrt(math.prod(step.parameters[0].shape[1:]))
                    found[key] = self.rand(*shape).mul_(2 * bound).sub_(bound)
                elif step.operator.name == "mul" or (step.operator.kind is Kind.NORM and parameter.suffix == "weight"):
                    value = self.randn(*shape)
                    found[key] = value.masked_fill_(self.rand(*shape) < 0.03, 0.0)
                elif step.operator.name == "div":
                    found[key] = torch.where(self.rand(*shape) < 0.5, -1.0, 1.0) * (0.5 + self.rand(*shape))
                else:
                    found[key] = self.randn(*shape)
        return found

    def state(self) -> Parameters:
        """Random running statistics, as some training would leave them."""
        made = {
            "zeros": lambda shape: self.randn(*shape).mul_(0.5), "ones": lambda shape: self.rand(*shape).add_(0.5),
            "count": lambda shape: self.integers(1, 1000, *shape),
        }  # fmt: skip
        return {key: made[fill](shape) for key, shape, fill in self.spec.buffers}

    @property
    def weight(self) -> str:
        """Key of the producer's weight."""
        return self.spec.producer.key(self.spec.producer.parameters[0])

    @property
    def shifts(self) -> list[str]:
        """Keys of what is added before the norm: the producer's bias and `add`'s parameters."""
        keys = [self.spec.producer.key(p) for p in self.spec.producer.parameters[1:]]
        return keys + [step.key(p) for step in self.spec.before_norm if step.operator.name == "add" for p in step.parameters]

    def reference_channels(self) -> torch.Tensor:
        """Indices 0..channels-1, shaped to scale the producer's weight by output channel."""
        return torch.arange(self.spec.channels, device=self.device).view(-1, *[1] * (len(self.spec.producer.parameters[0].shape) - 1))

    def finish(self, x: torch.Tensor, parameters: Parameters) -> tuple[tuple[torch.Tensor, ...], Parameters]:
        """All inputs, x first, and the parameters with random running statistics (neither, for those the constructor drew), in the spec's storage type."""
        dtype = getattr(torch, self.spec.precision.dtype)
        others = [getattr(self, given.values)(*given.shape) for given in self.spec.inputs[1:]]
        state = self.state() if parameters else {}
        return (
            (x.to(dtype), *(other.to(dtype) for other in others)),
            {key: value.to(dtype) if value.is_floating_point() else value for key, value in (parameters | state).items()},
        )  # fmt: skip
