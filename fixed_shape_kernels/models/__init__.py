"""Whole models: chains of a model's operators replaced by generated kernels, each only where it is right and faster.

    regions.py   the parts of a model that torch.fx can trace, with what they are called with
    chains.py    in such a part: runs of operators that are a spec
    judge.py     is a generated chain right, and how fast, beside the model's own modules?
    optimized.py the calls `optimize` and `explain`: find, build, judge, install, take back
    report.py    what became of each chain, as a table, JSON and a page
    command.py   fsk optimize
"""

from .optimized import Optimized, explain_model, optimize
from .report import NotReplaced, Report, Row

__all__ = ["NotReplaced", "Optimized", "Report", "Row", "explain_model", "optimize"]
