"""The shipped problems as PyTorch modules, written as a user would: what the specs have to be equal to."""

from __future__ import annotations

import torch
from torch import nn


class MatmulGroupNormLeakyReLUSum(nn.Module):
    def __init__(self, input_size, hidden_size, num_groups, eps=1e-5, negative_slope=0.01):
        super().__init__()
        self.fc = nn.Linear(input_size, hidden_size)
        self.gn = nn.GroupNorm(num_groups=num_groups, num_channels=hidden_size, eps=eps)
        self.leaky_relu = nn.LeakyReLU(negative_slope=negative_slope)

    def forward(self, x):
        x = self.leaky_relu(self.gn(self.fc(x)))
        return x + x


class GemmGroupNormSwishMultiplySwish(nn.Module):
    def __init__(self, in_features, out_features, num_groups, multiply_weight_shape):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.group_norm = nn.GroupNorm(num_groups, out_features)
        self.multiply_weight = nn.Parameter(torch.randn(multiply_weight_shape))

    def forward(self, x):
        x = self.group_norm(self.gemm(x))
        x = x * torch.sigmoid(x) * self.multiply_weight
        return x * torch.sigmoid(x)


class MatmulSwishSumGroupNorm(nn.Module):
    def __init__(self, in_features, out_features, num_groups, bias_shape):
        super().__init__()
        self.matmul = nn.Linear(in_features, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_features)

    def forward(self, x):
        x = self.matmul(x)
        return self.group_norm(torch.sigmoid(x) * x + self.bias)


class Conv2dAddScaleSigmoidGroupNorm(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, num_groups, bias_shape, scale_shape):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.group_norm = nn.GroupNorm(num_groups, out_channels)

    def forward(self, x):
        return self.group_norm(torch.sigmoid((self.conv(x) + self.bias) * self.scale))


class GemmGroupNormMinBiasAdd(nn.Module):
    def __init__(self, in_features, out_features, num_groups, bias_shape):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.group_norm = nn.GroupNorm(num_groups, out_features)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x):
        x = self.group_norm(self.gemm(x))
        return torch.min(x, dim=1, keepdim=True)[0] + self.bias


class Conv2dGroupNormTanhHardSwishResidualAddLogSumExp(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, groups, eps=1e-5):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.group_norm = nn.GroupNorm(groups, out_channels, eps=eps)
        self.tanh = nn.Tanh()
        self.hard_swish = nn.Hardswish()

    def forward(self, x):
        first = self.conv(x)
        x = first + self.hard_swish(self.tanh(self.group_norm(first)))
        return torch.logsumexp(x, dim=1, keepdim=True)


PROBLEMS: dict[str, type[nn.Module]] = {
    "matmul_groupnorm_leakyrelu_sum": MatmulGroupNormLeakyReLUSum,
    "gemm_groupnorm_swish_multiply_swish": GemmGroupNormSwishMultiplySwish,
    "matmul_swish_sum_groupnorm": MatmulSwishSumGroupNorm,
    "conv2d_add_scale_sigmoid_groupnorm": Conv2dAddScaleSigmoidGroupNorm,
    "gemm_groupnorm_min_biasadd": GemmGroupNormMinBiasAdd,
    "conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp": Conv2dGroupNormTanhHardSwishResidualAddLogSumExp,
}
