"""What several families of kernels have in common."""
