"""Which form and layout multiply a spec on Hopper, and where its groups are complete: every way, and the family's own choice."""

from __future__ import annotations

import math
from dataclasses import replace

from codegen.ir.apply import costly
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import FP32
from codegen.plan.gemm_sm90a.cost import FORM_MARGIN, SLICE_MARGIN, estimated_ms, rounds_of
from codegen.plan.gemm_sm90a.epilogue import epilogue, vector_count
from codegen.plan.gemm_sm90a.kernel import ragged_result
from codegen.plan.gemm_sm90a.layout import TILE_K, Form, Layout, by_rows, memory
from codegen.targets import DeviceClass, Target

WIDEST_HELD = 4  # tiles of one group that a CTA computes before it normalises them
LEAST_STEPS = 4  # of K: shorter products are a matter of memory and launch times
CLUSTERS = ((2, "weight"), (2, "input"), (1, "none"))  # CTAs, and the operand that they share
SLICES_OF_K = (2, 3, 4, 5, 6, 8, 10, 12, 16)  # that CTAs of one tile may share

Way = tuple[Form, Layout]


def layouts(spec: FusedSpec, form: Form) -> list[Layout]:
    """Every way to lay the chain out, the preferred first; the last ones leave the norm to its own kernel."""
    width, tile = spec.group_channels, form.tile_channels
    apart = [Layout(cluster, share, 1, "none") for cluster, share in CLUSTERS]
    if ragged_result(spec) or not spec.has_norm:
        return apart
    if form.parts == 1 and spec.precision.itemsize == 4:
        # 128 sums a thread are finished slowly while nothing is multiplied: the norm kernel is faster, measured, by 8 % of all. Not for groups of two tiles of
        # two blocks, whose halves meet through the cluster: problem 30, prepared, 0.2135 ms, where the kernels apart add up to 0.219.
        return ([Layout(2, "input", 1, "strips", exchange=True)] if width == 2 * tile and not form.registers else []) + apart
    power_of_two = width & (width - 1) == 0
    if power_of_two and width < 16:
        return [Layout(cluster, share, 1, "lanes") for cluster, share in CLUSTERS]
    if power_of_two and width <= tile:
        return [Layout(cluster, share, 1, "strips") for cluster, share in CLUSTERS]
    found = []
    if width % tile == 0:
        tiles = width // tile
        if tiles <= WIDEST_HELD:
            found += [Layout(2, "weight", tiles, "strips"), Layout(1, "none", tiles, "strips")]
        if tiles % 2 == 0 and tiles // 2 <= WIDEST_HELD:
            found.append(Layout(2, "input", tiles // 2, "strips", exchange=True))
    return found + apart


def sliced_layouts(spec: FusedSpec, form: Form) -> list[Layout]:
    """Every way to cut K into parts, none of them empty."""
    k = spec.input_shape[1]
    found = []
    for wanted in SLICES_OF_K:
        steps = math.ceil(math.ceil(k / TILE_K) / wanted)
        slices = math.ceil(math.ceil(k / TILE_K) / steps)
        if steps >= LEAST_STEPS and slices > 1:
            found += [Layout(cluster, share, 1, "none", slices=slices) for cluster, share in CLUSTERS]
    return list(dict.fromkeys(found))


def fitting(spec: FusedSpec, target: Target, form: Form) -> list[Layout]:
    """The layouts of `layouts` that fit into shared memory and registers."""
    listed = layouts(spec, form)
    if spec.gives:  # fp32 results of 16-bit operands: a tile that waits takes registers that they leave none of
        listed = [layout for layout in listed if layout.unit_tiles == 1 and not layout.exchange]
    return [
        layout for layout in listed
        if memory(form, layout, spec.group_channels, spec.result.itemsize, target.smem_bytes, vector_count(spec)) is not None
        and not _held_tail(spec, form, layout) and not _crowded(spec, form, layout)
    ]  # fmt: skip


def choose_layout(spec: FusedSpec, target: Target, device: DeviceClass, form: Form) -> Layout:
    """The layout with the fewest rounds of tiles; ties go to the earlier of those that `layouts` lists."""
    return min(fitting(spec, target, form), key=lambda layout: rounds_of(spec, form, layout, device.sms)[0])


def _held_tail(spec: FusedSpec, form: Form, layout: Layout) -> bool:
    """Tiles that wait for their group lie in y, so all of them must be there."""
    samples = layout.cluster if layout.share == "weight" else 1
    return layout.unit_tiles > 1 and spec.batch % (form.tile_samples * samples) != 0


def _crowded(spec: FusedSpec, form: Form, layout: Layout) -> bool:
    """Seen with nvcc 13: where tiles of 16-bit results wait in y and a thread has 128 sums, too few registers are left for exponentials behind the norm."""
    if layout.unit_tiles == 1 or form.promote or by_rows(form, layout, spec.precision.itemsize):
        return False
    _, after, *_ = epilogue(spec, True)
    return costly(after)


def faster(spec: FusedSpec, device: DeviceClass, ways: list[tuple[Form, Layout]]) -> tuple[Form, Layout]:
    """The first, unless another saves more than the estimate of its conversion of W, or of its smaller tiles, can be off by."""
    others = [way for way in ways[1:] if estimated_ms(spec, device, *way) < FORM_MARGIN * estimated_ms(spec, device, *ways[0])]
    return min(others, key=lambda way: estimated_ms(spec, device, *way), default=ways[0])


def sliced(spec: FusedSpec, device: DeviceClass, forms: list[Form], whole: tuple[Form, Layout]) -> tuple[Form, Layout]:
    """`whole`, or tiles whose K several CTAs share, where that saves more than its estimate can be off by."""
    found = [(form, layout) for form in _sliced_forms(forms) for layout in sliced_layouts(spec, form)]
    best = min(found, key=lambda way: estimated_ms(spec, device, *way), default=whole)
    return best if estimated_ms(spec, device, *best) < SLICE_MARGIN * estimated_ms(spec, device, *whole) else whole


def _sliced_forms(forms: list[Form]) -> list[Form]:
    """The forms, and tiles of half as many channels and twice as many samples where one product comes from shared memory: some results fill them better."""
    narrow = [replace(form, tile_channels=128, tile_samples=256) for form in forms if not form.registers and form.parts == 1]
    return forms + narrow


def all_ways(spec: FusedSpec, target: Target, forms: list[Form]) -> list[Way]:
    """Every form with every layout that fits, K whole and in slices."""
    whole = [(form, layout) for form in forms for layout in fitting(spec, target, form)]
    parts = [(form, layout) for form in _sliced_forms(forms) for layout in sliced_layouts(spec, form)]
    return whole + [(form, layout) for form, layout in parts if memory(form, layout, spec.group_channels, FP32.itemsize, target.smem_bytes) is not None]
