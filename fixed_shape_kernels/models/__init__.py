"""Whole models: chains of a model's operators replaced by generated kernels, each only where it is right and faster.

    regions.py   the parts of a model that torch.fx can trace, with what they are called with
    tracing.py   torch.fx's trace of a module for the shapes of one call
    chains.py    in such a part: runs of operators that are a spec
    building.py  from a chain to the module that runs it, with the model's own parameters
    seen.py      what parts are called with and give, and whether their traces give the same
    judge.py     is a generated chain right, and how fast, beside the model's own modules?
    installed.py the forwards that run generated chains, and the model's own otherwise
    optimized.py the calls `optimize`, `explain_model` and `load_optimized`
    saved.py     an optimised model on disk
    report.py    what became of each chain, as a table, JSON and a page
    command.py   fsk optimize
    captured.py  a graph of torch.compile as a region, and operators put into it
    compiled.py  the backend of torch.compile, and the pass of Inductor
"""

from .compiled import inductor_pass
from .installed import Optimized
from .optimized import explain_model, load_optimized, optimize
from .report import NotReplaced, Report, Row
from .saved import save_optimized

__all__ = ["NotReplaced", "Optimized", "Report", "Row", "explain_model", "inductor_pass", "load_optimized", "optimize", "save_optimized"]
