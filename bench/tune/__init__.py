"""Measures the planner's candidates for a spec on the present card and records them. `fsk tune` is the command."""
