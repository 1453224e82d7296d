"""gemm_groupnorm_hardtanh_small: linear -> group_norm -> hardtanh, fp32.

x (128, 1024) -> y (128, 512). `ModelNew` runs the kernels beside this file, `Model` is the same layer in plain PyTorch.
Generated from specs/gemm_groupnorm_hardtanh_small.yaml; do not edit. Again: make generate SPEC=specs/gemm_groupnorm_hardtanh_small.yaml
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
        self.gemm = nn.Linear(1024, 512)
        self.group_norm = nn.GroupNorm(8, 512)

    def forward(self, x):
        v = self.gemm(x)
        v = self.group_norm(v)
        v = F.hardtanh(v, -2.0, 2.0)
        return v


class ModelNew(GeneratedModule):
    """The generated layer: same constructor, same parameters, same initial weights under the same seed."""

    def __init__(self, in_features, out_features, num_groups, hardtanh_min, hardtanh_max):
        super().__init__(PACKAGE, in_features=in_features, out_features=out_features, num_groups=num_groups, hardtanh_min=hardtanh_min, hardtanh_max=hardtanh_max)
        self.gemm = nn.Linear(1024, 512)
        self.group_norm = nn.GroupNorm(8, 512)


def get_inputs():
    """One random input, on the CPU."""
    return [torch.randn(128, 1024)]


def get_init_inputs():
    """The constructor's arguments."""
    return [1024, 512, 8, -2.0, 2.0]
