"""How a convolution chain is cut for Hopper: tiles, strips, parts, shared memory and warpgroups. Arithmetic only, no text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.plan.shared.windows import Windows, ceil_div, ceil_to
from codegen.targets import DeviceClass, Target

ROWS_A = 64  # of the instruction's result: output channels
MAX_TILE = 128  # pixels of a tile: 64 accumulators a thread
WARPGROUP = 128
PIXEL_BYTES = 16  # 8 channels of 16 bits
MOMENTS_BYTES = 16
SAMPLE_COST = 1  # strips
# How cuts are compared, each rule where those before it leave several. Behind the first: the converting warpgroup works on a chunk for about 1000
# cycles whatever its length, multiplying warpgroups spend more of their time on waiting than on issuing.
PREFERENCE = "least rounds x (strips + 1), x by the copy engine, more multiplying warpgroups, longer chunks, more bytes on their way, smaller clusters"
# Chunks of x that the copy engine has on their way, and pixels of a chunk for each converting thread. (0, 0): through registers.
RAW_STAGES = ((4, 4), (3, 4), (2, 4), (4, 2), (3, 2), (2, 2), (0, 0))
COEFFICIENTS_BYTES = 16
# Warpgroups that multiply, registers of a multiplying and of a converting thread (multiples of 8, at most 512 in all), and the pixels of 8
# channels that a converting thread has in flight. The first of a number of warpgroups that suffices is taken.
REGISTERS = ((3, 144, 80, 3), (3, 152, 56, 2), (2, 208, 88, 4), (2, 224, 56, 2))
OVERHEAD = {False: 32, True: 42}  # registers beside accumulators, extremes and weights (as ptxas allots them); True: two walks over a tile
CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15}  # cluster size -> clusters of one CTA per SM that fit (measured on H100 and H200)


@dataclass(frozen=True)
class Layout:
    """What may be chosen: CTAs of a cluster, multiplying warpgroups of a CTA, and whether the copy engine brings x to shared memory first."""

    cluster: int
    warpgroups: int
    bulk: bool = True


@dataclass(frozen=True)
class Geometry:
    """One CTA's work. A strip is the conv rows of one pooled row; a part is the strips of one sample that a CTA of the cluster takes.

    Sizes in pixels unless named otherwise: `pitch` of a row in shared memory (with zero columns for the padding), `tile_columns` x `tile_rows`
    of one accumulator tile, `tile` of both. Moments of `merged` channels of a group meet in a warp. `turns`: two
    warpgroups multiply in turn. `fold` columns of a window meet in registers, `folds` such pieces when it is written.
    """

    layout: Layout
    channels: int
    channel_tiles: int
    octets: int
    parts: int
    pitch: int
    column_tiles: int
    tile_columns: int
    tile_rows: int
    fold: int
    folds: int
    entries: int
    strips: int
    units: int
    ring: int
    repeats: int
    chunk: int
    strip_barriers: int
    items: int
    clusters: int
    channel_floats: int
    constants: bool
    turns: bool
    merged: int
    pixels_at_once: int
    raw_stages: int
    raw_stage_bytes: int
    multiply_registers: int
    convert_registers: int

    @property
    def tile(self) -> int:
        return self.tile_columns * self.tile_rows

    @property
    def plane(self) -> int:
        """Pixels of one plane: the ring and the rows that it repeats."""
        return (self.ring + self.repeats) * self.pitch

    @property
    def planes(self) -> int:
        return self.octets * self.parts

    @property
    def slot_pitch(self) -> int:
        """Values between two channels of a strip's extremes: odd, so that channels fall into different banks."""
        return self.entries | 1

    @property
    def slot_values(self) -> int:
        return self.channels * self.slot_pitch

    @property
    def operand_bytes(self) -> int:
        return self.planes * self.plane * PIXEL_BYTES

    @property
    def constants_bytes(self) -> int:
        return max(self.tile, 16) * PIXEL_BYTES if self.constants else 0

    @property
    def slots_bytes(self) -> int:
        return ceil_to(self.units * self.slot_values * 4, 16)

    @property
    def raw_bytes(self) -> int:
        """Rows of x on their way, as they lie in memory."""
        return self.raw_stages * self.raw_stage_bytes

    @property
    def row_threads(self) -> int:
        """Threads that write a row of y together: those that leave fewest idle, the more the better."""
        width = self.entries // self.folds
        return min((32, 16, 8), key=lambda count: (ceil_to(width, count), -count))

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the source, at most."""
        groups, cluster = self.layout.warpgroups, self.layout.cluster
        fixed = groups * (self.channels * COEFFICIENTS_BYTES + ROWS_A * ceil_to(self.channel_floats * 4, 16))
        fixed += 2 * self.channels // self.merged * cluster * groups * MOMENTS_BYTES
        return ceil_to(fixed + 8 * (self.ring + self.strip_barriers + 2 + self.raw_stages) + 8 * self.items + 16, 16)

    @property
    def passing_bytes(self) -> int:
        """What lies before the struct Shared: planes, slots, rows of x. The exact route's moments, a thread each, take its place."""
        return max(self.operand_bytes + self.constants_bytes + self.slots_bytes + self.raw_bytes, self.layout.warpgroups * WARPGROUP * MOMENTS_BYTES)

    @property
    def smem_bytes(self) -> int:
        return self.passing_bytes + self.shared_bytes

    @property
    def threads(self) -> int:
        return (self.layout.warpgroups + 1) * WARPGROUP

    def sure_octets(self, width: int) -> int:
        """The largest power of two of 8 columns that exist in every tile of rows of `width`, at most 4; 0 where there are none."""
        octets = min(self.tile_columns, width - (self.column_tiles - 1) * self.tile_columns) // 8
        return next((count for count in (4, 2, 1) if count <= octets), 0)

    @property
    def tile_values(self) -> int:
        """Accumulators of a thread."""
        return self.tile // 2

    @property
    def strips_computed(self) -> int:
        """Strips that the busiest CTA computes, nearly what the time is proportional to."""
        return self.items * self.units

    @property
    def cost(self) -> int:
        """The time in strips: every sample also costs a start and an exchange of statistics."""
        return self.items * (self.units + SAMPLE_COST)


def largest_divisor(whole: int, limit: int) -> int:
    """The largest divisor of `whole` that is at most `limit`."""
    return max(d for d in range(1, limit + 1) if whole % d == 0)


def fold_of(width: int) -> int:
    """Columns of a pooling window that meet in registers: two neighbours in a lane, then lanes 1 and 2 apart."""
    return next(fold for fold in (8, 4, 2, 1) if width % fold == 0)


def channel_tile(spec: FusedSpec) -> int | None:
    """Output channels of a CTA: whole groups, at most ROWS_A, the same number in every tile; None where a group is wider."""
    counts = (count for count in range(1, spec.channels + 1) if spec.channels % count == 0)
    tiles = (spec.channels // count for count in counts)
    return next((tile for tile in tiles if tile <= ROWS_A and tile % spec.group_channels == 0), None)


def registers_needed(tile: int, tile_columns: int, fold: int, taps: int, parts: int, two_walks: bool) -> int:
    """Registers of a multiplying thread, about: accumulators, extremes, weights (and some while they are loaded), the rest."""
    return tile // 2 + tile_columns // 4 * (1 if fold > 1 else 2) + 5 * taps * parts // 2 + 2 + OVERHEAD[two_walks]


def candidates(
    spec: FusedSpec, device: DeviceClass, windows: Windows, parts: int, two_walks: bool, channels: int, channel_floats: int,
) -> Iterator[Geometry]:  # fmt: skip
    """Every way to cut the chain whose registers suffice, whatever its shared memory."""
    values = spec.producer.values
    height, width = spec.norm.input_shape[2:]
    kernel, padding = values["kernel_size"], values["padding"]
    pitch = ceil_to(spec.input_shape[3] + 2 * padding[1], 8)
    octets = ceil_div(spec.input_shape[1], 8)
    column_tiles = ceil_div(width, MAX_TILE)
    tile_rows, tile_columns = 1, ceil_to(ceil_div(width, column_tiles), 8)
    if column_tiles == 1:
        options = [r for r in range(1, windows.size[0] + 1) if windows.size[0] % r == 0 and height % r == 0 and r * pitch <= MAX_TILE]
        tile_rows = max(options, default=1)
        tile_columns = pitch if tile_rows > 1 else tile_columns
    fold = fold_of(windows.size[1])
    folds = windows.size[1] // fold
    strips = ceil_div(height, windows.size[0])
    taps = octets * kernel[0] * kernel[1]
    needed = (6 if column_tiles > 1 else 0) + registers_needed(tile_rows * tile_columns, tile_columns, fold, taps, parts, two_walks)
    merged = max(count for count in (1, 2, 4, 8) if spec.group_channels % count == 0)
    taken: set[int] = set()
    for warpgroups, registers, convert, in_flight in REGISTERS:
        if needed > registers or warpgroups in taken:
            continue
        taken.add(warpgroups)
        for size, fit in CLUSTERS.items():
            fit = fit * device.sms // 132
            tiles = spec.channels // channels
            if size > strips or fit < tiles:
                continue
            units = ceil_div(strips, size)
            if units * (size - 1) >= strips:
                continue  # the last part would be empty
            items = ceil_div(spec.batch, fit // tiles)
            halo = kernel[0] - 1
            row_bytes = spec.input_shape[3] * spec.precision.itemsize
            for stages, bulk_pixels in RAW_STAGES if row_bytes % 16 == 0 else ((0, 0),):
                # Checks beside the loads take registers too: then fewer pixels are in flight.
                guarded = padding != (0, 0) or spec.input_shape[1] % 8 != 0 or octets > 1
                at_once = in_flight // (2 if guarded else 1)
                pixels = bulk_pixels if stages else at_once
                chunk = max(1, min(pixels * WARPGROUP // spec.input_shape[3], 16))
                ring = warpgroups * windows.size[0] + (warpgroups // units + 1) * halo + chunk
                # Each needs the other's next rows in the ring beside its own; strips must fall to them in equal numbers.
                reach = windows.size[0] + halo
                turns = parts == 2 and warpgroups == 2 and units % 2 == 0 and ring >= reach + ceil_to(reach, chunk)
                yield Geometry(
                    layout=Layout(size, warpgroups, stages > 0), channels=channels, channel_tiles=tiles, octets=octets, parts=parts, pitch=pitch,
                    column_tiles=column_tiles, tile_columns=tile_columns, tile_rows=tile_rows, fold=fold, folds=folds,
                    entries=windows.output[1] * folds, strips=strips, units=units, ring=ring, repeats=tile_rows + halo - 1, chunk=chunk,
                    strip_barriers=ceil_div(ring, windows.size[0]) + 3, items=items, clusters=ceil_div(spec.batch, items) * tiles,
                    channel_floats=channel_floats, constants=not two_walks or (parts == 1 and taps % 2 == 1), turns=turns, merged=merged,
                    pixels_at_once=largest_divisor(pixels, at_once), raw_stages=stages, raw_stage_bytes=spec.input_shape[1] * chunk * row_bytes,
                    multiply_registers=registers, convert_registers=convert,
                )  # fmt: skip


def fitting(listed: list[Geometry], target: Target) -> list[Geometry]:
    """Those that fit, the fastest first: see PREFERENCE."""
    able = [g for g in listed if g.smem_bytes <= target.smem_bytes]
    return sorted(able, key=lambda g: (g.cost, not g.layout.bulk, -g.layout.warpgroups, -g.chunk * g.layout.bulk, -g.raw_bytes, g.layout.cluster))
