"""The sweep's records and what they say: how many are right, how fast by class, and where the slowest lose their time."""

from __future__ import annotations

import math
from typing import Any

import yaml
from rich.table import Table

from bench.store import Record

FLOOR = 0.95  # no case shall be slower than this share of its fastest peer
WANTED = {"fp32": 1.5, "conv2d": 1.5, "tf32": 1.15, "fp16": 1.15, "bf16": 1.15}  # geometric mean over the best peer, by class
SLOWEST = 5

Case = Record


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def class_of(case: Case) -> str:
    """The class that a case is counted in: convolutions of a kind together, linears by precision."""
    return case["precision"] if case["producer"] == "linear" else case["producer"]


def timed(cases: list[Case]) -> list[Case]:
    """The cases with a time and a peer of equal or better accuracy."""
    return [case for case in cases if case.get("speedup")]


def classes(cases: list[Case]) -> list[dict[str, Any]]:
    """By class: cases, right ones, geometric means over the best equal peer and over torch's best, the least, those below FLOOR, what is wanted."""
    rows = []
    for name in dict.fromkeys(("fp32", "tf32", "fp16", "bf16", *map(class_of, cases))):
        mine = [case for case in cases if class_of(case) == name]
        if not mine:
            continue
        ratios = [case["speedup"] for case in timed(mine)]
        rows.append({
            "name": f"linear, {name}" if mine[0]["producer"] == "linear" else f"{name}, all precisions" if name == mine[0]["producer"] else name,
            "cases": len(mine), "right": counts(mine)["right"], "timed": len(ratios), "speedup": geometric_mean(ratios),
            "speedup_torch": geometric_mean([case["speedup_torch"] for case in mine if case.get("speedup_torch")]),
            "least": min(ratios, default=None), "below": sum(ratio < FLOOR for ratio in ratios), "wanted": WANTED.get(name),
        })  # fmt: skip
    return rows


def counts(cases: list[Case]) -> dict[str, int]:
    """Cases that are right, wrong, failed (neither verified nor timed to the end) and still to run."""
    failed = [case for case in cases if case.get("failure")]
    return {
        "right": sum(case["verified"] is True and not case.get("failure") for case in cases),
        "wrong": sum(case["verified"] is False for case in cases), "failed": len(failed),
        "open": sum(case["verified"] is None and not case.get("failure") for case in cases),
    }  # fmt: skip


def slowest(cases: list[Case], count: int = SLOWEST) -> list[Case]:
    """The cases with the least speed-up over the best peer of equal accuracy."""
    return sorted(timed(cases), key=lambda case: case["speedup"])[:count]


def chain_of(case: Case) -> str:
    """The operators' names, in order."""
    data = yaml.safe_load(case["spec"])
    return " ".join(next(iter(step)) if isinstance(step, dict) else step for step in data["chain"])


def cause(case: Case) -> str:
    """Route and limiter of a case, from its plan, and the share of the card's own limit that it reached."""
    share = f", {100 * case['floor_ms'] / case['ours']['ms']:.0f}% of this card's roofline" if case.get("floor_ms") else ""
    return f"{case['route']}; bound by {case['limiter']}{share}"


def complaints(case: Case) -> str:
    """Why a case is not right."""
    if case.get("failure"):
        return case["failure"]
    return "; ".join(f"{row['family']}: {', '.join(row['problems'])}" for row in case.get("verification", ()) if not row["ok"])


def tables(cases: list[Case]) -> list[Table]:
    """The summary for a terminal."""
    made = Table(title="Speed-up over the fastest peer of equal or better accuracy", title_justify="left")
    for column in ("class", "cases", "right", "timed", "geometric mean", "over torch's best", "least", f"below {FLOOR}", "wanted"):
        made.add_column(column, justify="left" if column == "class" else "right")
    times = lambda value: "-" if value is None else f"{value:.2f}x"  # noqa: E731
    for row in classes(cases):
        made.add_row(
            row["name"], str(row["cases"]), str(row["right"]), str(row["timed"]), times(row["speedup"]), times(row["speedup_torch"]), times(row["least"]),
            str(row["below"]), times(row["wanted"]),
        )  # fmt: skip
    last = slowest(cases)
    if not last:
        return [made]
    slow = Table(title="The slowest", title_justify="left")
    for column in ("case", "precision", "ours", "best peer", "times", "cause"):
        slow.add_column(column, overflow="fold")
    for case in last:
        best = case["best_peer"]
        slow.add_row(
            f"{case['package']}: {chain_of(case)}", case["precision"], f"{case['ours']['ms']:.4f} ms", f"{best}, {case['peers'][best]['ms']:.4f} ms",
            times(case["speedup"]), cause(case),
        )  # fmt: skip
    return [made, slow]
