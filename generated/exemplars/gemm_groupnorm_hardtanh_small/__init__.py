"""gemm_groupnorm_hardtanh_small: generated from specs/gemm_groupnorm_hardtanh_small.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
