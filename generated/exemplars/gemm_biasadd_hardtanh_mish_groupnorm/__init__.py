"""gemm_biasadd_hardtanh_mish_groupnorm: generated from specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
