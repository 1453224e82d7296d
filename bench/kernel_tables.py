"""The figures of docs/kernels.md that repeat records of bench/results: rows that begin with a record's name, and the card's ceilings."""

from __future__ import annotations

import re
from pathlib import Path

from bench import store
from bench.records import lend_fastest_peers, name_of
from bench.store import EVIDENCE, MACHINE, Record

CARD = "h100"  # whose records the document repeats
ROW = re.compile(r"^\| `(\w+\.(?:fp32|tf32|fp16|bf16)(?:\.\w+)*)` \|.*$", re.MULTILINE)
RATES = re.compile(r"[\d.]+ TFLOP/s in fp16, [\d.]+ in TF32, [\d.]+ in fp32, [\d.]+ GB/s")


def renewed(text: str, results: Path) -> str:
    """The document with today's figures. A peer's time is the fastest of the package's records, as in docs/results.md; a row without a record stays."""
    found = store.read(EVIDENCE, results, CARD)
    lend_fastest_peers(found)
    records = {name_of(record): record for record in found}
    text = ROW.sub(lambda row: _row(row[1], records[row[1]]) if row[1] in records else row[0], text)
    machine = store.find(MACHINE, results, CARD, measured_by="evidence")
    if machine is None:
        return text
    rates = [_digits(machine["ceilings"][name]) for name in ("fp16_tflops", "tf32_tflops", "fp32_tflops")]
    return RATES.sub("{} TFLOP/s in fp16, {} in TF32, {} in fp32, {:.0f} GB/s".format(*rates, machine["ceilings"]["copy_gbs"]), text)


def _row(name: str, record: Record) -> str:
    floor, ours, torch = record["floor"], record["ours"]["ms"], record["best_torch"]
    limit = "multiply" if floor["compute_ms"] >= floor["memory_ms"] else "memory"
    alone = next((row["ms"] for peer, row in record["peers"].items() if peer.endswith(" alone")), None)
    return (
        f"| `{name}` | {_digits(record['floor_ms'])} ({limit}) | {_digits(ours)} | {record['floor_ms'] / ours:.0%} | {'-' if alone is None else _digits(alone)} "
        f"| {'-' if torch is None else _digits(record['peers'][torch]['ms']) + f' ({torch})'} |"
    )


def _digits(value: float) -> str:
    """Three significant digits."""
    return f"{value:#.3g}".rstrip(".")
