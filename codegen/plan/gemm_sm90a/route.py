"""Planning for Hopper: which tiles, clusters and arithmetic multiply a chain that starts with `linear`, and where its groups are complete.

W is operand A and x operand B: rows of the accumulators are channels. The operand with larger, one-signed values (x, usually) belongs in
slot B, which costs less power, and power is what limits these kernels. W may then also come from registers, converted on the way; or a kernel
of its own converts it first, once for given parameters (`prepack`) or on every call, where that is faster or the copy engine cannot read W as it is.
"""

from __future__ import annotations

import math
from dataclasses import replace

from codegen.ir.apply import costly
from codegen.plan.floor import floor
from codegen.plan.gemm.cost import SLICE_MARGIN
from codegen.plan.gemm_sm90a.epilogue import epilogue, vector_count
from codegen.plan.gemm_sm90a.kernel import gemm_kernel, ragged_result, result_pitch
from codegen.plan.gemm_sm90a.layout import CONSUMERS, TILE_K, Form, Layout, by_rows, memory
from codegen.plan.gemm_sm90a.split import WEIGHT_SPLIT, WEIGHT_UNSCALE, X_SPLIT, X_UNSCALE, padded_columns, split_kernel
from codegen.plan.gemm_sm90a.window import WEIGHT_SHIFT
from codegen.plan.model import Buffer, Launch, Plan, PlanError
from codegen.plan.norm.flat import access_width, residency
from codegen.plan.norm.route import plan_norm, plan_norm_of_product
from codegen.plan.shared.slices import sliced_product
from codegen.spec import Spec
from codegen.targets import DeviceClass, Target

WIDEST_HELD = 4  # tiles of one group that a CTA computes before it normalises them
LEAST_STEPS = 4  # of K: shorter products are a matter of memory and launch times
LANES_MS = 0.02  # that a tile's epilogue takes longer where groups lie in the lanes of a warp, and as much again where results are fp32
CLUSTERS = ((2, "weight"), (2, "input"), (1, "none"))  # CTAs, and the operand that they share
SLICES_OF_K = (2, 3, 4, 5, 6, 8, 10, 12, 16)  # that CTAs of one tile may share
SLICED_MEMORY = 0.8  # of the memory's rate, at most, where it limits slices: a stage takes 128 bytes of each row
FP32_GBS = 1900.0  # at which W comes in fp32 at most, in pieces of 64 bytes: 1400 to 2000 on an H200 in four cases, whose memory gives 4200
FILL_MS = 0.003  # that a slice waits for its first stages, and its sums for the copy to memory
CONVERSION_MARGIN = 0.95  # W is converted on every call where the estimate is below this share of the other
CONVERSION_BYTES = 1 << 30  # the most that a call may take for W's copy

# Measured on an H200 (K = 8192): what promotion every 256 costs is lost in the noise, 128 costs 2 %, 64 more. The error of PyTorch's fp32
# grows with K, that of a promoted sum hardly: shorter sums may be added up more often. (least K, k between promotions) So must those of results too few to
# keep the card busy, whose K the vendor cuts into parts, which are more accurate: 7e-7 at 384 x 17696 -> 7761 with 256, 1.3 times PyTorch's.
# For few rows the vendor's sums are about 16 chains each (1.6e-7 at K = 1021, one row). So exact are sums promoted every 64 (modelled: 1.5e-7, 3.7e-7
# with 128). As long as all rows are one tile's, W's way from memory takes longer than the multiplication.
PROMOTION = ((4096, 256), (512, 128), (0, 64))
PARTS_RESULTS = 1 << 22  # fewer results are such

FORMS = {
    # registers, parts, channels, samples, stages, promote
    ("fp32", False): Form(True, 2, 128, 128, 3, 4),
    ("fp32", True): Form(False, 2, 128, 128, 3, 4),
    ("tf32", False): Form(True, 1, 128, 256, 3, 0),
    ("tf32", True): Form(False, 1, 256, 128, 4, 0),
    ("fp16", False): Form(False, 1, 256, 128, 4, 0),
    ("bf16", False): Form(False, 1, 256, 128, 4, 0),
}
# Share of the card's tensor rate at which a busy SM multiplies (an H100, K = 8192; bench/results/h100; ("tf32", False) from an H200): power takes the rest.
PACE = {("fp32", False): 0.74, ("fp32", True): 0.74, ("tf32", False): 0.67, ("tf32", True): 0.67, ("fp16", False): 0.77, ("bf16", False): 0.79}
PRODUCTS = {"fp32": 3, "tf32": 1, "fp16": 1, "bf16": 1}


def plan_sm_90a(spec: Spec, target: Target, device: DeviceClass, *, debug: bool = False, form: Form | None = None, layout: Layout | None = None) -> Plan:
    """The plan of a chain that starts with `linear` on Hopper; `debug` bounds every wait. `form` and `layout` force theirs, for
    measurements.

    Raises PlanError where this target cannot serve the chain; whether it serves it better than sm_80 is not asked here.
    """
    _check(spec)
    forms = [form] if form else _forms(spec)[: 1 if layout else None]
    ways = [(form, layout or choose_layout(spec, target, device, form)) for form in forms]
    whole = _faster(spec, device, ways)
    form, chosen = whole if layout else _sliced(spec, device, forms, whole)
    rounds, busy = _rounds(spec, form, chosen, device.sms)
    notes = _notes(spec, form, chosen, rounds)
    gemm = gemm_kernel(spec, target, form, chosen, device.sms, debug, notes)
    steps, buffers = [], []
    if spec.precision.itemsize == 4:
        split, buffers = _splits(spec, form)
        steps += split
    steps.append(Launch(gemm))
    why = _why(spec, device, ways, form, chosen, busy)
    if chosen.slices > 1:
        steps[-1:], own = sliced_product(spec, gemm, chosen.slices)
        buffers = [*buffers, *own]
        tail = plan_norm_of_product(spec, target, device)
        steps, buffers, why = steps + list(tail.steps), buffers + list(tail.buffers), why + tail.why
    elif chosen.statistics == "none":
        pitch = result_pitch(spec, chosen)
        source = "t0" if pitch else "y"
        if pitch:
            steps[-1] = Launch(gemm, result=source)
            buffers = [*buffers, Buffer(source, (spec.batch, pitch), spec.precision.dtype)]
        tail = plan_norm(spec, target, device, source=source, apply_before=True, producer_bias=None, statistics=None, pitch=pitch)
        steps, buffers, why = steps + list(tail.steps), buffers + list(tail.buffers), why + tail.why
    return Plan(spec, target, device, tuple(steps), tuple(buffers), floor(spec, device, PRODUCTS[spec.precision.name], device.fp16), why)


def hopper_linear_ms(spec: Spec, target: Target, device: DeviceClass) -> float:
    """Estimate of what this target's kernels take for the chain, a norm kernel behind them not counted beyond its share of a tile's time."""
    forms = _forms(spec)
    whole = _faster(spec, device, [(form, choose_layout(spec, target, device, form)) for form in forms])
    return estimated_ms(spec, device, *_sliced(spec, device, forms, whole))


def _faster(spec: Spec, device: DeviceClass, ways: list[tuple[Form, Layout]]) -> tuple[Form, Layout]:
    """The first, unless the second saves more than its conversion of W can be off by."""
    if len(ways) > 1 and estimated_ms(spec, device, *ways[1]) < CONVERSION_MARGIN * estimated_ms(spec, device, *ways[0]):
        return ways[1]
    return ways[0]


def _sliced(spec: Spec, device: DeviceClass, forms: list[Form], whole: tuple[Form, Layout]) -> tuple[Form, Layout]:
    """`whole`, or tiles whose K several CTAs share, where that saves more than its estimate can be off by."""
    found = [(form, layout) for form in _sliced_forms(forms) for layout in sliced_layouts(spec, form)]
    best = min(found, key=lambda way: estimated_ms(spec, device, *way), default=whole)
    return best if estimated_ms(spec, device, *best) < SLICE_MARGIN * estimated_ms(spec, device, *whole) else whole


def _sliced_forms(forms: list[Form]) -> list[Form]:
    """The forms, and tiles of half as many channels and twice as many samples where one product comes from shared memory: some results fill them better."""
    narrow = [replace(form, tile_channels=128, tile_samples=256) for form in forms if not form.registers and form.parts == 1]
    return forms + narrow


def sliced_layouts(spec: Spec, form: Form) -> list[Layout]:
    """Every way to cut K into parts, none of them empty."""
    k = spec.input_shape[1]
    found = []
    for wanted in SLICES_OF_K:
        steps = math.ceil(math.ceil(k / TILE_K) / wanted)
        slices = math.ceil(math.ceil(k / TILE_K) / steps)
        if steps >= LEAST_STEPS and slices > 1:
            found += [Layout(cluster, share, 1, "none", slices=slices) for cluster, share in CLUSTERS]
    return list(dict.fromkeys(found))


def choose_layout(spec: Spec, target: Target, device: DeviceClass, form: Form) -> Layout:
    """The layout with the fewest rounds of tiles; ties go to the earlier of those that `layouts` lists."""
    listed = layouts(spec, form)
    if spec.gives:  # fp32 results of 16-bit operands: a tile that waits takes registers that they leave none of
        listed = [layout for layout in listed if layout.unit_tiles == 1 and not layout.exchange]
    fitting = [
        layout for layout in listed
        if memory(form, layout, spec.group_channels, spec.result.itemsize, target.smem_bytes, vector_count(spec)) is not None
        and not _held_tail(spec, form, layout) and not _crowded(spec, form, layout)
    ]  # fmt: skip
    return min(fitting, key=lambda layout: _rounds(spec, form, layout, device.sms)[0])


def estimated_ms(spec: Spec, device: DeviceClass, form: Form, layout: Layout) -> float:
    """The busiest CTA's tiles at the pace of an SM, or the bytes from memory, and a launch for each kernel; W's conversion, where every call has one."""
    precision, converts = spec.precision.name, _converts(spec, form)
    rounds, _ = _rounds(spec, form, layout, device.sms)
    products = PRODUCTS[precision]
    k = layout.slice_steps(spec.input_shape[1]) * TILE_K
    pace = device.fp16 * 1e9 * PACE[precision, converts] / device.sms
    multiply = rounds * 2 * form.tile_channels * form.tile_samples * k * products / pace
    conversion = spec.channels * spec.input_shape[1] * (4 + 2 * form.parts) / (device.hbm * 1e6) if converts and not spec.prepack else 0.0
    if layout.statistics == "lanes":
        multiply += rounds * LANES_MS * (2 if spec.gives else 1)
    if layout.slices > 1:  # sums are written and read, their total too
        moved = (8 * layout.slices + spec.precision.itemsize * 2 + spec.result.itemsize) * spec.batch * spec.channels
        multiply += rounds * FILL_MS + moved / (device.hbm * 1e6)
    launches = 1 + (spec.precision.itemsize == 4) + (layout.statistics == "none") + (layout.slices > 1) + (conversion > 0)
    rate = min(SLICED_MEMORY if layout.slices > 1 else 1.0, FP32_GBS / device.hbm if form.registers else 1.0)
    memory = floor(spec, device, products, device.fp16).memory_ms / rate
    return max(multiply, memory) + conversion + launches * device.launch_us / 1e3


def layouts(spec: Spec, form: Form) -> list[Layout]:
    """Every way to lay the chain out, the preferred first; the last ones leave the norm to its own kernel."""
    width, tile = spec.group_channels, form.tile_channels
    apart = [Layout(cluster, share, 1, "none") for cluster, share in CLUSTERS]
    if ragged_result(spec):
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


def _check(spec: Spec) -> None:
    k = spec.input_shape[1]
    if spec.producer.operator.name != "linear":
        raise PlanError("this target has no convolution kernel")
    if spec.gemm == "library":
        raise PlanError("gemm: library asked for")
    wanted = {"fp32": "fp16x3", "tf32": "fp16"}.get(spec.precision.name)
    if spec.math is not None and spec.math not in (wanted, spec.precision.name):
        raise PlanError(f"math: {spec.math} asked for, which this target does not have")
    if spec.precision.itemsize == 2 and k % 8:
        raise PlanError(f"in_features: {k} is no multiple of 8, and rows of x and W that do not start at multiples of 16 bytes are out of the copy engine's reach")
    if ragged_result(spec) and (spec.gives or residency(spec, access_width(spec)) is None):
        raise PlanError(f"out_features: {spec.channels} is no multiple of 8, and rows of y must start at multiples of 16 bytes for the copy engine")
    if k < LEAST_STEPS * TILE_K:
        raise PlanError(f"in_features: {k} gives fewer than {LEAST_STEPS} stages of {TILE_K}, too few to fill the ring; sm_80 serves it as well")


def _forms(spec: Spec) -> list[Form]:
    """The forms that serve the spec, the preferred first. Raises PlanError where none does."""
    if spec.precision.itemsize == 2 or spec.prepack:
        return [_form(spec, spec.precision.itemsize == 4)]
    k = spec.input_shape[1]
    found = [_form(spec, False)] if k % 16 == 0 else []  # W is read as planes of 16 k
    converted = _form(spec, True)
    scratch = converted.parts * spec.channels * padded_columns(k) * 2
    if scratch <= CONVERSION_BYTES:
        found.append(converted)
    if not found:
        raise PlanError(
            f"in_features: {k} is no multiple of 16, so W would have to be copied on every call, {scratch / 1e6:.0f} MB, more than {CONVERSION_BYTES / 1e6:.0f}; "
            "prepack: true keeps the copy"
        )
    return found


def _form(spec: Spec, converted: bool) -> Form:
    form = FORMS[spec.precision.name, converted]
    if not form.promote:
        return form
    k = spec.input_shape[1]
    if spec.batch <= form.tile_samples:
        k = 0
    elif spec.batch * spec.channels < PARTS_RESULTS:
        k = min(k, PROMOTION[0][0] - 1)
    interval = next(interval for least, interval in PROMOTION if k >= least)
    return replace(form, promote=interval // TILE_K)


def _converts(spec: Spec, form: Form) -> bool:
    """Does a kernel of its own turn W into halves?"""
    return spec.precision.itemsize == 4 and not form.registers


def _rounds(spec: Spec, form: Form, layout: Layout, sms: int) -> tuple[float, float]:
    """Tiles that the busiest CTA computes, the norm kernel's passes included as a share of one, and the share of SMs kept busy."""
    sample_tiles, channel_tiles = math.ceil(spec.batch / form.tile_samples), math.ceil(spec.channels / form.tile_channels)
    samples = layout.cluster if layout.share == "weight" else 1
    channels = (layout.cluster if layout.share == "input" else 1) * layout.unit_tiles
    units = math.ceil(sample_tiles / samples) * math.ceil(channel_tiles / channels) * layout.slices
    rounds = math.ceil(units / (sms // layout.cluster)) * layout.unit_tiles
    busy = sample_tiles * channel_tiles * layout.slices / (rounds * sms)
    uncached = 0.05 * rounds if layout.cluster == 1 else 0.0  # operands fetched twice
    return rounds * (1.1 if layout.statistics == "none" and layout.slices == 1 else 1.0) + uncached, busy


def _held_tail(spec: Spec, form: Form, layout: Layout) -> bool:
    """Tiles that wait for their group lie in y, so all of them must be there."""
    samples = layout.cluster if layout.share == "weight" else 1
    return layout.unit_tiles > 1 and spec.batch % (form.tile_samples * samples) != 0


def _crowded(spec: Spec, form: Form, layout: Layout) -> bool:
    """Seen with nvcc 13: where tiles of 16-bit results wait in y and a thread has 128 sums, too few registers are left for exponentials behind the norm."""
    if layout.unit_tiles == 1 or form.promote or by_rows(form, layout, spec.precision.itemsize):
        return False
    _, after, *_ = epilogue(spec, True)
    return costly(after)


def _splits(spec: Spec, form: Form) -> tuple[list[Launch], list[Buffer]]:
    batch, k = spec.input_shape
    pitch = padded_columns(k)
    padded = math.ceil(batch / (2 * form.tile_samples)) * 2 * form.tile_samples
    x = split_kernel(spec, "x", form, batch, padded, WEIGHT_SHIFT if form.registers and form.parts == 2 else 0)
    if x is None:
        raise PlanError(f"in_features: {k} is more than a block of the splitting kernel holds")
    steps, buffers = [Launch(x)], [Buffer(X_SPLIT, (form.parts * batch, pitch), "float16"), Buffer(X_UNSCALE, (padded,), "float32")]
    if _converts(spec, form):
        weight = split_kernel(spec, "weight", form, spec.channels, spec.channels, 0)
        steps.insert(0, Launch(weight, prepares=(WEIGHT_SPLIT, WEIGHT_UNSCALE) if spec.prepack else ()))
        buffers += [Buffer(WEIGHT_SPLIT, (form.parts * spec.channels, pitch), "float16"), Buffer(WEIGHT_UNSCALE, (spec.channels,), "float32")]
    return steps, buffers


def _notes(spec: Spec, form: Form, layout: Layout, rounds: float) -> tuple[str, ...]:
    notes = [
        f"tiles of {form.tile_channels} channels x {form.tile_samples} samples, {form.stages} stages of {TILE_K} k; one warpgroup fetches, {CONSUMERS} multiply",
    ]
    if layout.cluster > 1:
        notes.append(f"clusters of {layout.cluster} CTAs that share rows of {'W' if layout.share == 'weight' else 'x'}: fetched once, received by both")
    if layout.statistics == "lanes":
        notes.append(f"groups of {spec.group_channels} channels lie in the lanes of a warp")
    elif layout.statistics == "strips":
        wide = layout.unit_tiles > 1 or layout.exchange
        place = "registers" if by_rows(form, layout, spec.precision.itemsize) else "y"
        where = f"{layout.unit_tiles} tiles of a CTA" + (f", which wait in {place}" if layout.unit_tiles > 1 else "") if wide else "one tile"
        notes.append(f"groups of {spec.group_channels} channels lie in {where}" + (", and their other half in the cluster's other CTA" if layout.exchange else ""))
    if form.registers:
        notes.append("W stays fp32 in memory and is converted on its way into the multiplier's operand registers")
    if form.promote:
        notes.append(f"the tensor core's sums are added to fp32 registers every {form.promote * TILE_K} of K")
    return tuple(notes)


def _why(spec: Spec, device: DeviceClass, ways: list[tuple[Form, Layout]], form: Form, layout: Layout, busy: float) -> tuple[str, ...]:
    arithmetic = {
        "fp32": "three fp16 products of scaled operands split in two, promoted: fp32's error at the tensor cores' speed",
        "tf32": "one fp16 product of scaled operands rounded to nearest: TF32's error at twice its rate",
    }.get(spec.precision.name, f"one {spec.precision.name} product")
    reasons = [arithmetic, f"tiles of {form.tile_channels} x {form.tile_samples} keep {busy:.0%} of the SMs busy"]
    if _converts(spec, form) and not spec.prepack:
        if len(ways) > 1:
            direct, converted = (estimated_ms(spec, device, *way) for way in ways)
            reasons.append(f"W is converted by a kernel of its own on every call: {converted:.3f} ms estimated in all, against {direct:.3f} ms with W converted in the multiplication")
        else:
            reasons.append(f"W is converted by a kernel of its own on every call: of in_features {spec.input_shape[1]} the multiplication could not read it in planes of 16")
    if layout.exchange:
        reasons.append("the statistics of a group meet through distributed shared memory, so that the chain ends in this kernel")
    elif layout.slices > 1:
        parts, whole = estimated_ms(spec, device, form, layout), estimated_ms(spec, device, *_faster(spec, device, ways))
        reasons.append(f"K is cut into {layout.slices} parts, whose sums are added in front of the norm kernel: {parts:.3f} ms estimated, against {whole:.3f} ms with whole tiles")
    elif layout.statistics == "none":
        reasons.append(f"groups of {spec.group_channels} channels do not match the tiles, so the norm kernel follows")
    else:
        reasons.append(f"groups of {spec.group_channels} channels are complete within a CTA, so the chain ends in this kernel")
    return tuple(reasons)
