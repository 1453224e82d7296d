"""Convolutions of few channels on the CUDA cores: a thread sums all channels of its results in registers."""
