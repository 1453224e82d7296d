"""The figures of docs/kernels.md that repeat files of bench/results: rows that begin with a file's name, and the card's ceilings."""

from __future__ import annotations

import re
from pathlib import Path

from bench.records import Record, lend_fastest_peers, read

CARD = "h100"  # whose files the document repeats
ROW = re.compile(r"^\| `([a-z0-9_.]+\.json)` \|.*$", re.MULTILINE)
RATES = re.compile(r"[\d.]+ TFLOP/s in fp16, [\d.]+ in TF32, [\d.]+ in fp32, [\d.]+ GB/s")


def renewed(text: str, results: Path) -> str:
    """The document with today's figures. A peer's time is the fastest of the package's files, as in the README; a row without a file stays."""
    folder = results / CARD
    records = {name: record for name in ROW.findall(text) if (record := read(folder / name))}
    lend_fastest_peers(list(records.values()) + [r for p in sorted(folder.glob("*.json")) if p.name not in records and "ours" in (r := read(p))])
    text = ROW.sub(lambda row: _row(row[1], records[row[1]]) if row[1] in records else row[0], text)
    machine = read(folder / "machine.json")
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
