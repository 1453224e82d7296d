"""conv2d_add_scale_sigmoid_groupnorm: conv2d -> add -> mul -> sigmoid -> group_norm, fp32.

x (128, 8, 256, 256) -> y (128, 32, 254, 254). `ModelNew` runs the kernels beside this file, `Model` is the same layer in plain PyTorch.
Generated from specs/conv2d_add_scale_sigmoid_groupnorm.yaml; do not edit. Again: make generate SPEC=specs/conv2d_add_scale_sigmoid_groupnorm.yaml
"""

from pathlib import Path

import torch
from torch import nn

from runtime import GeneratedModule, Package

PACKAGE = Package(Path(__file__).parent)


class Model(nn.Module):
    """The reference: every operator by PyTorch. Sizes are those of the spec, so the constructor's arguments are not used again."""

    def __init__(self, in_channels, out_channels, kernel_size, num_groups, bias_shape, scale_shape):
        super().__init__()
        self.conv = nn.Conv2d(8, 32, 3)
        self.bias = nn.Parameter(torch.randn((32, 1, 1)))
        self.scale = nn.Parameter(torch.randn((32, 1, 1)))
        self.group_norm = nn.GroupNorm(8, 32)

    def forward(self, x):
        v = self.conv(x)
        v = v + self.bias
        v = v * self.scale
        v = torch.sigmoid(v)
        v = self.group_norm(v)
        return v


class ModelNew(GeneratedModule):
    """The generated layer: same constructor, same parameters, same initial weights under the same seed."""

    def __init__(self, in_channels, out_channels, kernel_size, num_groups, bias_shape, scale_shape):
        super().__init__(PACKAGE, in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, num_groups=num_groups, bias_shape=bias_shape, scale_shape=scale_shape)
        self.conv = nn.Conv2d(8, 32, 3)
        self.bias = nn.Parameter(torch.randn((32, 1, 1)))
        self.scale = nn.Parameter(torch.randn((32, 1, 1)))
        self.group_norm = nn.GroupNorm(8, 32)


def get_inputs():
    """One random input, on the CPU."""
    return [torch.rand(128, 8, 256, 256)]


def get_init_inputs():
    """The constructor's arguments."""
    return [8, 32, 3, 8, (32, 1, 1), (32, 1, 1)]
