"""gemm_groupnorm_hardtanh: linear -> group_norm -> hardtanh, fp32.

x (1024, 8192) -> y (1024, 8192). `ModelNew` runs the kernels beside this file, `Model` is the same layer in plain PyTorch.
Generated from specs/default.yaml; do not edit. Again: make generate SPEC=specs/default.yaml
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from runtime import GeneratedModule, Package

PACKAGE = Package(Path(__file__).parent)


class Model(nn.Module):
    """The reference: every operator by PyTorch. Sizes are those of the spec, so the constructor's arguments are not used again."""

    def __init__(self, in_features, out_features, num_groups, hardtanh_min, hardtanh_max):
        super().__init__()
        self.gemm = nn.Linear(8192, 8192)
        self.group_norm = nn.GroupNorm(16, 8192)

    def forward(self, x):
        v = self.gemm(x)
        v = self.group_norm(v)
        v = F.hardtanh(v, -2.0, 2.0)
        return v


class ModelNew(GeneratedModule):
    """The generated layer: same constructor, same parameters, same initial weights under the same seed."""

    def __init__(self, in_features, out_features, num_groups, hardtanh_min, hardtanh_max):
        super().__init__(PACKAGE, in_features=in_features, out_features=out_features, num_groups=num_groups, hardtanh_min=hardtanh_min, hardtanh_max=hardtanh_max)
        self.gemm = nn.Linear(8192, 8192)
        self.group_norm = nn.GroupNorm(16, 8192)


def get_inputs():
    """One random input, on the CPU."""
    return [torch.rand(1024, 8192)]


def get_init_inputs():
    """The constructor's arguments."""
    return [8192, 8192, 16, -2.0, 2.0]
