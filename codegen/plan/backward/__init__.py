"""Gradients: the backward of every target."""
