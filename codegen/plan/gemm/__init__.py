"""The GEMM for mma.sync."""
