"""Every distinct checked-in CUDA source compiles with nvcc: no warnings, spills, local memory or double arithmetic, inside its plan. So do those of the
other shipped specs for sm_80, and the stages behind fused kernels."""

import tempfile
from pathlib import Path

import pytest

from codegen import index
from codegen.emit import make_package
from codegen.plan import plan as plan_of
from codegen.render import render_kernel
from codegen.spec import load_spec, shipped
from tests.codegen import test_stages as stages
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


def other_sources():
    """The shipped specs without checked-in packages in fp32, and chains that end in stages, in fp32 and bf16: one case per distinct text."""
    listed = {spec for spec, _ in index.entries(TOP / "generated")}
    plans = [plan_of(load_spec(path), "sm_80") for path in shipped() if path not in listed]
    with tempfile.TemporaryDirectory() as folder:
        plans += [stages.planned(Path(folder), number, precision, "sm_80") for number in range(len(stages.CHAINS)) for precision in ("fp32", "bf16")]
    staged = lambda plan, kernel: plan.spec.name != "chain_under_test" or kernel.template.startswith("stages/")  # noqa: E731
    seen = {render_kernel(plan, kernel): (plan, kernel) for plan in plans for kernel in plan.kernels if staged(plan, kernel)}
    return [pytest.param(plan, kernel, id=f"{number}-{plan.spec.package}-{kernel.file(plan.target)}") for number, (plan, kernel) in enumerate(seen.values())]


@pytest.mark.parametrize(("plan", "kernel"), [*sources(), *other_sources()])
def test_source_compiles_within_its_plan(plan, kernel, tmp_path):
    assert not (found := faults(plan, kernel, tmp_path)), "\n".join(found)
