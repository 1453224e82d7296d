"""Convolutions without a norm as products on Hopper, without a GPU: every product counted once, what lies where, plans, refusals, estimates."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from codegen.ir.fused_form import FusedSpec
from codegen.ops.windows import window_count
from codegen.plan import Launch, plan
from codegen.plan.conv_product_sm90a.forms import FORMS, form_of
from codegen.plan.conv_product_sm90a.geometry import geometry_of, rows_of
from codegen.plan.conv_product_sm90a.kernel import conv_kernel, ordered_taps
from codegen.plan.conv_product_sm90a.layout import layout_of
from codegen.plan.conv_product_sm90a.route import CONV_PRODUCT_SM90A, offers
from codegen.plan.model import Refusal
from codegen.plan.product_norm.route import CONV_PRODUCT_NORM
from codegen.plan.shared.axes import axis_of, transposed_axis_of
from codegen.render import render_kernel
from codegen.spec import load_spec
from codegen.targets import DEVICES, TARGETS
from tests.codegen.conv_product_cases import CASES, NORMED, product, scale
from tests.codegen.forced import planned_by, request_for
from tests.codegen.schedules import listed

LIMIT = TARGETS["sm_90a"].smem_bytes


def read(folder, data, precision="fp32", **asked):
    path = folder / "case.yaml"
    path.write_text(yaml.safe_dump(data))
    return load_spec(path, precision, **asked)


def kinds(found):
    return [step.kernel.name.split("_", 1)[1] if isinstance(step, Launch) else f"torch {step.operation}" for step in found.steps]


def wanted(values, size, results, transposed):
    """(result, value of x, tap) of an axis by the definition."""
    kernel, stride, padding, dilation = values
    if transposed:
        pairs = ((i * stride + t * dilation - padding, i, t) for i in range(size) for t in range(kernel))
        return Counter(pair for pair in pairs if 0 <= pair[0] < results)
    pairs = ((o, o * stride + t * dilation - padding, t) for o in range(results) for t in range(kernel))
    return Counter(pair for pair in pairs if 0 <= pair[1] < size)


@given(st.integers(5, 19), st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)), st.booleans())
def test_every_product_of_an_axis_is_counted_once(size, values, transposed):
    kernel, stride, padding, dilation = values
    results = (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 if transposed else window_count(size, *values)
    if results < 1:
        return
    axis = (transposed_axis_of if transposed else axis_of)(size, results, *values)
    found = Counter(
        (axis.step * j + phase, axis.stride * j + axis.lower + offset, tap)
        for phase, taps in enumerate(axis.phases) for tap, offset in taps for j in range(axis.count)
        if axis.step * j + phase < results and 0 <= axis.stride * j + axis.lower + offset < size
    )  # fmt: skip
    assert found == wanted(values, size, results, transposed)
    assert all(offset >= 0 for taps in axis.phases for _, offset in taps)
    assert len(range(axis.lower, size + axis.upper, axis.stride)) == axis.count


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("row", ["", "folded", "shared"])
@pytest.mark.parametrize("name", CASES)
def test_stages_fit_and_swizzle_patterns_begin_where_they_must(tmp_path, name, row, precision):
    spec, form = FusedSpec.of(read(tmp_path, CASES[name], precision)), FORMS[precision]
    if row not in rows_of(spec, form.in_turn):
        return
    geometry = geometry_of(spec, row)
    try:
        layout = layout_of(form, spec.input_shape[1] * geometry.folded_taps, spec.channels, geometry, LIMIT)
    except Refusal as refusal:
        assert row == "shared" and "no room for 3 stages" in str(refusal)
        return
    stages = layout.stages(LIMIT)
    assert stages >= 3 and layout.shared_bytes(stages) <= LIMIT < layout.shared_bytes(stages + 1)
    assert all(part % 1024 == 0 for part in (layout.weight_part, layout.input_part, layout.tile_channels * layout.row_bytes, layout.pixels * layout.row_bytes))
    assert layout.planes * layout.row_bytes == 2 * layout.parts * layout.block and layout.group_steps >= 1
    assert layout.padded_channels >= spec.input_shape[1] * geometry.folded_taps
    if not form.in_turn:
        assert layout.input_tap * (layout.taps - 1) + layout.tile_pixels * layout.row_bytes <= layout.fetched_part <= layout.input_part
    for phase in geometry.phases:
        assert all(layout.stages_of(len(taps)) % layout.unrolled == 0 for taps in phase.taps)
    places = sorted(tap.place for tap in ordered_taps(geometry, layout) if tap)
    assert places == list(range(0, math.prod(geometry.kernel), geometry.folded_taps))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_runs_are_multiplied_with_every_tap_once(tmp_path, name, precision):
    spec, form = FusedSpec.of(read(tmp_path, CASES[name], precision)), FORMS[precision]
    if "runs" not in rows_of(spec, form.in_turn):
        return
    geometry = geometry_of(spec, "runs", form.in_turn)
    layout = layout_of(form, spec.input_shape[1], spec.channels, geometry, LIMIT)
    kernel = conv_kernel(spec, TARGETS["sm_90a"], geometry, layout, 132, False, ())
    assert layout.stages(LIMIT) >= 3 and layout.shared_bytes(layout.stages(LIMIT)) <= LIMIT
    rows = Counter()
    for one in kernel.multiplications:
        step, place = divmod(one.weight, layout.weight_tap)
        assert step < layout.steps and place + kernel.weight_step <= layout.weight_tap // layout.parts
        for place in (one.input, *([one.input + one.lead] if one.lead is not None else [])):  # in bytes of high halves: a piece of a run, and a tap's offset in it
            piece, offset = divmod(place, layout.run_bytes)
            rows[one.column, piece, offset // 16] += 1
            assert offset % 16 == 0 and offset + layout.tile_pixels * 16 <= layout.run_bytes
    taps = zip(geometry.row_columns, (offset for _, offset in geometry.row_taps), strict=True)
    assert rows == Counter((column, piece, offset) for column, offset in taps for piece in range(layout.block // 8))
    assert geometry.gathered >= geometry.pixels + max(kernel.offsets) + geometry.halo and geometry.pixels <= math.prod(axis.count for axis in geometry.axes)


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_paired_and_stepped_through_in_one_way(tmp_path, name):
    """Stages, filters and multiplications pair the taps of a row as the geometry does, and a step leads from each to the next of its column."""
    spec = FusedSpec.of(read(tmp_path, CASES[name], "fp16"))
    for row, of_phases in itertools.product(("", "folded", "shared", "runs"), (False, True)):
        if row not in rows_of(spec, of_phases):
            continue
        geometry = geometry_of(spec, row, of_phases)
        pairs, taps = geometry.row_pairs, list(zip(geometry.row_columns, geometry.row_taps, strict=True))
        assert [(pair.column, tap) for pair in pairs for tap in (pair.first, pair.second) if tap] == taps
        lone = [pair for pair in pairs if pair.second is None]
        assert len(lone) == sum(geometry.row_columns.count(column) % 2 for column in set(geometry.row_columns)) and len(pairs) == (len(taps) + len(lone)) // 2
        if geometry.wide_phases == 1:
            assert [offset for _, (_, offset) in taps] == [place * geometry.tap_step for place in range(len(taps))]
        layout = layout_of(form_of(spec.precision), spec.input_shape[1] * geometry.folded_taps, spec.channels, geometry, LIMIT)
        if layout.paired:
            kernel, places = conv_kernel(spec, TARGETS["sm_90a"], geometry, layout, 132, False, ()), [tap for pair in pairs for tap in (pair.first, pair.second)]
            first = next(tap.place for tap in ordered_taps(geometry, layout)) - pairs[0].first[0]
            assert layout.taps == len(places) == 2 * len(kernel.multiplications)
            assert [tap and tap.place - first for tap in ordered_taps(geometry, layout)[: len(places)]] == [tap and tap[0] for tap in places]
            assert [(one.column, one.input // 16, one.lead is None) for one in kernel.multiplications] == [(pair.column, pair.first[1], pair in lone) for pair in pairs]


@pytest.mark.parametrize("precision", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_operands_are_split_or_arranged_and_then_multiplied(tmp_path, name, precision):
    spec = read(tmp_path, CASES[name], precision)
    found = planned_by(CONV_PRODUCT_SM90A, spec, DEVICES["h200"])
    before = ["split_weight", "measure", "split_x"] if form_of(spec.precision).scaled else ["arrange_weight", "arrange_x"]
    assert [step.kernel.name for step in found.steps] == [*before, "conv"]
    assert found.steps[-1].arguments[-1] == "y"
    for kernel in found.kernels:
        assert render_kernel(found, kernel)


def test_element_wise_operators_end_in_the_epilogue_and_others_follow(tmp_path):
    tail = ("relu", scale(128, 3), {"max_pool3d": {"kernel_size": 2}})
    found = plan(read(tmp_path, product(3, 64, 128, 3, 32, batch=8, tail=tail)), "sm_90a", "h200")
    assert kinds(found)[:4] == ["split_weight", "measure", "split_x", "conv"] and "windows" in kinds(found)[4]
    assert {"conv.bias", "scale"} <= set(found.steps[3].arguments) and found.steps[3].arguments[-1] == "value:2"


@pytest.mark.parametrize("precision", FORMS)
def test_the_norm_kernels_follow_a_convolution_that_ends_in_front_of_them(tmp_path, precision):
    found = planned_by(CONV_PRODUCT_NORM, read(tmp_path, NORMED, precision), DEVICES["h200"])
    conv, norm = found.steps[-2:]
    assert conv.kernel.name == "conv" and conv.arguments[-2:] == ("conv.bias", "t0") and conv.part.chain[-1].operator.name == "relu"
    assert norm.kernel.name == "group_norm" and norm.arguments[0] == "t0" and norm.arguments[-1] == "y" and "conv.bias" not in norm.arguments
    for kernel in found.kernels:
        assert render_kernel(found, kernel)


def test_weights_that_stay_are_split_once(tmp_path):
    found = plan(read(tmp_path, product(2, 64, 128, 3, 64, batch=64), prepack=True), "sm_90a", "h200")
    assert [step.kernel.name.split("_", 1)[1] for step in found.preparing] == ["split_weight"] and len(found.prepared) == 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [  # sums that are too long for a direct convolution, which would serve them otherwise
        (product(2, 64, 64, 3, 32, groups=4), "groups: 4: the convolution as a product serves one group"),
        (product(2, 5000, 64, 3, 8, transposed=True, stride=3), "results of a transposed convolution are 3 apart along the width"),
        (product(2, 512, 64, 3, 64, stride=9), "stride: 9 along the height is more than the 8"),
        (product(3, 512, 64, 3, 40, padding=17, stride=2), "padding: the windows along the depth reach further beyond x"),
        (product(3, 512, 64, 3, 80, padding=16, dilation=16, stride=(1, 1, 2)), "kernel_size: the taps along the depth lie further apart"),
        (product(2, 8192, 64, 3, 16), "a filter of 73728 values is longer"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(tmp_path, data, reason):
    spec = read(tmp_path, data)
    with pytest.raises(Refusal, match=reason):
        offers(request_for(CONV_PRODUCT_SM90A, spec, DEVICES["h200"]))
    with pytest.raises(Refusal, match=reason):
        plan(replace(spec, gemm="generated"), "sm_90a", "h200")


def test_a_filter_of_more_taps_than_constant_memory_holds_is_not_taken_in_runs(tmp_path):
    few, many = (offers(request_for(CONV_PRODUCT_SM90A, read(tmp_path, product(1, 1, 64, taps, 30000, batch=2)), DEVICES["h200"])) for taps in (400, 17000))
    assert ["runs" in {offer.choice.settings["row"] for offer in found} for found in (few, many)] == [True, False]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_values_of_16_bits_are_multiplied_as_they_come(tmp_path, precision):
    found = plan(read(tmp_path, product(2, 64, 128, 3, 64, batch=64), precision), "sm_90a", "h200")
    assert [buffer.dtype for buffer in found.buffers] == [{"fp16": "float16", "bf16": "bfloat16"}[precision]] * 2
    assert not any("scale" in constant.why for kernel in found.kernels[:2] for constant in kernel.constants)


@pytest.mark.parametrize("name", CASES)
def test_no_zero_of_a_missing_tap_meets_a_value_that_nobody_looked_at(tmp_path, name):
    """It may be infinite, and their product is not a number."""
    asked = request_for(CONV_PRODUCT_SM90A, read(tmp_path, CASES[name], "fp16"), DEVICES["h200"])
    apart, paired = ([offer.detail for offer in offers(asked) if offer.detail.layout.paired == of_pairs] for of_pairs in (False, True))
    assert all(None not in ordered_taps(detail.geometry, detail.layout) for detail in apart)
    for detail in paired:  # the taps that pairs lack meet zeros that the kernel itself has stored
        taps = ordered_taps(detail.geometry, detail.layout)
        stage = conv_kernel(asked.form, TARGETS["sm_90a"], detail.geometry, detail.layout, 132, False, ()).multiplications
        assert [tap is None for tap in taps[1::2]] == [one.lead is None for one in stage] * (len(taps) // 2 // len(stage)) and None not in taps[::2]


def test_costly_operators_stay_with_a_convolution_that_hides_them(tmp_path):
    found = plan(read(tmp_path, product(2, 64, 128, 3, 64, batch=64, tail=("relu", "gelu")), "fp16"), "sm_90a", "h200")
    assert kinds(found) == ["arrange_weight", "arrange_x", "conv"]


def test_the_cuda_cores_convolve_where_they_are_estimated_faster(tmp_path):
    """Few channels on both sides: most of what the tensor cores multiply would be zeros."""
    with pytest.raises(Refusal, match="sm_80 has the same steps"):
        plan(read(tmp_path, product(2, 2, 4, 3, (40, 40), batch=2)), "sm_90a", "h200")


def test_few_channels_take_the_taps_along_the_width_with_them(tmp_path):
    cases = ((8, 2), (8, 1), (64, 1))
    rows = [offers(request_for(CONV_PRODUCT_SM90A, read(tmp_path, product(2, channels, 64, 3, 128, batch=64, stride=stride)), DEVICES["h200"]))[0] for channels, stride in cases]
    assert [offer.choice.settings["row"] for offer in rows] == ["folded", "runs", "apart"] and rows[1].detail.layout.paired


def test_phases_with_most_taps_come_first(tmp_path):
    geometry = geometry_of(FusedSpec.of(read(tmp_path, CASES["eight_phases"])))
    counts = [sum(map(len, phase.taps)) for phase in geometry.phases]
    assert counts == [12, 6, 6, 3] and sum(counts) == 27


@pytest.mark.parametrize("batch", [24, 66])
def test_all_tiles_of_all_phases_are_taken_once_and_phases_in_turn(tmp_path, batch):
    data = product(2, 64, 128, 4, (40, 41), batch=batch, transposed=True, stride=2, padding=1)
    chosen = planned_by(CONV_PRODUCT_SM90A, read(tmp_path, data, "bf16"), DEVICES["h200"])
    kernel = next(kernel for kernel in chosen.kernels if kernel.name == "conv")
    loops = "for (int unit = 0; unit < kUnits; ++unit)"
    found = listed(tmp_path, render_kernel(chosen, kernel), "PhaseTile", "phase_tile(unit)", loops, "t.phase, t.tile")
    assert sorted(found) == [(phase, tile) for phase in range(kernel.phases) for tile in range(kernel.phase_tiles)]
    turns = [found[first : first + kernel.blocks] for first in range(0, kernel.units // (kernel.phases * kernel.blocks) * kernel.phases * kernel.blocks, kernel.blocks)]
    assert kernel.bands and turns and all(len({phase for phase, _ in turn}) == 1 for turn in turns)
