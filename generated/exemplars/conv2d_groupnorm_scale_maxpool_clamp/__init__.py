"""conv2d_groupnorm_scale_maxpool_clamp: generated from specs/conv2d_groupnorm_scale_maxpool_clamp.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
