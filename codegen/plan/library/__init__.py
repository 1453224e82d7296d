"""Torch's own GEMM or convolution, with our kernels behind it."""
