"""Algebra: rewrites of a chain that hold for all weights and inputs, up to rounding. One module a pass, one row of table.py each."""

from codegen.algebra.rewriting import ByChain, ByRanges, ByTaps, Derived, Rewriting
from codegen.algebra.table import PASSES, Pass, passes_of, rewrite

__all__ = ["PASSES", "ByChain", "ByRanges", "ByTaps", "Derived", "Pass", "Rewriting", "passes_of", "rewrite"]
