"""The Hopper GEMM's plans and sources, without a GPU: coverage of the result, memory, refusals, text."""

import itertools
import math
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from codegen.plan.gemm_sm90a.kernel import GemmSm90aKernel
from codegen.plan.gemm_sm90a.layout import TILE_K, balanced, bands_of, memory
from codegen.plan.gemm_sm90a.choice import LEAST_STEPS, choose_layout, layouts, sliced_layouts
from codegen.plan.gemm_sm90a.forms import FORMS, form_of
from codegen.plan.gemm_sm90a.split import WEIGHT_SPLIT, X_SPLIT
from codegen.plan.model import Launch, Refusal
from codegen.plan.planner import plan
from codegen.plan.route import Choice
from codegen.render import render_kernel
from codegen.targets import DEVICES, TARGETS
from tests.codegen.forced import hopper_gemm
from tests.codegen.gemm_cases import Case
from tests.codegen.schedules import listed
from tests.compile_matrix import faults
from tests.fused import load_fused

TARGET, DEVICE = TARGETS["sm_90a"], DEVICES["h100"]
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
LARGE = ("specs/default.yaml", "specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml")


def spec_of(folder, batch, k, n, groups, precision="fp32", before=(), after=("hardtanh",), **extra):
    chain = [{"linear": {"name": "gemm", "in_features": k, "out_features": n}}, *before, {"group_norm": {"name": "norm", "num_groups": groups}}, *after]
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": "layer", "batch": batch, "precision": precision, "chain": chain, **extra}, sort_keys=False))
    return load_fused(path)


def gemm_of(plan) -> GemmSm90aKernel:
    return next(k for k in plan.kernels if isinstance(k, GemmSm90aKernel))


def constants(kernel):
    return {c.name: int(c.text) for c in kernel.constants if c.c_type == "int"}


def place_of(c, unit):
    """(place along the batch, place along the channels) of a unit's cluster, in clusters."""
    if "kBand" not in c:
        return unit % c["kSampleBlocks"], unit // c["kSampleBlocks"]
    band, within = divmod(unit, c["kBandUnits"])
    width = c["kLastBand"] if band == c.get("kBands", 0) - 1 else c["kBand"]
    return band * c["kBand"] + within % width, within // width


def tiles_of(kernel):
    """(first sample, first channel) of every tile that any CTA computes, as the emitted tile_of gives them."""
    c = constants(kernel)
    share, cluster = kernel.share, c["kCluster"]
    for unit, tile, rank in itertools.product(range(c["kUnits"]), range(c["kUnitTiles"]), range(cluster)):
        samples, span = place_of(c, unit)
        row = samples * cluster + rank if share == "weight" else samples
        column = (span * cluster + rank if share == "input" else span) * c["kUnitTiles"] + tile
        yield row * c["kTileSamples"], column * c["kTileChannels"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("path", LARGE)
def test_the_problems_end_in_one_kernel_and_fill_the_device(path, precision):
    plan = hopper_gemm(load_fused(path, precision), DEVICE)
    kernel = gemm_of(plan)
    if precision == "tf32":  # one product of W in fp32 waits for L2: the norm's own kernel is faster than a tile's end
        assert plan.kernels[-1].name == "group_norm" and kernel.statistics == "none"
    else:
        assert plan.kernels[-1] is kernel and kernel.statistics == "strips"
    assert kernel.smem_bytes <= TARGET.smem_bytes
    assert 0.95 * DEVICE.sms <= kernel.blocks <= DEVICE.sms
    assert len(plan.kernels) == {"fp32": 2, "tf32": 3}.get(precision, 1)


@given(st.integers(1, 3000), st.integers(16, 200), st.sampled_from((2, 4, 8, 16, 24, 32, 64, 100, 128, 256, 384, 512, 1024, 2048)), st.integers(1, 40), st.sampled_from(PRECISIONS))
def test_every_value_is_computed_once_by_a_layout_that_fits(tmp_path_factory, batch, sixteens, width, groups, precision):
    spec = spec_of(tmp_path_factory.mktemp("spec"), batch, 16 * max(sixteens, 16), 8 * width * groups, 8 * groups, precision)
    plan = hopper_gemm(spec, DEVICE, layout=_chosen(spec))
    kernel = gemm_of(plan)
    c = constants(kernel)
    inside = [(row, column) for row, column in tiles_of(kernel) if row < batch and column < spec.channels]
    assert len(set(inside)) == len(inside) == math.ceil(batch / c["kTileSamples"]) * math.ceil(spec.channels / c["kTileChannels"])
    assert kernel.smem_bytes <= TARGET.smem_bytes
    if kernel.statistics != "none":
        held = c["kTileChannels"] * c["kUnitTiles"] * (c["kCluster"] if kernel.exchange else 1)
        assert held % width == 0, "a group is cut between CTAs that do not exchange its statistics"
    if kernel.held:
        assert all(row + c["kTileSamples"] <= batch and column + c["kTileChannels"] <= spec.channels for row, column in tiles_of(kernel)), "tiles wait outside y"
    if not kernel.sample_tail:
        assert all(row + c["kTileSamples"] <= batch for row, _ in tiles_of(kernel))
    if not kernel.channel_tail:
        assert all(column + c["kTileChannels"] <= spec.channels for _, column in tiles_of(kernel))


def _chosen(spec):
    return choose_layout(spec, TARGET, DEVICE, form_of(spec, False))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_regions_of_shared_memory_follow_each_other(precision, tmp_path):
    for width in (16, 32, 128, 256, 512, 1024):
        spec = spec_of(tmp_path, 1024, 1024, 8192, 8192 // width, precision)
        form = form_of(spec, False)
        for layout in layouts(spec, form):
            where = memory(form, layout, width, spec.precision.itemsize, TARGET.smem_bytes, 4)
            if where is None:
                continue
            edges = [form.stages * where.stage, where.scratch_at, where.groups_at, where.parameters_at, where.exchange_at, where.barriers_at, where.total]
            assert edges == sorted(edges) and where.total <= TARGET.smem_bytes
            assert where.scratch_at % 1024 == where.scratch % 1024 == where.stage % 1024 == 0, "the swizzle counts from multiples of 1024 bytes"
            assert where.barriers_at % 8 == where.parameters_at % 16 == 0


@pytest.mark.parametrize(
    ("shape", "extra", "reason"),
    [
        ((1024, 1030, 8192, 16), {"precision": "fp16"}, "multiple of 8"),
        ((1024, 32001, 65536, 128), {}, "prepack: true keeps the copy"),
        ((1024, 64 * (LEAST_STEPS - 1), 8192, 16), {}, "too few"),
        ((1024, 8192, 8192, 16), {"gemm": "library"}, "library"),
        ((1024, 8192, 8192, 16), {"math": "ffma"}, "math"),
        ((1024, 200_000, 8192, 16), {}, "splitting kernel"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_the_reason(shape, extra, reason, tmp_path):
    extra = {"precision": "bf16"} | extra if "gemm" in extra else extra
    with pytest.raises(Refusal, match=reason):
        hopper_gemm(spec_of(tmp_path, *shape, **extra), DEVICE)


@pytest.mark.nvcc
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("k", [1000, 1028, 1030, 1031])
def test_rows_that_no_plane_of_16_fits_are_converted_on_every_call(k, precision, tmp_path):
    """Halves lie at a pitch of whole 16 bytes; the map's size keeps what lies between from being read."""
    plan = hopper_gemm(spec_of(tmp_path, 1024, k, 8192, 16, precision), DEVICE)
    weight, x, gemm = plan.kernels
    assert not plan.preparing and (weight.arguments[0], x.arguments[0]) == ("gemm.weight", "x") and gemm.arguments[1] == "gemm.weight"
    pitch, shapes = -(-k // 8) * 8, {buffer.name: buffer.shape for buffer in plan.buffers}
    assert shapes[WEIGHT_SPLIT][1] == shapes[X_SPLIT][1] == pitch
    text = render_kernel(plan, gemm)
    assert f"{{kInFeatures, kBatch, {gemm.form.parts}}}" in text and ("kPitch * 2ull" in text) == (k % 8 != 0)
    assert ("float4*>(weights" in text) == (k % 4 == 0)
    for kernel in plan.kernels:
        assert not (found := faults(plan, kernel, tmp_path)), found


@pytest.mark.parametrize(("batch", "converts"), [(1024, False), (4096, False), (16384, True)])
def test_a_large_batch_pays_for_a_conversion_of_w(batch, converts, tmp_path):
    """TF32's W from registers costs its conversion and bytes on the way into the SMs with every tile, a copy in halves once a call."""
    plan = hopper_gemm(spec_of(tmp_path, batch, 8192, 8192, 16, "tf32"), DEVICE)
    assert ([kernel.name for kernel in plan.kernels] == ["split_weight", "split_x", "gemm"]) == converts
    assert any("on every call" in why for why in plan.why) == converts and not plan.preparing


@pytest.mark.parametrize(
    ("shape", "extra", "served"),
    [
        ((16, 8192, 8192, 16), {}, False), ((128, 8192, 8192, 16), {}, True), ((1024, 8192, 8192, 16), {}, True), ((1, 8192, 8192, 16), {}, False),
        ((128, 1001, 65536, 128), {"precision": "tf32"}, False), ((192, 4096, 10240, 40), {"precision": "bf16"}, False), ((5, 13312, 14592, 768), {}, False),
        ((1024, 8192, 8192, 16), {"precision": "fp16"}, True),
    ],
)  # fmt: skip
def test_this_target_is_taken_where_it_is_estimated_to_finish_first(shape, extra, served, tmp_path):
    """All of these can be planned; on an H200 those that are not served took 1.2 to 3 times as long as sm_80's kernels or torch's GEMM."""
    spec = spec_of(tmp_path, *shape, **extra)
    assert hopper_gemm(spec, DEVICE)
    if served:
        assert plan(spec, "sm_90a", "h200")
    else:
        with pytest.raises(Refusal, match="Hopper's tiles would take .* against .* with sm_80's kernels or torch's GEMM"):
            plan(spec, "sm_90a", "h200")
        assert plan(replace(spec, gemm="generated"), "sm_90a", "h200") and plan(spec, "sm_90a", "h200", forced=Choice("gemm_sm90a"))


def test_odd_rows_of_halves_are_left_in_a_temporary_with_a_pitch(tmp_path):
    """The copy engine writes rows that start at multiples of 16 bytes; the norm kernel reads them from there. Results of 32 bits leave by threads."""
    assert not [b for b in hopper_gemm(spec_of(tmp_path, 1024, 1024, 4100, 41), DEVICE).buffers if b.name == "t0"]
    halves = hopper_gemm(spec_of(tmp_path, 1024, 1024, 4100, 41, "fp16"), DEVICE)
    (buffer,) = halves.buffers
    gemm, norm = halves.steps
    assert buffer.shape == (1024, 4104) and gemm.result == buffer.name and gemm.kernel.statistics == "none"
    assert norm.arguments[0] == buffer.name and norm.arguments[-1] == "y" and norm.kernel.pitch == 4104
    assert 100 % norm.kernel.width == 0
    with pytest.raises(Refusal, match="multiple of 8"):  # a group that no block holds
        hopper_gemm(spec_of(tmp_path, 1024, 1024, 65537, 1, "fp16"), DEVICE)


@given(st.integers(256, 70000), st.sampled_from(PRECISIONS))
def test_slices_cover_k_once_and_none_is_empty(tmp_path_factory, k, precision):
    spec = spec_of(tmp_path_factory.mktemp("spec"), 130, k, 320, 10, precision)
    for layout in sliced_layouts(spec, FORMS[precision, False]):
        steps = layout.slice_steps(k)
        assert layout.slices > 1 and steps >= 4
        assert (layout.slices - 1) * steps * TILE_K < k <= layout.slices * steps * TILE_K


@pytest.mark.parametrize(
    ("shape", "precision", "sliced"),
    [
        ((2048, 12272, 285, 1), "fp16", True), ((326, 32768, 5120, 1280), "tf32", True), ((121, 2716, 4096, 1), "fp32", True), ((224, 2080, 3159, 27), "fp32", True),
        ((1024, 8192, 8192, 16), "fp32", False), ((1024, 8192, 8192, 16), "bf16", False), ((2048, 512, 285, 1), "fp16", False),
    ],
)  # fmt: skip
def test_few_tiles_of_a_long_k_are_shared(shape, precision, sliced, tmp_path):
    """Their sums, without the bias, are added in fp32 in front of the norm kernel, which adds it."""
    found = hopper_gemm(spec_of(tmp_path, *shape, precision), DEVICE)
    assert ("add_slices" in [kernel.name for kernel in found.kernels]) == sliced
    if not sliced:
        return
    kernel = gemm_of(found)
    whole = math.ceil(shape[0] / kernel.form.tile_samples) * math.ceil(shape[2] / kernel.form.tile_channels)
    assert kernel.result_type == "float" and not kernel.before_lines and "gemm.bias" not in kernel.arguments and "gemm.bias" in found.kernels[-1].arguments
    assert whole < kernel.blocks <= DEVICE.sms
    buffer = next(b for b in found.buffers if b.name == "sliced_sums")
    assert buffer.shape == (kernel.layout.slices, shape[0], shape[2]) and any("parts, whose sums are added" in reason for reason in found.why)


def test_groups_that_match_no_tile_go_to_the_norm_kernel(tmp_path):
    plan = hopper_gemm(spec_of(tmp_path, 1024, 1024, 9600, 100, before=("mish",)), DEVICE)
    assert not isinstance(plan.kernels[-1], GemmSm90aKernel) and gemm_of(plan).before_lines == ("value + gemm_bias_c[h]",)


def test_a_prepared_weight_is_split_by_a_step_of_its_own():
    spec = replace(load_fused(LARGE[0]), prepack=True)
    plan = hopper_gemm(spec, DEVICE)
    first = next(step for step in plan.steps if isinstance(step, Launch)).kernel
    assert first.arguments[0] == "gemm.weight" and first.arguments[1] == WEIGHT_SPLIT
    assert {b.name for b in plan.buffers} >= {WEIGHT_SPLIT, X_SPLIT}
    assert not gemm_of(plan).registers_a


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_argument_is_a_parameter_a_buffer_or_an_end_of_the_chain(precision):
    for path in LARGE:
        spec = load_fused(path, precision)
        plan = hopper_gemm(spec, DEVICE)
        known = {"x", "y"} | {key for key, _ in spec.parameters} | {b.name for b in plan.buffers}
        assert all(set(kernel.arguments) <= known for kernel in plan.kernels)


def test_debug_sources_bound_every_wait_and_name_it():
    spec = load_fused(LARGE[0])
    text, debug = (render_kernel(plan, gemm_of(plan)) for plan in (hopper_gemm(spec, DEVICE, debug=flag) for flag in (False, True)))
    assert "__trap" in debug and "waits for ever at barrier" in debug and "printf" not in text
    for source in (text, debug):
        waits = [line for line in source.splitlines() if line.lstrip().startswith(("wait(", "wait_cluster("))]
        assert waits and all('"' in line for line in waits)


@given(st.integers(1, 1000), st.integers(1, 66))
def test_balanced_takes_no_more_rounds_than_all_places_would(units, places):
    clusters = balanced(units, places)
    assert clusters <= places and math.ceil(units / clusters) == math.ceil(units / places)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 132), st.sampled_from([128, 256, 512]), st.sampled_from([64, 128, 256]))
def test_bands_cover_every_block_once_and_are_about_square(blocks, channels, clusters, rows, columns):
    bands = bands_of(blocks, clusters, rows, columns, 1 << 30, 50e6)
    numbers = {"kBand": bands.width, "kBandUnits": bands.width * channels, "kLastBand": bands.last, "kBands": bands.count}
    assert sorted(place_of(numbers, unit) for unit in range(blocks * channels)) == sorted(itertools.product(range(blocks), range(channels)))
    assert bands.count == 1 or 0.4 <= bands.width * rows / (clusters / bands.width * columns) <= 2.5 or bands.width <= 3
    assert bands_of(blocks, clusters, rows, columns, 1 << 20, 50e6).count == 1  # x stays in the cache


# Bands of one width and of two, with each operand shared and with none.
BANDED = {"even": (16384, 1024, 2048, 0), "uneven": (13000, 1024, 2000, 0), "normed": (32768, 512, 4096, 64)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", BANDED)
def test_the_emitted_schedule_computes_every_tile_once(name, precision, tmp_path):
    batch, k, n, groups = BANDED[name]
    spec = spec_of(tmp_path, batch, k, n, groups, precision) if groups else Case("product", batch, k, n, 0, ("relu",)).spec(tmp_path, precision, None)
    chosen = hopper_gemm(spec, DEVICE)
    kernel = gemm_of(chosen)
    assert kernel.bands.count > 1
    loops = "for (int unit = 0; unit < kUnits; ++unit) for (int tile = 0; tile < kUnitTiles; ++tile) for (int rank = 0; rank < kCluster; ++rank)"
    found = listed(tmp_path, render_kernel(chosen, kernel), "Tile", "tile_of(unit, tile, rank)", loops, "t.sample, t.channel")
    assert found == list(tiles_of(kernel)) and len(set(found)) == len(found)
    wanted = set(itertools.product(range(0, batch, kernel.form.tile_samples), range(0, n, kernel.form.tile_channels)))
    assert wanted <= set(found)


@pytest.mark.parametrize(("width", "before", "expected"), [(8, (), False), (32, ("mish",), True), (256, ("mish",), True), (512, (), True), (512, ("mish",), True), (1024, (), False)])
def test_results_of_16_bits_are_finished_by_rows_where_registers_allow(width, before, expected, tmp_path):
    for precision in ("fp16", "bf16"):
        kernel = gemm_of(hopper_gemm(spec_of(tmp_path, 1024, 1024, 8192, 8192 // width, precision, before=before), DEVICE))
        assert kernel.by_rows is expected
        if not expected:
            continue
        c = constants(kernel)
        assert c["kPartChannels"] * kernel.row_parts * (2 if width > kernel.row_channels else 1) * kernel.layout.unit_tiles == max(width, c["kPartChannels"])
        assert c["kVectors"] == len(kernel.vectors) == 3  # bias, gamma, beta
        assert c["kParametersAt"] + 4 * c["kVectors"] * c["kTileChannels"] * c["kUnitTiles"] <= c["kBarriersAt"]


@pytest.mark.parametrize(
    ("precision", "width", "before", "after"), [("fp16", 1024, (), ("gelu",)), ("bf16", 1024, ("mish",), ("silu",))]
)
def test_tiles_with_exponentials_do_not_wait_in_y(precision, width, before, after, tmp_path):
    """They would take more registers than there are; the norm's own kernel finishes them, or the cluster's other CTA has the rest of the group."""
    plain = gemm_of(hopper_gemm(spec_of(tmp_path, 1024, 1024, 8192, 8192 // width, precision, before=("relu",)), DEVICE))
    assert plain.held_in_y
    costly = gemm_of(hopper_gemm(spec_of(tmp_path, 1024, 1024, 8192, 8192 // width, precision, before=before, after=after), DEVICE))
    assert not costly.held_in_y


def test_promotion_is_a_whole_number_of_stages(tmp_path):
    for k in (256, 512, 1024, 4096, 8192):
        kernel = gemm_of(hopper_gemm(spec_of(tmp_path, 2048, k, 8192, 16), DEVICE))
        assert kernel.promote in (1, 2, 4) and kernel.promote * TILE_K <= k


COMPILED = [
    ("problem_fp32", (1024, 8192, 8192, 16), "fp32", {}), ("problem_fp16", (1024, 8192, 8192, 16), "fp16", {}),
    ("mish_bf16", (1024, 8192, 8192, 256), "bf16", {"before": ("mish",)}), ("exchange_tf32", (1024, 8192, 8192, 16), "tf32", {}),
    ("tails_fp32", (4000, 336, 4000, 125), "fp32", {"before": ("mish",)}), ("lanes_fp16", (4000, 328, 4008, 501), "fp16", {}),
    ("across_warpgroups_fp16", (1024, 1024, 8192, 32), "fp16", {"before": ("mish",)}), ("waits_bf16", (1024, 1024, 8192, 16), "bf16", {}),
    ("pieces_tf32", (1024, 1024, 8192, 128), "tf32", {"before": ("silu",)}), ("waits_before_fp16", (1024, 1024, 8192, 16), "fp16", {"before": ("gelu",), "after": ("silu",)}),
    ("waits_costly_bf16", (1024, 1024, 8192, 16), "bf16", {"after": ("gelu",)}), ("norm_fp32", (1024, 1024, 9600, 100), "fp32", {"before": ("mish",)}), ("few_steps_bf16", (4096, 256, 4096, 8), "bf16", {}),
    ("slices_fp32", (384, 17696, 7761, 39), "fp32", {}), ("slices_tf32", (326, 32768, 5120, 1280), "tf32", {}), ("slices_fp16", (2048, 12272, 285, 1), "fp16", {"before": ("mish",)}),
    ("bands_bf16", (13000, 1024, 4096, 16), "bf16", {}), ("bands_fp32", (13000, 1024, 4096, 16), "fp32", {}),
    ("slices_of_copies_fp32", (121, 2716, 4096, 1), "fp32", {}),
]  # fmt: skip


@pytest.mark.nvcc
@pytest.mark.parametrize(("shape", "precision", "extra"), [c[1:] for c in COMPILED], ids=[c[0] for c in COMPILED])
def test_sources_compile_without_spills(shape, precision, extra, tmp_path):
    plan = hopper_gemm(spec_of(tmp_path, *shape, precision, **extra), DEVICE)
    found = [fault for kernel in plan.kernels for fault in faults(plan, kernel, tmp_path)]
    assert not found, "\n".join(found)


@pytest.mark.nvcc
@pytest.mark.parametrize("operators", [("relu",), ("gelu", {"add": {"from": "gemm"}}, "mish", {"mul": {"name": "gain", "shape": [8192]}}, "tanh")], ids=["plain", "costly"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_products_without_a_norm_compile_without_spills(precision, operators, tmp_path):
    plan = hopper_gemm(Case("product", 1024, 512, 8192, 0, operators, linear={"bias": operators != ("relu",)}).spec(tmp_path, precision, None), DEVICE)
    found = [fault for kernel in plan.kernels for fault in faults(plan, kernel, tmp_path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("k", "promoted"), [(512, 64), (1024, 64), (2048, 128), (4096, 128), (8192, 128)])
def test_sums_that_no_norm_scales_are_promoted_more_often(k, promoted, tmp_path):
    """What the tensor cores cut off makes a sum smaller, which a norm takes away, and an average of results has whole."""
    kernel = gemm_of(hopper_gemm(Case("product", 4096, k, 2048, 0, ("relu",)).spec(tmp_path, "fp32", None), DEVICE))
    assert kernel.promote * TILE_K == promoted


def test_sums_of_few_results_are_promoted_more_often(tmp_path):
    """The vendor cuts the K of such products into parts, whose error is smaller: with 256 of K ours was 1.3 times PyTorch's."""
    few = gemm_of(hopper_gemm(spec_of(tmp_path, 384, 17696, 7761, 39), DEVICE))
    many = gemm_of(hopper_gemm(load_fused(LARGE[0], "fp32"), DEVICE))
    assert few.promote * TILE_K == 128 and many.promote * TILE_K == 256


@pytest.mark.parametrize(("batch", "promoted"), [(1, 64), (16, 64), (128, 64), (129, 128)])
@pytest.mark.parametrize("k", [1021, 1024, 8192])
def test_sums_of_one_tile_of_rows_are_promoted_at_every_stage(batch, promoted, k, tmp_path):
    """For few rows the vendor sums in many chains; promoted every 128 of K, ours was 2.4 times PyTorch's at one row and K = 1021."""
    kernel = gemm_of(hopper_gemm(spec_of(tmp_path, batch, k, 254, 127), DEVICE))
    assert kernel.promote * TILE_K == promoted
