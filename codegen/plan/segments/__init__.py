"""Kernels of segments: element-wise operators around a norm, softmax, reduction or pooling, or around nothing."""
