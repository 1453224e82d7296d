"""How long the one-pass convolution for mma.sync takes, estimated, with the kernel behind it."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.plan.conv_sm80.geometry import Geometry
from codegen.plan.conv_sm80.finish import FinishLayout
from codegen.plan.shared.cost import costly_operators, pass_ms
from codegen.plan.shared.fitted import SWEEP, Fitted
from codegen.targets import DeviceClass

SCHEDULERS = 4  # of an SM, which share its warps

START_US = Fitted(2.0, "us", SWEEP)  # of the kernel
WEIGHT_US = Fitted(0.19, "us", SWEEP)  # of an instruction of weights
MULTIPLY_US = Fitted(0.006, "us", SWEEP)  # of a tile's instruction
COSTLY_US = Fitted(0.0155, "us", SWEEP)  # of a lane's result, for each operator of exponentials before the norm
KEPT_US = {False: Fitted(0.034, "us", SWEEP), True: Fitted(0.067, "us", SWEEP)}  # of a lane's result that is kept; True: at tf32
PLANE_US = Fitted(0.24, "us", SWEEP)  # of a part's plane of scaled pixels
PIXEL_US = Fitted(0.0093, "us", SWEEP)  # of a pixel that a thread brings
MERGE_US = Fitted(0.35, "us", SWEEP)  # of a thread that fetches and merges one of its group's moments


def one_pass_ms(spec: FusedSpec, device: DeviceClass, g: Geometry, finish: FinishLayout) -> float:
    """Milliseconds of both kernels: the busiest block's parts one after the other, its SM's warps taking turns, then what was kept read and y written."""
    blocks = g.blocks(spec.batch, device)
    resident = min(g.blocks_per_sm, device.smem_per_sm // (g.smem_bytes + 1024), math.ceil(blocks / device.sms))
    waiting = max(1.0, resident * g.warps / SCHEDULERS)
    parts = math.ceil(spec.batch * g.sample_parts * g.channel_tiles / blocks)
    tiles = parts * math.ceil(g.units / g.column_warps) * g.window_rows / g.tile_rows
    multiplies = g.steps * g.tile // 8 * g.row_tiles * (3 if g.parts == 2 else 1)
    results = g.tile * g.row_tiles // 2
    pixels = 8 * g.octets * g.part_rows * g.pitch / g.threads
    kept = finish.kept_values
    kept_share = kept / math.prod(spec.producer.output_shape)
    result_us = COSTLY_US.on(device) * costly_operators(spec) + kept_share * KEPT_US[spec.precision.name == "tf32"].on(device)
    us = START_US.on(device) + WEIGHT_US.on(device) * g.steps * g.parts * g.row_tiles
    us = us + waiting * (tiles * (MULTIPLY_US.on(device) * multiplies + result_us * results) + PIXEL_US.on(device) * parts * pixels)
    us += PLANE_US.on(device) * parts * g.octets * (spec.precision.itemsize == 4)
    sharing = finish.lanes or finish.threads
    us += MERGE_US.on(device) * math.ceil(spec.group_channels * g.sample_parts / sharing)
    return us / 1e3 + pass_ms(kept * (4 + spec.result.itemsize), device, min(1.0, finish.blocks / device.sms))
