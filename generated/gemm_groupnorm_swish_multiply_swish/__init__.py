"""gemm_groupnorm_swish_multiply_swish: generated from specs/gemm_groupnorm_swish_multiply_swish.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
