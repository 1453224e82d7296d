"""Evidence: what a generated package computes, how wrong it is and how long it takes, beside PyTorch."""
