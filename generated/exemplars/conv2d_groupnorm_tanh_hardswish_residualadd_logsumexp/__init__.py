"""conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp: generated from specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
