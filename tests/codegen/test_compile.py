"""Every distinct checked-in CUDA source compiles with nvcc: no warnings, spills, local memory or double arithmetic, inside its plan."""

from pathlib import Path

import pytest

from codegen import index
from codegen.emit import make_package
from codegen.render import render_kernel
from codegen.spec import load_spec
from tests.compile_matrix import faults

TOP = Path(__file__).parents[2]


def sources():
    """One case per distinct text; the cache behind compile_report makes a second run quick."""
    seen = {}
    for spec, precision in index.entries(TOP / "generated"):
        for plan in make_package(load_spec(spec, precision)).plans:
            if plan.target.language == "cuda":
                for kernel in plan.kernels:
                    seen.setdefault(render_kernel(plan, kernel), (plan, kernel))
    return [pytest.param(plan, kernel, id=f"{plan.spec.package}-{kernel.file(plan.target)}") for plan, kernel in seen.values()]


@pytest.mark.parametrize(("plan", "kernel"), sources())
def test_source_compiles_within_its_plan(plan, kernel, tmp_path):
    assert not (found := faults(plan, kernel, tmp_path)), "\n".join(found)
