"""Convolutions without a norm on Hopper: an implicit GEMM whose pixels the copy engine gathers, or copies in runs."""
