"""Random specs from the whole grammar: drawn, generated, verified, timed. `fsk sweep` is the command."""
