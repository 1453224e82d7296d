"""One kernel of every CUDA template, small and quick to plan: what `make test` compiles. `make test-all` compiles all that ships and all that was once at fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import yaml

from codegen.plan import plan
from codegen.plan.backward.cuda import plan_backward_cuda
from codegen.plan.conv_direct.route import CONV_DIRECT
from codegen.plan.conv_gemm.route import CONV_GEMM
from codegen.plan.conv_product_sm90a.route import CONV_PRODUCT_SM90A
from codegen.plan.conv_sm80.route import CONV_SM80
from codegen.plan.conv_sm90a.route import CONV_SM90A
from codegen.plan.model import Kernel, Plan
from codegen.plan.route import Route
from codegen.spec import load_spec
from codegen.targets import DEVICES, TARGETS
from tests.codegen import norm_harness, test_segment_kernels, test_stages
from tests.codegen.conv_cases import FAMILY
from tests.codegen.conv_product_cases import CASES as PRODUCTS
from tests.codegen.cpu_chains import conv_chain, linear_chain, make_spec
from tests.codegen.forced import planned_by
from tests.codegen.gemm_cases import Case, bias
from tests.codegen.segment_chains import segment_spec

TEMPLATES = Path(__file__).parents[2] / "codegen" / "templates"
COSTLY = Case("costly", 130, 336, 320, 10, before=(bias(320), "hardtanh", "mish"), after=("silu",))
WIDE = Case("wide", 1024, 2048, 1536, 48, before=("relu",), after=("silu",))
NORMS = {case.name: case for case in norm_harness.ALL_CASES}


def gemm(case: Case, precision: str, math: str | None = None, target: str = "sm_80") -> Callable[[Path], Plan]:
    """The plan of a GEMM's chain on an H100."""
    return lambda folder: plan(case.spec(folder, precision, math), target, "h100")


def norm(name: str) -> Callable[[Path], Plan]:
    """The plan of the norm kernels alone behind torch's producer."""
    return lambda folder: NORMS[name].plan(folder)


def stages(number: int) -> Callable[[Path], Plan]:
    """The plan of a chain that ends in stages."""
    return lambda folder: test_stages.planned(folder, number, "bf16", "sm_80")


def segment(name: str) -> Callable[[Path], Plan]:
    """The plan of a chain in segments."""
    shape, chain, inputs = test_segment_kernels.CASES[name]
    return lambda folder: plan(segment_spec(folder, shape, chain, "bf16", inputs), "sm_80", "h100")


def conv(data: dict, precision: str, route: Route) -> Callable[[Path], Plan]:
    """The plan of a convolution's chain by a route of our own, on an H100."""

    def planned(folder: Path) -> Plan:
        path = folder / "conv.yaml"
        path.write_text(yaml.safe_dump(data))
        return planned_by(route, load_spec(path, precision), DEVICES["h100"])

    return planned


def summed(axes: list[int]) -> Callable[[Path], Plan]:
    """The plan of a mean over axes of a transposed convolution, for which x and the filters are summed first."""
    up = {"conv_transpose3d": {"name": "up", "in_channels": 3, "out_channels": 8, "kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}}
    return lambda folder: plan(segment_spec(folder, [2, 3, 6, 7, 8], [up, {"mean": {"dim": axes}}]), "sm_80", "h100")


def backward(chain: list, size: tuple[int, int] | None) -> Callable[[Path], Plan]:
    """The plan of a chain's CUDA backward."""
    return lambda folder: plan_backward_cuda(make_spec(folder, chain, 7, "fp16", size), TARGETS["sm_80"], DEVICES["a100"])


POOLED = conv_chain(["silu"], [{"max_pool2d": {"kernel_size": 2}}, {"mul": {"name": "scale", "shape": [8, 1, 1]}}], 8, 2)
LEAST = linear_chain([], ["silu", {"min": {"keepdim": True}}, "tanh", {"add": {"name": "bias", "shape": [1, 64, 1, 1]}}], 64, 8)
WINDOWS = {"name": "windows", "batch": 2, "input": {"height": 5, "width": 6}, "chain": [
    {"conv2d": {"name": "conv", "in_channels": 40, "out_channels": 64, "kernel_size": 3, "stride": 2, "padding": 1}}, {"group_norm": {"name": "norm", "num_groups": 8}}, "silu",
]}  # fmt: skip

# (template, kind of arithmetic where it has several that read operands in ways of their own) -> plan that has a kernel of it
REPRESENTATIVES: dict[tuple[str, str], Callable[[Path], Plan]] = {
    ("gemm/mma.cu.j2", "halves"): gemm(COSTLY, "bf16"),
    ("gemm/mma.cu.j2", "tf32"): gemm(COSTLY, "tf32"),
    ("gemm/mma_presplit.cu.j2", ""): gemm(WIDE, "fp32", "fp16x3"),
    ("gemm/mma_split.cu.j2", ""): gemm(COSTLY, "fp32", "tf32x3"),
    ("gemm/ffma.cu.j2", ""): gemm(COSTLY, "fp32", "ffma"),
    ("gemm/row_scale.cu.j2", ""): gemm(COSTLY, "fp32", "fp16x3"),
    ("gemm/add_slices.cu.j2", ""): gemm(Case("lengthy", 7, 20011, 51, 3, before=("relu",)), "fp16"),
    ("gemm/end_slices.cu.j2", ""): gemm(Case("lengthy_product", 7, 20011, 52, 0, before=("relu", bias(52))), "fp16"),
    ("gemm/align_rows.cu.j2", ""): gemm(Case("odd", 256, 4097, 512, 4), "fp16"),
    ("norm/group_norm_warp.cu.j2", ""): norm("mish_before"),
    ("norm/group_norm_block.cu.j2", ""): norm("width_8192"),
    ("norm/group_norm_stream.cu.j2", ""): norm("conv_long"),
    ("norm/group_norm_statistics.cu.j2", ""): norm("conv_split"),
    ("norm/group_norm_apply.cu.j2", ""): norm("conv_split"),
    ("norm/group_norm_pool.cu.j2", ""): norm("pool_falls"),
    ("norm/group_norm_pool_stream.cu.j2", ""): norm("pool_large"),
    ("stages/rows.cu.j2", ""): stages(0),
    ("stages/spread.cu.j2", ""): stages(0),
    ("stages/columns.cu.j2", ""): stages(3),
    ("stages/windows.cu.j2", ""): stages(4),
    ("segments/map.cu.j2", ""): segment("broadcasts"),
    ("segments/rows.cu.j2", ""): segment("layer_norm"),
    ("segments/columns.cu.j2", ""): segment("channels"),
    ("segments/partial.cu.j2", ""): segment("batch_norm"),
    ("segments/merge.cu.j2", ""): segment("batch_norm"),
    ("segments/windows.cu.j2", ""): segment("max_pool3d"),
    ("derived/taps.cu.j2", ""): summed([2]),
    ("derived/ranges.cu.j2", "planes"): summed([2, 3, 4]),
    ("derived/ranges.cu.j2", "leading axes"): summed([2]),
    ("conv_gemm/conv_gemm.cu.j2", ""): conv(WINDOWS, "fp16", CONV_GEMM),
    ("conv_gemm/channels_last.cu.j2", ""): conv(WINDOWS, "fp16", CONV_GEMM),
    ("conv_sm80/conv.cu.j2", ""): conv(FAMILY["odd_width"], "fp16", CONV_SM80),
    ("conv_sm80/finish.cu.j2", ""): conv(FAMILY["odd_width"], "fp16", CONV_SM80),
    ("conv_sm90a/conv.cu.j2", ""): conv(FAMILY["one_group"], "fp32", CONV_SM90A),
    ("conv_product_sm90a/conv.cu.j2", ""): conv(PRODUCTS["uneven_phases"], "fp32", CONV_PRODUCT_SM90A),
    ("conv_product_sm90a/conv.cu.j2", "bf16"): conv(PRODUCTS["uneven_phases"], "bf16", CONV_PRODUCT_SM90A),
    ("conv_product_sm90a/arrange.cu.j2", ""): conv(PRODUCTS["few_channels_apart"], "fp16", CONV_PRODUCT_SM90A),
    ("conv_product_sm90a/arrange_filters.cu.j2", ""): conv(PRODUCTS["few_channels"], "fp16", CONV_PRODUCT_SM90A),
    ("conv_product_sm90a/runs.cu.j2", ""): conv(PRODUCTS["few_results"], "fp32", CONV_PRODUCT_SM90A),
    ("conv_product_sm90a/measure.cu.j2", ""): conv(PRODUCTS["few_channels"], "fp32", CONV_PRODUCT_SM90A),
    ("conv_product_sm90a/split.cu.j2", ""): conv(PRODUCTS["few_channels_apart"], "fp32", CONV_PRODUCT_SM90A),
    ("conv_product_sm90a/filters.cu.j2", ""): conv(PRODUCTS["few_channels"], "fp32", CONV_PRODUCT_SM90A),
    ("conv_direct/conv.cu.j2", ""): conv(PRODUCTS["few_channels"], "bf16", CONV_DIRECT),
    ("gemm_sm90a/gemm.cu.j2", "halves"): gemm(COSTLY, "fp16", None, "sm_90a"),
    ("gemm_sm90a/gemm.cu.j2", "fp32"): gemm(COSTLY, "fp32", None, "sm_90a"),
    ("gemm_sm90a/split.cu.j2", ""): gemm(COSTLY, "fp32", None, "sm_90a"),
    ("backward/backward.cu.j2", ""): backward(POOLED, (9, 11)),
    ("backward/stage.cu.j2", ""): backward(LEAST, None),
}


def representative(key: tuple[str, str], folder: Path) -> tuple[Plan, Kernel]:
    """A kernel of the template, and its plan."""
    planned = REPRESENTATIVES[key](folder)
    return planned, next(kernel for kernel in planned.kernels if kernel.template == key[0])
