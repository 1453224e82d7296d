"""The sm_80 GEMM's kernels as data: everything that templates/gemm/*.cu.j2 read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Apply, Constant, applies, called, parameter_keys, unique_constants
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import FP32, Arithmetic, Precision, float_literal
from codegen.plan.gemm.choice import Tiling
from codegen.plan.gemm.companions import SCALES, WEIGHT_ROWS, X_ROWS
from codegen.plan.gemm.epilogue import Epilogue, epilogue_of
from codegen.plan.gemm.tiles import Tile, aligned_k, partial_sum_stages, slice_stages
from codegen.plan.model import Kernel
from codegen.plan.shared.pointers import Pointer, PointerKernel
from codegen.plan.shared.values import LoadedOperand, kept_in_front, loaded, named_operand, norm_operands

RASTER_ROWS = 16  # tiles of x that pass by one tile of W before the next: both stay in L2
FFMA_PARTIAL_K = 128  # K of one partial sum, at most: its error stays below that of one chain of K additions
STATISTICS = "tile_statistics"


@dataclass(frozen=True)
class TiledKernel(PointerKernel):
    """A product by tiles. `copy_bytes` is the widest copy that every row of both operands allows; `storage` is their type, `result` that of what is stored; the `ragged_*` flags say whether a
    tile can reach beyond the operands' rows or K, `raster_remainder` whether the last tiles of x that pass by one tile of W are fewer."""

    tile: Tile | None = None
    arithmetic: Arithmetic | None = None
    storage: str = "float"
    result: Precision = FP32
    copy_bytes: int = 16
    ragged_m: bool = False
    ragged_n: bool = False
    ragged_k: bool = False
    raster_remainder: bool = False
    slices: int = 1

    @property
    def sliced(self) -> bool:
        """Whether several blocks share a tile, each with its own part of K, and leave the sums of that part."""
        return self.slices > 1

    @property
    def layered(self) -> bool:
        """Whether the block's warps form several layers, each with its own part of K."""
        return self.tile.warps_k > 1

    @property
    def access_bytes(self) -> int:
        """Of one copy to shared memory. Where neighbouring threads take neighbouring words, narrow ones meet as few lines of the cache as wide ones."""
        return self.copy_bytes if self.copy_bytes in (4, 8) and not self.tile.presplit else 16

    @property
    def copy_rows(self) -> int:
        """Rows that the block's threads copy at once, an access each."""
        return self.tile.threads * self.access_bytes // self.tile.row_bytes

    def guard_copy(self, rows: int) -> bool:
        """Whether the block's threads outnumber the accesses to `rows` rows of a panel."""
        return self.copy_rows > rows


@dataclass(frozen=True)
class GemmKernel(TiledKernel):
    """One GEMM with its epilogue. `affine`: gamma and beta, or nothing."""

    ragged_outputs: bool = False
    finished: bool = False
    statistics: bool = False
    bias: LoadedOperand | None = None
    weight: str = ""
    affine: tuple[LoadedOperand, ...] = ()
    before: tuple[Apply, ...] = ()
    after: tuple[Apply, ...] = ()
    epilogue: Epilogue | None = None
    kept_lines: tuple[tuple[str, ...], ...] = ((), (), ())
    fold: Kernel | None = None  # a StageKernel: what folds the finished row, in place of writing it

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that the epilogue calls."""
        return (*called(self.before), *called(self.after), *(self.fold.functions if self.fold else ()))

    @property
    def store_width(self) -> int:
        """Values of one store."""
        return 1 if self.fold else self.epilogue.vector

    @property
    def ragged(self) -> bool:
        return self.ragged_m or self.ragged_n or self.ragged_k

    @property
    def scaled(self) -> bool:
        return self.arithmetic.name == "fp16x3"

    @property
    def tail_pointers(self) -> tuple[Pointer, ...]:
        """What the epilogue reads and writes: all but the operands and their scales."""
        return tuple(p for p in self.pointers if p.name not in ("x", self.weight, SCALES))

    @property
    def rounds(self) -> bool:
        """Whether statistics are those of values as 16 bits store them."""
        return self.statistics and self.result.itemsize == 2

    @property
    def uses_to_float(self) -> bool:
        """Whether the epilogue reads single values of the storage type."""
        by_value = self.epilogue.vector == 1 and self.loads_channels
        return self.storage != "float" and bool(self.scalars or by_value or self.rounds or (self.fold and self.fold.operands))

    @property
    def loads_channels(self) -> bool:
        """Whether the epilogue reads per-channel parameters."""
        return bool(self.vectors_before or self.vectors_after)

    @property
    def scalars(self) -> tuple[LoadedOperand, ...]:
        """The one-element parameters."""
        return tuple(loaded(item.operand) for item in self.before + self.after if item.operand and not item.operand.per_channel)

    @property
    def vectors_before(self) -> tuple[LoadedOperand, ...]:
        """The per-channel parameters up to the norm."""
        return ((self.bias,) if self.bias else ()) + tuple(loaded(item.operand) for item in self.before if item.operand and item.operand.per_channel)

    @property
    def vectors_after(self) -> tuple[LoadedOperand, ...]:
        """The norm's per-channel parameters and those behind it."""
        return self.affine + tuple(loaded(item.operand) for item in self.after if item.operand and item.operand.per_channel)

    @property
    def before_lines(self) -> tuple[str, ...]:
        """C statements on `v`, element `e` of a vector, up to the norm."""
        return (*self.kept_lines[0], *_statements(self.before))

    @property
    def after_lines(self) -> tuple[str, ...]:
        """C statements on the normalised `v`."""
        affine = ("v = fmaf(v, {}[e], {}[e]);".format(*(operand.value for operand in self.affine)),) if self.affine else ()
        return (*self.kept_lines[1], *affine, *self.kept_lines[2], *_statements(self.after))


def gemm_kernel(spec: FusedSpec, arithmetic: Arithmetic, choice: Tiling, statistics: bool, notes: tuple[str, ...] = ()) -> GemmKernel:
    """The GEMM of `spec` with the chosen tile; `statistics`: leave the moments of every row and tile behind."""
    tile, precision = choice.tile, spec.precision
    k = aligned_k(spec.input_shape[1]) if choice.aligned else spec.input_shape[1]
    sliced = choice.slices > 1
    bare = sliced or rounds_early(spec, choice)
    before = () if bare else applies(spec, spec.before_norm)
    after = applies(spec, spec.after_norm) if choice.finished else ()
    bias = None if sliced else spec.bias
    affine = norm_operands(spec) if choice.finished else ()
    named = [spec.weight, bias, *parameter_keys(before), *(operand.key for operand in affine), *parameter_keys(after)]
    parameters = tuple(dict.fromkeys(key for key in named if key))
    scaled = arithmetic.name == "fp16x3"
    arguments = ("x", *parameters, *((SCALES,) if scaled else ()), *((STATISTICS,) if statistics else ()), "y")
    types = {SCALES: "float", STATISTICS: "float4", "y": "float" if sliced else spec.result.c_type}
    known = {operand.key: operand.pointer for operand in (*map(named_operand, parameters), *affine)}
    pointers = tuple(Pointer(types.get(a, precision.c_type), known.get(a, a), a in ("y", STATISTICS)) for a in arguments)
    if choice.aligned:
        arguments = tuple({"x": X_ROWS, spec.weight: WEIGHT_ROWS}.get(argument, argument) for argument in arguments)
    slice_k = slice_stages(arithmetic, tile, k, precision.itemsize, choice.slices) * tile.stage_k(precision.itemsize) if sliced else k
    stages_per_chunk, stage_count = stage_counts(arithmetic, tile, slice_k, precision.itemsize)
    padded_k = choice.slices * stage_count * tile.stage_k(precision.itemsize)
    tiles_m, tiles_n = math.ceil(spec.batch / tile.m), math.ceil(spec.channels / choice.columns)
    raster = min(RASTER_ROWS, tiles_m)
    if sliced:
        spec = replace(spec, gives=FP32)
    epilogue = epilogue_of(spec, tile, choice.columns, choice.finished, arithmetic)
    kernel = GemmKernel(
        name="gemm", template=f"gemm/{_template(arithmetic, tile)}.cu.j2", arguments=arguments, constants=(), summary=_summary(spec, choice, arithmetic, [what for what, there in (("bias", bias is not None), ("the operators before the norm", not bare)) if there]),
        smem_bytes=max(tile.smem_bytes, epilogue.round_rows * epilogue.pitch * 4 * tile.warps_k), max_registers=tile.max_registers,
        threads=tile.threads, blocks=tiles_m * tiles_n * choice.slices, pointers=pointers, tile=tile, arithmetic=arithmetic, storage=precision.c_type, result=spec.result,
        copy_bytes=math.gcd(16, k * precision.itemsize), ragged_m=spec.batch % tile.m != 0,
        ragged_n=(tiles_n - 1) * choice.columns + tile.n > spec.channels, ragged_k=padded_k != k,
        ragged_outputs=tiles_n * choice.columns != spec.channels, raster_remainder=tiles_m % raster != 0,
        finished=choice.finished, statistics=statistics, bias=named_operand(bias) if bias else None,
        weight=named_operand(spec.weight).pointer, affine=affine, before=before, after=after, epilogue=epilogue, notes=notes,
        kept_lines=((), (), ()) if bare else _kept_lines(spec, choice.finished), slices=choice.slices,
    )  # fmt: skip
    constants = _shape_constants(spec, choice, k) + _tile_constants(spec, kernel, choice, tiles_m, tiles_n, raster, stage_count, stages_per_chunk)
    constants += _epilogue_constants(spec, kernel) + unique_constants(before + after)
    return replace(kernel, constants=constants)


def rounds_early(spec: FusedSpec, choice: Tiling) -> bool:
    """Whether values would be rounded to 16 bits between the operators in front of the norm and the norm itself. Where a sigmoid or a bound has brought them
    near one another, rounding leaves of their differences nothing that the norm could find again, so the linear's own result is rounded instead, as PyTorch's is."""
    return spec.has_norm and not choice.finished and bool(spec.before_norm) and spec.result.itemsize == 2


def _statements(items: tuple[Apply, ...]) -> tuple[str, ...]:
    """The operators as C statements on `v`, element `e` of a vector."""
    lines = []
    for item in items:
        operand = loaded(item.operand) if item.operand else None
        value = f"{operand.value}[e]" if operand and operand.per_channel else operand and operand.value
        lines.append(f"v = {item.apply('v', value)};  // {item.comment}")
        if item.keeps:
            lines.append(f"const float {item.keeps} = v;")
    return tuple(lines)


def _kept_lines(spec: FusedSpec, finished: bool) -> tuple[tuple[str, ...], ...]:
    """What is kept for operators that take it once more: the product, the norm's input and the norm's result."""
    after = spec.after_norm if finished else ()
    at = len(spec.before_norm) + 1
    return kept_in_front(spec, spec.before_norm, 0), kept_in_front(spec, after, at - 1, "values[j][e]"), kept_in_front(spec, after, at)


def _template(arithmetic: Arithmetic, tile: Tile) -> str:
    if arithmetic.name == "ffma":
        return "ffma"
    return "mma" if arithmetic.parts == 1 else "mma_presplit" if tile.presplit else "mma_split"


def _summary(spec: FusedSpec, choice: Tiling, arithmetic: Arithmetic, front: list[str]) -> str:
    if choice.slices > 1:
        return f"x W^T by {arithmetic.summary}, {choice.slices} parts of K apart"
    inside = "the whole chain" if choice.finished or (not spec.has_norm and len(spec.chain) > 1) else " and ".join(front[: 2 if spec.has_norm else 1])
    return f"x W^T by {arithmetic.summary}" + (f", {inside} in its epilogue" if inside else "")


def stage_counts(arithmetic: Arithmetic, tile: Tile, k: int, itemsize: int) -> tuple[int, int]:
    """(stages in one partial sum, stages in all). Split products run whole partial sums, so their stage count is rounded up to them."""
    stages = math.ceil(k / tile.stage_k(itemsize))
    if arithmetic.name == "ffma":
        # Two chains of about equal length, within a partial sum and over them, round least.
        partial = min(FFMA_PARTIAL_K, 1 << round(math.log2(max(1, k / tile.warps_k)) / 2))
        return max(1, partial // tile.panel_k(itemsize)), stages
    if not arithmetic.promote:  # one product
        return stages, stages
    chunk = min(stages, partial_sum_stages(arithmetic, tile, itemsize))
    return chunk, math.ceil(stages / chunk) * chunk


def _shape_constants(spec: FusedSpec, choice: Tiling, k: int) -> tuple[Constant, ...]:
    shape = (
        Constant("kBatch", str(spec.batch), "rows of x and y"),
        Constant("kInFeatures", str(k), "K: values in a row of x or W" + (f", zeros behind the first {spec.input_shape[1]}" if choice.aligned else "")),
        Constant("kOutFeatures", str(spec.channels), "rows of W, columns of y"),
    )
    if not choice.finished:
        return shape
    width = spec.group_channels
    return shape + (
        Constant("kGroupWidth", str(width), f"out_features / num_groups = {spec.channels} / {spec.num_groups}"),
        Constant("kEps", float_literal(spec.norm.values["eps"]), "added to the variance", "float"),
    )


def warp_constants(tile: Tile) -> tuple[Constant, ...]:
    """How a block's warps share its tile."""
    deep = " * warps_k" if tile.warps_k > 1 else ""
    return (
        *(() if tile.presplit else (Constant("kWarpsM", str(tile.warps_m), "warps along the tile's rows"),)),
        Constant("kWarpsN", str(tile.warps_n), "warps along the tile's columns"),
        *(() if tile.presplit else (Constant("kWarpsK", str(tile.warps_k), "layers of warps, each with its own part of K"),)),
        Constant("kThreads", str(tile.threads), "32 * warps_m * warps_n" + deep),
        Constant("kBlocksPerSm", str(tile.blocks_per_sm), f"resident blocks of an SM, which leaves {tile.max_registers} registers a thread"),
        Constant("kWarpM", str(tile.warp_m), "tile_m / warps_m: rows of a warp's part"),
        Constant("kWarpN", str(tile.warp_n), "tile_n / warps_n: columns of a warp's part"),
    )


def panel_constants(tile: Tile, itemsize: int) -> tuple[Constant, ...]:
    """The panels and stages of shared memory, of operands of `itemsize` bytes."""
    deep = " * warps_k" if tile.warps_k > 1 else ""
    return (
        Constant("kRowBytes", str(tile.row_bytes), "bytes of a panel's row" + (", 16-bit parts" if tile.presplit else "")),
        *(() if tile.presplit else (Constant("kPanelK", str(tile.panel_k(itemsize)), f"row_bytes / {itemsize}: values of K in a panel"),)),
        Constant("kStageK", str(tile.stage_k(itemsize)), f"panel_k{deep}: values of K in a stage, " + ("one panel for each layer of warps" if deep else "one panel")),
        *(() if tile.presplit else (Constant("kStages", str(tile.stages), "stages in flight"),)),
    )


def _tile_constants(
    spec: FusedSpec, kernel: GemmKernel, choice: Tiling, tiles_m: int, tiles_n: int, raster: int, stage_count: int, stages_per_chunk: int
) -> tuple[Constant, ...]:  # fmt: skip
    tile, itemsize = kernel.tile, spec.precision.itemsize
    ffma = kernel.arithmetic.name == "ffma"
    deep = " * warps_k" if kernel.layered else ""
    kept = "" if choice.columns == tile.n else f", of which the first {choice.columns} are kept: whole groups"
    constants = [
        Constant("kTileM", str(tile.m), "rows of x in a block's tile"),
        Constant("kTileN", str(tile.n), "rows of W in a block's tile" + kept),
        Constant("kTileColumns", str(choice.columns), "columns of y that a block writes"),
        Constant("kTilesM", "(kBatch + kTileM - 1) / kTileM", f"batch / tile_m, rounded up: {tiles_m}"),
        Constant("kTilesN", "(kOutFeatures + kTileColumns - 1) / kTileColumns", f"out_features / tile_columns, rounded up: {tiles_n}"),
        Constant("kRaster", str(raster), "tiles of x that meet one tile of W before the next"),
        *warp_constants(tile),
        Constant("kRowsPerThread", str(tile.warp_m // 8), "rows of a thread: warp_m / 8 lanes") if ffma else Constant("kBlocksM", str(tile.warp_m // 16), "warp_m / 16: multiplies along the rows"),
        Constant("kColumnsPerThread", str(tile.warp_n // 4), "columns of a thread: warp_n / 4 lanes") if ffma else Constant("kBlocksN", str(tile.warp_n // 8), "warp_n / 8: multiplies along the columns"),
        *panel_constants(tile, itemsize),
        Constant("kStageCount", str(stage_count), f"in_features / {'slices / ' if kernel.sliced else ''}stage_k, rounded up" + (" to whole partial sums" if kernel.arithmetic.parts == 2 else "")),
        Constant("kCopyRows", str(kernel.copy_rows), f"rows that the block's threads copy at once, {kernel.access_bytes} bytes each: threads * {kernel.access_bytes} / row_bytes"),
        Constant("kStageBytes", str(tile.stage_bytes), f"(tile_m + tile_n) * row_bytes{deep}" + (" * 2 parts" if tile.presplit else "")),
        Constant("kSharedBytes", str(kernel.smem_bytes), f"bytes of {tile.stages} stages, reused by the epilogue" if kernel.smem_bytes == tile.smem_bytes else "bytes that the epilogue stages at once, more than the stages need"),
        *([
            Constant("kSlices", str(kernel.slices), "blocks that share a tile, each with its own part of K"),
            Constant("kSliceK", "kStageCount * kStageK", f"values of K in a slice: {stage_count * tile.stage_k(itemsize)}"),
        ] if kernel.sliced else []),
        Constant("kBlocks", "kTilesM * kTilesN" + (" * kSlices" if kernel.sliced else ""), str(kernel.blocks)),
    ]  # fmt: skip
    if ffma or kernel.arithmetic.parts == 2:
        constants.append(Constant("kStagesPerSum", str(stages_per_chunk), f"K = {stages_per_chunk * tile.panel_k(itemsize)} in one partial sum of a warp"))
    return tuple(constants)


def _epilogue_constants(spec: FusedSpec, kernel: GemmKernel) -> tuple[Constant, ...]:
    e, tile = kernel.epilogue, kernel.tile
    what = "kGroupWidth" if kernel.finished else "kTileN"
    items = "kRoundRows * kSpans" if e.spans > 1 else "kRoundRows"
    constants = [
        Constant("kSpan", what, "neighbouring columns that a team of lanes takes together"),
        Constant("kSpans", "kTileColumns / kSpan", str(e.spans)),
        Constant("kVector", str(e.vector), "values of one access: the most that span and out_features allow"),
        Constant("kTeam", str(e.team), "lanes in a team"),
        Constant("kTeams", "kThreads / kTeam", str(e.teams)),
        Constant("kVectorsPerLane", "(kSpan / kVector + kTeam - 1) / kTeam", str(e.vectors_per_lane)),
        Constant("kRoundRows", str(e.round_rows), "rows staged at once, as many as fit into the stages' memory"),
        Constant("kItemsPerTeam", f"({items} + kTeams - 1) / kTeams" if e.ragged_items else f"{items} / kTeams", str(e.items_per_team)),
        Constant("kPitch", str(e.pitch), f"tile_n + {e.pitch - tile.n}: floats of a staged row, without bank conflicts"),
    ]
    if e.round_rows != tile.m:
        constants.append(Constant("kRounds", "kTileM / kRoundRows", str(tile.m // e.round_rows)))
    if kernel.finished or kernel.statistics:
        constants.append(Constant("kInverseSpan", "1.0f / kSpan", "factor of the mean and the variance", "float"))
    return tuple(constants)
