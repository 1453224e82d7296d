"""The K dimension of a convolution without im2col: which filter taps each tensor-core instruction multiplies, and where their pixels lie.

Pixels lie in shared memory as 8 channels of 16 bits (16 bytes), row after row: 8 neighbouring pixels are one core matrix of an operand
without swizzle. One instruction covers K = 16: two halves of 8 channels, each a filter tap on one plane of 8 input channels. The first half's
pixels start at the tile's first pixel plus the tap's offset; the second half's follow at a fixed distance, the operand's leading byte offset,
which must be positive (a negative one faults on the device).
"""

from __future__ import annotations

from dataclasses import dataclass

CONSTANTS = "constants"  # a region of equal values, behind all planes: its address is known at run time only


@dataclass(frozen=True)
class Half:
    """8 values of K: `weights` is the C expression of its two fragment registers, `offset` its pixels' place in units of 16 bytes or CONSTANTS."""

    weights: str
    offset: int | str
    label: str


@dataclass(frozen=True)
class Step:
    """One instruction. `offset` and `distance` are in units of 16 bytes; `distance` is None where the second half is the constant region."""

    first: Half
    second: Half
    corrects: bool

    @property
    def offset(self) -> int:
        return self.first.offset

    @property
    def distance(self) -> int | None:
        return None if self.second.offset == CONSTANTS else self.second.offset - self.first.offset

    @property
    def label(self) -> str:
        return f"{self.first.label}, {self.second.label}"


def steps(kernel: tuple[int, int], octets: int, pitch: int, plane: int, parts: int, shifted: bool) -> tuple[Step, ...]:
    """The instructions of one tile, corrections first: they are summed while the truncating accumulator is still small.

    `kernel` is (height, width), `octets` the planes of 8 input channels, `pitch` the pixels of a row in shared memory, `plane` the pixels of a
    plane, `parts` 2 for operands split in two (the low parts' planes follow the high parts'), `shifted` whether the constant region carries a shift.
    """
    taps = [
        (o * kernel[0] * kernel[1] + r * kernel[1] + c, o * plane + r * pitch + c, f"{r},{c}" + (f" of plane {o}" if octets > 1 else ""))
        for o in range(octets)
        for r in range(kernel[0])
        for c in range(kernel[1])
    ]

    def halves(weights: str, low_pixels: bool) -> list[Half]:
        base = octets * plane if low_pixels else 0
        return [Half(f"{weights}[{index}]", base + offset, f"{weights} {label}{' low x' if low_pixels else ''}") for index, offset, label in taps]

    main = halves("high", False)
    pairs = _correction_pairs(halves("low", False), halves("high", True)) if parts == 2 else []
    tail = [Half("shift", CONSTANTS, "shift")] if shifted else []
    if (len(main) + len(tail)) % 2:
        # Operands in two parts fill the free half with the smallest products of the last tap.
        tail.insert(0, halves("low", True)[-1] if parts == 2 else Half("none", CONSTANTS, "nothing"))
    ordered = main[: len(main) - len(tail)]
    for half, partner in zip(main[len(main) - len(tail) :], tail, strict=True):
        ordered += [half, partner]
    listed = [Step(a, b, True) for a, b in pairs]
    return (*listed, *(Step(a, b, False) for a, b in zip(ordered[::2], ordered[1::2], strict=True)))


def _correction_pairs(first: list[Half], second: list[Half]) -> list[tuple[Half, Half]]:
    """Pairs of neighbours, as in the main products: an instruction's weights are four registers in a row, so other pairs would cost copies."""
    pairs = [*zip(first[:-1:2], first[1::2], strict=True), *zip(second[:-1:2], second[1::2], strict=True)]
    return [*pairs, (first[-1], second[-1])] if len(first) % 2 else pairs


def uses_none(listed: tuple[Step, ...]) -> bool:
    """Is some half of K unused?"""
    return any(step.second.weights == "none" for step in listed)
