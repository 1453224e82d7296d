"""Records on disk: one JSON object a line, in one file a kind and card, bench/results/<card>/<kind>.jsonl.

A command reads one kind of one card at a time, so that is a file. A changed measurement is one changed line, and lines that two branches added are
merged by git without a conflict (merge=union). Equal records give equal bytes: fields and lines stand in a fixed order.
"""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

FORMAT = 1
_OF_A_CLONE = Path(__file__).parent / "results"
RESULTS = _OF_A_CLONE if _OF_A_CLONE.is_dir() else Path("results")  # an installation keeps none: there, in the current folder

Record = dict[str, Any]


class RecordError(RuntimeError):
    """A file of records that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Kind:
    """A kind of record: its file's name and the fields that say which record it is. Those in `optional` may be missing, which means none."""

    name: str
    identity: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def path(self, results: Path, card: str) -> Path:
        """The file of a card's records."""
        return results / card / f"{self.name}.jsonl"

    def key(self, record: Record) -> tuple:
        """The identity of a record: two of the same key cannot both stand in a file."""
        return tuple(record.get(field) for field in self.identity)

    def line(self, record: Record) -> str:
        """The record as its line: the format, its identity, then the other fields by name."""
        first = {"format": FORMAT} | {field: record[field] for field in self.identity if field in record}
        rest = json.loads(json.dumps({field: value for field, value in record.items() if field not in first}, sort_keys=True))
        return json.dumps(first | rest, separators=(",", ":"), allow_nan=False)


# What was measured of a package. `asked_target` is there where a target was asked for instead of the loader's choice.
EVIDENCE = Kind("evidence", ("spec", "precision", "batch", "weights", "asked_target"), ("batch", "asked_target"))
SANITIZE = Kind("sanitize", ("spec", "precision", "target", "tool"))
KERNELBENCH = Kind("kernelbench", ("shapes", "problem", "precision"))
LEVEL2 = Kind("level2", ("problem", "precision", "algebra"), ("algebra",))  # one of KernelBench's level-2 problems; `algebra`: is its chain rewritten?
SWEEP = Kind("sweep", ("small", "seed", "index"))
PARALLEL = Kind("parallel", ("spec", "precision", "ranks"))  # of a chain divided among ranks; in the folder of the card with their number, as in h200-x2
MODELS = Kind("models", ("model", "precision"))  # a whole model with kernels in the place of its chains
MACHINE = Kind("machine", ("measured_by",))  # the rates of the card as the command of that name last measured them
KINDS = (EVIDENCE, SANITIZE, KERNELBENCH, LEVEL2, SWEEP, PARALLEL, MODELS, MACHINE)


def read(kind: Kind, results: Path, card: str) -> list[Record]:
    """A card's records of one kind, in the order of their identities; none where there is no file.

    Raises RecordError for a line that is no record, and for two different records of the same identity, as a merge may leave them.
    """
    path = kind.path(results, card)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start}); take the file from git again") from None
    found: dict[tuple, tuple[int, Record]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parsed(kind, f"{path}:{number}", line)
        before, same = found.setdefault(kind.key(record), (number, record))
        if same != record:
            raise RecordError(f"{path}:{number}: differs from line {before}, and both are of {_named(kind, record)}; delete one of the two lines")
    return [record for _, record in sorted(found.values(), key=lambda item: _rank(kind.key(item[1])))]


def find(kind: Kind, results: Path, card: str, **identity: Any) -> Record | None:
    """The record of an identity; None where there is none. Raises RecordError as `read` does."""
    wanted = tuple(identity.get(field) for field in kind.identity)
    return next((record for record in read(kind, results, card) if kind.key(record) == wanted), None)


def put(kind: Kind, results: Path, card: str, records: Iterable[Record]) -> None:
    """Add `records` to a card's file, each in place of one of the same identity. Raises RecordError as `read` does; the file stays as it was then."""
    with _locked(kind, results, card):
        _write(kind, results, card, [*read(kind, results, card), *records])


def replace(kind: Kind, results: Path, card: str, records: Iterable[Record]) -> None:
    """Make `records` all that a card's file holds."""
    with _locked(kind, results, card):
        _write(kind, results, card, records)


def cards(results: Path, *kinds: Kind) -> list[str]:
    """The cards with a file of any of these kinds, by name."""
    return sorted({path.parent.name for kind in kinds for path in results.glob(f"*/{kind.name}.jsonl")})


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def bundle(results: Path, card: str, archive: Path) -> None:
    """All records of one card in one tar, to be unpacked in bench/results/."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary = archive.with_name(f".{archive.name}.tmp")
    with tarfile.open(temporary, "w") as tar:
        for path in sorted((results / card).glob("*.jsonl")):
            tar.add(path, arcname=f"{card}/{path.name}")
    os.replace(temporary, archive)


def _locked(kind: Kind, results: Path, card: str) -> FileLock:
    """The lock of a card's file: two commands that add to it at once lose nothing."""
    path = kind.path(results, card)
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path.with_name(f".{path.name}.lock"))


def _write(kind: Kind, results: Path, card: str, records: Iterable[Record]) -> None:
    latest = {kind.key(record): record for record in records}
    write_text(kind.path(results, card), "".join(kind.line(latest[key]) + "\n" for key in sorted(latest, key=_rank)))


def _parsed(kind: Kind, where: str, line: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        reason = f"is no JSON ({error})"
        raise RecordError(f"{where}: {reason}; a line holds one record, so take it from git again or delete it") from None
    if not isinstance(record, dict):
        raise RecordError(f"{where}: holds {type(record).__name__} where a record is expected; delete the line")
    if record.get("format") != FORMAT:
        raise RecordError(f"{where}: is of format {record.get('format')!r}, and this version reads format {FORMAT}; use the version that wrote it, or delete the line")
    missing = [field for field in kind.identity if field not in record and field not in kind.optional]
    if missing:
        raise RecordError(f"{where}: names no {', no '.join(missing)}, and a record of {kind.name} needs it; delete the line")
    return record


def _named(kind: Kind, record: Record) -> str:
    return ", ".join(f"{field} {record[field]}" for field in kind.identity if field in record)


def _rank(key: tuple) -> list[tuple]:
    """A key as something to sort by: none first, then numbers, then words."""
    return [(0,) if part is None else (1, part) if isinstance(part, int | float) else (2, str(part)) for part in key]
