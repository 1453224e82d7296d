"""`fsk rekey`: evidence follows the machine code. Records of sources whose text changed and whose machine code did not get today's key.

A record names the sources that it measured by a key of their text. Where a record's key is that of the package at an earlier commit, both versions
are rendered, every source that differs is compiled as both (bench.same_code), and where all are the same, and steps, buffers and flags too, the
record is given the new key. Its `same_code_as` lists the earlier keys, the measured one first, each with the compilers that found no difference.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench import same_code, store
from bench.kernelbench import Run
from bench.level2_case import evidence_key, rewritable
from bench.records import PREPARED
from bench.same_code import Unit
from bench.store import EVIDENCE, KERNELBENCH, LEVEL2, RESULTS, SANITIZE, SWEEP, Kind, Record
from codegen import index
from codegen.manifest import source_key
from codegen.spec import load_spec
from codegen.targets import DEVICES, TARGETS
from runtime.resources import usable_cores

TOP = Path(__file__).resolve().parents[1]
CHILD = Path(__file__).with_name("render_child.py")
KINDS = (EVIDENCE, SANITIZE, KERNELBENCH, LEVEL2, SWEEP)  # whose records have keys
STANDALONE = "standalone"


@dataclass(frozen=True)
class Wanted:
    """A package to render: a spec's path, or its `text` and a file name; precision, prepared weights, the device class where it is no default,
    and whether passes of algebra may rewrite its chain."""

    spec: str
    precision: str
    text: str | None = None
    prepack: bool = False
    device: str | None = None
    algebra: bool = True


@dataclass(frozen=True)
class Claim:
    """A key in a record and what it stands for: a target's sources in the manifest's `section`, or the text of standalone.py.

    `path` leads from the record to the fields around the key. The key is that of `key_of`, given the manifest's entry.
    """

    kind: Kind
    card: str
    record: tuple
    path: tuple[str, ...]
    key: str
    package: Wanted
    section: str
    target: str
    batch: int | None = None
    key_of: Callable[[Mapping[str, Any]], str] = field(default=lambda entry: entry["source_key"], compare=False)

    @property
    def label(self) -> str:
        return " ".join([self.card, self.kind.name, *(str(part) for part in self.record if part is not None), *self.path])


@dataclass(frozen=True)
class Code:
    """What a claim stands for as rendered: its key, the sources by target and name, and the text of all else that a run depends on."""

    key: str
    units: dict[tuple[str, str], Unit]
    around: str


# ---- what is claimed --------------------------------------------------------------------------------------------------


def claims_of(kind: Kind, card: str, record: Record, specs: Mapping[str, str]) -> Iterator[Claim]:
    """The claims of a record; `specs` are the shipped specs' paths by name. None of a record that was never measured."""

    def claim(package: Wanted, section: str, target: str, path: tuple[str, ...] = (), **more: Any) -> Claim:
        at = record
        for name in path:
            at = at[name]
        return Claim(kind, card, kind.key(record), path, at["key"], package, section, target, **more)

    if not record.get("key"):
        return
    precision = record["precision"]
    if kind is EVIDENCE:
        package, batch = Wanted(record["path"], precision, prepack=record["weights"] == PREPARED), record.get("batch")
        yield claim(package, "targets", record["target"], batch=batch)
        if record.get("backward", {}).get("key"):
            yield claim(package, "backward", record["backward"]["target"], ("backward",), batch=batch)
    elif kind is SANITIZE and record["spec"] in specs:
        yield claim(Wanted(specs[record["spec"]], precision), "targets", record["target"])
    elif kind is KERNELBENCH:
        yield claim(Wanted(Run(record["problem"], record["shapes"], precision).spec.path, precision), "targets", record["target"])
    elif kind is LEVEL2:
        package = Wanted(record["path"], precision, algebra=record.get("algebra", False) or not rewritable(record["path"], precision))
        yield claim(package, "targets", record["target"], key_of=evidence_key)
        if record.get("harness", {}).get("key"):
            yield claim(package, STANDALONE, record["target"], ("harness",))
    elif kind is SWEEP:
        yield claim(Wanted(f"{record['package']}.yaml", precision, record["spec"], device=record["device_class"]), "targets", record["target"])


def code_of(claim: Claim, folder: Path) -> Code | None:
    """What the claim stands for, as the package in `folder` has it; None where that has no such part."""
    if not (folder / "manifest.json").is_file():
        return None
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    if claim.section == STANDALONE:
        return _standalone_code(manifest, folder)
    entries = next((size for size in manifest.get("sizes", [manifest]) if claim.batch in (None, size["batch"])), {})
    entry = entries.get(claim.section, {}).get(claim.target)
    if entry is None:
        return None
    around = {name: value for name, value in entry.items() if name not in ("source_key", "why")}
    return Code(claim.key_of(entry), _units(entry, claim.target, folder), json.dumps(around, sort_keys=True))


def _units(entry: Mapping[str, Any], target: str, folder: Path) -> dict[tuple[str, str], Unit]:
    text = lambda name: (folder / name).read_text(encoding="utf-8")  # noqa: E731
    return {(target, name): Unit(name, text(name), TARGETS[target], tuple(entry["flags"])) for name in entry["sources"]}


def _standalone_code(manifest: Mapping[str, Any], folder: Path) -> Code | None:
    """The sources that standalone.py holds, and its text around them."""
    if not (folder / "standalone.py").is_file():
        return None
    text = (folder / "standalone.py").read_text(encoding="utf-8")
    key, units = hashlib.sha256(text.encode()).hexdigest(), {}
    for size in manifest.get("sizes", [manifest]):
        for target, entry in size["targets"].items():
            if TARGETS[target].language == "cuda":
                units |= _units(entry, target, folder)
    for (_, name), unit in units.items():
        text = text.replace(unit.text.rstrip("\n"), f"<{name}>")
    return Code(key, units, text)


# ---- rendering --------------------------------------------------------------------------------------------------------


def tree_of(commit: str, folder: Path) -> Path:
    """The files of `codegen` at a commit, written under `folder`. Raises click.ClickException."""
    done = subprocess.run(["git", "-C", str(TOP), "archive", "--format=tar", commit, "--", "codegen"], capture_output=True, check=False)
    if done.returncode != 0:
        raise click.ClickException(f"--from {commit}: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def start_rendering(tree: Path, jobs: Mapping[str, Wanted], out: Path) -> subprocess.Popen:
    """A child that renders `jobs` into `out` by the `codegen` of `tree`, and prints each that is done."""
    out.mkdir()
    listed = out.with_suffix(".json")
    listed.write_text(json.dumps({name: vars(job) for name, job in jobs.items()}), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-P", str(CHILD), str(listed.resolve()), str(out.resolve())], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def render_both(before: Path, jobs: Mapping[str, Wanted], work: Path, told: Callable[[int], None]) -> tuple[Path, Path]:
    """Folders with all packages as the tree `before` emits them, and as this one does. Raises click.ClickException where a child ends early."""
    outs = {work / "old": before, work / "new": TOP}
    children = {out: start_rendering(tree, jobs, out) for out, tree in outs.items()}
    for out, child in children.items():
        for number, _ in enumerate(child.stdout, 1):
            told(number)
        complaint = child.stderr.read()
        if child.wait() != 0:
            raise click.ClickException(f"the generator of {outs[out]} failed: {complaint.strip()[-2000:]}")
    return work / "old", work / "new"


# ---- comparing --------------------------------------------------------------------------------------------------------


def unlike(old: Unit, new: Unit) -> bool:
    """Do two versions of a source differ in more than comments and white space?"""
    bare = lambda unit: source_key({unit.name: unit.text}, unit.flags, unit.target.name)  # noqa: E731
    return bare(old) != bare(new)


def pairs_of(old: Code, new: Code) -> list[tuple[Unit, Unit]]:
    """The sources that must be compiled to compare two versions."""
    return [(old.units[name], new.units[name]) for name in old.units if name in new.units and unlike(old.units[name], new.units[name])]


def difference(old: Code, new: Code, same: Callable[[Unit, Unit], bool]) -> str | None:
    """What differs between two versions beside their sources' texts, in words; None where nothing does."""
    if old.units.keys() != new.units.keys():
        return "its sources have other names"
    if old.around != new.around:
        return "what is around its sources differs: steps, buffers or flags"
    changed = [new_one.name for old_one, new_one in pairs_of(old, new) if not same(old_one, new_one)]
    return f"{', '.join(changed)}: other machine code" if changed else None


class Comparer:
    """The machine code of sources, each compiled once. `capability` is the card's."""

    def __init__(self, workers: int) -> None:
        self.workers, self.digests = workers, {}

    def compile(self, units: Iterable[tuple[Unit, tuple[int, int] | None]], told: Callable[[int, int], None]) -> None:
        """Compile what has not been. Raises ToolchainError or BuildError."""
        open_ones = [key for key in dict.fromkeys(units) if key not in self.digests]
        with ThreadPoolExecutor(self.workers) as pool:
            for number, (key, digest) in enumerate(zip(open_ones, pool.map(lambda key: same_code.digest_of(*key), open_ones), strict=True), 1):
                self.digests[key] = digest
                told(number, len(open_ones))

    def same(self, old: Unit, new: Unit, capability: tuple[int, int] | None) -> bool:
        return self.digests[old, capability] == self.digests[new, capability]


def capability_of(card: str, asked: str | None) -> tuple[int, int] | None:
    """The compute capability to compile a card's sources for: what was `asked` for, else that of its class's own target, where it has one."""
    if asked:
        return tuple(map(int, asked.split(".")))
    own = [TARGETS[name] for name in DEVICES[card].targets if TARGETS[name].arch != "native"] if card in DEVICES else []
    return max((target.min_capability for target in own), default=None)


def with_new_key(record: Record, path: tuple[str, ...], key: str, by: str) -> Record:
    """The record with another key at `path`, and the present one at the end of `same_code_as` there."""
    if path:
        return {**record, path[0]: with_new_key(record[path[0]], path[1:], key, by)}
    return {**record, "key": key, "same_code_as": [*record.get("same_code_as", []), {"key": record["key"], "compilers": by}]}


# ---- the command ------------------------------------------------------------------------------------------------------


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--from", "commit", required=True, help="The commit whose sources the records were measured on, or were given a key of.")
@click.option("--card", "chosen", multiple=True, help="Only the records of this card (repeatable).")
@click.option("--kind", "kinds", multiple=True, type=click.Choice([kind.name for kind in KINDS]), help="Only records of this kind (repeatable).")
@click.option("--results", type=click.Path(exists=True, file_okay=False, path_type=Path), default=RESULTS, help="Folder of the records; default bench/results.")
@click.option("--capability", help="Compile for this compute capability, such as 8.6; default: that of the card's class.")
@click.option("--jobs", "workers", default=usable_cores(), show_default=True, type=click.IntRange(1), help="Compilers at once.")
@click.option("--dry-run", is_flag=True, help="Compare and tell; write no record.")
def main(commit, chosen, kinds, results, capability, workers, dry_run) -> None:
    """Give records today's keys where the machine code is that of an earlier commit, and list those where it differs."""
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=not sys.stdout.isatty(), highlight=False)
    specs = {load_spec(path).name: path for path, _ in index.entries(Path("generated"))}
    claims = [
        claim
        for card in chosen or store.cards(results, *KINDS) for kind in KINDS if not kinds or kind.name in kinds
        for record in store.read(kind, results, card) for claim in claims_of(kind, card, record, specs)
    ]  # fmt: skip
    if not claims:
        raise click.UsageError(f"{results} holds no record with a key" + (" of these cards and kinds" if chosen or kinds else ""))
    names = {package: f"{number:04}" for number, package in enumerate(dict.fromkeys(claim.package for claim in claims))}
    with tempfile.TemporaryDirectory(prefix="rekey-") as work, console.status("") as status:
        before = tree_of(commit, Path(work) / "tree")
        told = lambda number: status.update(f"rendering: {number} of {len(names)} packages")  # noqa: E731
        old, new = render_both(before, {name: package for package, name in names.items()}, Path(work), told)
        for what, folder in ((f"at {commit}", old), ("today", new)):
            refused = [(folder / name / "error.txt").read_text(encoding="utf-8") for name in names.values() if (folder / name / "error.txt").is_file()]
            if refused:
                console.print(f"{len(refused)} packages cannot be rendered {what}, such as: {refused[0].splitlines()[0]}")
        current, neither, moved = _sorted(claims, names, old, new)
        comparer = Comparer(workers)
        needed = [
            (unit, capability_of(claim.card, capability))
            for claim, (was, now) in moved.items() if was.around == now.around for pair in pairs_of(was, now) for unit in pair
        ]  # fmt: skip
        comparer.compile(needed, lambda number, of: status.update(f"compiling: {number} of {of} sources"))
    found: dict[tuple[Kind, str], dict[tuple, list[tuple[Claim, str]]]] = {}
    differing: list[tuple[Claim, str]] = []
    for claim, (was, now) in moved.items():
        where = capability_of(claim.card, capability)
        why = difference(was, now, lambda one, other: comparer.same(one, other, where))  # noqa: B023
        if why is None:
            found.setdefault((claim.kind, claim.card), {}).setdefault(claim.record, []).append((claim, now.key))
        else:
            differing.append((claim, why))
    for (kind, card), of_records in () if dry_run else found.items():
        store.put(kind, results, card, _rekeyed(store.read(kind, results, card), kind, of_records))
    for claim, why in differing:
        console.print(f"{claim.label}: {why}")
    same = sum(len(claims) for of_records in found.values() for claims in of_records.values())
    console.print(f"{same} keys renewed{' (dry run: none written)' if dry_run else ''}, {len(differing)} of other machine code; {current} were current, {neither} of neither version")
    sys.exit(bool(differing))


def _sorted(claims: list[Claim], names: Mapping[Wanted, str], old: Path, new: Path) -> tuple[int, int, dict[Claim, tuple[Code, Code]]]:
    """The number of claims whose key is today's, the number of those with another one than the two versions have, and both versions of the rest."""
    current = neither = 0
    moved = {}
    for claim in claims:
        was, now = (code_of(claim, folder / names[claim.package]) for folder in (old, new))
        if now is not None and claim.key == now.key:
            current += 1
        elif was is None or now is None or claim.key != was.key:
            neither += 1
        else:
            moved[claim] = was, now
    return current, neither, moved


def _rekeyed(records: list[Record], kind: Kind, found: Mapping[tuple, list[tuple[Claim, str]]]) -> Iterator[Record]:
    """Those of `records` that get new keys."""
    for record in records:
        for claim, key in found.get(kind.key(record), []):
            record = with_new_key(record, claim.path, key, same_code.compilers(TARGETS[claim.target].language == "cuda"))
        if kind.key(record) in found:
            yield record
