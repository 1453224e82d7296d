"""A convolution of ours whose result lies in memory, and the norm's kernels behind it."""
