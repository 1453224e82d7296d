"""conv2d_groupnorm_scale_maxpool_clamp_bf16: conv2d -> group_norm -> mul -> max_pool2d -> clamp, bf16.

x (128, 8, 128, 128) -> y (128, 64, 31, 31). `ModelNew` runs the kernels beside this file, `Model` is the same layer in plain PyTorch.
Generated from specs/conv2d_groupnorm_scale_maxpool_clamp.yaml; do not edit. Again: make generate SPEC=specs/conv2d_groupnorm_scale_maxpool_clamp.yaml PRECISION=bf16
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime import GeneratedModule, Package

PACKAGE = Package(Path(__file__).parent)


class Model(nn.Module):
    """The reference: every operator by PyTorch. Sizes are those of the spec, so the constructor's arguments are not used again."""

    def __init__(self, in_channels, out_channels, kernel_size, num_groups, scale_shape, maxpool_kernel_size, clamp_min, clamp_max):
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3)
        self.group_norm = nn.GroupNorm(16, 64)
        self.scale = nn.Parameter(torch.ones((64, 1, 1)))
        self.to(torch.bfloat16)

    def forward(self, x):
        v = self.conv(x)
        v = self.group_norm(v)
        v = v * self.scale
        v = F.max_pool2d(v, 4)
        v = torch.clamp(v, min=0.0, max=1.0)
        return v


class ModelNew(GeneratedModule):
    """The generated layer: same constructor, same parameters, same initial weights under the same seed."""

    def __init__(self, in_channels, out_channels, kernel_size, num_groups, scale_shape, maxpool_kernel_size, clamp_min, clamp_max):
        super().__init__(PACKAGE, in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, num_groups=num_groups, scale_shape=scale_shape, maxpool_kernel_size=maxpool_kernel_size, clamp_min=clamp_min, clamp_max=clamp_max)
        self.conv = nn.Conv2d(8, 64, 3)
        self.group_norm = nn.GroupNorm(16, 64)
        self.scale = nn.Parameter(torch.ones((64, 1, 1)))
        self.to(torch.bfloat16)


def get_inputs():
    """One random input, on the CPU."""
    return [torch.rand(128, 8, 128, 128).to(torch.bfloat16)]


def get_init_inputs():
    """The constructor's arguments."""
    return [8, 64, 3, 16, (64, 1, 1), 4, 0.0, 1.0]
