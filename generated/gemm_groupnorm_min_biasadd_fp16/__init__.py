"""gemm_groupnorm_min_biasadd_fp16: generated from specs/gemm_groupnorm_min_biasadd.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
