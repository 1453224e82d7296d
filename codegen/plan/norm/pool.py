"""GroupNorm and max pooling behind a convolution, without the normalised tensor.

    one read    every operator between the norm and the pool rises or falls with its input: a window's largest or smallest value before the norm
                decides, so one read gives the statistics and one value of each window, which wait in shared memory
    two reads   otherwise: statistics, then windows of normalised values, from the caches
    split       few, long groups: the same two, each in a kernel in which many blocks share a group
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Constant, applies
from codegen.ir.fused_form import FusedSpec
from codegen.ir.window import COLUMNS, ROWS, Window, window_of
from codegen.plan.model import Buffer, Launch
from codegen.plan.norm.flat import SPLIT_BLOCKS, plan_statistics
from codegen.plan.shared.values import (
    NormKernel, LoadedOperand, ValueFunction, blocks_within, chain_items, channel_mode, finish_function, follow_function,
    launch_arguments, norm_constants, prepare_function, register_limit, shape_constants,
    share_constants, shares, tensor_names, tensor_types, unique_operands, vector_width,
)  # fmt: skip
from codegen.plan.shared.windows import Direction, direction
from codegen.spec import Step
from codegen.targets import DeviceClass, Target

CHUNK_VALUES = 16  # values that a thread has in flight where it streams
CHUNK_BYTES = 64  # bytes that a lane has in flight for the statistics
FEW_REGISTERS, MANY_REGISTERS = 64, 80  # of a thread, the latter where the operators before the norm run on every value of a window
BAND_BYTES = 1000  # a warp should ask the memory for at least this much at once; twice that was slower
UNROLLED_WINDOW = 16  # values of a window that are read at once
LANE_SHARE = 0.75  # of a warp's lanes should find a window in a band
REDUCTION_BYTES = 32 * 16  # moments of a block's warps
LONG_BYTES = 256 * 1024  # of a group that a block alone takes as long to read as two launches
SPLIT_THREADS = 256


@dataclass(frozen=True, kw_only=True)
class PoolKernel(NormKernel):
    """A kernel that pools.

    `direction` is a C expression of 1 or -1, `prepared` the operands of `prepare`, which may commute with the pool (`prepare_rises`);
    `channel_values` is what a channel needs, `chunks` the loads that a lane's share of a band takes.
    """

    vectors: int
    ragged: bool
    padding: tuple[int, int]
    dilation: tuple[int, int]
    guard_rows: bool
    guard_columns: bool
    unroll_windows: bool
    unroll_rows: bool
    unroll_band: bool
    channel_values: tuple[LoadedOperand, ...]
    prepared: tuple[LoadedOperand, ...] = ()
    direction: str = ""
    guard_bands: bool = False
    chunks: int = 1
    prepare_rises: bool = False
    store_widths: tuple[int, ...] = (1,)
    follow: ValueFunction | None = None

    @property
    def uses_channels(self) -> bool:
        """Does the kernel need the group's first channel?"""
        vectors = self.prepare if self.direction == "" else self.finish
        return any(operand.per_channel for operand in self.channel_values) or bool(vectors and vectors.operands)

    @property
    def reads_single_values(self) -> bool:
        """Does an access or a parameter take one value at a time, in the kernel of one read?"""
        alone = any(self.channel_mode != "vector" or not operand.per_channel for operand in self.finish.operands)
        return alone or 1 in self.io_widths or bool(self.channel_values)

    @property
    def prepared_parameters(self) -> list[str]:
        return [f"float {operand.value}" for operand in self.prepared]


def _window_constants(window: Window, rows_compared: bool) -> list[Constant]:
    """`rows_compared`: the kernel compares with the number of pooled rows."""
    output = " x ".join(str(size) for size in window.output[ROWS:])
    listed = [
        *([Constant("kHeight", str(window.input[ROWS]), "rows of a plane")] if window.clipped(ROWS) else []),
        Constant("kRow", str(window.input[COLUMNS]), "values of a row"),
        *([Constant("kPooledHeight", str(window.output[ROWS]), "rows of a pooled plane")] if rows_compared else []),
        Constant("kPooledRow", str(window.output[COLUMNS]), "values of a pooled row"),
        Constant("kPooledPlane", str(math.prod(window.output)), f"{output} results of a channel"),
        Constant("kPooledSize", "kGroupChannels * kPooledPlane", "results of a group"),
    ]
    for axis, name in ((ROWS, "Height"), (COLUMNS, "Width")):
        listed.append(Constant(f"kWindow{name}", str(window.size[axis]), "max_pool2d's kernel_size"))
        listed.append(Constant(f"kStride{name}", str(window.stride[axis]), "max_pool2d's stride"))
        if window.padding[axis]:
            listed.append(Constant(f"kPadding{name}", str(window.padding[axis]), "max_pool2d's padding"))
        if window.dilation[axis] > 1:
            listed.append(Constant(f"kDilation{name}", str(window.dilation[axis]), "max_pool2d's dilation"))
    return listed


def _split_at_pool(spec: FusedSpec) -> tuple[tuple[Step, ...], Step, tuple[Step, ...]]:
    (before, after), (pool,) = spec.runs, spec.pools
    return before, pool, after


def _plane(window: Window) -> dict[str, object]:
    """How windows lie in a plane, as kernels are told."""
    return dict(
        padding=window.padding[ROWS:], dilation=window.dilation[ROWS:], guard_rows=window.clipped(ROWS), guard_columns=window.clipped(COLUMNS),
    )  # fmt: skip


def _unrolled(window: Window, rows: int) -> dict[str, bool]:
    """Which loops are short enough to be unrolled: over a window, over its row, over the windows of a lane in a band of `rows`."""
    return dict(
        unroll_windows=math.prod(window.size) <= UNROLLED_WINDOW, unroll_rows=window.size[COLUMNS] <= UNROLLED_WINDOW,
        unroll_band=rows * window.output[COLUMNS] <= 64,
    )  # fmt: skip


def band_rows(window: Window, itemsize: int) -> int:
    """Pooled rows of a band: the fewest that keep LANE_SHARE of a warp's lanes and the memory busy, or those that keep most lanes busy."""
    shares = {}
    for rows in range(1, min(window.output[ROWS], 32) + 1):
        count = rows * window.output[COLUMNS]
        shares[rows] = count / (32 * -(-count // 32))
        if shares[rows] >= LANE_SHARE and rows * window.stride[ROWS] * window.input[COLUMNS] * itemsize >= BAND_BYTES:
            return rows
    return max(shares, key=lambda rows: (shares[rows], -rows))


def plan_pool(
    spec: FusedSpec, target: Target, device: DeviceClass, source: str, apply_before: bool, producer_bias: str | None,
) -> tuple[tuple[Launch, ...], tuple[Buffer, ...], str]:  # fmt: skip
    """The kernels for a chain with one max_pool2d behind the norm, the buffers between them, and why it is those."""
    before_pool, pool, _ = _split_at_pool(spec)
    window = window_of(pool)
    rising = direction(spec, before_pool)
    extremes = 4 * spec.group_channels * math.prod(window.output)
    groups = spec.batch * spec.num_groups
    if groups < device.sms and spec.group_size * spec.precision.itemsize >= LONG_BYTES:
        first, buffer, pieces = plan_statistics(spec, device, source, apply_before, producer_bias)
        second = _windows(spec, device, window, source, apply_before, producer_bias, buffer.name, pieces)
        why = f"{groups} group{'s' if groups > 1 else ''} of {spec.group_size} values leave SMs idle, so several blocks share a group: statistics first, then windows of normalised values"
        return (first, Launch(second)), (buffer,), why
    if rising is None:
        why = "two reads: an operator between the norm and the pool neither rises nor falls everywhere, so each value is normalised before it is pooled"
    elif window.sees_nothing:
        why = "two reads: some pooling windows see padding alone"
    elif extremes + REDUCTION_BYTES > target.smem_bytes:
        why = f"two reads: the {extremes} bytes of a group's pooled values do not fit into shared memory"
    else:
        kernel = _one_read(spec, window, rising, extremes, source, apply_before, producer_bias)
        why = "one read: the sign of a channel's factors decides whether a window's largest or smallest value counts, before the statistics are known"
        return (Launch(kernel),), (), why
    return (Launch(_two_reads(spec, window, source, apply_before, producer_bias)),), (), why


def _one_read(spec: FusedSpec, window: Window, rising: Direction, extremes: int, source: str, apply_before: bool, producer_bias: str | None) -> PoolKernel:
    prepare = prepare_function(spec, apply_before, producer_bias)
    finish = finish_function(
        spec, spec.after_norm, "finish_value", "The norm and the operators after it, for the value that the pool keeps."
    )
    rows = band_rows(window, spec.precision.itemsize)
    plane, band_values = spec.spatial, rows * window.stride[ROWS] * window.input[COLUMNS]
    bands = max(-(-plane // band_values), -(-window.output[ROWS] // rows))
    width = vector_width(spec.precision, plane, band_values)
    lane_vectors = -(-band_values // (32 * width))
    rises = all(item.monotone for item in applies(spec, spec.before_norm))
    chunk_values = CHUNK_BYTES // spec.precision.itemsize if rises else CHUNK_VALUES
    chunks = -(-lane_vectors * width // chunk_values)
    vectors = -(-lane_vectors // chunks)
    apart = window.clipped(COLUMNS) or window.dilation[COLUMNS] > 1
    access = 1 if apart else vector_width(spec.precision, window.size[COLUMNS], window.stride[COLUMNS], window.input[COLUMNS])
    pooled = spec.group_channels * math.prod(window.output)
    pooled_width = vector_width(spec.result, pooled)
    tasks = spec.group_channels * bands
    warps = 16 if extremes > 24 * 1024 else 8
    threads = 32 * min(warps, 1 << (tasks - 1).bit_length())
    min_blocks = min(blocks_within(threads, FEW_REGISTERS if rises else MANY_REGISTERS), 16)
    dynamic = extremes + REDUCTION_BYTES > 48 * 1024
    groups = spec.batch * spec.num_groups
    prepared = prepare.operands if prepare else ()
    items = chain_items(spec, apply_before)
    guard_bands = bands * rows != window.output[ROWS]
    constants = [
        *shape_constants(spec),
        *_window_constants(window, guard_bands),
        Constant("kBandRows", str(rows), "pooled rows of a band, which a warp takes"),
        Constant("kBands", str(bands), "bands of a plane; the last may be short"),
        Constant("kWidth", str(width), f"values of one access for the statistics: {width * spec.precision.itemsize} bytes"),
        Constant("kBandVectors", str(band_values // width), "kBandRows x kStrideHeight x kRow / kWidth"),
        Constant("kPlaneVectors", str(plane // width), "kPlane / kWidth"),
        Constant("kVectors", str(vectors), "accesses that a lane has in flight"),
        *([Constant("kBandChunks", str(chunks), "chunks of a band")] if chunks > 1 else []),
        Constant("kWindowAccess", str(access), f"values of one access to a window: {access * spec.precision.itemsize} bytes"),
        Constant("kPooledWidth", str(pooled_width), "results that a thread stores at once"),
        Constant("kThreads", str(threads), "threads of a block, which takes a group"),
        Constant("kWarps", str(threads // 32), "kThreads / 32"),
        Constant("kBlocks", str(groups), f"{spec.batch} samples x kNumGroups"),
        Constant("kMinBlocks", str(min_blocks), "blocks that fit on an SM"),
    ]
    if dynamic:
        constants.append(Constant("kSharedBytes", str(extremes), "4 x kPooledSize"))
    operands = unique_operands(prepare, finish)
    names = tensor_names(source)
    return PoolKernel(
        name="group_norm_pool", template="norm/group_norm_pool.cu.j2", entry="group_norm_pool", arguments=launch_arguments(source, operands),
        constants=(*constants, *norm_constants(spec, items)),
        summary=f"GroupNorm, max pool and the operators after them in one read; a block takes a group of {spec.group_size} values",
        smem_bytes=extremes + threads // 32 * 16,
        max_registers=register_limit(threads, min_blocks), threads=threads, blocks=groups, input=names[0], output=names[1], operands=operands,
        applied=items, prepare=prepare, finish=finish, width=width, io_widths=tuple(sorted({width, access, *_parameter_width(pooled_width, window)})),
        store_widths=(pooled_width,), channel_mode=channel_mode(math.prod(window.output), pooled_width), groups=groups, min_blocks=min_blocks,
        **tensor_types(spec, source), vectors=vectors, ragged=True, **_plane(window), **_unrolled(window, rows),
        channel_values=unique_operands(ValueFunction("", "", (), (*prepared, *rising.factors))),
        prepared=prepared, direction=rising.expression, guard_bands=guard_bands, chunks=chunks,
        prepare_rises=rises,
    )  # fmt: skip


def _parameter_width(pooled_width: int, window: Window) -> tuple[int, ...]:
    """The widths at which parameters are loaded: vectors of them where each pooled value is a channel of its own."""
    return (pooled_width,) if math.prod(window.output) == 1 else ()


def _two_reads(spec: FusedSpec, window: Window, source: str, apply_before: bool, producer_bias: str | None) -> PoolKernel:
    before_pool, _, after_pool = _split_at_pool(spec)
    prepare = prepare_function(spec, apply_before, producer_bias)
    finish = finish_function(spec, before_pool, "normalise_value", "The norm and the operators up to the pool. __fsub_rn is never fused with a product before it: a value equal to the mean gives 0.")
    follow = follow_function(spec, after_pool, "follow_value", "The operators after the pool.")
    width = vector_width(spec.precision, spec.group_size)
    uniform = vector_width(spec.precision, spec.group_size, spec.spatial)
    width = uniform if uniform * spec.precision.itemsize >= 8 else width
    group_bytes = spec.group_size * spec.precision.itemsize
    threads = 512 if group_bytes >= 32 * 1024 else 256
    min_blocks = blocks_within(threads, MANY_REGISTERS)
    vectors = max(1, CHUNK_VALUES // width)
    group_vectors, groups = spec.group_size // width, spec.batch * spec.num_groups
    items = chain_items(spec, apply_before)
    operands = unique_operands(prepare, finish, follow)
    names = tensor_names(source)
    constants = (
        *shape_constants(spec),
        *_window_constants(window, False),
        Constant("kWidth", str(width), f"values of one access for the statistics: {width * spec.precision.itemsize} bytes"),
        Constant("kGroupVectors", str(group_vectors), "kGroupSize / kWidth"),
        Constant("kVectors", str(vectors), "accesses that a thread has in flight"),
        Constant("kThreads", str(threads), "threads of a block, which takes a group"),
        Constant("kWarps", str(threads // 32), "kThreads / 32"),
        Constant("kChunk", str(threads * vectors), "kThreads x kVectors: accesses of a block in flight"),
        Constant("kBlocks", str(groups), f"{spec.batch} samples x kNumGroups"),
        Constant("kMinBlocks", str(min_blocks), "blocks that fit on an SM"),
    )
    return PoolKernel(
        name="group_norm_pool", template="norm/group_norm_pool_stream.cu.j2", entry="group_norm_pool", arguments=launch_arguments(source, operands),
        constants=(*constants, *norm_constants(spec, items)),
        summary=f"GroupNorm, max pool and the operators after them in two reads; a block takes a group of {spec.group_size} values", smem_bytes=threads // 32 * 16,
        max_registers=register_limit(threads, min_blocks), threads=threads, blocks=groups, input=names[0], output=names[1], operands=operands,
        applied=items, prepare=prepare, finish=finish, follow=follow, width=width, io_widths=(width,), channel_mode=channel_mode(spec.spatial, width),
        groups=groups, min_blocks=min_blocks, **tensor_types(spec, source), vectors=vectors, ragged=group_vectors % (threads * vectors) != 0,
        **_plane(window), **_unrolled(window, 1), channel_values=operands,
    )  # fmt: skip


def _windows(
    spec: FusedSpec, device: DeviceClass, window: Window, source: str, apply_before: bool, producer_bias: str | None, buffer: str, pieces: int,
) -> PoolKernel:  # fmt: skip
    """The second of two reads: windows of normalised values, with the moments of `pieces` pieces of a group in `buffer`."""
    alone = _two_reads(spec, window, source, apply_before, producer_bias)
    results = spec.group_channels * math.prod(window.output)
    slices, share = shares(results, SPLIT_THREADS, -(-device.sms * SPLIT_BLOCKS // alone.groups))
    min_blocks = blocks_within(SPLIT_THREADS, MANY_REGISTERS)
    constants = (
        *shape_constants(spec),
        *_window_constants(window, False),
        Constant("kPieces", str(pieces), "pieces of a group with statistics"),
        *share_constants(slices, share),
        Constant("kThreads", str(SPLIT_THREADS), "threads of a block"),
        Constant("kWarps", str(SPLIT_THREADS // 32), "kThreads / 32"),
        Constant("kBlocks", str(alone.groups * slices), f"{spec.batch} samples x kNumGroups x kSlices"),
        Constant("kMinBlocks", str(min_blocks), "blocks that fit on an SM"),
    )
    return replace(
        alone, arguments=(*alone.arguments, buffer), statistics="reads", constants=(*constants, *norm_constants(spec, alone.applied)),
        summary=f"GroupNorm, max pool and the operators after them, with statistics of {pieces} pieces of a group merged; {slices} blocks share a group of {spec.group_size} values",
        threads=SPLIT_THREADS, blocks=alone.groups * slices, min_blocks=min_blocks, max_registers=register_limit(SPLIT_THREADS, min_blocks), io_widths=(),
        smem_bytes=SPLIT_THREADS // 32 * 16,
    )  # fmt: skip
