"""Twins: a model with kernels in it and an untouched copy, trained side by side."""

from __future__ import annotations

import torch
from torch import nn


def backward_both(y: torch.Tensor, wanted: torch.Tensor) -> None:
    """Hold a result to the twin's and send the gradient of the sum of squares back through both."""
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    y.square().sum().backward()
    wanted.square().sum().backward()


def same_gradients_and_buffers(model: nn.Module, twin: nn.Module) -> None:
    """Hold the gradients of all parameters, and all buffers, to the twin's."""
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=name)
    for (name, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=name)
