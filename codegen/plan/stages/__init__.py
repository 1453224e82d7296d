"""Operators that cannot be fused, as small kernels of their own."""
