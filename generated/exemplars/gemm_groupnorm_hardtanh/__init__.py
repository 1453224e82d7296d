"""gemm_groupnorm_hardtanh: generated from specs/default.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
