"""matmul_swish_sum_groupnorm_bf16: generated from specs/matmul_swish_sum_groupnorm.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
