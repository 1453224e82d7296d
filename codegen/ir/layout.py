"""Layouts: along which axis several ranks hold equal parts of a tensor, and what becomes of that axis under other sizes.

Part r of an axis of n places over tp ranks are the places from r * n / tp on, as torch.distributed's Shard has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ops import Shape

Layout = int | None
"""The axis along which ranks hold equal parts; None: each rank holds the whole."""


class ShardError(ValueError):
    """A chain that cannot be divided among ranks as it is asked for; the message is a sentence for the user."""


def part_of(shape: Shape, layout: Layout, tp: int) -> Shape:
    """The shape of a rank's part."""
    return shape if layout is None else (*shape[:layout], shape[layout] // tp, *shape[layout + 1 :])


def renamed(shape: Shape, axis: int, other: Shape, tp: int) -> Layout:
    """The axis of `other`, the same values under other sizes, whose parts are those of `axis` of `shape`; None where there is no such axis."""
    leading = math.prod(shape[:axis])
    return next((at for at, size in enumerate(other) if size > 1 and math.prod(other[:at]) == leading and size % tp == 0), None)


@dataclass(frozen=True)
class GroupParts:
    """The groups of a norm on one rank where ranks share some of them.

    The rank's value is (outer, sum of widths, inner): part i of it has widths[i] places and belongs to one group. `sent` are the parts that other ranks are told
    of, as many on each rank. `holders` has for each part the (rank, place among that rank's sent, values of a sample) of all that hold the group, by rank; it is
    empty where this rank alone does.
    """

    outer: int
    inner: int
    widths: tuple[int, ...]
    sent: tuple[int, ...]
    holders: tuple[tuple[tuple[int, int, int], ...], ...]


def shared_by_all(outer: int, widths: tuple[int, ...], inner: int, tp: int) -> GroupParts:
    """Groups of which each rank holds an equal part."""
    holders = tuple(tuple((rank, at, width * inner) for rank in range(tp)) for at, width in enumerate(widths))
    return GroupParts(outer, inner, widths, tuple(range(len(widths))), holders)


def straddling(outer: int, channels: int, groups: int, inner: int, tp: int, rank: int) -> GroupParts:
    """Channel groups that do not end where the ranks' channels do: a rank shares its first and its last with its neighbours at most."""
    width, own = channels // groups, channels // tp

    def parts(of: int) -> dict[int, int]:
        """Channels of each group on a rank, by group."""
        first, end = of * own, (of + 1) * own
        return {group: min(end, (group + 1) * width) - max(first, group * width) for group in range(first // width, (end - 1) // width + 1)}

    all_parts = [parts(of) for of in range(tp)]
    holders = []
    for group in all_parts[rank]:
        held = [(of, 0 if group == min(mine) else 1, mine[group] * inner) for of, mine in enumerate(all_parts) if group in mine]
        holders.append(tuple(held) if len(held) > 1 else ())
    widths = tuple(all_parts[rank].values())
    return GroupParts(outer, inner, widths, (0, len(widths) - 1), tuple(holders))
