"""Norms behind a producer, with all that follows them."""
