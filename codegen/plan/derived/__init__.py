"""Kernels that derive tensors of a rewritten chain from a parameter or x, at each call."""
