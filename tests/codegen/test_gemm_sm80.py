"""GEMM plans for sm_80: tiles fit the device, every output is written once, accesses are aligned, groups are whole; sources compile clean."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.numerics import ARITHMETICS as NAMED
from codegen.plan import plan
from codegen.plan.gemm.choice import choose_tile
from codegen.plan.gemm.route import GEMM, HELD_BY_NORM, plan_gemm
from codegen.plan.gemm.tiles import FFMA, SINGLE, SPLIT, SPLIT_16_BIT, aligned_k
from codegen.plan.route import Choice
from codegen.render import render_kernel
from codegen.report import explain
from codegen.targets import DEVICES, TARGETS
from tests.codegen.forced import request_for
from tests.codegen.gemm_cases import ARITHMETICS, CASES, Case
from tests.compile_matrix import faults

SM_80 = TARGETS["sm_80"]
SM_80_DEVICES = [device for device in DEVICES.values() if "sm_80" in device.targets]


def planned(case, folder, precision, math_name, device="a100"):
    spec = case.spec(folder, precision, math_name)
    arithmetic, tiling = best_offer(spec, DEVICES[device]).detail
    return spec, plan_gemm(spec, SM_80, DEVICES[device], arithmetic, tiling)


def best_offer(spec, device):
    """The GEMM's own choice."""
    return GEMM.offers(request_for(GEMM, spec, device))[0]


def arithmetic_of(spec, device):
    return best_offer(spec, device).detail[0]


@pytest.mark.parametrize("tile", (*SINGLE, *SPLIT, *SPLIT_16_BIT), ids=str)
def test_tensor_core_tiles_are_whole_multiplies(tile):
    assert tile.warp_m % 16 == 0 and tile.warp_n % 16 == 0
    assert tile.row_bytes in (64, 128)


@pytest.mark.parametrize("tile", (*SINGLE, *SPLIT, *SPLIT_16_BIT, *FFMA), ids=str)
def test_tiles_fit_the_target(tile):
    assert tile.m % (8 * tile.warps_m) == 0 and tile.n % (4 * tile.warps_n) == 0
    assert tile.smem_bytes <= SM_80.smem_bytes
    assert tile.threads * tile.blocks_per_sm * tile.max_registers <= 65536
    # The permutation of a panel's pieces repeats after 8 rows, so that one offset serves all rows that a thread copies 16 bytes of.
    assert (copied := tile.threads * 16 // tile.row_bytes) % 8 == 0
    for access in (4, 8, 16):
        assert all(rows % (at_once := tile.threads * access // tile.row_bytes) == 0 or at_once % rows == 0 for rows in (tile.m, tile.n))
    if tile.presplit:
        assert tile.m % copied == 0 and tile.n % copied == 0 and tile.stages == 2 and tile.row_bytes == 64


@given(
    batch=st.integers(1, 3000), k=st.integers(1, 9000), width=st.integers(2, 700), groups=st.integers(1, 40), chosen=st.sampled_from(ARITHMETICS),
    device=st.sampled_from([device.name for device in SM_80_DEVICES]),
)  # fmt: skip
def test_every_output_is_written_once_and_no_group_is_cut(tmp_path_factory, batch, k, width, groups, chosen, device):
    case = Case("any_shape", batch, k, width * groups, groups)
    spec, gemm = planned(case, tmp_path_factory.mktemp("specs"), *chosen, device)
    kernel = next(step.kernel for step in gemm.steps if step.kernel.name == "gemm")
    choice = choose_tile(spec, DEVICES[device], NAMED[chosen[1]])
    columns = choice.columns
    tiles_m, tiles_n = math.ceil(batch / kernel.tile.m), math.ceil(spec.channels / columns)
    assert kernel.blocks == tiles_m * tiles_n * choice.slices and kernel.slices == choice.slices
    stages = int(next(c.text for c in kernel.constants if c.name == "kStageCount"))
    slice_k = stages * kernel.tile.stage_k(spec.precision.itemsize)
    assert (choice.slices - 1) * slice_k < k <= choice.slices * slice_k  # all of K, and no slice without a part of it
    assert columns <= kernel.tile.n and (not gemm.finished or columns % width == 0)
    e = kernel.epilogue
    assert e.span % e.vector == 0 and spec.channels % e.vector == 0 and e.vector * spec.precision.itemsize <= 16
    assert e.team * e.vectors_per_lane * e.vector >= e.span and e.team <= 32
    assert e.items_per_team * e.teams >= e.items == e.round_rows * e.spans and kernel.tile.m % e.round_rows == 0
    assert kernel.smem_bytes <= SM_80.smem_bytes
    assert e.round_rows * e.pitch * 4 * kernel.tile.warps_k <= kernel.smem_bytes
    assert ((aligned_k(k) if choice.aligned else k) * spec.precision.itemsize) % kernel.copy_bytes == 0 and (not choice.aligned or k % 2 == 1)
    assert kernel.ragged_m == (batch % kernel.tile.m != 0)
    assert kernel.arguments[0] == ("x_rows" if choice.aligned else "x") and kernel.arguments[-1] == "y"


@pytest.mark.nvcc
@pytest.mark.parametrize(
    ("precision", "shape"),
    [*((p, s) for p in ("fp32", "tf32") for s in ((24, 46080, 348), (12, 19652, 144), (7, 3863, 510), (64, 16384, 1024))), ("bf16", (24, 46080, 348)), ("fp16", (64, 21046, 400))],
)
def test_few_tiles_of_a_long_k_are_shared_by_blocks(shape, precision, tmp_path):
    """Without slices the first of these would take six times as long; the norm kernel reads the sum, without the bias."""
    batch, k, n = shape
    spec = Case("long_rows", batch, k, n, 2, before=("relu",), after=("hardtanh",)).spec(tmp_path, precision, None)
    made = plan(spec, "sm_80", "h100")
    gemm, add, *norm = made.kernels
    assert gemm.slices > 1 and gemm.bias is None and not gemm.before and made.steps[0].result == add.arguments[0] and add.arguments[1] == "t0"
    assert norm[0].arguments[:2] == ("t0", "gemm.bias") and made.buffers[0].shape == (gemm.slices, batch, n)
    assert "parts, a block each" in explain(made)
    for kernel in made.kernels:
        assert not (found := faults(made, kernel, tmp_path)), found


@pytest.mark.parametrize(("batch", "k", "n", "groups", "team", "items"), [(32768, 72, 9, 1, 1, 1), (4096, 128, 510, 30, 2, 7), (300, 96, 33, 11, 1, 11), (4096, 64, 64, 1, 4, 4)])
def test_narrow_groups_take_few_lanes_and_columns_that_do_not_exist_none(batch, k, n, groups, team, items, tmp_path):
    """With a lane for each of 9 values and all 7 groups that a tile has room for, a thread waited through 112 rounds of shuffles instead of one of none."""
    made = plan(Case("narrow", batch, k, n, groups).spec(tmp_path, "fp16", None), "sm_80", "h100", forced=Choice("gemm", (("tile", "128x64" if n < 100 else "128x128"), ("end", "one_kernel"), ("slices", 1))))
    e = made.kernels[0].epilogue
    assert (e.team, e.items_per_team) == (team, items) and e.spans * e.span <= n and e.vectors_per_lane * e.team * e.vector >= e.span


def test_k_is_not_sliced_where_tiles_are_enough(tmp_path):
    for precision, batch, k, n in (("fp32", 1, 8192, 8192), ("fp32", 128, 1024, 512), ("tf32", 1024, 8192, 8192), ("fp16", 1024, 8192, 8192)):
        made = plan(Case("whole", batch, k, n, 2).spec(tmp_path, precision, None), "sm_80", "h100")
        assert all(getattr(kernel, "slices", 1) == 1 for kernel in made.kernels)


@pytest.mark.parametrize("chosen", ARITHMETICS, ids=lambda chosen: chosen[1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_text_is_deterministic_and_every_constant_is_used(case, chosen, tmp_path):
    made = plan(case.spec(tmp_path, *chosen), "sm_80")
    for kernel in made.kernels:
        if not kernel.template.startswith("gemm/"):
            continue
        text = render_kernel(made, kernel)
        assert text == render_kernel(plan(case.spec(tmp_path, *chosen), "sm_80"), kernel)
        body = re.sub(r"//.*", "", text)
        for constant in kernel.constants:
            assert len(re.findall(rf"\b{constant.name}\b", body)) != 1, f"{constant.name} is defined but not used"
        assert "double" not in body and not re.search(r"\bpass\b", body)


def test_arguments_follow_the_chain(tmp_path):
    case = Case("ordered_chain", 64, 256, 256, 8, before=({"add": {"name": "bias", "shape": [256]}},), after=({"mul": {"name": "gain", "shape": [256]}},))
    _, gemm = planned(case, tmp_path, "bf16", "bf16")
    assert gemm.finished
    assert gemm.steps[0].kernel.arguments == ("x", "gemm.weight", "gemm.bias", "bias", "norm.weight", "norm.bias", "gain", "y")


def test_a_group_wider_than_any_tile_is_left_to_the_norm_kernel(tmp_path):
    case = Case("wide", 256, 512, 2048, 2, before=("relu",), after=("tanh",))
    _, gemm = planned(case, tmp_path, "fp32", "ffma")
    kernel = gemm.steps[-1].kernel
    assert not gemm.finished and gemm.statistics is None and not kernel.after and kernel.before and "norm.weight" not in kernel.arguments


@pytest.mark.parametrize("channels", [HELD_BY_NORM, 2 * HELD_BY_NORM, 20000])
def test_statistics_are_left_where_the_norm_kernel_cannot_hold_a_group(channels, tmp_path):
    _, gemm = planned(Case("stats", 64, 256, channels, 1), tmp_path, "fp16", "fp16")
    if channels == 2 * HELD_BY_NORM:
        assert gemm.statistics.tile_n * gemm.statistics.tiles == channels
        assert gemm.buffers[-1].name == gemm.statistics.buffer and gemm.buffers[-1].shape == (64, gemm.statistics.tiles, 4)
    else:
        assert gemm.statistics is None


def test_scales_come_before_the_product_that_needs_them(tmp_path):
    _, gemm = planned(Case("scaled", 64, 4096, 512, 8), tmp_path, "fp32", "fp16x3")
    scale, product = (step.kernel for step in gemm.steps)
    assert scale.arguments == ("x", "gemm.weight", "row_scales") and "row_scales" in product.arguments
    assert [buffer.shape for buffer in gemm.buffers] == [(64 + 512,)]


def test_each_reason_is_told_once(tmp_path):
    made = plan(Case("told", 1024, 1024, 512, 8).spec(tmp_path, "fp32", None), "sm_80")
    lines = [line.strip() for line in explain(made).splitlines()]
    assert all(lines.count(reason) == 1 for reason in made.why)


@pytest.mark.parametrize("device", SM_80_DEVICES, ids=lambda device: device.name)
def test_the_planner_chooses_the_fastest_arithmetic_that_keeps_the_promise(device, tmp_path):
    case = Case("problem_30", 1024, 8192, 8192, 16)
    free = case.spec(tmp_path, "fp32", None)
    chosen = arithmetic_of(free, device)
    assert chosen.name != "bf16x3", "16 bits of operand are not fp32-grade"
    for name in ("fp16x3", "tf32x3", "ffma"):
        forced = case.spec(tmp_path, "fp32", name)
        assert arithmetic_of(forced, device).name == name
        assert best_offer(free, device).ms <= best_offer(forced, device).ms
    assert arithmetic_of(case.spec(tmp_path, "tf32", None), device).name == "tf32"
    # Short sums do not average the dropped product away.
    assert arithmetic_of(Case("short_sums", 1024, 64, 1024, 8).spec(tmp_path, "fp32", None), device).name == "ffma"


COMPILED = [("odd_pitch", "fp16"), ("group_250", "ffma"), ("group_17", "fp16x3"), ("group_48", "tf32x3"), ("small_94", "bf16x3"), ("wider_than_norm_holds", "bf16")]


@pytest.mark.nvcc
@pytest.mark.parametrize(("name", "arithmetic"), COMPILED)
def test_awkward_shapes_compile_within_their_plan(name, arithmetic, tmp_path):
    case = next(case for case in CASES if case.name == name)
    precision = next(p for p, a in ARITHMETICS if a == arithmetic)
    made = plan(case.spec(tmp_path, precision, arithmetic), "sm_80")
    found = [fault for kernel in made.kernels if kernel.template.startswith("gemm/") for fault in faults(made, kernel, tmp_path)]
    assert not found, "\n".join(found)


@pytest.mark.nvcc
def test_any_name_of_a_parameter_compiles(tmp_path):
    names = ("lane", "column", "channel", "allowed", "ready", "kThreads", "mish", "gamma", "gamma_", "beta", "team_sum", "values")
    before, after = ([{"add": {"name": name, "shape": [1024]}} for name in part] for part in (names[:6], names[6:]))
    case = Case("any_names", 128, 512, 1024, 32, before=(*before, "mish"), after=tuple(after), linear={"name": "load"}, norm={"name": "sums"})
    made = plan(case.spec(tmp_path, "fp32", "ffma"), "sm_80")
    (kernel,) = made.kernels
    assert len(set(kernel.names)) == len(kernel.names) == len(kernel.arguments)
    assert not (found := faults(made, kernel, tmp_path)), "\n".join(found)


@pytest.mark.nvcc
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_rows_of_an_odd_pitch_are_copied_where_k_is_long(precision, tmp_path):
    """Value by value a stage waits for memory each time; a short product has few stages."""
    long, short = (plan(Case("odd", 256, k, 512, 4).spec(tmp_path, precision, None), "sm_80", "h100") for k in (4097, 71))
    align, gemm = long.kernels[:2]
    assert align.name == "align_rows" and gemm.arguments[:2] == align.arguments[2:] == ("x_rows", "weight_rows") and gemm.copy_bytes == 16
    assert [buffer.shape for buffer in long.buffers[:2]] == [(256, 4104), (512, 4104)] and "copied" in explain(long)
    assert short.kernels[0].name == "gemm" and short.kernels[0].copy_bytes == 2
    for kernel in long.kernels[:2]:
        assert not (found := faults(long, kernel, tmp_path)), found


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_halves_are_rounded_in_front_of_the_operators_before_the_norm(tmp_path, precision):
    """Behind a sigmoid, rounding to 16 bits leaves little of the differences that the norm divides by: bf16 of hardswish(sigmoid(hardswish(v))) was 2.2 off."""
    case = Case("saturated", 4066, 1024, 5438, 1, before=("hardswish", "sigmoid", "hardswish"), after=("silu",))
    planned = plan(case.spec(tmp_path, precision, arithmetic := {"fp32": "tf32x3"}.get(precision, precision)), "sm_80", "a100", forced=Choice("gemm", (("math", arithmetic), ("tile", "64x64"), ("end", "norm_kernel"), ("slices", 1))))
    gemm, norm = planned.kernels[-2:]
    assert bool(gemm.before) == (precision == "fp32") and (norm.prepare is not None) == (precision != "fp32")
    assert gemm.bias is not None
