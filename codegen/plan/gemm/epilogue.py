"""The sm_80 GEMM's epilogue as data: which lanes take which of the staged sums, and an estimate of how long they take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.numerics import Arithmetic
from codegen.plan.gemm.cost import VALUE_CYCLES, item_cycles
from codegen.plan.gemm.tiles import WARP, Tile

LANE_VALUES = 16  # of an item in a lane's registers, at most


@dataclass(frozen=True)
class Epilogue:
    """How staged sums become results: a team of `team` lanes takes `span` neighbouring columns of one row, `vector` at a time.

    `span` is the norm's group width where the chain finishes here, else the tile's width. `items` (row, span) pairs are staged at once.
    """

    span: int
    spans: int
    vector: int
    team: int
    vectors_per_lane: int
    round_rows: int
    items: int
    teams: int
    pitch: int

    @property
    def ragged_lanes(self) -> bool:
        return self.span // self.vector != self.team * self.vectors_per_lane

    @property
    def items_per_team(self) -> int:
        return math.ceil(self.items / self.teams)

    @property
    def ragged_items(self) -> bool:
        return self.items % self.teams != 0


def epilogue_of(spec: FusedSpec, tile: Tile, columns: int, finished: bool, arithmetic: Arithmetic) -> Epilogue:
    """The epilogue of a tile of which `columns` are kept; `finished`: it normalises, so spans are groups."""
    span = spec.group_channels if finished else tile.n
    vector = math.gcd(math.gcd(span, spec.channels), 16 // spec.result.itemsize)
    spans = columns // span
    pitch = tile.n + (4 if arithmetic.name == "ffma" else 8)
    rows = tile.warp_m
    while rows < tile.m and 2 * rows * pitch * 4 * tile.warps_k <= tile.smem_bytes:
        rows *= 2
    slices = span // vector
    team = _team(slices, vector, rows * spans, tile.threads)
    return Epilogue(span, spans, vector, team, math.ceil(slices / team), rows, rows * spans, tile.threads // team, pitch)


def epilogue_cycles(epilogue: Epilogue, tile: Tile, finished: bool) -> float:
    """Estimated cycles from the last multiply to the last store of a block."""
    values = epilogue.vectors_per_lane * epilogue.vector
    rounds = tile.m // epilogue.round_rows
    if not finished:
        return rounds * epilogue.items_per_team * VALUE_CYCLES.value * values
    return rounds * item_cycles(epilogue.items, epilogue.teams, epilogue.team.bit_length() - 1, values)


def _team(slices: int, vector: int, items: int, threads: int) -> int:
    """Lanes that take an item of `slices` accesses of `vector` values: those with the least estimated time."""
    widest = min(WARP, 1 << (slices - 1).bit_length())
    cycles = {}
    for log in range(widest.bit_length()):
        values = math.ceil(slices / (1 << log)) * vector
        if values <= LANE_VALUES or 1 << log == widest:
            cycles[1 << log] = item_cycles(items, threads >> log, log, values)
    return min(cycles, key=cycles.get)
