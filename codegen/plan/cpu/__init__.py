"""The cpu target: one C++ pass behind torch's own producer."""
