"""How long the Hopper GEMM takes, estimated: the busiest CTA's tiles, the bytes from memory, conversions and launches."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.floor import floor
from codegen.plan.gemm_sm90a.forms import converts
from codegen.plan.gemm_sm90a.layout import TILE_K, Form, Layout
from codegen.plan.shared.fitted import HOPPER_SHAPES, Fitted
from codegen.targets import DeviceClass

LANES_MS = Fitted(0.02, "ms", HOPPER_SHAPES)  # more for each tile if groups are reduced across lanes; doubled for fp32 results
SLICED_SHARE = Fitted(0.8, "share", HOPPER_SHAPES)  # of the memory's rate, at most, where it limits slices: a stage takes 128 bytes of each row
FP32_GBS = Fitted(1900.0, "GB/s", HOPPER_SHAPES)  # at which W comes in fp32 at most, in pieces of 64 bytes: 1400 to 2000 in four cases on an H200
FILL_MS = Fitted(0.003, "ms", HOPPER_SHAPES)  # that a slice waits for its first stages, and its sums for the copy to memory
UNCACHED_ROUNDS = Fitted(0.05, "ratio", HOPPER_SHAPES)  # of a round more, where no cluster shares what it fetches
APART_ROUNDS = Fitted(1.1, "ratio", HOPPER_SHAPES)  # rounds, where the norm's kernel passes over the result
FORM_MARGIN = 0.95  # another form than the preferred is taken where its estimate is below this share
SLICE_MARGIN = 0.85  # K is sliced where the estimate is below this share of the other

# Share of the card's tensor rate at which a busy SM multiplies, by precision and whether W is converted first: power takes the rest.
PACE = {
    key: Fitted(share, "share", HOPPER_SHAPES)
    for key, share in {
        ("fp32", False): 0.74, ("fp32", True): 0.74, ("tf32", False): 0.67, ("tf32", True): 0.67, ("fp16", False): 0.77, ("bf16", False): 0.79,
    }.items()
}  # fmt: skip
PRODUCTS = {"fp32": 3, "tf32": 1, "fp16": 1, "bf16": 1}


def estimated_ms(spec: FusedSpec, device: DeviceClass, form: Form, layout: Layout) -> float:
    """The busiest CTA's tiles at the pace of an SM, or the bytes from memory, and a launch for each kernel; W's conversion, where every call has one."""
    precision, converted = spec.precision.name, converts(spec, form)
    rounds, _ = rounds_of(spec, form, layout, device.sms)
    products = PRODUCTS[precision]
    k = layout.slice_steps(spec.input_shape[1]) * TILE_K
    pace = device.fp16 * 1e9 * PACE[precision, converted].on(device) / device.sms
    multiply = rounds * 2 * form.tile_channels * form.tile_samples * k * products / pace
    conversion = spec.channels * spec.input_shape[1] * (4 + 2 * form.parts) / (device.hbm * 1e6) if converted and not spec.prepack else 0.0
    if layout.statistics == "lanes":
        multiply += rounds * LANES_MS.on(device) * (2 if spec.gives else 1)
    if layout.slices > 1:  # sums are written and read, their total too
        moved = (8 * layout.slices + spec.precision.itemsize * 2 + spec.result.itemsize) * spec.batch * spec.channels
        multiply += rounds * FILL_MS.on(device) + moved / (device.hbm * 1e6)
    launches = 1 + (spec.precision.itemsize == 4) + (layout.statistics == "none" and spec.has_norm) + (layout.slices > 1) + (conversion > 0)
    rate = min(SLICED_SHARE.on(device) if layout.slices > 1 else 1.0, FP32_GBS.on(device) / device.hbm if form.registers else 1.0)
    memory = floor(spec, device, products, device.fp16).memory_ms / rate
    return max(multiply, memory) + conversion + launches * device.launch_us / 1e3


def rounds_of(spec: FusedSpec, form: Form, layout: Layout, sms: int) -> tuple[float, float]:
    """Tiles that the busiest CTA computes, the norm kernel's passes included as a share of one, and the share of SMs kept busy."""
    sample_tiles, channel_tiles = math.ceil(spec.batch / form.tile_samples), math.ceil(spec.channels / form.tile_channels)
    samples = layout.cluster if layout.share == "weight" else 1
    channels = (layout.cluster if layout.share == "input" else 1) * layout.unit_tiles
    units = math.ceil(sample_tiles / samples) * math.ceil(channel_tiles / channels) * layout.slices
    rounds = math.ceil(units / (sms // layout.cluster)) * layout.unit_tiles
    busy = sample_tiles * channel_tiles * layout.slices / (rounds * sms)
    uncached = UNCACHED_ROUNDS.value * rounds if layout.cluster == 1 else 0.0  # operands fetched twice
    apart = layout.statistics == "none" and layout.slices == 1 and spec.has_norm
    return rounds * (APART_ROUNDS.value if apart else 1.0) + uncached, busy
