"""A random spec: any chain with a producer that the operator table allows, sizes log-uniform, every precision.

What an argument may be is read off the table's `type`, so an operator that joins the table is drawn from then on. A draw that the spec's reader
refuses, or that costs more than its limits, is thrown away and drawn again: the reader alone says what is valid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

from codegen.numerics import PRECISIONS
from codegen.ops import FILLS, OPERATORS, REQUIRED, Argument, Kind, Operator, Shape, ShapeError
from codegen.ir.flop import producer_flop as flop_of
from codegen.spec import Spec, SpecError, load_spec
from codegen.spec.types import result_shape

Range = tuple[int, int]
ATTEMPTS = 2000  # about one draw in four is a valid spec within its limits
CHAIN = 3  # at most so many operators before the norms, and behind them


@dataclass(frozen=True)
class Limits:
    """Ranges of the sizes, and what one case may cost: FLOP of the producer, bytes of `footprint`. `images` is the batch of a convolution."""

    batch: Range
    images: Range
    features: Range
    channels: Range
    side: Range
    flop: float
    bytes: float


LARGE = Limits(batch=(1, 65536), images=(1, 512), features=(8, 65536), channels=(1, 1024), side=(4, 256), flop=2e11, bytes=4e9)
SMALL = Limits(batch=(1, 32), images=(1, 8), features=(8, 512), channels=(1, 48), side=(4, 24), flop=2e7, bytes=1e8)


@dataclass
class _Scene:
    """What has been drawn of a spec so far, for the arguments that depend on it."""

    rng: Random
    limits: Limits
    shape: Shape = ()  # of the value that the operator in hand takes
    drawn: dict[str, Any] = field(default_factory=dict)  # of the operator in hand
    results: dict[str, Shape] = field(default_factory=dict)  # that `from` may name: earlier operators' and other inputs
    owners: dict[str, Shape] = field(default_factory=dict)  # that `parameter` may name: operators with a shape of their own

    @property
    def channels(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else self.shape[0]


def size(rng: Random, low: int, high: int) -> int:
    """Log-uniform; two times in three rounded down to a multiple of a power of two, as sizes are in practice (the rest holds primes)."""
    value = round(math.exp(rng.uniform(math.log(low), math.log(high))))
    if rng.random() < 2 / 3:
        value -= value % 2 ** rng.randint(0, int(math.log2(value)))
    return max(low, value)


def divisor(rng: Random, of: int) -> int:
    small = [d for d in range(1, math.isqrt(of) + 1) if of % d == 0]
    return rng.choice([*small, *(of // d for d in small if d * d != of)])


def _several(rng: Random, low: int, high: int, axes: int) -> int | list[int]:
    """One size for all axes, or now and then one for each."""
    return [rng.randint(low, high) for _ in range(axes)] if rng.random() < 0.2 else rng.randint(low, high)


def _axes(scene: _Scene) -> int | list[int]:
    """An axis behind the batch, counted from either end; now and then several, or the batch's own."""
    rank = len(scene.shape)
    axis = lambda at: at - rank if scene.rng.random() < 0.3 else at  # noqa: E731
    chosen = scene.rng.sample(range(1, rank), scene.rng.randint(1, rank - 1)) if rank > 1 and scene.rng.random() < 0.4 else [scene.rng.randint(min(1, rank - 1), rank - 1)]
    return axis(chosen[0]) if len(chosen) == 1 else [axis(at) for at in sorted(chosen)]


def _operand_shape(scene: _Scene) -> list[int]:
    """One value a channel or one for all; now and then any of the trailing axes."""
    shape = scene.shape
    if scene.rng.random() < 0.25:
        return [size if scene.rng.random() < 0.6 else 1 for size in shape[scene.rng.randint(min(1, len(shape) - 1), len(shape) - 1) :]]
    return [scene.channels if scene.rng.random() < 0.8 else 1, *[1] * (len(shape) - 2)]


def number(rng: Random, default: Any) -> float:
    """Around the default, or within [-2, 2] where there is none (or it is 0)."""
    value = default * 2.0 ** rng.uniform(-1.5, 1.5) if isinstance(default, float) and default else rng.uniform(-2.0, 2.0)
    return float(f"{value:.3g}")


# Arguments whose meaning lies in their name: what they may be depends on the shapes around them.
_BY_NAME: dict[str, Callable[[_Scene], Any]] = {
    "in_features": lambda s: s.shape[-1],
    "out_features": lambda s: size(s.rng, *s.limits.features),
    "in_channels": lambda s: s.channels,
    "out_channels": lambda s: size(s.rng, *s.limits.channels),
    "groups": lambda s: 1 if s.rng.random() < 0.6 else divisor(s.rng, math.gcd(s.drawn["in_channels"], s.drawn["out_channels"])),
    "num_groups": lambda s: divisor(s.rng, s.channels),
    "normalized_shape": lambda s: list(s.shape[s.rng.randint(1, max(1, len(s.shape) - 1)) :]) or s.shape[-1],
    "num_features": lambda s: s.channels,
    "kernel_size": lambda s: _several(s.rng, 1, s.rng.choice((3, 3, 5, 7)), max(1, len(s.shape) - 2)),
    "momentum": lambda s: number(s.rng, 0.1),
    "p": lambda s: round(s.rng.random(), 3),
    "eps": lambda s: number(s.rng, 1e-5),
    "sizes": lambda s: [0, -1],
}
_AXES = {"single": 1, "pair": 2, "triple": 3}
_BY_TYPE: dict[str, Callable[[_Scene, Argument], Any]] = {
    "size": lambda s, a: s.rng.randint(1, 3),
    "count": lambda s, a: s.rng.randint(0, 2),
    **{name: lambda s, a, axes=axes: _several(s.rng, 1, 3, axes) for name, axes in _AXES.items()},
    **{f"count_{name}": lambda s, a, axes=axes: _several(s.rng, 0, 3, axes) for name, axes in _AXES.items()},
    "number": lambda s, a: number(s.rng, a.default),
    "bound": lambda s, a: number(s.rng, None),
    "flag": lambda s, a: s.rng.random() < 0.5,
    "tap": lambda s, a: s.rng.choice(list(s.results)),
    "shape": lambda s, a: _operand_shape(s),
    "axis": lambda s, a: s.rng.randint(-len(s.shape), len(s.shape) - 1),
    "axes": lambda s, a: _axes(s),
    "owner": lambda s, a: s.rng.choice(list(s.owners)),
    "view": lambda s, a: [1, -1, *[1] * (len(s.shape) - 2)],
    "fill": lambda s, a: s.rng.choice((*FILLS, 0.5)),
}


# Where an operand comes from, one of these with its weight; and the arguments that go with some of them, which few draws take.
_OPERANDS = {"shape": 5, "value": 3, "from": 3, "parameter": 2}
_GOES_WITH = {"init": ("shape",), "view": ("shape", "parameter"), "detach": ("from",)}
_SELDOM = ("view", "detach")


def _argument(scene: _Scene, argument: Argument) -> Any:
    if argument.name in _BY_NAME:
        return _BY_NAME[argument.name](scene)
    if isinstance(argument.type, tuple):
        return scene.rng.choice(argument.type)
    if argument.type not in _BY_TYPE:
        raise ValueError(f"argument {argument.name}: no rule draws the type {argument.type!r}; add one to bench/sweep/draw.py")
    return _BY_TYPE[argument.type](scene, argument)


def _operator(scene: _Scene, operator: Operator, name: str) -> dict[str, Any] | str | None:
    """One entry of the chain, which the scene's value goes through; None where the operator does not take it. Half of what has a default is left at it."""
    scene.drawn = {}
    operand = _operand(scene, operator)
    for argument in operator.arguments:
        if operand is not None:
            if argument.name in _OPERANDS and argument.name != operand or operand not in _GOES_WITH.get(argument.name, (operand,)):
                continue
            if argument.name in _SELDOM and scene.rng.random() < 0.8:
                continue
        if argument.default is REQUIRED or argument.name == operand or scene.rng.random() < 0.5:
            if argument.type == "tap" and not scene.results:
                return None
            scene.drawn[argument.name] = _argument(scene, argument)
    tap = scene.drawn.get("from")
    values = _values(operator, scene.drawn)
    if operator.check(values):
        return None
    try:
        result = result_shape(operator, values, scene.shape, scene.results.get(tap))
    except ShapeError:
        return None
    if not result:  # a number, of which nothing further is drawn
        return None
    scene.shape = result
    if operator.takes_name:
        scene.results[name] = scene.shape
    if operand == "shape":
        scene.owners[name] = tuple(scene.drawn["shape"])
    given = ({"name": name} if operator.takes_name else {}) | scene.drawn
    return {operator.name: given} if given else operator.name


def _operand(scene: _Scene, operator: Operator) -> str | None:
    """Where the operand comes from, of an operator that takes exactly one; a source that nothing in the scene offers is left out."""
    if not any(argument.type == "owner" for argument in operator.arguments):
        return None
    offered = {"from": scene.results, "parameter": scene.owners}
    sources = [source for source in _OPERANDS if offered.get(source, True)]
    return scene.rng.choices(sources, [_OPERANDS[source] for source in sources])[0]


def _values(operator: Operator, drawn: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the reader gives them to the table: defaults filled in, one size for several axes repeated."""
    values = {argument.name: drawn.get(argument.name, None if argument.default is REQUIRED else argument.default) for argument in operator.arguments}
    for argument in operator.arguments:
        value = values[argument.name]
        axes = _AXES.get(argument.type.removeprefix("count_")) if isinstance(argument.type, str) else None
        values[argument.name] = (value,) * axes if axes and isinstance(value, int) else tuple(value) if isinstance(value, list) else value
    if values.get("stride", ()) is None:
        values["stride"] = values["kernel_size"]
    return values


def _takes(operator: Operator, shape: Shape) -> bool:
    """Can the operator take a value of as many axes at all?"""
    return operator.rank in (0, len(shape) - 2) and (operator.kind is not Kind.NORM or len(shape) > 1)


def _attempt(rng: Random, limits: Limits, name: str, first: Operator, precision: str) -> dict[str, Any]:
    images = first.name != "linear"
    kinds = {kind: [op for op in OPERATORS.values() if op.kind is kind] for kind in Kind}
    behind = [kind for kind in Kind if kind not in (Kind.PRODUCER, Kind.NORM)]
    batch = size(rng, *(limits.images if images else limits.batch))
    side = size(rng, *limits.side)
    sizes = [size(rng, *limits.channels), *(side if rng.random() < 0.6 else size(rng, *limits.side) for _ in range(first.rank))] if images else [size(rng, *limits.features)]
    scene = _Scene(rng, limits, (batch, *sizes))
    inputs: dict[str, Any] = {"x": {"values": rng.choice(("rand", "randn")), "shape": sizes}}
    data: dict[str, Any] = {"name": name, "batch": batch, "precision": precision}
    chain: list[dict[str, Any] | str] = []

    def add(choose: Callable[[], Operator]) -> None:
        """One more operator, of those that take the value; the reader refuses the spec where luck finds none."""
        for _ in range(ATTEMPTS // 100):
            operator = choose()
            entry = _operator(scene, operator, f"op{len(chain)}") if _takes(operator, scene.shape) else None
            if entry is not None:
                chain.append(entry)
                return

    def any_of(*which: Kind) -> Callable[[], Operator]:
        """Of the operators that a value of as many axes can go through, so that those of one rank are no rarer than the others."""
        return lambda: rng.choice([op for op in kinds[rng.choice(which)] if _takes(op, scene.shape)] or kinds[which[0]])

    if rng.random() < 0.2:
        add(any_of(*behind))  # in front of the producer
    add(lambda: first)
    if rng.random() < 0.25:  # a second input of the value's own shape, or one that has no batch and broadcasts
        own = scene.shape[:1] == (batch,) and rng.random() < 0.5
        inputs["other"] = {"shape": list(scene.shape[1:])} if own else {"shape": list(scene.shape[-1:]), "batched": False}
        scene.results["other"] = scene.shape if own else scene.shape[-1:]
    for _ in range(rng.randint(0, CHAIN)):
        add(any_of(Kind.ELEMENTWISE))
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        add(any_of(Kind.NORM))
    for _ in range(rng.randint(0, CHAIN)):
        add(any_of(*behind))
    if rng.random() < 0.1:
        add(any_of(Kind.PRODUCER))
    if "other" in inputs and not any(isinstance(entry, dict) and next(iter(entry.values())).get("from") == "other" for entry in chain):
        chain.append({"add": {"from": "other"}})
    return data | ({"inputs": inputs} if len(inputs) > 1 else {"input": inputs["x"]}) | {"chain": chain}


def producer_flop(spec: Spec) -> float:
    """Multiply-adds of the producers, two FLOP each."""
    return sum(flop_of(step) for step in spec.chain if step.operator.kind is Kind.PRODUCER)


def producer_name(spec: Spec) -> str:
    """The first producer's operator; the first operator of a chain that has none."""
    return next((step for step in spec.chain if step.operator.kind is Kind.PRODUCER), spec.chain[0]).operator.name


def footprint(spec: Spec) -> float:
    """Bytes that verifying needs at most: inputs and the parameters in fp32 and in float64, and of the largest result behind x five float64 tensors at once."""
    parameters = sum(math.prod(shape) for _, shape in spec.parameters)
    largest = max(math.prod(step.output_shape) for step in spec.chain)
    inputs = sum(math.prod(given.shape) for given in spec.inputs)
    return 16.0 * (parameters + inputs) + 40.0 * largest


def draw(seed: int, index: int, limits: Limits, folder: Path) -> Spec:
    """Case `index` of the sequence `seed`, written to a YAML file in `folder`. The same arguments and table give the same spec."""
    return first_valid(seed, index, limits, folder, [op for op in OPERATORS.values() if op.kind is Kind.PRODUCER], _attempt)


def first_valid(
    seed: int, index: int, limits: Limits, folder: Path, producers: Sequence[Operator], attempt: Callable[[Random, Limits, str, Operator, str], dict[str, Any]],
    wanted: Callable[[Spec], bool] = lambda spec: True,
) -> Spec:  # fmt: skip
    """The first of the attempts that the reader takes, that is within the limits and `wanted`."""
    rng = Random(f"{seed}:{index}")
    name = f"sweep_{seed}_{index:03d}"
    fixed = rng.choice(producers), rng.choice(list(PRECISIONS))  # kept from draw to draw, so that no kind is rarer for being refused more often
    path = folder / f"{name}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        path.write_text(yaml.safe_dump(attempt(rng, limits, name, *fixed), sort_keys=False, default_flow_style=None, width=140), encoding="utf-8")
        try:
            spec = load_spec(path)
        except SpecError:
            continue
        if wanted(spec) and producer_flop(spec) <= limits.flop and footprint(spec) <= limits.bytes:
            return spec
    raise RuntimeError(f"no valid spec in {ATTEMPTS} draws: the operator table and bench/sweep/draw.py no longer fit")
