"""matmul_groupnorm_leakyrelu_sum_fp16: generated from specs/matmul_groupnorm_leakyrelu_sum.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
