"""conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: conv2d -> group_norm -> tanh -> hardswish -> add -> logsumexp, fp32.

x (128, 8, 128, 128) -> y (128, 1, 126, 126). `ModelNew` runs the kernels beside this file, `Model` is the same layer in plain PyTorch.
Generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml; do not edit. Again: make generate SPEC=specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime import GeneratedModule, Package

PACKAGE = Package(Path(__file__).parent)


class Model(nn.Module):
    """The reference: every operator by PyTorch. Sizes are those of the spec, so the constructor's arguments are not used again."""

    def __init__(self, in_channels, out_channels, kernel_size, groups, eps=1e-05):
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3)
        self.group_norm = nn.GroupNorm(16, 64)

    def forward(self, x):
        v = self.conv(x)
        conv_kept = v
        v = self.group_norm(v)
        v = torch.tanh(v)
        v = F.hardswish(v)
        v = v + conv_kept
        v = torch.logsumexp(v, dim=1, keepdim=True)
        return v


class ModelNew(GeneratedModule):
    """The generated layer: same constructor, same parameters, same initial weights under the same seed."""

    def __init__(self, in_channels, out_channels, kernel_size, groups, eps=1e-05):
        super().__init__(PACKAGE, in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, groups=groups, eps=eps)
        self.conv = nn.Conv2d(8, 64, 3)
        self.group_norm = nn.GroupNorm(16, 64)


def get_inputs():
    """One random input, on the CPU."""
    return [torch.rand(128, 8, 128, 128)]


def get_init_inputs():
    """The constructor's arguments."""
    return [8, 64, 3, 16]
