"""Fleets: a command that measures many cases, on several machines or GPUs at once under torchrun.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint host:29400 -m fixed_shape_kernels sweep --count 200

Each rank takes every so many-th case and the GPUs of its machine that are its own, and keeps its records in a folder of its own. When all have ended the first
rank merges them; what a run that was cut short left in those folders is found by the next one. Without torchrun there is one rank, and nothing of this happens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import distributed

from bench import store
from bench.store import KINDS, Kind, Record

Item = TypeVar("Item")
OWN = ".ranks"  # the folder in that of the records that has one for each rank
PATIENCE = timedelta(days=2)  # ranks end hours apart

Held = dict[tuple[str, str], list[Record]]  # records by kind and card


def heard(own: Any, group: distributed.ProcessGroup | None = None) -> list[Any]:
    """What every rank of `group` (of all, without) has, by rank: any object that pickles. Raises RuntimeError where one of them has ended."""
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, own, group=group)
    return found


@dataclass(frozen=True)
class Fleet:
    """The ranks of a command: how many, and which of them this process is. `results` is the folder where it keeps its records, of a command that has any."""

    size: int
    rank: int
    results: Path | None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def mine(self, items: Sequence[Item]) -> Sequence[Item]:
        """This rank's share of the cases."""
        return items[self.rank :: self.size]

    def heard(self, own: Any) -> list[Any]:
        """What every rank has, by rank."""
        return [own] if self.size == 1 else heard(own)

    def refuse(self, option: str, asked: bool) -> None:
        """Raise click.UsageError where an option is asked for that is one rank's business."""
        if asked and self.size > 1:
            raise click.UsageError(f"{option} is for one rank: with {self.size} of them the records are complete when all have ended")


@contextmanager
def fleet(results: Path | None = None) -> Iterator[Fleet]:
    """The fleet that torchrun started, for the length of a command that keeps its records in `results`; one rank without torchrun.

    Raises click.UsageError where a rank has no GPU of its own.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        yield Fleet(1, 0, results)
        return
    _take_cards(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    distributed.init_process_group("gloo", timeout=PATIENCE)
    try:
        if results is None:
            yield Fleet(size, rank, None)
            return
        made = Fleet(size, rank, results / OWN / str(rank))
        known = _merged(made.heard(_found(results)))
        _write(known, made.results)
        try:
            yield made
        except SystemExit:  # the command's verdict: its records count all the same
            _end(made, results, known)
            raise
        _end(made, results, known)
    finally:
        distributed.destroy_process_group()


def _take_cards(local: int, count: int) -> None:
    """Leave this process those of the machine's visible GPUs that are its own."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()] or [str(card) for card in range(torch.cuda.device_count())]
    own = visible[local::count]
    if visible and not own:
        raise click.UsageError(f"{count} ranks on this machine, and {len(visible)} GPUs; start as many ranks as there are GPUs, or fewer")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)


def _found(results: Path) -> Held:
    """The records on this machine: the merged ones, and in their place those that ranks left."""
    return _merged([_in(folder) for folder in (results, *sorted(results.glob(f"{OWN}/*")))])


def _in(folder: Path) -> Held:
    return {(kind.name, card): store.read(kind, folder, card) for kind in KINDS for card in store.cards(folder, kind)}


def _merged(parts: Sequence[Held]) -> Held:
    """Records of several folders as one; of the same identity the last."""
    found: dict[tuple[str, str], dict[tuple, Record]] = {}
    for part in parts:
        for (name, card), records in part.items():
            found.setdefault((name, card), {}).update((_kind(name).key(record), record) for record in records)
    return {place: list(records.values()) for place, records in found.items()}


def _kind(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def _write(held: Held, results: Path) -> None:
    for (name, card), records in held.items():
        store.replace(_kind(name), results, card, records)


def _end(made: Fleet, results: Path, known: Held) -> None:
    """Merge what the ranks changed into the first rank's records, and leave no folder of a rank behind."""
    now = _in(made.results)
    changed = {place: [record for record in records if record not in known.get(place, [])] for place, records in now.items()}
    parts = made.heard({place: records for place, records in changed.items() if records})
    if made.first:
        for (name, card), records in _merged([known, *parts]).items():
            store.put(_kind(name), results, card, records)
        click.echo(f"the records of {made.size} ranks are merged in {results}")
    made.heard(None)  # the first rank has them
    shutil.rmtree(results / OWN, ignore_errors=True)
