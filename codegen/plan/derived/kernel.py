"""The kernels that derive tensors, as data: what templates/derived/* read."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from codegen.algebra import ByRanges, ByTaps, Derived
from codegen.ir.apply import Constant, rounded
from codegen.ir.operand import c_identifier
from codegen.numerics import Precision, float_literal
from codegen.ops import Shape
from codegen.plan.model import Kernel
from codegen.plan.shared.axes import AXES
from codegen.plan.shared.values import VECTOR_BYTES, register_limit
from codegen.targets import DeviceClass, Target

THREADS = 256  # of a block
PLANE_THREADS = 512  # of a block that sums a plane
SUMS = 16  # that a thread keeps of neighbouring values, at most
PIECE = 2048  # places that C++ takes at a time
PARALLEL_VALUES = 32768  # fewer are not worth a second thread


@dataclass(frozen=True, kw_only=True)
class DerivingKernel(Kernel):
    """What all templates that derive a tensor read: the type of the source; the result is of float32. `ragged`: has the last block threads to spare?"""

    precision: Precision
    ragged: bool = False
    parallel: bool = True

    def parameters(self, restrict: str = "") -> list[str]:
        """C parameters in CUDA."""
        return [f"const {self.precision.c_type}* {restrict}source", f"float* {restrict}output"]

    @property
    def cpu_parameters(self) -> list[str]:
        return [f"const {'std::uint16_t' if self.half else 'float'}* source", "float* output"]

    @property
    def names(self) -> list[str]:
        return ["source", "output"]

    @property
    def half(self) -> bool:
        return self.precision.itemsize == 2

    @property
    def dtype(self) -> str:
        """The source's storage type, for templates that are shared."""
        return self.precision.dtype


@dataclass(frozen=True, kw_only=True)
class TapsKernel(DerivingKernel):
    """What templates/derived/taps.* read: for each axis and tap of the result a mask of the source's taps that it sums; `front`: the axes in front of the second channel."""

    masks: tuple[tuple[int, ...], ...]
    swaps: bool
    front: int


@dataclass(frozen=True, kw_only=True)
class RangesKernel(DerivingKernel):
    """What templates/derived/ranges.* read: `ranges` of each axis that is summed, whole ones where the axis has but one place; `width` values an access.

    `keeps`: are there axes behind those that stay?
    """

    ranges: tuple[tuple[tuple[int, int], ...], ...]
    sizes: Shape
    width: int
    keeps: bool

    def inside(self, numbers: tuple[int, ...], places: tuple[str, ...], first_axis: int = 0) -> str:
        """C: are `places`, from `first_axis` on, in their axes' ranges of these `numbers`? Empty where all places are."""
        tests = []
        for axis, (number, place) in enumerate(zip(numbers, places, strict=False), first_axis):
            (first, last), size = self.ranges[axis][number], self.sizes[axis]
            tests += ([f"{place} >= {first}"] if first else []) + ([f"{place} < {last}"] if last < size else [])
        return " && ".join(tests)

    def ends(self, numbers: tuple[int, ...]) -> list[tuple[int, int]]:
        """The range of each axis of a combination."""
        return [listed[number] for listed, number in zip(self.ranges, numbers, strict=True)]

    @property
    def combinations(self) -> list[tuple[int, ...]]:
        """The numbers of ranges of all axes, in the order of the result."""
        return list(itertools.product(*(range(len(listed)) for listed in self.ranges)))


def taps_kernel(tensor: Derived, precision: Precision, target: Target) -> TapsKernel:
    """The kernel that sums taps of a filter."""
    how: ByTaps = tensor.how
    p, q, *taps = tensor.source_shape
    missing = 3 - len(taps)
    sizes, sums = (*(1,) * missing, *taps), (*(((0,),),) * missing, *how.sums)
    outputs = math.prod(tensor.shape)
    blocks = -(-outputs // THREADS)
    numbers = [
        Constant("kOutputs", str(outputs), "values of the result"),
        Constant("kFirst", str(p), "of the source's first axis"),
        Constant("kSecond", str(q), "of its second"),
        *(Constant(f"k{word}", str(size), f"the source's taps along the {word.lower()}") for word, size in zip(AXES, sizes, strict=True)),
        *(Constant(f"kResult{word}", str(len(found)), f"the result's taps along the {word.lower()}") for word, found in zip(AXES, sums, strict=True)),
        Constant("kScale", float_literal(how.scale), "what a sum is multiplied by", "float"),
        *_grid(target, THREADS, blocks, "kOutputs / kThreads" + rounded(outputs % THREADS != 0)),
    ]
    masks = tuple(tuple(sum(1 << tap for tap in listed) for listed in found) for found in sums)
    return TapsKernel(
        name=f"derive_{c_identifier(tensor.key)}", template=_template("taps", target), arguments=("x", "y"), constants=tuple(numbers),
        summary=f"sums of the taps of {tensor.source}", **_launched(target, THREADS, blocks), precision=precision,
        ragged=outputs % THREADS != 0, parallel=outputs >= PARALLEL_VALUES // 8, masks=masks, swaps=how.swaps, front=how.front + missing if how.front else 0,
    )  # fmt: skip


def ranges_kernel(tensor: Derived, precision: Precision, target: Target, device: DeviceClass) -> RangesKernel:
    """The kernel that sums ranges of places."""
    how: ByRanges = tensor.how
    batch, channels, *spatial = tensor.source_shape
    summed, kept = spatial[: len(how.ranges)], math.prod(spatial[len(how.ranges) :])
    keeps = len(how.ranges) < len(spatial)
    missing = 3 - len(summed)
    sizes, ranges = (*(1,) * missing, *summed), (*(((0, 1),),) * missing, *how.ranges)
    planes = batch * channels
    width = math.gcd(VECTOR_BYTES // precision.itemsize, kept if keeps else sizes[2])
    while keeps and width > 1 and width * how.count > SUMS:
        width //= 2
    runs = planes * kept // width if keeps else math.prod(sizes) // width
    threads = THREADS if keeps else max(32, min(PLANE_THREADS, 1 << (runs - 1).bit_length()))
    blocks = -(-runs // threads) if keeps else planes
    numbers = [
        *(Constant(f"k{word}", str(size), f"places along the {word.lower()} that is summed") for word, size in zip(AXES[1:], sizes[1:], strict=True)),
        Constant("kPlaces", str(math.prod(sizes)), "places that are summed"),
        Constant("kKept", str(kept), "places that stay"),
        Constant("kRanges", str(how.count), "sums of each"),
    ]
    if target.language == "cpp":
        numbers += [Constant("kPlanes", str(planes), "samples x channels"), Constant("kPiece", str(min(kept, PIECE)), "places that stay, at a time")]
    else:
        numbers += [
            Constant("kRun", str(width), f"values of a run: {width * precision.itemsize} bytes"),
            Constant("kRuns", str(runs), "runs of neighbouring values" + ("" if keeps else " of a plane")),
            Constant("kWarps", str(threads // 32), "kThreads / 32"),
            *_grid(target, threads, blocks, "kRuns / kThreads" + rounded(runs % threads != 0) if keeps else "samples x channels: one block a plane"),
        ]
    return RangesKernel(
        name=f"derive_{c_identifier(tensor.key)}", template=_template("ranges", target), arguments=("x", "y"), constants=tuple(numbers),
        summary=f"sums of {tensor.source} over {how.count} range{'s' if how.count > 1 else ''} of places", **_launched(target, threads, blocks), precision=precision, ragged=keeps and runs % threads != 0, parallel=math.prod(tensor.source_shape) >= PARALLEL_VALUES,
        ranges=ranges, sizes=sizes, width=width, keeps=keeps,
    )  # fmt: skip


def _grid(target: Target, threads: int, blocks: int, why: str) -> list[Constant]:
    """The constants of a launch; none of a C++ function."""
    found = [Constant("kThreads", str(threads), "threads of a block"), Constant("kBlocks", str(blocks), why)]
    return [] if target.language == "cpp" else found


def _launched(target: Target, threads: int, blocks: int) -> dict[str, int]:
    """The shape of a launch; nothing of a C++ function."""
    return {} if target.language == "cpp" else {"threads": threads, "blocks": blocks, "max_registers": register_limit(threads, 2)}


def _template(stem: str, target: Target) -> str:
    return f"derived/{stem}.{'cpp' if target.language == 'cpp' else 'cu'}.j2"
