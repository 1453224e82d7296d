"""The convolution in one read of x, for Hopper."""
