"""The README's results table, from the records and the ledger."""

from __future__ import annotations

import re
from pathlib import Path

from bench.records import PREPARED, Record, Status, loaders_choice, present_keys, state_of
from codegen.spec import SpecError

HEADLINE = ("gemm_groupnorm_hardtanh", "gemm_biasadd_hardtanh_mish_groupnorm", "conv2d_groupnorm_scale_maxpool_clamp")  # at the shapes of either version
HEAD = [
    "| system | precision | target | ours | error | torch's best | times as fast | best peer of equal or better accuracy | times as fast | verified |",
    "|--|--|--|--|--|--|--|--|--|--|",
]
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
_WORDS = {"verified": "yes", "wrong": "**no: wrong**", "changed": "unverified (sources changed since)", "missing": "unverified"}


def readme_table(cards: dict[str, list[Record]], statuses: list[Status]) -> str:
    """Markdown: two tables, of the systems that this project exists for and of the others, on the card with the most verified packages. A row for every
    package that has a record, of the target that the loader picks there; then what has none, and the other cards by name."""
    states = {(s.gpu, s.spec, s.precision, s.target): s.state for s in statuses}
    lines: list[str] = []
    verified = {card: sum(_state(card, r, states) == "verified" for r in loaders_choice(records)) for card, records in cards.items() if card != "cpu"}
    chosen = max(verified, key=verified.get, default=None)
    if chosen is None:
        return "No GPU has been measured yet: every kernel is unverified there. `make evidence` on a GPU fills this table."
    records = cards[chosen]
    first = records[0]
    lines += [
        f"**{first['gpu']}**, torch {first['torch']}, times in milliseconds (median, L2 flushed before each call), errors relative to float64:",
        "",
    ]
    shown = loaders_choice(records)
    for title, rows in (("", [r for r in shown if _headline(r["spec"])]), ("Other shipped systems:", [r for r in shown if not _headline(r["spec"])])):
        if rows:
            lines += [*([title, ""] if title else []), *HEAD, *(_row(chosen, r, states) for r in rows), ""]
    missing = not_measured(chosen, statuses)
    lines += [f"Not measured yet on this card, so unverified: {'; '.join(missing)}.", ""] if missing else []
    others = [f"{cards[card][0]['gpu']} ({count} packages verified)" for card, count in verified.items() if card != chosen]
    lines += [f"Also measured, and on `make report`'s page: {', '.join(others)}.", ""] if others else []
    lines += [
        "*Torch's best* is the fastest of eager, eager in a CUDA graph and torch.compile at that precision. *Best peer* is the fastest of those that were timed (`make "
        "evidence-peers` adds max-autotune, Triton and the library with our tail) and that compute the whole chain with equal or better accuracy: an error of at most 1.1 times the larger of ours and eager's. "
        "A peer's time is the fastest that any record of the package on that card has; one that was not timed again with new sources keeps its time. "
        f"Weights are not prepared beforehand{_exception(shown)}. *Target* is what the loader picks on that card; `make report` also shows "
        "what was measured of the others."
    ]
    return "\n".join(lines)


def not_measured(card: str, statuses: list[Status]) -> list[str]:
    """The checked-in packages without a record on a card, as `name (precisions)`."""
    missing: dict[str, list[str]] = {}
    for status in statuses:
        if status.gpu == card and status.state == "missing":
            missing.setdefault(status.spec, []).append(status.precision)
    return [f"{spec} ({', '.join(precisions)})" for spec, precisions in missing.items()]


def _headline(spec: str) -> bool:
    return spec.removesuffix("_small") in HEADLINE


def _row(card: str, r: Record, states: dict[tuple[str, str, str, str], str]) -> str:
    state = _state(card, r, states)
    return (
        f"| {r['spec']}{', weights prepared' if r['weights'] == PREPARED else ''} | {r['precision']} | {r['target']} | {r['ours']['ms']:.4f} | {r['ours']['rel_error']:.1e} | {_peer(r, 'best_torch')} "
        f"| {_times(r['speedup_torch'])} | {_peer(r, 'best_peer')} | {_times(r['speedup'])} | {_WORDS[state]} |"
    )


def _state(card: str, r: Record, states: dict[tuple[str, str, str, str], str]) -> str:
    known = None if r["weights"] == PREPARED else states.get((card, r["spec"], r["precision"], r["target"]))
    return known or state_today(r)


def _exception(shown: list[Record]) -> str:
    prepared = any(r["weights"] == PREPARED for r in shown)
    return ", except where a row says so: the time that takes is not in it (`make report`)" if prepared else ""


def state_today(record: Record) -> str:
    """The state of a package that is not checked in: its spec is read again where it still exists."""
    try:
        return state_of(record, present_keys(record["path"], record["precision"], record["weights"] == PREPARED, record.get("batch")))
    except SpecError:
        return "changed"


def _peer(record: Record, which: str) -> str:
    name = record[which]
    return "-" if name is None else f"{name}, {record['peers'][name]['ms']:.4f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"**{value:.2f}x**"


def put_table(readme: Path, table: str) -> bool:
    """Replace what stands between the markers; True when the file changed. Raises ValueError when the markers are not there."""
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{readme} has no {BEGIN} ... {END}")
    new = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: f"{BEGIN}\n{table}\n{END}", text, flags=re.DOTALL)
    if new != text:
        readme.write_text(new, encoding="utf-8")
    return new != text


def claims(readme: Path) -> list[tuple[str, str, str, bool]]:
    """(system, precision, target, claimed to be verified) of every row between the markers."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if BEGIN not in text:
        return []
    found = []
    for line in text.split(BEGIN, 1)[1].split(END, 1)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 10 and cells[1] in ("fp32", "tf32", "fp16", "bf16"):
            found.append((cells[0], cells[1], cells[2], cells[9] == "yes"))
    return found
