"""The GEMM for Hopper: TMA and wgmma."""
