"""docs/level2.md from the records of level 2: a table of a hundred for each card and precision, the classes apart, geometric means of the ordinary ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from bench import store
from bench.level2 import EXACT, geometric_mean, speedups
from bench.level2_case import todays_key
from bench.level2_classes import CLASSES, MEANINGS, ORDINARY, class_of
from bench.store import LEVEL2, Record
from bench.tables import TEMPLATES
from codegen.numerics import PRECISIONS

PROBLEMS = 100
LEAST = 0.95  # a ratio below this is a loss beyond noise


def page(results: Path) -> str:
    """The page's text. It needs no record."""
    found = [_card(store.read(LEVEL2, results, card), card) for card in store.cards(results, LEVEL2)]
    cards = [card for card in found if card is not None]
    return _environment().get_template("level2.md.j2").render(cards=cards, classes=CLASSES, meanings=MEANINGS)


def _card(records: list[Record], card: str) -> dict[str, Any] | None:
    if not records:
        return None
    parts = [_part(name, [r for r in records if r["precision"] == name], card) for name in PRECISIONS if any(r["precision"] == name for r in records)]
    return {field: records[0].get(field) for field in ("gpu", "torch", "cuda")} | {"precisions": parts}


def _part(precision: str, records: list[Record], card: str) -> dict[str, Any]:
    """What the page says of one precision on one card: of the chains as written, and beside them of those that algebra rewrites."""
    listed = [_row(record, card) for record in sorted(records, key=lambda record: record["problem"])]
    rows, rewritten = ([row for row in listed if bool(row["algebra"]) == algebra] for algebra in (False, True))
    changed = {row["problem"]: row for row in rewritten if row["current"] and row["verified"] and row["speedup_torch"]}
    current = [row for row in rows if row["current"]]
    ordinary = list(speedups(current))
    over = lambda peer: geometric_mean(list(speedups(current, lambda r: r["peers"][peer] / r["ours_ms"] if r.get("ours_ms") and r["peers"].get(peer) else None)))  # noqa: E731
    with_algebra = list(speedups([changed.get(row["problem"], row) for row in current]))
    present = {row["problem"] for row in rows}
    return {
        "precision": precision, "records": rows, "verified": sum(row["verified"] for row in current), "timed": sum(row["ours_ms"] is not None for row in current), "earlier": sum(not row["current"] for row in listed),
        "rewritten": [row | {"written": next((other for other in rows if other["problem"] == row["problem"]), None)} for row in rewritten],
        "mean_algebra": geometric_mean(with_algebra) if any(class_of(number) == ORDINARY for number in changed) else None,
        "ordinary": len(ordinary), "mean": geometric_mean(ordinary), "mean_eager": over("eager"), "mean_compile": over("compile"),
        "below": sum(ratio < LEAST for ratio in ordinary), "harness": sum(row["harness"] is not None for row in rows),
        "correct": sum((row["harness"] or {}).get("verdict") == "correct" for row in rows), "beside_fp32": sum(_beside_fp32(row["harness"]) == "correct" for row in rows),
        "missing": _spans([n for n in range(1, PROBLEMS + 1) if n not in present]),
    }  # fmt: skip


def _spans(numbers: list[int]) -> str:
    """`1 to 3, 7`."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def _row(record: Record, card: str) -> dict[str, Any]:
    """A record with every field that the page shows; None for what was not measured."""
    shown = dict.fromkeys(("algebra", "passes", "error", "eager_error", "library_steps", "kernels", "ours_ms", "speedup_torch", "harness"))
    problems = "; ".join(f"{family}: {', '.join(found)}" for family, found in record.get("problems", {}).items())
    failed = "; ".join(f"{name} could not be run: {why}" for name, why in record.get("failed", {}).items())
    outside, wrong = record.get("reference_outside"), (record.get("harness") or {}).get("verdict") == "wrong"
    rounding = f"{outside} elements of the harness's reference are outside its tolerance of the exact result" if wrong and outside else ""
    complaint = "; ".join(filter(None, (record.get("failure"), problems, failed, rounding)))
    return {**shown, "class": ORDINARY, "peers": {}, **record, "current": _is_current(record, card), "complaint": complaint.replace("\n", " ")}


def _is_current(record: Record, card: str) -> bool:
    """Whether a record is of what the card runs today; one without a key measured nothing."""
    return "key" not in record or record["key"] == todays_key(record["path"], record["precision"], record["target"], card, bool(record.get("algebra")))


def _environment() -> jinja2.Environment:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.filters.update(
        verdict=lambda row: "earlier sources" if not row["current"] else "yes" if row["verified"] else "**no**", exp=lambda value: "-" if value is None else f"{value:.1e}", ms=_ms,
        times=lambda value: "-" if value is None else f"**{value:.2f}x**", peer=lambda row, name: _ms(row["peers"].get(name)), torchs=_torchs, harness=_harness,
    )  # fmt: skip
    return env


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _torchs(row: Record) -> str:
    """The operators that torch computes; `all` where no kernel of ours runs."""
    if row["library_steps"] is None:
        return "-"
    return "none" if not row["library_steps"] else ("all: " if not row["kernels"] else "") + ", ".join(row["library_steps"])


def _beside_fp32(found: dict[str, Any] | None) -> str | None:
    """The verdict beside a reference that keeps fp32, where the harness's own run was wrong and this one is not."""
    if found is None or found["verdict"] != "wrong":
        return None
    verdict = found.get(EXACT, found)["verdict"]
    return None if verdict == "wrong" else verdict


def _harness(row: Record) -> str:
    found = row["harness"]
    if found is None:
        return "-"
    beside = _beside_fp32(found)
    said, run, mark = (f"{beside} beside fp32", found[EXACT], "") if beside else (found["verdict"], found, " (TF32)" if found.get("tf32_reference") else "")
    return said if run.get("ms") is None else f"{said}, {_ms(run['ms'])} / {_ms(run['eager_ms'])}{mark}"
