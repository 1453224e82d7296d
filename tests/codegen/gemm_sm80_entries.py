"""Which chains, tiles and slices the emulated tests of the sm_80 GEMM take, and what of its templates they reach."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from codegen.numerics import ARITHMETICS as NAMED
from codegen.plan import plan
from codegen.plan.gemm.kernel import GemmKernel
from codegen.plan.gemm.route import GEMM
from codegen.plan.gemm.tiles import tiles_for
from codegen.plan.planner import planned
from codegen.plan.route import Choice, Request
from codegen.targets import DEVICES, TARGETS
from tests.codegen.forced import planned_by
from tests.codegen.gemm_cases import ARITHMETICS, CASES, Case, bias
from tests.codegen.gemm_sm80_emulated import build

A100 = DEVICES["a100"]
TAPS = {"before": ({"tanh": {"name": "act"}}, {"add": {"from": "gemm", "name": "sum"}}), "after": ("silu", {"mul": {"from": "norm"}}, {"add": {"from": "sum"}})}
SMALL = {
    case.name: case
    for case in (
        *CASES,
        Case("groups_cut", 70, 130, 170, 10, before=(bias(1), "silu"), after=({"mul": {"value": 0.5}},), linear={"bias": False}),
        Case("block_a_group", 9, 72, 2048, 1, before=(bias(2048), "hardtanh")),
        Case("taps", 20, 48, 64, 8, **TAPS),
        Case("wide_taps", 20, 48, 640, 2, **TAPS),
        Case("tall", 265, 72, 264, 11, before=(bias(264), "tanh"), after=({"mul": {"name": "gain", "shape": [264]}},)),
        Case("whole", 128, 256, 256, 4, after=({"add": {"name": "shift", "shape": [1]}},), linear={"bias": False}),
        Case("low_groups", 275, 24, 40, 5, after=("silu",), norm={"affine": False}),
        Case("folded", 20, 48, 300, 1, before=("silu",), after=("silu", {"mean": {"dim": 1}})),
        Case("row_folded", 35, 77, 51, 1, after=({"logsumexp": {"dim": 1}}, {"mul": {"name": "gain", "shape": [1]}})),
        Case("row_mean", 70, 48, 128, 1, before=("silu",), after=("silu", {"add": {"value": 0.5}}, {"mean": {"dim": 1}}), linear={"bias": False}, norm={"affine": False}),
        Case("reduced", 20, 48, 64, 8, after=("silu", {"mean": {"dim": 1}})),
        Case("tiles_merged", 3, 16, 8448, 1, before=(bias(1), "relu"), after=("sigmoid",)),
        Case("tiles_alone", 3, 16, 8448, 1, after=("sigmoid",)),
        Case("blocks_share_a_group", 2, 8, 36008, 1),
        Case("longer_than_registers", 3, 33000, 16, 2),
        Case("saturated", 70, 136, 170, 1, before=("hardswish", "sigmoid", "hardswish"), after=("silu",)),
        Case("few_costly", 4, 48, 16872, 1, before=("elu", "celu"), after=("softplus", "elu", "tanh")),
        Case("product", 70, 130, 170, 0, (bias(170), "silu", {"add": {"from": "gemm"}}, {"mul": {"name": "gain", "shape": [1]}})),
        Case("product_alone", 35, 77, 51, 0, linear={"bias": False}),
        Case("product_sliced", 20, 20011, 52, 0, ({"mul": {"name": "gain", "shape": [1]}}, "silu", {"add": {"from": "gemm"}}, bias(52))),
        Case("product_sliced_odd", 130, 3540, 73, 0, (bias(73), "relu6")),
        Case("slices_odd", 7, 3863, 51, 3, before=("relu",), after=("sigmoid",)),
        Case("slices_even", 16, 4096, 64, 4, linear={"bias": False}),
        Case("slices_half", 35, 2050, 66, 3, before=(bias(66), "silu")),
        Case("slices_long", 7, 20011, 51, 3, before=("relu",)),
        Case("slices_words", 16, 16390, 66, 3, linear={"bias": False}),
        Case("slices_reduced", 32, 3863, 64, 1, before=("selu",), after=({"max": {"dim": 1}}, "tanh")),
    )
}


@dataclass(frozen=True)
class Entry:
    """A case with a tile, whether the chain ends in the GEMM, how many blocks share a tile and whether rows are copied first; without a tile the planner chooses, for a card of
    `sms` SMs."""

    name: str
    tile: tuple[int, int] | None = None
    finished: bool = True
    slices: int | None = None
    sms: int = A100.sms
    aligned: bool = False

    @property
    def case(self) -> Case:
        return SMALL[self.name]

    def plan(self, folder, precision, arithmetic):
        spec = self.case.spec(folder, precision, arithmetic)
        if self.tile is None:
            return planned(Request(spec, TARGETS["sm_80"], replace(A100, sms=self.sms)))
        if not self.case.groups:
            return planned_by(GEMM, spec, A100, math=arithmetic, tile="{}x{}".format(*self.tile), slices=self.slices or 1, aligned=self.aligned)
        end = "one_kernel" if self.finished else "norm_kernel"
        knobs = (("math", arithmetic), ("tile", "{}x{}".format(*self.tile)), ("slices", self.slices or 1), ("aligned", self.aligned), ("end", end))
        return plan(spec, "sm_80", "a100", forced=Choice("gemm", knobs))


# Every arithmetic has a table of tiles: what comes with each, as (case, whether the chain ends in the GEMM).
BY_TILE = {
    (128, 256): [("tall", True)], (256, 128): [("tall", True)], (256, 64): [("tall", True)], (64, 256): [("tall", True)], (128, 128): [("whole", True)],
    (128, 64): [("whole", True)], (64, 128): [("odd_pitch", True), ("row_mean", True)], (64, 64): [("odd_pitch", False), ("groups_cut", True), ("row_folded", True)], (32, 128): [("group_100", True)],
    (32, 64): [("taps", True)], (32, 32): [("groups_cut", False)], (16, 256): [("tiles_merged", False)], (16, 128): [("group_3", True)],
    (16, 64): [("taps", True), ("row_folded", True)], (16, 32): [("low_groups", True), ("one_row", True)],
}  # fmt: skip
BF16_TILES = ((128, 128), (64, 128), (64, 64), (32, 128), (16, 256), (16, 32))  # some of those of fp16, whose kernels are the same but for the type
# What no tile leads to: longer chains, norm kernels for longer groups, blocks that share a tile, all that splitting once a block has.
LONGER = (Entry("wide_taps"), Entry("block_a_group"), Entry("folded"), Entry("reduced"))
SLICED = (Entry("slices_odd", (64, 64), False, 16), Entry("slices_even", (16, 32), False, 8), Entry("slices_reduced", (16, 32), False, 8))
PRODUCTS = (Entry("product", (64, 64)), Entry("product_alone", (64, 64)))
SLICED_PRODUCT = (Entry("product_sliced", (64, 64), slices=16), Entry("product_sliced_odd", (16, 32), slices=4))
SLICED_HALVES = (
    Entry("slices_long", (64, 64), False, 32), Entry("slices_long", (32, 32), False, 16, aligned=True), Entry("odd_pitch", (64, 128), True, aligned=True),
    Entry("odd_pitch", (16, 32), False, aligned=True), Entry("slices_words", (16, 32), False, 13), Entry("slices_reduced", (32, 64), False, 8),
)  # fmt: skip
ONCE = (
    Entry("whole", (64, 64)), Entry("taps", (64, 64)), Entry("one_row", (64, 64)), Entry("groups_cut", (64, 64), False),
    Entry("tiles_merged", (64, 256), False), Entry("odd_pitch", (128, 128)),
)  # fmt: skip
FURTHER = {
    "fp16": (*LONGER, *PRODUCTS, *SLICED_PRODUCT, *SLICED_HALVES, Entry("saturated", (64, 64), False), Entry("tiles_alone", (16, 256), False), Entry("few_costly"), Entry("blocks_share_a_group")),
    "bf16": (*PRODUCTS, *SLICED_HALVES, Entry("saturated", (64, 64), False), Entry("tiles_alone", (16, 256), False), Entry("blocks_share_a_group", sms=1)),  # in front of the kernel that streams
    "tf32": (*LONGER, *PRODUCTS, *SLICED),
    "fp16x3": (*LONGER, *PRODUCTS, *ONCE, Entry("longer_than_registers")),
    "tf32x3": (*LONGER, *PRODUCTS, *SLICED_PRODUCT, *SLICED, Entry("slices_half", (16, 32), False, 4)),
    "bf16x3": (),
    "ffma": (*LONGER, *PRODUCTS),
}
# An entry for each of the templates, with what it needs in front of it and behind it.
ONE_EACH = {
    "fp16": (Entry("slices_words", (16, 32), False, 13), Entry("odd_pitch", (16, 32), False, aligned=True)), "fp16x3": (Entry("groups_cut", (64, 64), False),), "tf32x3": (Entry("taps", (32, 64)),),
    "ffma": (Entry("row_folded", (16, 64)),),
}  # fmt: skip
FOLDER = tempfile.TemporaryDirectory(prefix="emulated-")  # of this process's libraries
# What the templates of a GEMM decide by, as it stands in a plan.
KERNEL_FLAGS = (
    "ragged_m", "ragged_n", "ragged_k", "ragged_outputs", "raster_remainder", "finished", "statistics", "layered", "sliced", "copy_bytes", "rounds",
    "uses_to_float",
)  # fmt: skip
KERNEL_PARTS = ("bias", "affine", "before", "after", "scalars", "loads_channels", "fold")
OTHERS = {"gemm/row_scale.cu.j2": ("vector", "held", "ragged"), "gemm/add_slices.cu.j2": ("width", "ragged"), "gemm/end_slices.cu.j2": ("width", "ragged")}


def entries(arithmetic):
    tiles = BF16_TILES if arithmetic == "bf16" else [(tile.m, tile.n) for tile in tiles_for(NAMED[arithmetic])]
    return [*(Entry(name, tile, finished) for tile in tiles for name, finished in BY_TILE[tile]), *FURTHER[arithmetic]]


def branches(planned):
    """What the kernels' templates decide by: (template, name, value)."""
    found = set()
    for kernel in planned.kernels:
        template, taken = kernel.template, {name: getattr(kernel, name) for name in OTHERS.get(kernel.template, ())}
        if isinstance(kernel, GemmKernel):
            e, tile = kernel.epilogue, kernel.tile
            taken = {name: getattr(kernel, name) for name in KERNEL_FLAGS} | {name: bool(getattr(kernel, name)) for name in KERNEL_PARTS}
            taken |= {name: getattr(e, name) for name in ("vector", "ragged_lanes", "ragged_items")} | {"team": e.team > 1, "spans": e.spans > 1}
            taken |= {"row_bytes": tile.row_bytes, "guard_x": kernel.guard_copy(tile.m), "guard_w": kernel.guard_copy(tile.n)}
            taken |= {"asks_for_memory": kernel.smem_bytes > 48 * 1024, "one_round": e.round_rows == tile.m, "one_vector": e.vectors_per_lane == 1}
        found |= {(template, "", ""), *((template, *item) for item in taken.items())}
    return found


@functools.cache
def layers_of(arithmetic: str, one: bool):
    """(precision, arithmetic, [(case, layer)]): the entries of an arithmetic, or those of ONE_EACH, compiled once as one library."""
    precision = next(p for p, a in ARITHMETICS if a == arithmetic)
    folder = Path(tempfile.mkdtemp(prefix=f"emulated-{arithmetic}-", dir=FOLDER.name))
    chosen = ONE_EACH[arithmetic] if one else entries(arithmetic)
    found = build(folder, [entry.plan(folder, precision, arithmetic) for entry in chosen])
    return precision, arithmetic, [(entry.case, layer) for entry, layer in zip(chosen, found, strict=True)]


def parameters(*arithmetics: str, one: tuple[str, ...] = ()) -> list:
    """Values of the fixture `layers`: a few entries of the arithmetics in `one` for make test, all of `arithmetics` for make test-all."""
    values = [(arithmetic, True) for arithmetic in one] + [(arithmetic, False) for arithmetic in arithmetics]
    marks = {True: pytest.mark.representative, False: pytest.mark.emulated}
    return [pytest.param(value, id=value[0] + ("-one" if value[1] else ""), marks=marks[value[1]]) for value in values]
