"""GroupNorm without pooling: which threads hold which values.

A group of a sample is one contiguous span. Behind a GEMM that left statistics the kernel only applies them; otherwise, by the span's length:

    warp    a few lanes hold a group in registers
    block   a block holds a group in registers
    stream  a block reads a group twice, the second time from the L2 cache
    split   few, long groups: many blocks share one, first for the statistics, then to apply them
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Constant, applies, costly, rounded
from codegen.ir.fused_form import FusedSpec
from codegen.plan.model import Buffer, Kernel, Launch
from codegen.plan.norm.cost import (
    BARRIERS, BARRIER_CYCLES, COSTLY_CYCLES, FLIGHT, LEVEL_CYCLES, SHARED_CYCLES, SHORT_SEGMENT, SPARING_CYCLES,
    VALUE_CYCLES,
)  # fmt: skip
from codegen.plan.shared.values import (
    NormKernel, blocks_within, chain_items, channel_mode, finish_function, launch_arguments, norm_constants,
    prepare_function, register_limit, shape_constants, tensor_names, tensor_types, unique_operands, vector_width,
)  # fmt: skip
from codegen.targets import DeviceClass

WARP_BLOCK = 128  # threads of a block whose groups take no more than a warp
APPLY_BLOCK = 256  # threads of a block that shares a group with others, or applies statistics
MAX_VALUES = 32  # values that a thread holds
CHUNK_VALUES = 16  # values that a thread has in flight where it streams
STREAM_THREADS = 1024
FEW_REGISTERS, MANY_REGISTERS = 48, 96  # of a thread that holds up to CHUNK_VALUES, or more
ELEMENT_REGISTERS = 32  # more, where each value looks for its own channel
SERIAL_PIECES = 8  # up to this many pieces' statistics are merged by every thread for itself
FEW_GROUPS = 2  # for an SM, at most: their threads wait for their own instructions, not for others
SPLIT_BLOCKS = 8  # blocks on an SM that split groups should give work to


@dataclass(frozen=True)
class Residency:
    """`lanes` threads hold a group, `vectors` accesses of `width` values each; `ragged`: the last access is partly beyond the group."""

    lanes: int
    vectors: int
    width: int
    group_vectors: int

    @property
    def ragged(self) -> bool:
        return self.lanes * self.vectors != self.group_vectors


@dataclass(frozen=True, kw_only=True)
class FlatKernel(NormKernel):
    """A kernel over flat spans. `vectors` accesses a thread has in flight; `ragged`: some lie beyond the group; `partial_block`: so do groups."""

    vectors: int
    ragged: bool
    partial_block: bool = False
    cooperative: bool = False
    pitch: int = 0  # values from one sample of the input to the next, where that is not kNumGroups * kGroupSize
    held: bool = False  # a group stays in registers
    fold: Kernel | None = None  # a StageKernel: what folds the row that a group is, in place of writing it

    def device_parameters(self, c_type: str) -> list[str]:
        listed = super().device_parameters(c_type)
        if self.fold is None:
            return listed
        return [*listed[:-1], *self.fold.operand_parameters(c_type, "__restrict__ "), listed[-1]]

    @property
    def functions(self) -> tuple[str, ...]:
        return (*super().functions, *(self.fold.functions if self.fold else ()))

    @property
    def store_widths(self) -> tuple[int, ...]:
        return self.io_widths if self.fold is None else (1,)

    @property
    def uses_channels(self) -> bool:
        return bool(self.operands)

    @property
    def reads_single_values(self) -> bool:
        """Does an access or a parameter take one value at a time?"""
        alone = self.width == 1 and (self.source.itemsize == 2 or self.loads_parameters)
        return alone or bool(self.fold and self.fold.operands) or any(self.channel_mode != "vector" or not operand.per_channel for operand in self.operands)

    @property
    def reads_first_value(self) -> bool:
        """Does the group's first value, which every thread of a block reads, or what is done to it, come as 16 bits?"""
        return self.source.itemsize == 2 or (self.storage.itemsize == 2 and self.prepare is not None and bool(self.prepare.operands))


def residency(spec: FusedSpec, width: int, sms: int = 0) -> Residency | None:
    """The cheapest way to hold a group in registers, `width` values an access, or None if none can.

    The cost weighs what was seen to matter: lanes that do nothing, segments shorter than the 128-byte line, too few accesses in flight to
    hide the memory's latency, registers, and the barriers that a block needs where lanes of a warp do not. Where groups are few for a card of
    `sms` SMs, it is the time that one of them takes.
    """
    few = spec.batch * spec.num_groups <= FEW_GROUPS * sms
    group_vectors = spec.group_size // width
    best: tuple[float, Residency] | None = None
    for lanes in (1, 2, 4, 8, 16, *range(32, 1025, 32)):
        vectors = -(-group_vectors // lanes)
        if vectors * width > min(MAX_VALUES, register_limit(lanes, 1) - _overhead(spec, width)):
            continue
        if few:
            how = Residency(lanes, vectors, width, group_vectors)
            cost = resident_cycles(spec, how)
            if best is None or cost < best[0]:
                best = (cost, how)
            continue
        cost = lanes * vectors / group_vectors
        cost += SHORT_SEGMENT.value * max(0.0, math.log2(128 / (min(lanes, 32) * width * spec.precision.itemsize)))
        cost += FLIGHT.value * abs(math.log2(vectors * width / CHUNK_VALUES))
        cost += BARRIERS.value if lanes > 32 else 0.0
        if best is None or cost < best[0] - 1e-9:
            best = (cost, Residency(lanes, vectors, width, group_vectors))
    return best[1] if best else None


def holder(spec: FusedSpec, sms: int) -> Residency | None:
    """How groups are held in registers, or None: none can be, or so few blocks would hold them, for so long, that a card of `sms` SMs is faster with all of
    them at work."""
    how = residency(spec, access_width(spec), sms)
    crowded = how is not None and 4 * spec.batch * spec.num_groups < sms and resident_cycles(spec, how) > SHARED_CYCLES.value
    return None if crowded else how


def split_groups(spec: FusedSpec, sms: int) -> bool:
    """Whether several blocks share a group that none holds: statistics first, in a kernel of their own."""
    return spec.batch * spec.num_groups < sms and holder(spec, sms) is None


def resident_cycles(spec: FusedSpec, how: Residency) -> float:
    """What a thread that holds its part of a group spends on it, where nothing else runs on its SM."""
    return how.vectors * how.width * _value_cycles(spec) + LEVEL_CYCLES.value * math.log2(min(how.lanes, 32)) + (BARRIER_CYCLES.value if how.lanes > 32 else 0)


def _value_cycles(spec: FusedSpec) -> float:
    """Cycles that a thread spends on a value, the chain's operators one after the other."""
    operators = chain_items(spec, True)
    return VALUE_CYCLES.value + sum(COSTLY_CYCLES.value if costly((item,)) else SPARING_CYCLES.value for item in operators)


def _channel_registers(spec: FusedSpec, width: int) -> int:
    """Registers to find channels: many where (nearly) each value looks for its own."""
    return ELEMENT_REGISTERS if spec.spatial > 1 and (width < 4 or channel_mode(spec.spatial, width) == "element") else 0


def _overhead(spec: FusedSpec, width: int) -> int:
    """Registers that a thread needs beside the values it holds: addresses, an operator's temporaries, parameters."""
    operands = sum(len(step.parameters) for step in spec.chain[1:])
    return 28 + 2 * operands + _channel_registers(spec, width)


def access_width(spec: FusedSpec) -> int:
    """Values of one access: all of one channel where that leaves accesses of at least 8 bytes."""
    width = vector_width(spec.result, spec.group_size)
    uniform = vector_width(spec.result, spec.group_size, spec.spatial)
    return uniform if spec.spatial > 1 and uniform * spec.result.itemsize >= 8 else width


def _shared(spec: FusedSpec, source: str, apply_before: bool, producer_bias: str | None, width: int) -> dict:
    prepare = prepare_function(spec, apply_before, producer_bias)
    finish = finish_function(spec, spec.after_norm, "finish_value", "The norm and the operators after it. __fsub_rn is never fused with a product before it: a value equal to the mean gives 0.")
    operands = unique_operands(prepare, finish)
    names = tensor_names(source)
    return dict(
        input=names[0], output=names[1], operands=operands, applied=chain_items(spec, apply_before), prepare=prepare, finish=finish, width=width,
        io_widths=(width,), channel_mode=channel_mode(spec.spatial, width), groups=spec.batch * spec.num_groups,
        arguments=launch_arguments(source, operands), **tensor_types(spec, source),
    )  # fmt: skip


def _access_constants(spec: FusedSpec, width: int, counted: bool = True) -> list[Constant]:
    """`counted`: the kernel compares with the number of accesses in a group."""
    listed = [Constant("kWidth", str(width), f"values of one access: {width * spec.result.itemsize} bytes{' of the result' if spec.gives else ''}")]
    return listed + [Constant("kGroupVectors", str(spec.group_size // width), "kGroupSize / kWidth")] if counted else listed


def blocks_per_sm(spec: FusedSpec, values: int, width: int, threads: int) -> int:
    """Blocks that fit on an SM when a thread holds `values` values."""
    registers = (FEW_REGISTERS if values <= CHUNK_VALUES else MANY_REGISTERS) + _channel_registers(spec, width)
    return blocks_within(threads, registers)


def resident_kernel(spec: FusedSpec, how: Residency, source: str, apply_before: bool, producer_bias: str | None, pitch: int = 0) -> FlatKernel:
    """A group per `how.lanes` threads, read once and written once; `pitch`: values from one sample of the input to the next, 0 where none lie between."""
    groups = spec.batch * spec.num_groups
    shared = _shared(spec, source, apply_before, producer_bias, how.width)
    warp = how.lanes <= 32
    threads = WARP_BLOCK if warp else how.lanes
    per_block = threads // how.lanes
    blocks = -(-groups // per_block)
    min_blocks = blocks_per_sm(spec, how.vectors * how.width, how.width, threads)
    layout = [Constant("kVectors", str(how.vectors), "accesses of a thread")]
    if pitch:
        if not shared["operands"]:  # which need it themselves
            layout.append(Constant("kNumGroups", str(spec.num_groups), "groups of a sample"))
        layout.append(Constant("kPitch", str(pitch), "values from one sample of the input to the next"))
    if warp:
        layout += [
            Constant("kLanes", str(how.lanes), "threads of a group"),
            Constant("kThreads", str(threads), "threads of a block"),
            Constant("kGroupsPerBlock", str(per_block), "kThreads / kLanes"),
        ]
        if blocks * per_block != groups:
            layout.append(Constant("kGroups", str(groups), f"{spec.batch} samples x kNumGroups"))
        layout.append(Constant("kBlocks", str(blocks), f"{spec.batch} samples x kNumGroups / kGroupsPerBlock" + rounded(blocks * per_block != groups)))
    else:
        layout += [
            Constant("kThreads", str(threads), "threads of a block, which holds a group"),
            Constant("kWarps", str(threads // 32), "kThreads / 32"),
            Constant("kBlocks", str(blocks), f"{spec.batch} samples x kNumGroups"),
        ]
    layout.append(Constant("kMinBlocks", str(min_blocks), "blocks that fit on an SM"))
    holder = f"{how.lanes} lane{'s' if how.lanes > 1 else ''}" if warp else "a block"
    return FlatKernel(
        name="group_norm", template=f"norm/group_norm_{'warp' if warp else 'block'}.cu.j2", entry="group_norm",
        constants=(
            *shape_constants(spec, shared["operands"]), *_access_constants(spec, how.width, how.ragged), *layout, *norm_constants(spec, shared["applied"]),
        ),
        summary=f"GroupNorm and the operators after it; {holder} hold{'s' if not warp or how.lanes == 1 else ''} a group of {spec.group_size} values",
        threads=threads, blocks=blocks, min_blocks=min_blocks, max_registers=register_limit(threads, min_blocks), vectors=how.vectors,
        ragged=how.ragged, pitch=pitch, held=True, partial_block=warp and blocks * per_block != groups, smem_bytes=0 if warp else 3 * threads // 32 * 4, **shared,
    )  # fmt: skip


def stream_kernel(spec: FusedSpec, source: str, apply_before: bool, producer_bias: str | None) -> FlatKernel:
    """A block per group, which it reads twice."""
    width = access_width(spec)
    shared = _shared(spec, source, apply_before, producer_bias, width)
    threads, vectors = STREAM_THREADS, CHUNK_VALUES // width
    group_vectors, chunk = spec.group_size // width, threads * vectors
    layout = [
        Constant("kVectors", str(vectors), "accesses that a thread has in flight"),
        Constant("kThreads", str(threads), "threads of a block, which takes a group"),
        Constant("kWarps", str(threads // 32), "kThreads / 32"),
        Constant("kChunk", str(chunk), "kThreads x kVectors: accesses of a block in flight"),
        Constant("kLastChunk", str((group_vectors - 1) // chunk * chunk), "first access of the group's last chunk"),
        Constant("kBlocks", str(shared["groups"]), f"{spec.batch} samples x kNumGroups"),
        Constant("kMinBlocks", "1", "blocks that must fit on an SM"),
    ]
    return FlatKernel(
        name="group_norm", template="norm/group_norm_stream.cu.j2", entry="group_norm",
        constants=(*shape_constants(spec, shared["operands"]), *_access_constants(spec, width), *layout, *norm_constants(spec, shared["applied"])),
        summary=f"GroupNorm and the operators after it; a block reads a group of {spec.group_size} values twice", threads=threads, blocks=shared["groups"],
        min_blocks=1, max_registers=register_limit(threads, 1), vectors=vectors, ragged=group_vectors % chunk != 0, smem_bytes=threads // 32 * 16,
        **shared,
    )  # fmt: skip


def split_pieces(spec: FusedSpec, device: DeviceClass, width: int) -> tuple[int, int]:
    """(pieces of a group, accesses of a piece) that give every SM work; a piece is a whole number of a block's chunks."""
    chunk = APPLY_BLOCK * (CHUNK_VALUES // width)
    group_vectors = spec.group_size // width
    wanted = -(-device.sms * SPLIT_BLOCKS // (spec.batch * spec.num_groups))
    chunks = -(-group_vectors // chunk)
    piece = -(-chunks // min(wanted, chunks)) * chunk
    return -(-group_vectors // piece), piece


def statistics_kernel(spec: FusedSpec, device: DeviceClass, source: str, apply_before: bool, producer_bias: str | None, buffer: str) -> FlatKernel:
    """Statistics alone: `kPieces` blocks share a group and leave the moments of a piece each in `buffer`."""
    width = access_width(spec)
    pieces, piece_vectors = split_pieces(spec, device, width)
    shared = _shared(spec, source, apply_before, producer_bias, width)
    operands = unique_operands(shared["prepare"])
    shared |= dict(operands=operands, arguments=(source, *(o.key for o in operands), buffer), input="input", output="", statistics="writes")
    shared |= dict(applied=applies(spec, spec.before_norm) if apply_before else (), finish=None)
    threads, vectors = APPLY_BLOCK, CHUNK_VALUES // width
    min_blocks = 3 if width == 1 and spec.spatial > 1 and operands else 4  # a value's own channel takes registers
    blocks = shared["groups"] * pieces
    layout = [
        Constant("kVectors", str(vectors), "accesses that a thread has in flight"),
        Constant("kThreads", str(threads), "threads of a block"),
        Constant("kWarps", str(threads // 32), "kThreads / 32"),
        Constant("kChunk", str(threads * vectors), "kThreads x kVectors: accesses of a block in flight"),
        Constant("kPieceVectors", str(piece_vectors), "accesses of a piece, which a block takes"),
        Constant("kPieces", str(pieces), "kGroupVectors / kPieceVectors, rounded up"),
        Constant("kBlocks", str(blocks), f"{spec.batch} samples x kNumGroups x kPieces"),
        Constant("kMinBlocks", str(min_blocks), "blocks that fit on an SM"),
    ]
    group_vectors = spec.group_size // width
    return FlatKernel(
        name="group_norm_statistics", template="norm/group_norm_statistics.cu.j2", entry="group_norm_statistics",
        constants=(*shape_constants(spec, shared["operands"]), *_access_constants(spec, width), *layout, *norm_constants(spec, shared["applied"])[1:]),
        summary=f"statistics of GroupNorm; {pieces} blocks share a group of {spec.group_size} values", threads=threads, blocks=blocks, min_blocks=min_blocks,
        max_registers=register_limit(threads, min_blocks), vectors=vectors, ragged=group_vectors % (threads * vectors) != 0, smem_bytes=threads // 32 * 16,
        **shared,
    )  # fmt: skip


def apply_kernel(
    spec: FusedSpec, source: str, apply_before: bool, producer_bias: str | None, buffer: str, pieces: int,
) -> FlatKernel:  # fmt: skip
    """The norm and what follows, with the moments of `pieces` pieces of a group in `buffer`."""
    width = access_width(spec)
    shared = _shared(spec, source, apply_before, producer_bias, width)
    group_vectors, groups = spec.group_size // width, shared["groups"]
    cooperative = pieces > SERIAL_PIECES
    how = residency(spec, width)
    if how is not None and how.lanes <= 32:
        lanes, vectors = how.lanes, how.vectors
    else:
        lanes, vectors = APPLY_BLOCK, CHUNK_VALUES // width
    if cooperative and lanes < 32:
        lanes, vectors = 32, -(-group_vectors // 32)
    min_blocks = blocks_per_sm(spec, vectors * width, width, APPLY_BLOCK)
    tiles = -(-group_vectors // (lanes * vectors))
    per_block = APPLY_BLOCK // lanes
    blocks = -(-groups * tiles // per_block)
    partial = blocks * per_block != groups * tiles
    shared |= dict(arguments=(*shared["arguments"], buffer), statistics="reads")
    layout = [
        Constant("kPieces", str(pieces), "pieces of a group with statistics"),
        Constant("kVectors", str(vectors), "accesses of a thread"),
        Constant("kLanes", str(lanes), "threads of a tile"),
        Constant("kTileVectors", str(lanes * vectors), "kLanes x kVectors"),
        Constant("kTiles", str(tiles), "tiles of a group: kGroupSize / kWidth / kTileVectors" + rounded(tiles * lanes * vectors != group_vectors)),
        Constant("kThreads", str(APPLY_BLOCK), "threads of a block"),
        Constant("kTilesPerBlock", str(per_block), "kThreads / kLanes"),
        *([Constant("kGroups", str(groups), f"{spec.batch} samples x kNumGroups")] if partial else []),
        Constant("kBlocks", str(blocks), f"{spec.batch} samples x kNumGroups x kTiles / kTilesPerBlock" + rounded(partial)),
        Constant("kMinBlocks", str(min_blocks), "blocks that fit on an SM"),
    ]
    ragged = tiles * lanes * vectors != group_vectors
    return FlatKernel(
        name="group_norm", template="norm/group_norm_apply.cu.j2", entry="group_norm",
        constants=(*shape_constants(spec, shared["operands"]), *_access_constants(spec, width, ragged), *layout, *norm_constants(spec, shared["applied"])),
        summary=f"GroupNorm and the operators after it, with statistics of {pieces} piece{'s' if pieces > 1 else ''} of a group merged", threads=APPLY_BLOCK,
        blocks=blocks, min_blocks=min_blocks, max_registers=register_limit(APPLY_BLOCK, min_blocks), vectors=vectors, ragged=ragged,
        partial_block=partial, cooperative=cooperative, **shared,
    )  # fmt: skip


def plan_statistics(spec: FusedSpec, device: DeviceClass, source: str, apply_before: bool, producer_bias: str | None) -> tuple[Launch, Buffer, int]:
    """Statistics by many blocks a group, the buffer that they fill, and the pieces of a group in it."""
    pieces, _ = split_pieces(spec, device, access_width(spec))
    buffer = Buffer("norm_statistics", bytes=16 * spec.batch * spec.num_groups * pieces)
    return Launch(statistics_kernel(spec, device, source, apply_before, producer_bias, buffer.name)), buffer, pieces


def plan_split(spec: FusedSpec, device: DeviceClass, source: str, apply_before: bool, producer_bias: str | None) -> tuple[tuple[Launch, ...], Buffer]:
    """Statistics by many blocks a group, then a kernel that applies them; the buffer between the two."""
    first, buffer, pieces = plan_statistics(spec, device, source, apply_before, producer_bias)
    return (first, Launch(apply_kernel(spec, source, apply_before, producer_bias, buffer.name, pieces))), buffer
