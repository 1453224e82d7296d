"""Measures the planner's candidates for a spec on the present card and records them. `python -m bench.tune` is the command."""
