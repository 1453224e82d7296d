"""The ways to serve a spec that are worth measuring on a card, as data: what `make tune` tries and codegen/tuned/ records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from codegen.numerics import ARITHMETICS
from codegen.plan.gemm.choice import tile_choices
from codegen.plan.gemm.route import arithmetics
from codegen.spec import Spec
from codegen.targets import DeviceClass

# Our convolutions for mma.sync, as a candidate names them.
CONVOLUTIONS = {"one_pass": "the convolution in one pass", "windows": "the convolution as a product of windows and filters, then the norm kernel"}
TILES = 3  # of an arithmetic, those with the least estimates


@dataclass(frozen=True)
class Candidate:
    """A target and what the planner takes there instead of its own choice; None leaves it the choice.

    `gemm` is "library", "generated" or a way of ours to compute a convolution (routes.CONVOLUTIONS); `math` an arithmetic; `tile` the rows and columns of a block of the sm_80 GEMM; `finished` says that the
    chain ends in that GEMM; `slices` blocks share a tile; `aligned`: rows of an odd number of values are copied first.
    """

    target: str
    gemm: str | None = None
    math: str | None = None
    tile: tuple[int, int] | None = None
    finished: bool | None = None
    slices: int | None = None
    aligned: bool | None = None

    @property
    def label(self) -> str:
        """`sm_80_generated_fp16x3_128x64_one_kernel`: unique among a spec's candidates, fit for a folder."""
        tile = f"{self.tile[0]}x{self.tile[1]}" if self.tile else None
        end = None if self.finished is None else "one_kernel" if self.finished else "norm_kernel"
        slices = f"{self.slices}_slices" if self.slices else None
        return "_".join(part for part in (self.target, self.gemm, self.math, tile, slices, "aligned" if self.aligned else None, end) if part)

    @property
    def data(self) -> dict[str, Any]:
        """As plain data, without what is left to the planner."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items() if value is not None}


def candidate_of(data: dict[str, Any]) -> Candidate:
    """The candidate that `data` (see Candidate.data) describes; other keys are left alone."""
    known = {key: data[key] for key in Candidate.__dataclass_fields__ if key in data}
    return Candidate(**known | ({"tile": tuple(known["tile"])} if "tile" in known else {}))


def candidates(spec: Spec, device: DeviceClass) -> tuple[Candidate, ...]:
    """What is worth measuring for `spec` on a card of this class; some may turn out to have no plan."""
    found: list[Candidate] = []
    for target in spec.targets or device.targets:
        if target not in device.targets:
            continue
        if target != "sm_80":
            found.append(Candidate(target))
            continue
        if spec.producer.operator.name != "linear":
            found += [Candidate(target, way) for way in ("library", *CONVOLUTIONS) if spec.gemm in (None, "library" if way == "library" else "generated")]
            continue
        if spec.gemm != "generated" and spec.precision.dtype != "float32":
            found.append(Candidate(target, "library"))
        if spec.gemm != "library":
            found += _generated(spec, device, target)
    return tuple(found)


def _generated(spec: Spec, device: DeviceClass, target: str) -> list[Candidate]:
    return [
        Candidate(target, "generated", name, (choice.tile.m, choice.tile.n), choice.finished, choice.slices if choice.slices > 1 else None, choice.aligned or None)
        for name in ([spec.math] if spec.math else arithmetics(spec))
        for choice in tile_choices(spec, device, ARITHMETICS[name])[:TILES]
    ]
