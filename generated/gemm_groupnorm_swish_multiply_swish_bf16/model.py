"""gemm_groupnorm_swish_multiply_swish_bf16: linear -> group_norm -> silu -> mul -> silu, bf16.

x (1024, 8192) -> y (1024, 8192). `ModelNew` runs the kernels beside this file, `Model` is the same layer in plain PyTorch.
Generated from specs/gemm_groupnorm_swish_multiply_swish.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_swish_multiply_swish.yaml PRECISION=bf16
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime import GeneratedModule, Package

PACKAGE = Package(Path(__file__).parent)


class Model(nn.Module):
    """The reference: every operator by PyTorch. Sizes are those of the spec, so the constructor's arguments are not used again."""

    def __init__(self, in_features, out_features, num_groups, multiply_weight_shape):
        super().__init__()
        self.gemm = nn.Linear(8192, 8192)
        self.group_norm = nn.GroupNorm(256, 8192)
        self.multiply_weight = nn.Parameter(torch.randn((8192,)))
        self.to(torch.bfloat16)

    def forward(self, x):
        v = self.gemm(x)
        v = self.group_norm(v)
        v = F.silu(v)
        v = v * self.multiply_weight
        v = F.silu(v)
        return v


class ModelNew(GeneratedModule):
    """The generated layer: same constructor, same parameters, same initial weights under the same seed."""

    def __init__(self, in_features, out_features, num_groups, multiply_weight_shape):
        super().__init__(PACKAGE, in_features=in_features, out_features=out_features, num_groups=num_groups, multiply_weight_shape=multiply_weight_shape)
        self.gemm = nn.Linear(8192, 8192)
        self.group_norm = nn.GroupNorm(256, 8192)
        self.multiply_weight = nn.Parameter(torch.randn((8192,)))
        self.to(torch.bfloat16)


def get_inputs():
    """One random input, on the CPU."""
    return [torch.rand(1024, 8192).to(torch.bfloat16)]


def get_init_inputs():
    """The constructor's arguments."""
    return [8192, 8192, 256, (8192,)]
