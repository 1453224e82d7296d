"""Records of measured packages, and the ledger that says which of them still hold.

A record is evidence for the sources it was measured on, named by `key`. When today's sources have another key, the package is unverified.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import store
from bench.store import EVIDENCE, RESULTS, Record
from codegen import index
from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec
from codegen.targets import DEVICES, preference

TORCH_PEERS = ("eager", "eager in a CUDA graph", "compile", "compile max-autotune", "compile max-autotune, no graph")
ACCURACY_MARGIN = 1.1
PREPARED, NOT_PREPARED = "prepared", "not prepared"  # a record's weights
VERDICT = ("verified", "verification", "same_code_as")  # what a record keeps when only its times are taken again


def system(spec: str, batch: int | None = None) -> str:
    """What a record calls its spec: of a range of batches, with the batch."""
    return spec if batch is None else f"{spec}, batch {batch}"


def find(
    results: Path, card: str, spec: str, precision: str, asked_target: str | None = None, weights: str = NOT_PREPARED, batch: int | None = None
) -> Record | None:
    """The record of a package; `asked_target` is named only for a target other than the loader's choice, `batch` only for one of a range."""
    return store.find(
        EVIDENCE, results, card, spec=system(spec, batch), precision=precision, batch=batch, weights=weights, asked_target=asked_target
    )  # fmt: skip


def name_of(record: Record) -> str:
    """The record's short name: spec, precision, and what sets it apart from others of the package, such as `layer.fp32.sm_80`."""
    parts = [record["spec"], record["precision"], record.get("asked_target"), PREPARED if record["weights"] == PREPARED else None]
    return ".".join(part for part in parts if part)


def keep(results: Path, card: str, record: Record, asked_target: str | None = None) -> None:
    """Write a package's record in place of an older one."""
    store.put(EVIDENCE, results, card, [record | ({"asked_target": asked_target} if asked_target else {})])


def read_all(results: Path = RESULTS) -> dict[str, list[Record]]:
    """All records by card, in the order of generated/index.yaml, others behind."""
    order = {(load_spec(path).name, precision): i for i, (path, precision) in enumerate(index.entries(Path("generated")))}
    found: dict[str, list[Record]] = {}
    for card in store.cards(results, EVIDENCE):
        records = store.read(EVIDENCE, results, card)
        lend_fastest_peers(records)
        found[card] = sorted(records, key=lambda r: (order.get((r["spec"], r["precision"]), len(order)), r["spec"], r["precision"], r["target"]))
    return found


def lend_fastest_peers(records: list[Record]) -> None:
    """Give every record of one package, shape and torch the fastest time that any of them has for a peer: its own may come from an unlucky choice of
    torch.compile's, which would flatter us. Our time beside it is then another process's."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault((record["spec"], record["precision"], record.get("batch"), record["torch"], record["gpu"]), []).append(record)
    for group in groups.values():
        fastest: dict[str, Record] = {}
        for name, row in ((name, row) for record in group for name, row in record["peers"].items()):
            if name not in fastest or row["ms"] < fastest[name]["ms"]:
                fastest[name] = row
        for record in group:
            slower = {name for name, row in record["peers"].items() if fastest[name]["ms"] < row["ms"]}
            record["peers"] |= {name: fastest[name] | {"ours_ms": record["ours"]["ms"]} for name in slower}
            if slower:
                conclude(record)


def loaders_choice(records: list[Record]) -> list[Record]:
    """Of every package the record of the target that the loader prefers on that card, in the records' order."""
    best: dict[tuple[str, str, str], Record] = {}
    order = preference()
    for record in records:
        key = (record["spec"], record["precision"], record["weights"])
        if key not in best or order.index(record["target"]) < order.index(best[key]["target"]):
            best[key] = record
    return [record for record in records if record in best.values()]


def picked(targets: Collection[str], card: str) -> str | None:
    """The one of a package's targets that the loader picks on a card (a device class) today; None where it runs none of them."""
    served = DEVICES[card].targets if card in DEVICES else ()
    return next((name for name in preference() if name in served and name in targets), None)


def conclude(record: Record) -> Record:
    """Fill in `best_peer`, `speedup`, `best_torch` and `speedup_torch` from the peers.

    `speedup` is over the fastest peer that computes the whole chain with equal or better accuracy: a relative error of at most 1.1 times the
    larger of ours and eager's at that precision (against ours alone no peer would be left where ours is the most accurate, and the figure would
    flatter). `speedup_torch` is over the fastest of eager, graph and compile. Each peer is compared with our time in its own process.
    """
    ours, peers = record["ours"], record["peers"]
    eager = peers.get("eager", {}).get("rel_error") or 0.0
    limit = ACCURACY_MARGIN * max(ours["rel_error"] or 0.0, eager, 3e-7 if record["precision"] in ("fp32", "tf32") else 0.0)
    rows = {name: peer["ms"] / peer.get("ours_ms", ours["ms"]) for name, peer in peers.items() if peer["rel_error"] is not None}
    equal = {name: ratio for name, ratio in rows.items() if peers[name]["rel_error"] <= limit}
    torchs = {name: ratio for name, ratio in rows.items() if name in TORCH_PEERS}
    first = lambda rows: min(rows, key=lambda name: (rows[name], name), default=None)  # noqa: E731
    record["best_peer"] = first(equal)
    record["speedup"] = round(equal[record["best_peer"]], 3) if equal else None
    record["best_torch"] = first(torchs)
    record["speedup_torch"] = round(torchs[record["best_torch"]], 3) if torchs else None
    return record


@dataclass(frozen=True)
class Status:
    """What the ledger says of one shipped package on one card."""

    spec: str
    precision: str
    target: str
    gpu: str
    state: str  # "verified", "wrong", "unverified" (timed alone), "changed" (since it was measured) or "missing"

    @property
    def verified(self) -> bool:
        return self.state == "verified"


def present_manifest(spec_path: str, precision: str, prepack: bool = False, algebra: bool = True) -> dict[str, Any]:
    """The manifest of a package as its spec emits it today. Raises SpecError or Refusal."""
    return json.loads(render(make_package(load_spec(spec_path, precision, prepack, algebra)))["manifest.json"])


def present_keys(spec_path: str, precision: str, prepack: bool = False, batch: int | None = None) -> dict[str, str]:
    """source_key of every target of a package as its spec emits it today, of a range for one `batch` of it; empty where it is not of the range."""
    manifest = present_manifest(spec_path, precision, prepack)
    sizes = manifest.get("sizes", [manifest | {"batch": None}])
    entries = next((size["targets"] for size in sizes if size["batch"] == batch), {})
    return {name: entry["source_key"] for name, entry in entries.items()}


def backward_keys(spec_path: str, precision: str, prepack: bool = False) -> dict[str, str]:
    """source_key of every backward of a package as its spec emits it today, by the target that it is made for."""
    return {name: entry["source_key"] for name, entry in present_manifest(spec_path, precision, prepack).get("backward", {}).items()}


def with_backward_of(record: Record, before: Record | None) -> Record:
    """A forward's new record with what its old one says of the backward, which is evidence for sources of its own."""
    return {**record, "backward": before["backward"]} if before and "backward" in before else record


def with_verdict_of(record: Record, before: Record | None) -> Record:
    """A record of times alone with what its old one says of the same sources: they are as right or as wrong as they were."""
    same = ("target", "key")
    if record.get("verification") or not before or any(record[name] != before[name] for name in same):
        return record
    return record | {name: before[name] for name in VERDICT if name in before}


def with_peers_of(record: Record, before: Record | None) -> Record:
    """A new record with the peers that its old one timed on the same card and torch and that have no time now (not asked, or failed this time): they know nothing of our sources (but for
    those with our tail, which do not stay), and a table without the strongest of them would flatter us. Our time beside them is the new one, and `kept` says so."""
    same = ("spec", "precision", "batch", "weights", "torch", "gpu", "flop", "bytes")
    if not before or any(record.get(key) != before.get(key) for key in same):
        return record
    kept = {name: row | {"ours_ms": record["ours"]["ms"], "kept": True} for name, row in before["peers"].items() if name not in record["peers"] and "our tail" not in name}
    return conclude({**record, "peers": record["peers"] | kept}) if kept else record


def state_of(record: Record | None, keys: dict[str, str]) -> str:
    """Does the record hold for sources with these keys? See `Status.state`."""
    if record is None:
        return "missing"
    if keys.get(record["target"]) != record["key"]:
        return "changed"
    if record["verified"]:
        return "verified"
    return "wrong" if record.get("verification") else "unverified"  # nothing was found wrong where nothing was examined


def ledger(results: Path = RESULTS, generated: Path = Path("generated")) -> list[Status]:
    """The state of every package listed in generated/index.yaml on every card that has records. Records of prepared weights are of other packages."""
    cards = read_all(results)
    statuses = []
    for spec_path, precision in index.entries(generated):
        name, keys = load_spec(spec_path).name, present_keys(spec_path, precision)
        for card, records in cards.items():
            mine = [r for r in records if (r["spec"], r["precision"]) == (name, precision) and r["weights"] != PREPARED] or [None]
            statuses += [Status(name, precision, r["target"] if r else "-", card, state_of(r, keys)) for r in mine]
    return statuses
