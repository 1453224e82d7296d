"""conv2d_add_scale_sigmoid_groupnorm_fp16: generated from specs/conv2d_add_scale_sigmoid_groupnorm.yaml."""

from .model import Model, ModelNew, get_init_inputs, get_inputs

__all__ = ["Model", "ModelNew", "get_init_inputs", "get_inputs"]
