"""How a convolution chain is cut for mma.sync: a warp's tile, a block's part of a sample, shared memory and registers. Arithmetic only, no text.

A warp multiplies 16 or 32 output channels, whose weights stay in its registers, by 16 or 32 pixels (a tile) at a time. A unit is a tile's columns in the conv
rows of one pooled row (a strip); a part is the strips of one sample whose rows of x a block holds in shared memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.plan.shared.values import REGISTERS_PER_SM
from codegen.plan.shared.windows import Windows, ceil_div, ceil_to
from codegen.targets import DeviceClass, Target

WARP = 32
TILE_SHAPES = ((1, 32), (2, 16), (4, 8), (1, 16), (2, 8))  # rows x columns of a warp's tile
ROWS_A = 16  # of the instruction's left operand: output channels
WARPS = 4  # of a block, at most
MAX_STRIPS = 16
PIXEL_BYTES = 16  # 8 channels of 16 bits
MOMENTS_BYTES = 16
REGISTERS = (128, 168, 255)  # of a thread, of which 4, 3 or 2 blocks of WARPS warps fit on an SM
# Registers beside weights, accumulators, extremes, sums and pixels, as ptxas allots them; more for tiles of several rows, for windows of an odd width
# and for a padded x.
OVERHEAD, TALL, NARROW, PADDED = 28, 10, 10, 8
# What ptxas was seen to miss where weights are many, for each instruction of them, or where few pixels meet two tiles of them. Where nothing but fewer
# registers than needed would be left, some are spilled.
CROWDED, MANY_WEIGHTS, TWO_TILES = 1.4, 12, 14
# The same for each tile of weights: the scales and the route in fp32 for values beyond fp16's range, the second round for squares beyond fp32's. That round
# takes UNSURE more where every column may be missing from some tile: what says which are there is kept for it.
RARE = {"fp32": 12, "tf32": 12, "bf16": 3, "fp16": 0}
UNSURE = 32
LOADS = 5  # pixels of 8 channels that a thread has on their way, at most
LOADING = {"fp32": 60, "tf32": 76, "bf16": 60, "fp16": 60}  # registers beside those and the weights meanwhile, as ptxas allots them
UNIT_COST = 16  # pixels whose multiplication takes as long as a unit's end: moments and extremes to shared memory
# Share of a part's time, for each row of x over its conv rows, that bringing the rows takes: by the parts of an operand, whose products take longer.
STARTING = {1: 0.3, 2: 0.15}
FEW_BLOCKS = (2.0, 1.5, 1.03, 1.0)  # by the blocks of an SM: how much longer it takes when few of them cover each other's waiting


@dataclass(frozen=True)
class Geometry:
    """One block's work. Sizes in pixels unless named otherwise.

    `used_columns` of a tile's `tile_columns` belong to it: whole windows. `fold` columns of a window meet in a lane. `strips` of a sample come
    `part_strips` at a time. A plane holds 8 input channels of a part's rows, `pitch` pixels each, and `slack` that the last tile reads beyond them.
    """

    channel_warps: int
    column_warps: int
    row_tiles: int
    channel_tiles: int
    channel_floats: int
    octets: int
    taps: int
    parts: int
    pitch: int
    slack: int
    tile_rows: int
    tile_columns: int
    used_columns: int
    column_tiles: int
    fold: int
    window_rows: int
    row_stride: int
    reach: int  # rows of x that one conv row reads, first to last
    strips: int
    part_strips: int
    weight_bytes: int
    noted_bytes: int  # room for what a warp notes of x
    loading: int  # registers beside the weights and the pixels on their way
    blocks_per_sm: int
    max_registers: int

    @property
    def channels(self) -> int:
        """Output channels of a block, the last of which may not exist."""
        return self.channel_warps * self.row_tiles * ROWS_A

    @property
    def tile(self) -> int:
        return self.tile_rows * self.tile_columns

    @property
    def warps(self) -> int:
        return self.channel_warps * self.column_warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def sample_parts(self) -> int:
        return ceil_div(self.strips, self.part_strips)

    @property
    def part_rows(self) -> int:
        """Rows of x that a part needs."""
        return (self.part_strips * self.window_rows - 1) * self.row_stride + self.reach

    @property
    def units(self) -> int:
        return self.part_strips * self.column_tiles

    @property
    def plane(self) -> int:
        return self.part_rows * self.pitch + self.slack

    @property
    def planes(self) -> int:
        return self.octets * self.parts

    @property
    def pieces(self) -> int:
        """Extremes of a channel in a unit, before those of one window meet."""
        return self.used_columns // self.fold

    @property
    def piece_pitch(self) -> int:
        """Values between two channels of a unit's extremes: odd, so that channels fall into different banks."""
        return self.tile_columns // self.fold | 1

    @property
    def halves(self) -> int:
        """Halves of an instruction's K: a filter tap of 8 input channels each."""
        return self.octets * self.taps

    @property
    def steps(self) -> int:
        """Instructions along K for each product: two filter taps of 8 input channels each."""
        return ceil_div(self.halves, 2)

    @property
    def many_weights(self) -> bool:
        """Has a channel so many weights that a thread must not hold them all at once?"""
        return self.steps >= MANY_WEIGHTS

    @property
    def operand_bytes(self) -> int:
        """x's planes and a pixel of zeros; the weights pass through the same place first."""
        return ceil_to(max((self.planes * self.plane + 1) * PIXEL_BYTES, self.weight_bytes), 16)

    @property
    def shared_bytes(self) -> int:
        """The struct Shared of the source, at most."""
        moments = self.units * self.channels * MOMENTS_BYTES
        extremes = self.warps * self.row_tiles * ROWS_A * self.piece_pitch * 4
        return ceil_to(moments + extremes + self.channels * ceil_to(self.channel_floats * 4, 16) + self.warps * self.noted_bytes, 16) + 16

    @property
    def smem_bytes(self) -> int:
        return self.operand_bytes + self.shared_bytes

    @property
    def loads(self) -> int:
        """Pixels that a thread has on their way: as many as there are registers for beside the weights, the fewest idle ones at the end, then the most."""
        pixels = ceil_div(self.octets * self.part_rows * self.pitch, self.threads)
        room = (self.max_registers - self.loading - 4 * self.steps * self.parts * self.row_tiles) // 8
        return min(range(1, max(1, min(LOADS, room)) + 1), key=lambda count: (ceil_to(pixels, count) + ceil_div(pixels, count), -count))

    def blocks(self, batch: int, device: DeviceClass) -> int:
        """Blocks to launch: one for each part of a sample, as many as run at the same time."""
        return min(batch * self.sample_parts * self.channel_tiles, device.sms * self.blocks_per_sm)

    def sure_octets(self, width: int) -> int:
        """The largest power of two of 8 columns that exist in every tile of rows of `width`, at most 4; 0 where there are none."""
        columns = sure_columns(self.used_columns, self.column_tiles, width)
        return next((count for count in (4, 2, 1) if count <= min(columns, self.tile_columns) // 8), 0)

    def cost(self, batch: int, device: DeviceClass) -> float:
        """What is proportional to the time: tiles computed for a pooled row, rows of x brought for it, idle warps and SMs."""
        blocks = min(self.blocks_per_sm, device.smem_per_sm // (self.smem_bytes + 1024)) if device.smem_per_sm else self.blocks_per_sm
        rounds = ceil_div(self.units, self.column_warps) * self.column_warps / self.units
        rows = self.sample_parts * self.part_rows / (self.strips * self.window_rows)
        computed = self.column_tiles * (self.tile_columns + UNIT_COST / self.window_rows) * rounds * self.sample_parts * self.part_strips / self.strips
        turns = self.channel_tiles * batch * self.sample_parts / (device.sms * max(blocks, 1))
        waiting = (1 + STARTING[self.parts] * rows) * FEW_BLOCKS[min(blocks, 3)]
        return computed * waiting * (turns + 0.5) / turns * self.channels * self.channel_tiles


def registers_needed(steps: int, parts: int, row_tiles: int, tile_rows: int, tile_columns: int, fold: int) -> int:
    """Registers of a thread, about: weights, accumulators, extremes, sums, pixels and the rest."""
    octets = tile_rows * tile_columns // 8
    extremes = tile_columns // 8 * (2 if fold == 1 else 1) * 2 * row_tiles
    special = (TALL if tile_rows > 1 else 0) + (NARROW if fold == 1 else 0)
    return steps * 4 * parts * row_tiles + 4 * octets * row_tiles + extremes + 6 * row_tiles + 2 * octets * parts + OVERHEAD + special


def sure_columns(used: int, column_tiles: int, width: int) -> int:
    """Of a tile's `used` columns, those that exist in every tile of rows of `width`."""
    return min(used, width - (column_tiles - 1) * used)


def _crowded(weights: int, row_tiles: int, tile_columns: int, rare: int, sure: bool) -> float:
    """Registers more than needed, by what a thread holds of `weights` instructions, what its `rare` routes take for each tile of them, and whether an
    octet of columns is `sure` to exist."""
    many = CROWDED * weights if weights >= MANY_WEIGHTS else 0.0
    routes = rare * row_tiles + (UNSURE if rare and not sure else 0)
    return max(many, TWO_TILES if row_tiles == 2 and tile_columns < 32 else 0.0, routes)


def candidates(spec: FusedSpec, windows: Windows, parts: int, channel_floats: int) -> Iterator[Geometry]:
    """Every way to cut the chain whose registers suffice, whatever its shared memory."""
    values = spec.producer.values
    height, width = spec.norm.input_shape[2:]
    kernel, padding, stride = values["kernel_size"], values["padding"], values["stride"]
    reach = [dilation * (taps - 1) + 1 for dilation, taps in zip(values["dilation"], kernel, strict=True)]
    pitch = spec.input_shape[3] + 2 * padding[1]
    octets, taps = ceil_div(spec.input_shape[1], 8), kernel[0] * kernel[1]
    strips = ceil_div(height, windows.size[0])
    fold = 2 if windows.size[1] % 2 == 0 else 1
    for tile_rows, tile_columns in TILE_SHAPES:
        used = min(tile_columns, ceil_to(width, windows.size[1])) // windows.size[1] * windows.size[1]
        if not used or windows.size[0] % tile_rows or height % tile_rows:
            continue
        column_tiles = ceil_div(width, used)
        sure = sure_columns(used, column_tiles, width) >= 8
        slack = max(0, ((column_tiles - 1) * used + tile_columns - 1) * stride[1] + reach[1] - pitch)
        for row_tiles in (2, 1) if spec.channels > ROWS_A else (1,):
            needed = registers_needed(ceil_div(octets * taps, 2), parts, row_tiles, tile_rows, tile_columns, fold)
            needed += PADDED if padding != (0, 0) else 0
            crowded = _crowded(ceil_div(octets * taps, 2) * parts * row_tiles, row_tiles, tile_columns, RARE[spec.precision.name], sure)
            registers = next((count for count in REGISTERS if needed + (0 if row_tiles == 1 and count == REGISTERS[-1] else crowded) <= count), None)
            if registers is None:
                continue
            channel_warps = min(WARPS, ceil_div(spec.channels, row_tiles * ROWS_A))
            channels = channel_warps * row_tiles * ROWS_A
            weight_bytes = min(channels, spec.channels) * spec.input_shape[1] * taps * spec.precision.itemsize
            for part_strips in range(1, min(strips, MAX_STRIPS) + 1):
                column_warps = min(WARPS // channel_warps, part_strips * column_tiles)
                yield Geometry(
                    channel_warps=channel_warps, column_warps=column_warps, row_tiles=row_tiles,
                    channel_tiles=ceil_div(spec.channels, channels), channel_floats=channel_floats, octets=octets, taps=taps, parts=parts, pitch=pitch,
                    slack=slack, tile_rows=tile_rows, tile_columns=tile_columns, used_columns=used, column_tiles=column_tiles, fold=fold,
                    window_rows=windows.size[0], row_stride=stride[0], reach=reach[0], strips=strips, part_strips=part_strips, weight_bytes=weight_bytes,
                    noted_bytes=16 if spec.precision.itemsize == 4 else 0, loading=LOADING[spec.precision.name],
                    blocks_per_sm=REGISTERS_PER_SM // (ceil_to(registers, 8) * channel_warps * column_warps * WARP), max_registers=registers,
                )  # fmt: skip


def fitting(listed: list[Geometry], batch: int, target: Target, device: DeviceClass) -> list[Geometry]:
    """Those that fit, the cheapest first: wider channel tiles of a warp before narrower ones, whose pixels are read twice as often, then less shared memory."""
    able = [g for g in listed if g.smem_bytes <= target.smem_bytes]
    return sorted(able, key=lambda g: (g.cost(batch, device) * (1.0 if g.row_tiles == 2 else 1.3), g.smem_bytes))
