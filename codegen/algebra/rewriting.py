"""What a rewriting is: a chain that gives the same result, and the tensors that kernels of ours derive for it at each call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ops import Shape
from codegen.spec import Spec, Step


@dataclass(frozen=True)
class ByChain:
    """Derivation by operators of the table: `steps` take the source as their value, and the kernels of segments compute them."""

    steps: tuple[Step, ...]


@dataclass(frozen=True)
class ByTaps:
    """Derivation of a filter from a filter of shape (p, q, taps along each axis): sums of its taps times `scale`.

    `sums[axis][m]` lists the source's taps along an axis whose sum is the result's tap m. The result lies as (first, m of the leading `front` axes, second,
    m of the other axes), where first and second are p and q, or q and p where it `swaps` them.
    """

    sums: tuple[tuple[tuple[int, ...], ...], ...]
    scale: float
    swaps: bool = False
    front: int = 0

    @property
    def counts(self) -> Shape:
        """Taps of the result along each axis."""
        return tuple(map(len, self.sums))


@dataclass(frozen=True)
class ByRanges:
    """Derivation of sums over ranges of places from a value of shape (batch, channels, places along each axis).

    `ranges` has for each leading spatial axis that is summed the ranges (first place, place behind the last); axes behind those stay. The result lies as
    (batch, channels, one for each combination of ranges, the axes that stay).
    """

    ranges: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def count(self) -> int:
        """Combinations of ranges."""
        return math.prod(map(len, self.ranges))


@dataclass(frozen=True)
class Derived:
    """A tensor of float32 that is derived at each call: under `key` the rewritten chain reads it, in the place of a parameter or of x.

    `source` is the key of a parameter, or "x"; `source_shape` is the shape under which it is read, which may be another than its own.
    """

    key: str
    shape: Shape
    source: str
    source_shape: Shape
    how: ByChain | ByTaps | ByRanges

    @property
    def buffer(self) -> str:
        """Its name in a plan."""
        return "derived:" + self.key.replace(".", ":")


@dataclass(frozen=True)
class Rewriting:
    """A chain under rewriting, in a mode (`training` or evaluation).

    `spec` has the rewritten chain, `derived` what it reads beside the layer's own tensors. `applied` are (pass, sentence) of what was rewritten, `declined` of
    what a pass would have rewritten but for the reason that its sentence gives.
    """

    spec: Spec
    training: bool = False
    derived: tuple[Derived, ...] = ()
    applied: tuple[tuple[str, str], ...] = ()
    declined: tuple[tuple[str, str], ...] = ()

    def to(self, spec: Spec, derived: tuple[Derived, ...] = ()) -> Rewriting:
        """The same with another chain, and tensors that this one reads too."""
        return replace(self, spec=spec, derived=(*self.derived, *derived))

    @property
    def names(self) -> tuple[str, ...]:
        """The passes that rewrote something, in order, each once."""
        return tuple(dict.fromkeys(name for name, _ in self.applied))

    @property
    def why(self) -> tuple[str, ...]:
        """One sentence for each rewrite, and for each that was declined."""
        return (*(f"algebra, {name}: {text}" for name, text in self.applied), *(f"algebra, not {name}: {text}" for name, text in self.declined))


class Declined(Exception):
    """A rewrite that holds and is not made; the message says why, in a sentence."""
