"""`make compile-all`: every emitted CUDA source over a matrix of shapes, precisions, arithmetics and targets, compiled and inspected.

A source must compile without warnings, spills, local memory and double arithmetic, within the registers and shared memory of its plan.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import yaml
from rich.progress import track

from codegen.numerics import MATH_CHOICES
from codegen.package import make_package
from codegen.plan import Refusal
from codegen.plan.model import Kernel, Plan
from codegen.render import render_kernel
from codegen.spec import load_spec, shipped
from codegen.targets import cuda_targets
from runtime.errors import BuildError
from runtime.kernel_report import compile_report
from tests import tiers

ARCHS = {name: name for name in cuda_targets()}  # what each is compiled for


def faults(plan: Plan, kernel: Kernel, folder: Path) -> list[str]:
    """Sentences about the faults of one emitted source; none where there are none."""
    tiers.claim("nvcc")
    source = folder / kernel.file(plan.target)
    source.write_text(render_kernel(plan, kernel), encoding="utf-8")
    label = f"{plan.spec.package} {source.name} ({plan.device.name})"
    try:
        report = compile_report(source, plan.target.flags, ARCHS[plan.target.name])
    except BuildError as error:
        return [f"{label}: does not compile\n{error}"]
    found = [f"{label}: {warning}" for warning in report.warnings]
    if report.uses_double:
        found.append(f"{label}: computes in double")
    for entry in report.kernels:
        if entry.stack or entry.spill_stores or entry.spill_loads:
            found.append(f"{label}: {entry.short_name} has {entry.stack} bytes of stack, {entry.spill_stores} of spill stores")
        if entry.registers > kernel.max_registers:
            found.append(f"{label}: {entry.short_name} takes {entry.registers} registers, planned {kernel.max_registers}")
        if entry.static_shared + kernel.smem_bytes > plan.target.smem_bytes:
            found.append(f"{label}: {entry.short_name} takes {entry.static_shared} bytes of static shared memory beside {kernel.smem_bytes}")
    return found


def layer(batch: int, k: int, n: int, groups: int, **extra) -> dict:
    """A Linear -> GroupNorm -> Hardtanh spec as data."""
    chain = [
        {"linear": {"name": "gemm", "in_features": k, "out_features": n}},
        {"group_norm": {"name": "norm", "num_groups": groups}},
        "hardtanh",
    ]
    return {"name": f"layer_{batch}_{k}_{n}_{groups}", "batch": batch, "chain": chain, **extra}


def matrix() -> Iterator[tuple[dict | str, str, str | None]]:
    """(spec data or path, precision, math) of every case."""
    for path in shipped():
        for precision in MATH_CHOICES:
            yield path, precision, None
    shapes = [(1, 64, 64, 4), (7, 100, 96, 2), (128, 1024, 512, 8), (300, 1000, 1000, 10), (33, 77, 51, 3), (64, 4096, 16384, 2), (1000, 515, 340, 20), (256, 2048, 1536, 32)]
    for shape in shapes:
        for precision, maths in MATH_CHOICES.items():
            for math in maths:
                yield layer(*shape), precision, math


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--jobs", default=2, show_default=True, help="Compilers at once.")
@click.option("--target", "targets", multiple=True, type=click.Choice(list(ARCHS)), help="Only this target (may be repeated).")
def main(jobs: int, targets: tuple[str, ...]) -> None:
    """Compile the full matrix and list what is wrong."""
    wanted = targets or tuple(ARCHS)
    with tempfile.TemporaryDirectory() as scratch:
        work: dict[str, tuple[Plan, Kernel]] = {}
        skipped = 0
        for number, (case, precision, math) in enumerate(matrix()):
            path = case
            if isinstance(case, dict):
                data = case | {"precision": precision} | ({"math": math} if math else {}) | {"gemm": "generated"}
                path = Path(scratch) / f"case{number}.yaml"
                path.write_text(yaml.safe_dump(data))
            spec = load_spec(path, precision)
            for target in wanted:
                try:
                    package = make_package(spec, (target,))
                except Refusal:
                    skipped += 1
                    continue
                for plan in (*package.plans, *package.backward_plans):
                    for kernel in plan.kernels:
                        work.setdefault(render_kernel(plan, kernel), (plan, kernel))

        def run(item: tuple[int, tuple[Plan, Kernel]]) -> list[str]:
            folder = Path(scratch) / str(item[0])
            folder.mkdir()
            return faults(*item[1], folder)

        with ThreadPoolExecutor(jobs) as pool:
            results = list(track(pool.map(run, enumerate(work.values())), total=len(work), description="compiling"))
    found = [text for result in results for text in result]
    print("\n".join(found))
    print(f"{len(work)} distinct sources, {len(found)} faults, {skipped} combinations that a target does not serve")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
