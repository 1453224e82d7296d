"""The convolution as a product of windows and filters, for mma.sync."""
