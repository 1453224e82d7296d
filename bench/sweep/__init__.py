"""Random specs from the whole grammar: drawn, generated, verified, timed. `python -m bench.sweep` is the command."""
