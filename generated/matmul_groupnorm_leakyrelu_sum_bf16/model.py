"""matmul_groupnorm_leakyrelu_sum_bf16: linear -> group_norm -> leaky_relu -> add, bf16.

x (1024, 8192) -> y (1024, 8192). `ModelNew` runs the kernels beside this file, `Model` is the same layer in plain PyTorch.
Generated from specs/matmul_groupnorm_leakyrelu_sum.yaml; do not edit. Again: make generate SPEC=specs/matmul_groupnorm_leakyrelu_sum.yaml PRECISION=bf16
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime import GeneratedModule, Package

PACKAGE = Package(Path(__file__).parent)


class Model(nn.Module):
    """The reference: every operator by PyTorch. Sizes are those of the spec, so the constructor's arguments are not used again."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-05, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(8192, 8192)
        self.gn = nn.GroupNorm(512, 8192)
        self.to(torch.bfloat16)

    def forward(self, x):
        v = self.fc(x)
        v = self.gn(v)
        v = F.leaky_relu(v, 0.01)
        v = v + v
        return v


class ModelNew(GeneratedModule):
    """The generated layer: same constructor, same parameters, same initial weights under the same seed."""

    def __init__(self, input_size, hidden_size, num_groups, eps=1e-05, negative_slope=0.01):
        super().__init__(PACKAGE, input_size=input_size, hidden_size=hidden_size, num_groups=num_groups, eps=eps, negative_slope=negative_slope)
        self.fc = nn.Linear(8192, 8192)
        self.gn = nn.GroupNorm(512, 8192)
        self.to(torch.bfloat16)


def get_inputs():
    """One random input, on the CPU."""
    return [torch.rand(1024, 8192).to(torch.bfloat16)]


def get_init_inputs():
    """The constructor's arguments."""
    return [8192, 8192, 512]
