"""matmul_swish_sum_groupnorm_fp16: linear -> silu -> add -> group_norm, fp16.

x (32768, 1024) -> y (32768, 4096). `ModelNew` runs the kernels beside this file, `Model` is the same layer in plain PyTorch.
Generated from specs/matmul_swish_sum_groupnorm.yaml; do not edit. Again: make generate SPEC=specs/matmul_swish_sum_groupnorm.yaml PRECISION=fp16
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime import GeneratedModule, Package

PACKAGE = Package(Path(__file__).parent)


class Model(nn.Module):
    """The reference: every operator by PyTorch. Sizes are those of the spec, so the constructor's arguments are not used again."""

    def __init__(self, in_features, out_features, num_groups, bias_shape):
        super().__init__()
        self.matmul = nn.Linear(1024, 4096)
        self.bias = nn.Parameter(torch.randn((4096,)))
        self.group_norm = nn.GroupNorm(64, 4096)
        self.to(torch.float16)

    def forward(self, x):
        v = self.matmul(x)
        v = F.silu(v)
        v = v + self.bias
        v = self.group_norm(v)
        return v


class ModelNew(GeneratedModule):
    """The generated layer: same constructor, same parameters, same initial weights under the same seed."""

    def __init__(self, in_features, out_features, num_groups, bias_shape):
        super().__init__(PACKAGE, in_features=in_features, out_features=out_features, num_groups=num_groups, bias_shape=bias_shape)
        self.matmul = nn.Linear(1024, 4096)
        self.bias = nn.Parameter(torch.randn((4096,)))
        self.group_norm = nn.GroupNorm(64, 4096)
        self.to(torch.float16)


def get_inputs():
    """One random input, on the CPU."""
    return [torch.rand(32768, 1024).to(torch.float16)]


def get_init_inputs():
    """The constructor's arguments."""
    return [1024, 4096, 64, (4096,)]
