"""Norm plans: every value is covered once, accesses are aligned, limits hold; the text is deterministic. No GPU needed."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.plan import plan
from codegen.plan.model import Refusal
from codegen.plan.norm.flat import MAX_VALUES, access_width, residency
from codegen.ir.window import COLUMNS, ROWS, window_of
from codegen.plan.norm.pool import band_rows
from codegen.plan.norm.route import plan_norm
from codegen.plan.shared.moments import TileStatistics
from codegen.plan.shared.windows import direction
from codegen.render import render_kernel
from codegen.targets import DEVICES, TARGETS
from tests.codegen import gemm_cases
from tests.codegen.norm_harness import ALL_CASES, POOL_CASES, Case


def constants(kernel):
    return {constant.name: int(constant.text) for constant in kernel.constants if re.fullmatch(r"-?\d+", constant.text)}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_text_is_deterministic_and_names_every_constant(case, precision, tmp_path):
    plan = case.plan(tmp_path, precision)
    for kernel in plan.kernels:
        text = render_kernel(plan, kernel)
        assert text == render_kernel(case.plan(tmp_path, precision), kernel)
        used = set(re.findall(r"\bk[A-Z]\w*", re.sub(r"//.*", "", text)))
        named = {constant.name for constant in kernel.constants}
        assert used - named <= {"kDevices", "kSharedBytes", "kShrink", "kGrow"}, "a constant is used but not defined"
        body = re.sub(r"//.*", "", text)
        assert not [name for name in named if len(re.findall(rf"\b{name}\b", body)) == 1], "a constant is defined but not used"
        assert all(len(re.findall(rf"\b{name}\b", body)) != 1 for name in ("to_float", "first_channel")), "defined but not used"
        assert "double" not in body and " pass" not in body
        assert kernel.threads <= 1024 and kernel.threads % 32 == 0
        assert kernel.threads * kernel.min_blocks * kernel.max_registers <= 65536
        assert kernel.smem_bytes <= plan.target.smem_bytes


@pytest.mark.parametrize("case", [case for case in ALL_CASES if case.in_place], ids=lambda case: case.name)
def test_in_place_kernels_promise_nothing_about_aliasing(case, tmp_path):
    plan = case.plan(tmp_path)
    for kernel in plan.kernels:
        assert kernel.arguments[0] == "y" and kernel.arguments.count("y") == 1
        text = render_kernel(plan, kernel)
        assert "float* values" in text and "__restrict__ values" not in text and "__restrict__ output" not in text


@given(channels=st.integers(1, 300), groups=st.integers(1, 8), batch=st.integers(1, 40), precision=st.sampled_from(["fp32", "fp16", "bf16"]))
def test_every_group_is_covered_once(tmp_path_factory, channels, groups, batch, precision):
    if channels == 1:
        return
    case = Case("covered", batch, channels * groups, groups)
    plan = case.plan(tmp_path_factory.mktemp("specs"), precision)
    (kernel,) = plan.kernels
    known = constants(kernel)
    assert channels % kernel.width == 0, "an access would cross the end of a group"
    assert kernel.width * plan.spec.precision.itemsize <= 16
    lanes = known.get("kLanes", kernel.threads)
    assert lanes * kernel.vectors * kernel.width >= channels > (lanes * kernel.vectors - lanes) * kernel.width
    assert kernel.vectors * kernel.width <= MAX_VALUES
    assert kernel.blocks * (kernel.threads // lanes) >= batch * groups > (kernel.blocks - 1) * (kernel.threads // lanes)
    assert kernel.ragged == (lanes * kernel.vectors * kernel.width != channels)


def test_long_groups_are_streamed_or_split(tmp_path):
    many = Case("many", 200, 65536, 1).plan(tmp_path)
    assert [kernel.template for kernel in many.kernels] == ["norm/group_norm_stream.cu.j2"]
    few = Case("few", 2, 65536, 1).plan(tmp_path)
    assert [kernel.name for kernel in few.kernels] == ["group_norm_statistics", "group_norm"]
    (buffer,) = few.buffers
    known = constants(few.kernels[0])
    assert buffer.bytes == 16 * few.kernels[0].blocks
    assert known["kPieces"] * known["kPieceVectors"] >= known["kGroupVectors"] > (known["kPieces"] - 1) * known["kPieceVectors"]
    assert few.kernels[0].arguments[-1] == few.kernels[1].arguments[-1] == buffer.name


@pytest.mark.parametrize("width, lanes", [(32, 8), (512, 32)])
def test_narrow_groups_share_a_warp(width, lanes, tmp_path):
    spec = Case("narrow", 64, width * 16, 16).spec(tmp_path)
    assert residency(spec, access_width(spec)).lanes == lanes


@pytest.mark.parametrize(
    "after, expected",
    [
        (("max_pool2d: {kernel_size: 2}",), "copysignf(1.0f, c_gamma)"),
        (("mul: {name: scale, shape: [12, 1, 1]}", "max_pool2d: {kernel_size: 2}"), "copysignf(1.0f, c_gamma) * copysignf(1.0f, c_scale)"),
        (("mul: {value: -2.0}", "sigmoid", "max_pool2d: {kernel_size: 2}"), "-1.0f * copysignf(1.0f, c_gamma)"),
        (("mul: {value: -2.0}", "mul: {value: -1.0}", "relu", "max_pool2d: {kernel_size: 2}"), "copysignf(1.0f, c_gamma)"),
        (("gelu", "max_pool2d: {kernel_size: 2}"), None),
        (("leaky_relu: {negative_slope: -0.5}", "max_pool2d: {kernel_size: 2}"), None),
    ],
)
def test_the_direction_up_to_the_pool_is_known(after, expected, tmp_path):
    spec = Case("directed", 2, 12, 4, (12, 12), after=after).spec(tmp_path)
    found = direction(spec, spec.after_norm[:-1])
    assert (found.expression if found else None) == expected


def test_one_read_where_the_pool_commutes_and_two_where_not(tmp_path):
    templates = {case.name: case.plan(tmp_path).kernels[0].template for case in POOL_CASES}
    two = {name for name, template in templates.items() if "stream" in template}
    assert two == {"pool_mish", "pool_large", "pool_no_affine_twice"}


@pytest.mark.parametrize("name", ["pool_shared_rises", "pool_shared"])
def test_long_pooled_groups_that_leave_sms_idle_are_shared_by_blocks(name, tmp_path):
    """One block a group took 3.2 ms for two groups of 18 MB, where PyTorch's kernels take 0.2."""
    case = next(case for case in POOL_CASES if case.name == name)
    made = case.plan(tmp_path)
    statistics, pool = made.kernels
    assert statistics.name == "group_norm_statistics" and statistics.arguments[-1] == pool.arguments[-1] == made.buffers[-1].name
    assert made.buffers[-1].bytes == 16 * statistics.blocks
    known = constants(pool)
    size = made.spec.group_channels * known["kPooledPlane"]
    assert known["kSlices"] * known["kSliceSize"] >= size > (known["kSlices"] - 1) * known["kSliceSize"] and known["kSliceSize"] % pool.threads == 0
    assert pool.blocks == known["kSlices"] * made.spec.batch * made.spec.num_groups and pool.blocks > DEVICES["a100"].sms
    assert len(replace(case, batch=400).plan(tmp_path).kernels) == 1


@pytest.mark.parametrize("case", POOL_CASES, ids=lambda case: case.name)
def test_guards_are_there_exactly_where_windows_leave_the_plane(case, tmp_path):
    spec = case.spec(tmp_path)
    window = window_of(spec.pools[0])
    for axis in (ROWS, COLUMNS):
        reached = [o * window.stride[axis] - window.padding[axis] + k * window.dilation[axis] for o in range(window.output[axis]) for k in range(window.size[axis])]
        assert window.clipped(axis) == any(not 0 <= at < window.input[axis] for at in reached)
    assert 1 <= band_rows(window, 4) <= window.output[ROWS]


def test_chains_and_statistics_that_do_not_fit_are_refused(tmp_path):
    pools = Case("pools", 2, 12, 4, (24, 24), after=("max_pool2d: {kernel_size: 2}", "max_pool2d: {kernel_size: 2}")).spec(tmp_path)
    options = dict(source="t0", apply_before=True, producer_bias=None, statistics=None)
    with pytest.raises(ValueError, match="2 max_pool2d"):
        plan_norm(pools, TARGETS["sm_80"], DEVICES["a100"], **options)
    one = Case("one", 2, 12, 4, (24, 24), after=("max_pool2d: {kernel_size: 2}",)).spec(tmp_path)
    with pytest.raises(Refusal, match="buffer of its own"):
        plan_norm(one, TARGETS["sm_80"], DEVICES["a100"], **{**options, "source": "y"})
    linear = Case("linear", 2, 300, 3).spec(tmp_path)
    with pytest.raises(ValueError, match="do not divide"):
        plan_norm(linear, TARGETS["sm_80"], DEVICES["a100"], **{**options, "statistics": TileStatistics(64, 5, "s")})


def test_few_groups_of_costly_values_are_shared_by_blocks(tmp_path):
    """Eight rows of 16868 values with five operators of exponentials took 26 us in the registers of eight blocks."""

    def kinds(name, batch, before, after):
        spec = gemm_cases.Case(name, batch, 64, 16872, 1, before=before, after=after).spec(tmp_path, "fp16", None)
        return [kernel.name for kernel in plan(spec, "sm_80", "h200").kernels if kernel.name.startswith("group_norm")]

    costly = (("elu", "celu"), ("softplus", "elu", "tanh"))
    assert kinds("costly", 8, *costly) == ["group_norm_statistics", "group_norm"]
    assert kinds("many", 800, *costly) == kinds("cheap", 8, ("relu",), ()) == ["group_norm"]
