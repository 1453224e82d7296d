"""What a convolution and its norm take, estimated: by our kernels for sm_80 and Hopper, by torch's library with the norm kernel behind it.

The constants were fitted to the kernels' own times of 28 random convolutions and the shipped ones on H100 and H200 (bench.sweep, November 2026): half
of the estimates are within 20 % of the measurement, nine of ten within a factor of 1.5. Times begin with the first kernel: its launch is common to all ways.
"""

from __future__ import annotations

import math

from codegen.ir.apply import applies, costly
from codegen.plan.model import Plan
from codegen.plan.norm.flat import split_groups
from codegen.spec import Spec
from codegen.targets import DeviceClass

SCHEDULERS = 4  # of an SM, which share its warps
STREAMED = 0.6  # of the memory's rate, what a kernel reaches that reads once and writes once
NORM_US = 1.5  # of a kernel that does nothing, about
MERGE_US = 0.35  # of a thread that fetches and merges one of its group's moments

# Microseconds of our sm_80 kernel: its start; an instruction of weights; a tile's multiply; each of a lane's results for each operator of exponentials
# before the norm, and for being kept, more where it is TF32's; a part's plane of scaled pixels; a pixel that a thread brings.
START, WEIGHT, MULTIPLY, COSTLY, KEPT_RESULT, TF32_KEPT_RESULT, PLANE, PIXEL = 2.0, 0.19, 0.006, 0.0155, 0.034, 0.067, 0.24, 0.0093

# Microseconds of the Hopper kernel: a sample of a CTA; 100 pixels of a tile for each instruction of K; a thread's result for each such operator; a
# thousand kept values of a CTA; a thousand weights.
SAMPLE, TILE, HOPPER_COSTLY, KEPT, WEIGHTS = 6.1, 0.0244, 0.016, 0.67, 0.43
DOUBTED = 1.16  # times as long: where channels are few and rows long it takes twice the estimate, where many come through registers three times

# The library's: shares of the arithmetic's rate on CUDA cores (which serve fp32 and few channels) and tensor cores, the channels below which there are
# idle ones, microseconds that each takes at least, and those for each k; the tensor cores' operands and results are turned around in memory.
LIBRARY_CORES, LIBRARY_TENSOR, TURNED = 0.3, 0.35, 0.5
FEW_CHANNELS, WHOLE_CHANNELS = 8, 32
CORES_US, TENSOR_US, TENSOR_HALVES_US, CORES_K_US, TENSOR_K_US = 6.5, 8.0, 14.0, 0.04, 0.003
GROUP_US = 7.0  # of each of conv2d's groups, on tensor cores
ODD_HALVES = 1.7  # times as long where channels, in or out, are no whole pieces of 16 bytes


def one_pass_ms(spec: Spec, device: DeviceClass, plan: Plan) -> float:
    """Of `plan`, by the sm_80 kernels: the busiest block's parts one after the other, its SM's warps taking turns, then what was kept read and y written."""
    kernel = plan.kernels[0]
    g = kernel.geometry
    resident = min(g.blocks_per_sm, device.smem_per_sm // (g.smem_bytes + 1024), math.ceil(kernel.blocks / device.sms))
    waiting = max(1.0, resident * g.warps / SCHEDULERS)
    parts = math.ceil(spec.batch * g.sample_parts * g.channel_tiles / kernel.blocks)
    tiles = parts * math.ceil(g.units / g.column_warps) * g.window_rows / g.tile_rows
    multiplies = g.steps * g.tile // 8 * g.row_tiles * (3 if g.parts == 2 else 1)
    results = g.tile * g.row_tiles // 2
    pixels = 8 * g.octets * g.part_rows * g.pitch / g.threads
    kept_share = math.prod(plan.buffers[0].shape) / math.prod(spec.producer.output_shape)
    result_us = COSTLY * _costly_operators(spec) + kept_share * (TF32_KEPT_RESULT if spec.precision.name == "tf32" else KEPT_RESULT)
    us = START + WEIGHT * g.steps * g.parts * g.row_tiles + waiting * (tiles * (MULTIPLY * multiplies + result_us * results) + PIXEL * parts * pixels)
    us += PLANE * parts * g.octets * (spec.precision.itemsize == 4)
    finish, kept = plan.kernels[1], math.prod(plan.buffers[0].shape) * (4 + spec.result.itemsize)
    sharing = finish.lanes or finish.threads
    us += MERGE_US * math.ceil(spec.group_channels * g.sample_parts / sharing)
    return us / 1e3 + _norm_ms(kept, device, min(1.0, finish.blocks / device.sms))


def hopper_ms(spec: Spec, device: DeviceClass, plan: Plan) -> float:
    """Of `plan`, by the Hopper kernel: the busiest CTA's samples and tiles."""
    kernel = plan.kernels[0]
    g = kernel.geometry
    tiles = g.items * g.units * spec.producer.output_shape[2] / g.strips / g.tile_rows * g.column_tiles
    us = SAMPLE * g.items + TILE * tiles * g.tile * len(kernel.steps) / 100 + HOPPER_COSTLY * tiles * g.tile_values * _costly_operators(spec)
    us += KEPT * g.items * g.units * g.channels * g.entries / g.folds / 1000
    us += WEIGHTS * g.channels * math.prod(spec.producer.parameters[0].shape[1:]) / 1000
    return DOUBTED * us / 1e3


def library_ms(spec: Spec, device: DeviceClass) -> float:
    """By torch's convolution, then the norm kernel, which reads its result and writes y."""
    result, weight = spec.producer.output_shape, spec.producer.parameters[0].shape
    k, itemsize = math.prod(weight[1:]), spec.precision.itemsize
    moved = (math.prod(spec.input_shape) + math.prod(result)) * itemsize / (device.hbm * TURNED * 1e6)
    groups = spec.producer.values["groups"]
    channels = result[1] // groups
    flop = 2.0 * math.prod(result) * k * math.ceil(channels / WHOLE_CHANNELS) * WHOLE_CHANNELS / channels
    if spec.precision.name == "fp32" or spec.input_shape[1] <= FEW_CHANNELS:
        conv = CORES_US / 1e3 + max(flop / (device.fp32 * LIBRARY_CORES * 1e9), moved, CORES_K_US * k * groups / 1e3)
    else:
        rate = device.tf32 if spec.precision.name == "tf32" else device.fp16
        start = (TENSOR_US if itemsize == 4 else TENSOR_HALVES_US) + (GROUP_US * groups if groups > 1 else 0.0)
        odd = ODD_HALVES if itemsize == 2 and math.gcd(weight[1], channels) % 8 else 1.0
        conv = (start + TENSOR_K_US * k) / 1e3 + odd * (flop / (rate * LIBRARY_TENSOR * 1e9) + (2 if itemsize == 2 else 1) * moved)
    return conv + norm_ms(spec, device)


def norm_ms(spec: Spec, device: DeviceClass) -> float:
    """The norm kernel behind a convolution that left its result in memory; where groups are few and long, statistics first, in a kernel of its own."""
    result, itemsize = math.prod(spec.producer.output_shape), spec.precision.itemsize
    split = split_groups(spec, device.sms)
    norm = _norm_ms((2 if split else 1) * result * itemsize + math.prod(spec.output_shape) * spec.result.itemsize, device)
    return norm + (_norm_ms(0, device) if split else 0.0)


def _norm_ms(moved: float, device: DeviceClass, busy: float = 1.0) -> float:
    """A launch, and so many bytes by a `busy` share of the SMs."""
    return (NORM_US + device.launch_us) / 1e3 + moved / (device.hbm * STREAMED * busy * 1e6)


def _costly_operators(spec: Spec) -> int:
    return sum(costly((item,)) for item in applies(spec, spec.before_norm))
