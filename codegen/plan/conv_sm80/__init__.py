"""The convolution in one read of x, for mma.sync."""
