"""Shardings: a chain divided among ranks, as kernels on each rank's own values and merges between them.

    x --[linear, add]--> value:1 --(moments)--> value:2 --[hardtanh]--> value:3

Kernels are chains of their own at local sizes, the same on all ranks. They end where ranks must exchange something, and behind each value that is reused in
another of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from codegen.ir.layout import Layout, ShardError, part_of
from codegen.ir.placing import Merge, Placed, Placing, entry_of
from codegen.ir.value import Value
from codegen.ops import Shape
from codegen.spec import Step
from codegen.spec.types import operand_shape

FIRST = "x"  # the name of the first input among values, as in Chain


@dataclass(frozen=True)
class Read:
    """A value that kernels or a merge take: its name, its whole shape, the layout in which ranks hold it and the one in which it is wanted.

    Taking a part of a whole value costs nothing; a value that is held in parts and wanted otherwise is gathered first. `called` names it inside the kernels, `of` is
    the shape under which they take it. A parameter is named by its key.
    """

    value: str
    shape: Shape
    held: Layout
    wanted: Layout
    called: str
    of: Shape
    parameter: bool = False

    @property
    def gathered(self) -> bool:
        return self.held is not None and self.held != self.wanted


@dataclass(frozen=True)
class Kernels:
    """A run of the chain that a rank computes alone: what it reads (the value in front first), its chain as a spec writes it, and what it gives.

    `parameters` are the keys of those that it holds, `shape` is the local shape of the result.
    """

    reads: tuple[Read, ...]
    entries: tuple[Any, ...]
    parameters: tuple[str, ...]
    gives: str
    shape: Shape
    product: bool

    def layer(self, name: str, precision: str) -> dict[str, Any]:
        """Its spec, as plain data."""
        front = self.reads[0].of
        samples = len(front) > 1
        inputs = {read.called: {"shape": list(read.of), "batched": False} for read in self.reads}
        if samples:
            inputs[self.reads[0].called] = {"shape": list(front[1:])}
        return {"name": name, "batch": front[0] if samples else 1, "precision": precision, "inputs": inputs, "chain": list(self.entries)}


@dataclass(frozen=True)
class Together:
    """A merge in its place: the value that it takes, and what it gives in which local shape. `scale` and `bias` are the keys of parameters that it reads itself."""

    merge: Merge
    step: Step
    read: Read
    gives: str
    shape: Shape
    scale: str | None = None
    bias: str | None = None


@dataclass(frozen=True)
class Collective:
    """What ranks exchange at one place: its kind, the operator there, and the elements that each rank receives from all others together."""

    kind: str
    at: str
    elements: int


@dataclass(frozen=True)
class Sharding:
    """A chain on one of `tp` ranks.

    `inputs` and `output` are the layouts of what is given and of the result, `parameters` those of parameters and running statistics by key, `shape` is the result's
    whole shape. `work` is done in order; its kernels are the same on all ranks.
    """

    tp: int
    rank: int
    inputs: dict[str, Layout]
    output: Layout
    shape: Shape
    parameters: dict[str, Layout]
    work: tuple[Kernels | Together, ...]

    @property
    def kernels(self) -> tuple[Kernels, ...]:
        return tuple(part for part in self.work if isinstance(part, Kernels))

    @property
    def merged(self) -> tuple[Step, ...]:
        """The steps that no kernel computes: the merge in their place does."""
        return tuple(part.step for part in self.work if isinstance(part, Together) and not part.merge.behind)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All that ranks exchange before the result is gathered; empty where each has whole groups."""
        found = []
        for part in self.work:
            for read in part.reads if isinstance(part, Kernels) else (part.read,):
                if read.gathered:
                    found.append(Collective("gather", read.value, math.prod(read.shape) * (self.tp - 1) // self.tp))
            if isinstance(part, Together):
                found.append(Collective(part.merge.kind, part.step.name or part.step.operator.name, (self.tp - 1) * _sent(part, self.tp)))
        return tuple(found)

    @property
    def text(self) -> str:
        """What is divided and what is exchanged, a line each, for people."""
        lines = [f"{self.tp} ranks; the result {'is whole on each' if self.output is None else f'is divided along dimension {self.output}'}"]
        lines += [f"  {key}: {'whole' if axis is None else f'divided along dimension {axis}'}" for key, axis in self.parameters.items()]
        lines += [f"  {one.kind} at {one.at}: {one.elements} elements from the other ranks" for one in self.collectives] or ["  no communication before the result is gathered"]
        return "\n".join(lines)


def _sent(part: Together, tp: int) -> int:
    """Elements that a rank sends to each other one."""
    kind, own = part.merge.kind, math.prod(part.read.of)
    if kind == "moments":
        return 2 * part.merge.groups.outer * len(part.merge.groups.sent)
    if kind == "product":
        return own if part.merge.scatter is None else own // tp
    return 2 * own // part.read.of[part.merge.axis] if kind == "rows" else math.prod(part.shape)


def shard(inputs: tuple[Value, ...], steps: Sequence[Step], training: bool, tp: int, rank: int, split: Layout = None) -> Sharding:
    """The steps of a chain on rank `rank` of `tp`. See Chain.shard."""
    if tp < 1 or not 0 <= rank < tp:
        raise ShardError(f"rank {rank} of {tp}: ranks count from 0 to {max(tp, 1) - 1}")
    shape = inputs[0].shape
    if split is not None and not -len(shape) <= split < len(shape):
        raise ShardError(f"dimension {split} of x: its shape {shape} has {-len(shape)} to {len(shape) - 1}")
    if split is not None and shape[split] % tp:
        raise ShardError(f"x: {shape[split]} places of dimension {split} over {tp} ranks: {tp} does not divide them")
    layouts: dict[str, Layout] = {given.name: None for given in inputs}
    layouts[FIRST] = split % len(shape) if split is not None and tp > 1 else None
    shapes = {given.name: given.shape for given in inputs}
    placing, placed = Placing(tp, rank, training), []
    for step in steps:
        front = FIRST if step.index == 0 else _result(step.index - 1)
        second = _second(step, shapes)
        placed.append(placing.place(step, layouts[front], (layouts[second], shapes[second]) if second else None))
        layouts[_result(step.index)], shapes[_result(step.index)] = placed[-1].gives, step.output_shape
    if tp > 1 and all(axis is None for axis in (*placing.parameters.values(), *layouts.values())):
        raise ShardError("nothing of this chain is divided: it has no linear and no convolution, and x is whole on each rank; give x in parts of one of its dimensions")
    work: list[Kernels | Together] = []
    bounds = sorted(_cuts(placed, layouts))
    for first, end in zip(bounds, bounds[1:], strict=False):
        work += _part(placed[first:end], tp, layouts, shapes)
    last = _result(steps[-1].index)
    return Sharding(tp, rank, {given.name: layouts[given.name] for given in inputs}, layouts[last], shapes[last], placing.parameters, tuple(work))


def _result(index: int) -> str:
    return f"value:{index}"


def _second(step: Step, shapes: dict[str, Shape]) -> str | None:
    """The name of the value that a step takes beside the one in front."""
    if step.reads is not None:
        name = f"input:{step.reads}"
        return name if name in shapes else FIRST
    return None if step.tap is None else _result(step.tap)


def _cuts(placed: Sequence[Placed], layouts: dict[str, Layout]) -> set[int]:
    """The places of the chain, its ends included, between which kernels run from end to end."""
    cuts = {0, len(placed)}
    for at, one in enumerate(placed):
        if at and layouts[_result(at - 1)] != one.takes:
            cuts.add(at)
        if one.merge is not None:
            cuts |= {at + 1} if one.merge.behind else {at, at + 1}
        if one.step.tap is not None and layouts[_result(one.step.tap)] != one.other:
            cuts |= {one.step.tap + 1, at}
    while True:
        apart = {one.step.tap + 1 for at, one in enumerate(placed) if one.step.tap is not None and any(one.step.tap < cut <= at for cut in cuts)}
        if apart <= cuts:
            return cuts
        cuts |= apart


def _part(run: Sequence[Placed], tp: int, layouts: dict[str, Layout], shapes: dict[str, Shape]) -> list[Kernels | Together]:
    """The work of a run between two cuts."""
    first, last = run[0], run[-1]
    merge, step = last.merge, last.step
    front = FIRST if first.step.index == 0 else _result(first.step.index - 1)
    gives, shape = _result(step.index), part_of(step.output_shape, last.gives, tp)
    work: list[Kernels | Together] = []
    if merge is not None and not merge.behind:
        return [_together(last, _read(front, "", layouts, shapes, last.takes, tp), gives, shape)]
    local = shape if merge is None else step.output_shape  # partial products have all channels, and a fold has left the divided axis
    work.append(_kernels(run, front, gives if merge is None else f"{gives} of a rank", local, tp, layouts, shapes))
    if merge is not None:
        work.append(_together(last, Read(f"{gives} of a rank", local, None, None, "", local), gives, shape))
    return work


def _read(value: str, called: str, layouts: dict[str, Layout], shapes: dict[str, Shape], wanted: Layout, tp: int) -> Read:
    return Read(value, shapes[value], layouts[value], wanted, called, part_of(shapes[value], wanted, tp))


def _together(placed: Placed, read: Read, gives: str, shape: Shape) -> Together:
    step = placed.step
    keys = {key.rpartition(".")[2]: key for key in placed.parameters}
    if placed.merge.kind == "product":
        return Together(placed.merge, step, read, gives, shape, None, keys.get("bias"))
    return Together(placed.merge, step, read, gives, shape, keys.get("weight"), keys.get("bias"))


def _kernels(run: Sequence[Placed], front: str, gives: str, shape: Shape, tp: int, layouts: dict[str, Layout], shapes: dict[str, Shape]) -> Kernels:
    own = {placed.step.index for placed in run}
    taken = {placed.step.name for placed in run if placed.step.name}
    reads: dict[Any, Read] = {}

    def called(value: str) -> str:
        """A name for a value from outside, that no operator of the run has."""
        base = name = value.replace("input:", "").replace("value:", "result_").replace(".", "_")
        number = 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        return name

    def read(value: str, wanted: Layout) -> str:
        if (value, wanted) not in reads:
            reads[value, wanted] = _read(value, called(value), layouts, shapes, wanted, tp)
        return reads[value, wanted].called

    read(front, run[0].takes)
    entries, keys = [], []
    for placed in run:
        step, names = placed.step, {}
        if step.reads is not None or (step.tap is not None and step.tap not in own):
            names["from"] = read(_second(step, shapes), placed.other)
        if step.owner is not None and step.owner not in own:
            key, stored = step.owned
            dimension = placed.parameters[key]
            if key not in reads:
                met = operand_shape(placed.values, part_of(stored, dimension, tp))
                reads[key] = Read(key, stored, dimension, dimension, called(key), met, parameter=True)
            names["parameter"] = reads[key].called
        entries.append(entry_of(placed, tp, names))
        merged = placed.merge is not None and placed.merge.kind == "product"
        keys += [step.key(entry) for entry in (*step.parameters, *step.buffers) if not (merged and entry.suffix == "bias")]
    return Kernels(tuple(reads.values()), tuple(entries), tuple(keys), gives, shape, any(placed.step.operator.takes for placed in run))


def work_on(sharding: Sharding) -> Iterable[tuple[Kernels | Together, tuple[str, ...]]]:
    """The work of a sharding in order, each with the values that nothing reads any more behind it."""
    last: dict[str, int] = {}
    for at, part in enumerate(sharding.work):
        for read in part.reads if isinstance(part, Kernels) else (part.read,):
            if not read.parameter:
                last[read.value] = at
    for at, part in enumerate(sharding.work):
        yield part, tuple(value for value, end in last.items() if end == at)


__all__ = ["FIRST", "Collective", "Kernels", "Read", "Sharding", "ShardError", "Together", "shard", "work_on"]
