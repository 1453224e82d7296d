"""Random specs of the fused form: a producer, element-wise operators, a norm, then anything that fused plans take.

A seed keeps its specs while the grammar grows, so that what is recorded of them stays comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench.sweep.draw import CHAIN, Limits, divisor, first_valid, number, size
from codegen.ir.fused_form import FOLDS, NORMS, POOLS, PRODUCERS, FusedSpec, departure
from codegen.ops import FILLS, OPERATORS, REQUIRED, Argument, Kind, Operator


@dataclass
class _Scene:
    """What has been drawn of a spec so far, for the arguments that depend on it."""

    rng: Random
    limits: Limits
    rank: int
    channels: int = 1  # behind the producer
    drawn: dict[str, Any] = field(default_factory=dict)  # of the operator in hand
    names: list[str] = field(default_factory=list)  # of the operators so far


def _pair(rng: Random, low: int, high: int) -> int | list[int]:
    """One size for both axes, or now and then one for each."""
    return [rng.randint(low, high), rng.randint(low, high)] if rng.random() < 0.2 else rng.randint(low, high)


# Arguments whose meaning lies in their name: what they may be depends on the shapes around them.
_BY_NAME: dict[str, Callable[[_Scene], Any]] = {
    "in_features": lambda s: size(s.rng, *s.limits.features),
    "out_features": lambda s: size(s.rng, *s.limits.features),
    "in_channels": lambda s: size(s.rng, *s.limits.channels),
    "out_channels": lambda s: size(s.rng, *s.limits.channels),
    "groups": lambda s: 1 if s.rng.random() < 0.6 else divisor(s.rng, math.gcd(s.drawn["in_channels"], s.drawn["out_channels"])),
    "num_groups": lambda s: divisor(s.rng, s.channels),
    "dim": lambda s: 1,
    "normalized_shape": lambda s: s.channels,
    "num_features": lambda s: s.channels,
    "kernel_size": lambda s: _pair(s.rng, 1, s.rng.choice((3, 3, 5, 7))),
}
_BY_TYPE: dict[str, Callable[[_Scene, Argument], Any]] = {
    "size": lambda s, a: s.rng.randint(1, 3),
    "count": lambda s, a: s.rng.randint(0, 2),
    "pair": lambda s, a: _pair(s.rng, 1, 3),
    "count_pair": lambda s, a: _pair(s.rng, 0, 3),
    "number": lambda s, a: number(s.rng, a.default),
    "bound": lambda s, a: number(s.rng, None),
    "flag": lambda s, a: s.rng.random() < 0.5,
    "fill": lambda s, a: s.rng.choice(FILLS),
    "tap": lambda s, a: s.rng.choice(s.names),
    "shape": lambda s, a: [s.channels if s.rng.random() < 0.8 else 1, *[1] * (s.rank - 2)],
}


def _argument(scene: _Scene, argument: Argument) -> Any:
    if argument.name in _BY_NAME:
        return _BY_NAME[argument.name](scene)
    if isinstance(argument.type, tuple):
        return scene.rng.choice(argument.type)
    if argument.type not in _BY_TYPE:
        raise ValueError(f"argument {argument.name}: no rule draws the type {argument.type!r}; add one to tests/fused_draw.py")
    return _BY_TYPE[argument.type](scene, argument)


# The operators of the fused form, and arguments of theirs that it has no use for. A seed keeps its specs while the grammar grows.
FUSED = (
    *PRODUCERS, *NORMS, *POOLS, *FOLDS,
    *(op.name for op in OPERATORS.values() if op.kind is Kind.ELEMENTWISE and op.name not in ("rsub", "rdiv", "minimum", "maximum")),
)  # fmt: skip
_LEFT_OUT = {("sub", "from"), ("div", "from"), *((producer, "init") for producer in PRODUCERS)}


def _arguments(operator: Operator) -> list[Argument]:
    """Those of an operator that are drawn."""
    return [a for a in operator.arguments if a.name not in ("parameter", "view") and (operator.name, a.name) not in _LEFT_OUT]


def _operator(scene: _Scene, operator: Operator, name: str) -> dict[str, Any] | str:
    """One entry of the chain. Half of what has a default is left at it."""
    scene.drawn = {}
    for argument in _arguments(operator):
        if argument.default is REQUIRED or scene.rng.random() < 0.5:
            scene.drawn[argument.name] = _argument(scene, argument)
    given = ({"name": name} if operator.takes_name else {}) | scene.drawn
    scene.names += [name] if operator.takes_name else []
    return {operator.name: given} if given else operator.name


def _attempt(rng: Random, limits: Limits, name: str, first: Operator, precision: str) -> dict[str, Any]:
    kinds = {kind: [op for op in OPERATORS.values() if op.kind is kind and op.name in FUSED] for kind in Kind}
    norm = rng.choice(kinds[Kind.NORM])
    behind = [kind for kind in Kind if kind not in (Kind.PRODUCER, Kind.NORM) and kinds[kind]]
    images = first.name != "linear"
    scene = _Scene(rng, limits, 4 if images else 2)
    data: dict[str, Any] = {"name": name, "batch": size(rng, *(limits.images if images else limits.batch)), "precision": precision}
    data["input"] = {"values": rng.choice(("rand", "randn"))}
    if images:
        height = size(rng, *limits.side)
        data["input"] |= {"height": height, "width": height if rng.random() < 0.6 else size(rng, *limits.side)}
    chain = [_operator(scene, first, "producer")]
    scene.channels = scene.drawn.get("out_features") or scene.drawn["out_channels"]
    before = [rng.choice(kinds[Kind.ELEMENTWISE]) for _ in range(rng.randint(0, CHAIN))]
    after = [rng.choice(kinds[rng.choice(behind)]) for _ in range(rng.randint(0, CHAIN))]
    for place, operator in enumerate([*before, norm, *after], 1):
        chain.append(_operator(scene, operator, f"op{place}"))
    return data | {"chain": chain}


def draw(seed: int, index: int, limits: Limits, folder: Path) -> FusedSpec:
    """Case `index` of the sequence `seed`, written to a YAML file in `folder`. The same arguments and table give the same spec."""
    producers = [op for op in OPERATORS.values() if op.name in PRODUCERS]
    return FusedSpec.of(first_valid(seed, index, limits, folder, producers, _attempt, lambda spec: departure(spec.chain) is None))
