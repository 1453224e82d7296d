"""The one-pass convolution for Hopper without a GPU: its K dimension, its cut, its refusals, and what is emitted compiles within its plan."""

from dataclasses import asdict

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from codegen.plan.conv_sm90a.geometry import Layout, channel_tile
from codegen.plan.conv_sm90a.route import CONV_SM90A
from codegen.plan.conv_sm90a.steps import CONSTANTS, steps, uses_none
from codegen.plan.model import Refusal
from codegen.render import render_kernel
from codegen.targets import DEVICES, TARGETS
from tests.codegen.conv_cases import FAMILY, chain
from tests.codegen.forced import planned_by
from tests.compile_matrix import faults
from tests.fused import load_fused

MAIN = "specs/conv2d_groupnorm_scale_maxpool_clamp.yaml"
SMALL = "specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml"


@pytest.fixture
def read(tmp_path):
    def load(data, precision="fp32"):
        path = tmp_path / "case.yaml"
        path.write_text(yaml.safe_dump(data))
        return load_fused(path, precision)

    return load


def planned(spec, layout=None, debug=False):
    return planned_by(CONV_SM90A, spec, DEVICES["h100"], debug, **(asdict(layout) if layout else {}))


@given(
    st.tuples(st.integers(1, 5), st.integers(1, 5)), st.integers(1, 4), st.integers(1, 32).map(lambda n: 8 * n), st.integers(6, 24), st.sampled_from([1, 2]),
    st.booleans(),
)  # fmt: skip
def test_every_product_appears_once_and_second_halves_lie_behind(kernel, octets, pitch, rows, parts, shifted):
    plane = rows * pitch
    listed = steps(kernel, octets, pitch, plane, parts, shifted)
    taps = octets * kernel[0] * kernel[1]
    offset = [o * plane + r * pitch + c for o in range(octets) for r in range(kernel[0]) for c in range(kernel[1])]
    expected = {(f"high[{i}]", offset[i]) for i in range(taps)}
    if parts == 2:
        expected |= {(f"low[{i}]", offset[i]) for i in range(taps)} | {(f"high[{i}]", octets * plane + offset[i]) for i in range(taps)}
    if parts == 2 and (taps + shifted) % 2:  # a free half takes the smallest products of one tap
        expected.add((f"low[{taps - 1}]", octets * plane + offset[-1]))
    halves = [half for step in listed for half in (step.first, step.second)]
    products = [(half.weights, half.offset) for half in halves if half.offset != CONSTANTS]
    assert len(products) == len(set(products)) and set(products) == expected
    assert [half.weights for half in halves if half.offset == CONSTANTS].count("shift") == int(shifted)
    assert all(step.distance is None or step.distance > 0 for step in listed)
    assert uses_none(listed) == (len(halves) > len(expected) + shifted)
    assert [step.corrects for step in listed] == sorted((step.corrects for step in listed), reverse=True)


def test_benchmark_shape_keeps_every_multiplier_busy():
    for precision in ("fp32", "tf32", "fp16", "bf16"):
        plan = planned(load_fused(MAIN, precision))
        kernel = plan.kernels[0]
        assert len(plan.steps) == 1 and not plan.buffers
        assert kernel.geometry.layout.cluster == 2 and kernel.blocks == 128 and kernel.geometry.strips_computed == 32
        assert kernel.smem_bytes <= TARGETS["sm_90a"].smem_bytes
        products = 3 if precision == "fp32" else 1
        assert len(kernel.steps) == (9 * products + 1) // 2


@given(
    st.integers(1, 12), st.sampled_from([16, 32, 48, 64, 96, 128]), st.integers(8, 260), st.integers(8, 260), st.integers(1, 5), st.integers(0, 2),
    st.integers(1, 8), st.integers(1, 300), st.sampled_from(["fp32", "tf32", "fp16", "bf16"]),
)  # fmt: skip
def test_cut_covers_the_sample_and_the_ring_never_starves(tmp_path_factory, cin, cout, height, width, kernel, padding, pool, batch, precision):
    if min(height, width) + 2 * padding - kernel + 1 < max(pool, 1):
        return
    data = chain(cin, cout, height, kernel, cout // 16 * 2, batch, pool=pool, padding=padding)
    data["input"]["width"] = width
    path = tmp_path_factory.mktemp("spec") / "case.yaml"
    path.write_text(yaml.safe_dump(data))
    spec = load_fused(path, precision)
    try:
        g = planned(spec).kernels[0].geometry
    except Refusal:
        return
    rows, columns = spec.norm.input_shape[2:]
    assert g.strips * pool >= rows > (g.strips - 1) * pool
    assert g.units * g.layout.cluster >= g.strips > g.units * (g.layout.cluster - 1)
    assert g.column_tiles * g.tile_columns >= columns and g.tile_columns % 8 == 0 and g.tile <= 256
    assert g.tile_rows == 1 or (g.tile_columns == g.pitch and rows % g.tile_rows == 0 and pool % g.tile_rows == 0)
    assert (g.column_tiles - 1) * g.tile_columns < columns
    # What the warpgroups read at once stays, and a chunk has room beside one strip: no waiting in a circle.
    assert g.ring >= g.layout.warpgroups * pool + kernel - 1 and g.ring >= pool + kernel - 1 + g.chunk
    assert g.repeats == g.tile_rows + kernel - 2
    assert g.items * (g.clusters // g.channel_tiles) >= spec.batch > (g.items - 1) * (g.clusters // g.channel_tiles)
    assert g.channels * g.channel_tiles == spec.channels and g.channels % spec.group_channels == 0
    threads = g.layout.warpgroups * g.multiply_registers + g.convert_registers
    assert threads * 128 <= 65536 // g.threads // 8 * 8 * g.threads
    assert g.smem_bytes <= TARGETS["sm_90a"].smem_bytes
    assert (g.operand_bytes + g.constants_bytes) // 16 < 1 << 14  # a descriptor's 14 bits


def strips_of(g, rank, height, window, halo):
    """(first row, end of the rows it reads, rows free once it is done) of every strip that a CTA's warpgroups report, in the stream of its rows."""
    stream, listed = 0, []
    for item in range(min(g.items, 2 * g.layout.cluster + 2)):
        first = (rank + item) % g.layout.cluster * g.units
        rows, strips = min(height - first * window, g.units * window), min(g.strips - first, g.units)
        for strip in range(strips):
            at = stream + strip * window
            end = min(at + window, stream + rows) + halo
            listed.append((at, end, at + window if strip + 1 < strips else stream + rows + halo))
        stream += rows + halo
    return listed


@given(
    st.integers(1, 12), st.integers(4, 260), st.integers(8, 200), st.integers(1, 5), st.integers(0, 2), st.sampled_from([0, 1, 2, 3, 4, 8]),
    st.integers(1, 300), st.sampled_from(["fp32", "fp16"]), st.sampled_from([None, 1, 2, 4, 8]),
)  # fmt: skip
def test_no_strip_is_reported_twice_before_the_converter_has_seen_it(tmp_path_factory, cin, height, width, kernel, padding, pool, batch, precision, cluster):
    """A barrier that two strips use must be waited for between them: reported twice, it would never show the parity that is waited for."""
    if min(height, width) + 2 * padding - kernel + 1 < max(pool, 1):
        return
    path = tmp_path_factory.mktemp("spec") / "case.yaml"
    path.write_text(yaml.safe_dump(chain(cin, 16, (height, width), kernel, 4, batch, pool=pool, padding=padding)))
    spec = load_fused(path, precision)
    layouts = [None] if cluster is None else [Layout(cluster, warpgroups, bulk) for warpgroups in (2, 3) for bulk in (False, True)]
    for layout in layouts:
        try:
            g = planned(spec, layout=layout).kernels[0].geometry
        except (Refusal, StopIteration):
            continue
        for rank in range(g.layout.cluster):
            listed = strips_of(g, rank, spec.norm.input_shape[2], pool or 1, kernel - 1)
            for index in range(len(listed) - g.strip_barriers):
                freed = listed[index - 1][2] if index else 0
                assert listed[index + g.strip_barriers][1] > freed + g.ring, "a strip's rows are there before an older user of its barrier was waited for"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stride": 2}, "stride"),
        ({"dilation": 2}, "dilation"),
        ({"conv_groups": 2}, "groups"),
        ({"pool": {"kernel_size": 3, "stride": 2}}, "overlap"),
        ({"pool": {"kernel_size": 4, "padding": 1}}, "padding"),
        ({"cout": 256, "groups": 2}, "wider than the 64"),
        ({"cin": 64}, "registers"),
        ({"size": 200, "pool": 0}, "shared memory"),
    ],
)
def test_refusals_name_the_reason(read, change, says):
    with pytest.raises(Refusal, match=says):
        data = chain(**{key: value for key, value in change.items() if key != "conv_groups"})
        if "conv_groups" in change:
            data["chain"][0]["conv2d"]["groups"] = change["conv_groups"]
        planned(read(data))


def test_operator_without_direction_is_refused(read):
    data = chain()
    data["chain"].insert(2, "mish")
    with pytest.raises(Refusal, match="neither rises nor falls"):
        planned(read(data))


def test_forced_arithmetic(read):
    data = chain() | {"math": "ffma"}
    with pytest.raises(Refusal, match="ffma"):
        planned(read(data))
    assert planned(read(chain() | {"math": "fp16x3", "precision": "tf32"}, "tf32")).kernels[0].split


def test_channel_tiles_hold_whole_groups(read):
    assert channel_tile(read(chain(cout=128, groups=32))) == 64
    assert channel_tile(read(chain(cout=96, groups=2))) == 48
    assert channel_tile(read(chain(cout=130, groups=1))) is None


def test_same_plan_same_bytes_and_debug_only_adds_checks():
    spec = load_fused(MAIN, "fp32")
    plain, debug = planned(spec), planned(spec, debug=True)
    assert render_kernel(plain, plain.kernels[0]) == render_kernel(planned(spec), planned(spec).kernels[0])
    assert "__trap" in render_kernel(debug, debug.kernels[0]) and "__trap" not in render_kernel(plain, plain.kernels[0])


def test_exact_route_exists_where_operands_are_scaled_or_squares_may_exceed_fp32():
    for precision, has in (("fp32", True), ("tf32", True), ("fp16", False), ("bf16", True)):
        plan = planned(load_fused(MAIN, precision))
        assert ("exact_sample" in render_kernel(plan, plan.kernels[0])) == has


def test_fp32_sums_that_are_too_short_are_left_to_the_library(read):
    with pytest.raises(Refusal, match="1 tap of 8 channels are too few for fp32"):
        planned(read(FAMILY["pointwise"]))
    assert planned(read(FAMILY["pointwise"], "tf32"))


@pytest.mark.nvcc
@pytest.mark.parametrize(("name", "precision"), [(n, p) for n in FAMILY for p in ("fp32", "fp16") if (n, p) != ("pointwise", "fp32")])
def test_family_compiles_within_its_plan(read, tmp_path, name, precision):
    plan = planned(read(FAMILY[name], precision))
    assert not (found := faults(plan, plan.kernels[0], tmp_path)), "\n".join(found)


@pytest.mark.nvcc
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("path", [MAIN, SMALL])
def test_shipped_specs_compile_within_their_plan(tmp_path, path, precision):
    plan = planned(load_fused(path, precision))
    assert not (found := faults(plan, plan.kernels[0], tmp_path)), "\n".join(found)


@pytest.mark.parametrize("bulk", [True, False])
def test_layout_can_be_forced_for_measurements(bulk):
    plan = planned(load_fused(MAIN, "tf32"), layout=Layout(2, 2, bulk))
    assert plan.kernels[0].geometry.layout == Layout(2, 2, bulk)
    assert ("cp.async.bulk" in render_kernel(plan, plan.kernels[0])) == bulk


def test_rows_that_the_copy_engine_cannot_bring_go_through_registers(read):
    assert planned(read(FAMILY["odd_width"])).kernels[0].geometry.raw_stages == 0
    assert planned(read(FAMILY["pool8"])).kernels[0].geometry.raw_stages == 0  # 66 values: 264 bytes
    assert planned(read(FAMILY["padded"])).kernels[0].geometry.raw_stages > 0


def test_addresses_of_operands_do_not_name_the_cta_of_the_cluster():
    plan = planned(load_fused(MAIN, "fp32"))
    text = render_kernel(plan, plan.kernels[0])
    assert "shared_address(p) & 0x3FFFF) >> 4" in text
    assert text.count(">> 4") == 2  # there, and in the distance of core matrices
