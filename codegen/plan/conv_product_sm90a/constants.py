"""The constants of the convolution as a product on Hopper: a table, of which a source shows those that it uses."""

from __future__ import annotations

import math

from codegen.ir.apply import Constant, applies, unique_constants
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import float_literal
from codegen.plan.conv_product_sm90a.kernel import CONSUMER_REGISTERS, PRODUCER_REGISTERS, ConvProductKernel
from codegen.plan.conv_product_sm90a.layout import CONSUMERS, PIECE, PIECE_BYTES, THREADS
from codegen.plan.conv_product_sm90a.operands import input_constants, near_constant, weight_constants
from codegen.plan.shared.axes import AXES
from codegen.plan.shared.halves import RESTORED


def conv_constants(spec: FusedSpec, kernel: ConvProductKernel) -> tuple[Constant, ...]:
    """The table of the multiplication's constants."""
    geometry, layout = kernel.geometry, kernel.layout
    depth, height, width = geometry.axes
    plane = math.prod(spec.producer.output_shape[2:])
    sample_tiles = math.ceil(geometry.pixels / layout.tile_pixels)
    stages = layout.stages(kernel.smem_bytes)
    rows = [
        ("kSamples", spec.batch, "batch"),
        *input_constants(spec, geometry),
        ("kDepth", depth.size, "depth of x"),
        ("kHeight", height.size, "rows of x"),
        *weight_constants(spec, geometry),
        *((f"kKernel{name}", size, f"size of W along the {name.lower()}") for name, size in zip(AXES, geometry.kernel, strict=True)),
        *((f"kStride{name}", axis.stride, f"{spec.producer.operator.name}'s stride") for name, axis in zip(AXES, geometry.windows, strict=True)),
        *((f"kStep{name}", axis.step, f"{spec.producer.operator.name}'s stride") for name, axis in zip(AXES, geometry.axes, strict=True)),
        *((f"kPadding{name}", size, f"{spec.producer.operator.name}'s padding") for name, size in zip(AXES, kernel.paddings, strict=True)),
        *((f"kDilation{name}", size, f"{spec.producer.operator.name}'s dilation") for name, size in zip(AXES, kernel.dilations, strict=True)),
        *(
            (f"kLower{name}", axis.lower, f"first pixel of the first window along the {name.lower()}")
            for name, axis in zip(AXES, geometry.windows, strict=True)
        ),
        *(
            (f"kUpper{name}", axis.upper, f"from the end of x to the end of the box of windows' first pixels, {axis.count} along the {name.lower()}")
            for name, axis in zip(AXES, geometry.axes, strict=True)
        ),
        ("kOutDepth", depth.results, "depth of y"),
        ("kOutHeight", height.results, "rows of y"),
        ("kOutWidth", width.results, "columns of y"),
        ("kPlane", plane, "results of a channel of a sample: " + " x ".join(map(str, spec.producer.output_shape[2:]))),
        ("kRows", height.count, "rows of pixels" + (" of a phase" if height.step > 1 else "")),
        ("kColumns", width.count, "columns of pixels" + (" of a phase" if width.step > 1 else "")),
        ("kTileChannels", layout.tile_channels, "channels of a tile: rows of W, operand A"),
        ("kWarpgroupPixels", layout.pixels, "pixels of a warpgroup"),
        ("kTilePixels", layout.tile_pixels, "pixels of a tile: operand B"),
        ("kSampleTiles", sample_tiles, f"tiles of a sample's {geometry.pixels} pixels"),
        ("kChannelTiles", kernel.channel_tiles, "tiles of out_channels"),
        ("kPhases", kernel.phases, "remainders of a result's depth and height by the stride"),
        (
            "kWidePhases",
            kernel.wide_phases,
            "remainders of a column of results by the stride: a thread has the sums of all"
            if kernel.wide_phases > 1
            else "a thread has the sums of a tile once",
        ),
        ("kTapLists", kernel.tap_lists, "lists of taps: one for each remainder"),
        ("kTaps", kernel.taps, "taps" + (", pairs completed" if layout.taps == 2 or layout.paired else "") + (" of all phases" if kernel.tap_lists > 1 else "")),
        ("kBlocks", layout.blocks, "blocks of channels of x"),
        ("kWeightSteps", kernel.taps // layout.taps * layout.steps * layout.blocks, "steps of K: " + ("eight channels of two taps each" if layout.paired else "a block of channels of a tap each")),
        ("kSteps", kernel.taps // layout.taps * layout.blocks, "stages of a tile"),
        ("kPhaseUnits", kernel.phase_tiles, "units of a phase"),
        ("kLastTiles", kernel.last_band, "those of a phase that are left for the last turn"),
        ("kUnits", kernel.units, "units of work: tiles; a CTA takes one at a time"),
        ("kGrid", kernel.blocks, f"CTAs: at most {math.ceil(kernel.units / kernel.blocks)} units each"),
        ("kThreads", THREADS, "one warpgroup that fetches, two that multiply" + (", tiles in turn" if layout.form.in_turn else "")),
        ("kConsumerWarps", 4 * (1 if layout.form.in_turn else CONSUMERS), f"multiplying warps{' of a tile' if layout.form.in_turn else ''}, each of which frees a stage once"),
        ("kProducerRegisters", PRODUCER_REGISTERS, "registers of a fetching thread"),
        ("kConsumerRegisters", CONSUMER_REGISTERS, "registers of a multiplying thread"),
        ("kAccumulators", layout.pixels // 2, "registers of sums: 64 x kWarpgroupPixels values over 128 threads"),
        ("kStages", stages, "stages of the ring"),
        ("kUnrolled", layout.unrolled, "stages that are multiplied without a pause: a divisor of a tile's"),
        ("kRowHalves", layout.row_bytes // 2, "halves of a row"),
        (
            "kRowBytes",
            layout.row_bytes,
            "bytes of a row: "
            + f"{layout.block} channels"
            + ("" if layout.parts == 1 else ", high halves or low ones" if layout.planes == 2 else ", high halves, then low ones"),
        ),
        ("kWeightPartBytes", layout.weight_part, "bytes of W in a stage" if layout.planes == 1 else "bytes of one part of W in a stage"),
        ("kInputPartBytes", layout.input_part, "bytes of x in a stage" if layout.planes == 1 else "bytes of one part of x in a stage"),
        ("kInputTapBytes", layout.input_tap, "bytes from the pixels of a tap to those of the next"),
        ("kStageBytes", layout.stage_bytes, "bytes of a stage"),
        ("kWeightLow", layout.weight_low, "bytes from W's high halves to its low ones"),
        ("kInputLow", layout.input_low, "bytes from x's high halves to its low ones"),
        ("kFetchedBytes", layout.fetched_bytes, "bytes that the copy engine brings for a stage"),
        ("kGroups", layout.steps * layout.halves, "groups of multiplications in a stage: " + ("halves of a tap's channels" if layout.halves == 2 else "taps")),
        ("kHalfBytes", layout.block, "bytes from a group's channels to those of the other half"),
        ("kWeightTapBytes", layout.weight_tap, "bytes of W for a step of K" if layout.runs else "bytes of W for a tap"),
        ("kGroupSteps", layout.group_steps, "multiplications along K in a group"),
        ("kPositions", geometry.gathered, "positions of a sample of x, its padding counted: " + " x ".join(map(str, geometry.grid[3 - geometry.rank:]))),
        ("kPieces", layout.pieces, "runs of x in a stage: of eight channels each" + (", high halves, then low ones" if layout.parts == 2 else "")),
        ("kRunBytes", layout.run_bytes, "bytes of a run of x: those of a tile's positions" + (" and of the kHalo behind them" if geometry.halo else "")),
        ("kWeightLead", layout.tile_channels * PIECE_BYTES, "bytes from eight values of K of W to the next eight"),
        ("kWeightStep", kernel.weight_step >> 4, "from the multiplications of a group to the next ones, in W, in units of 16 bytes"),
        ("kInputStep", kernel.input_step >> 4, "the same in x"),
        ("kHalo", geometry.halo, "pixels behind those of a tile that its taps read"),
        ("kWarpChannels", layout.warp_channels, "channels of y of a warp, of the 16 that it multiplies"),
        ("kRun", layout.run, "results of a channel that a warp turns around at a time"),
        ("kStagedPitch", layout.staged_pitch, "floats from one channel that a warp has staged to the next: its lanes meet no bank twice"),
        ("kStagedAt", stages * layout.stage_bytes, f"offset of the staged sums, {layout.staged_channels} channels x kRun results of each warp"),
        ("kZerosAt", stages * layout.stage_bytes + layout.staged_bytes, "offset of zeros: the x of the partner that a tap lacks"),
        ("kZeros", layout.zeros_bytes // PIECE_BYTES, "pieces of 16 bytes of them"),
        ("kBarriersAt", stages * layout.stage_bytes + layout.staged_bytes + layout.zeros_bytes, "offset of the barriers: full and empty"),
        ("kSharedBytes", kernel.smem_bytes, "bytes of shared memory"),
    ]
    near = (near_constant(),) if layout.form.scaled else ()
    if kernel.restored:
        lost = float_literal(RESTORED.value * layout.block)
        near += (Constant("kLost", lost, "of a sum that the tensor core cuts off on average, for each step of K", "float"),)
    return (*(Constant(name, str(value), why) for name, value, why in rows), *near, *unique_constants(applies(spec, spec.before_norm)))
