"""The results as Markdown: docs/results.md with every table, and the few rows between the README's markers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jinja2

from bench import store
from bench.records import PREPARED, Status, loaders_choice, picked, present_keys, state_of
from bench.store import MACHINE, MODELS, SWEEP, Record
from bench.sweep import summary
from codegen.numerics import PRECISIONS
from codegen.plan import Refusal
from codegen.spec import SpecError

HEADLINE = ("gemm_groupnorm_hardtanh", "gemm_biasadd_hardtanh_mish_groupnorm", "conv2d_groupnorm_scale_maxpool_clamp")  # at the shapes of either version
# The README's rows: the three systems in fp32, one of them in every other precision, a small shape. The least speed-up of all follows.
SHOWN = (
    *((name, "fp32") for name in HEADLINE), *((HEADLINE[0], precision) for precision in ("tf32", "fp16", "bf16")), (f"{HEADLINE[0]}_small", "fp32"),
)  # fmt: skip
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
TEMPLATES = Path(__file__).parent / "templates"
_WORDS = {"verified": "yes", "wrong": "**no: wrong**", "unverified": "unverified", "changed": "unverified (sources changed since)", "missing": "unverified"}
_CARD = re.compile(r"^(?:## (.+)|\*\*(.+?)\*\*, torch .*)$")


@dataclass(frozen=True)
class Card:
    """A card with its records, each with the state that today's sources give it, and the packages that have none there."""

    slug: str
    records: list[Record]
    states: list[str]
    missing: list[tuple[str, str]]
    results: Path

    @property
    def gpu(self) -> str:
        return self.records[0]["gpu"]

    @property
    def machine(self) -> Record:
        """The machine and its rates as they were last measured; what a record says of them where that is not known."""
        return machine_of(self.results, self.slug, self.records)

    @property
    def shown(self) -> list[tuple[Record, str]]:
        """(record, state) of the target that the loader picks, of every package."""
        chosen = [id(record) for record in loaders_choice(self.records)]
        return [(record, state) for record, state in zip(self.records, self.states, strict=True) if id(record) in chosen]

    @property
    def verified(self) -> int:
        """The number of packages whose record holds for today's sources."""
        return sum(state == "verified" for _, state in self.shown)

    def section(self, name: str) -> list[tuple[Record, str]]:
        """The rows of a table: "headline", "others" or, for records of targets that the loader does not pick, "named"."""
        if name == "named":
            chosen = [id(record) for record, _ in self.shown]
            return [(record, state) for record, state in zip(self.records, self.states, strict=True) if id(record) not in chosen]
        return [(record, state) for record, state in self.shown if _headline(record["spec"]) == (name == "headline")]

    @property
    def superseded(self) -> list[str]:
        """The packages whose record is not of the target that the loader picks on the card today, as `name (precisions)`."""
        return _by_name([(record["spec"], record["precision"]) for record, _ in self.shown if _superseded(record, self.slug)])

    @property
    def not_measured(self) -> list[str]:
        """The shipped packages without a record, as `name (precisions)`."""
        return _by_name(self.missing)

    @property
    def sweep(self) -> dict | None:
        """The sweep's counts and classes; None where there was none."""
        cases = store.read(SWEEP, self.results, self.slug)
        return {"cases": len(cases), "counts": summary.counts(cases), "classes": summary.classes(cases)} if cases else None

    @property
    def models(self) -> list[Record]:
        """Whole models that were measured there."""
        return store.read(MODELS, self.results, self.slug)


def machine_of(results: Path, card: str, records: list[Record]) -> Record:
    """The machine of a card's folder with its rates as last measured, else as one of `records` says."""
    known = {record["measured_by"]: record for record in store.read(MACHINE, results, card)}
    found = known.get("evidence") or known.get("sweep") or records[0]
    return {key: found.get(key) for key in ("gpu", "torch", "cuda", "driver", "ceilings")}


def cards_of(measured: dict[str, list[Record]], statuses: list[Status], results: Path) -> list[Card]:
    """Every measured GPU, the one with the most verified packages first."""
    made = []
    for slug, records in measured.items():
        if slug != "cpu":
            missing = [(s.spec, s.precision) for s in statuses if s.gpu == slug and s.state == "missing"]
            made.append(Card(slug, records, states_of(slug, records, statuses), missing, results))
    return sorted(made, key=lambda card: (-card.verified, card.slug))


def results_page(cards: list[Card]) -> str:
    """docs/results.md: of every card all that was measured there."""
    return _environment().get_template("results.md.j2").render(cards=cards)


def readme_table(cards: list[Card]) -> str:
    """The README's table: at most eight rows, of the card with the most verified packages."""
    if not cards:
        return _environment().get_template("readme.md.j2").render(card=None, others=[])
    best = cards[0]
    rows = [row for name in SHOWN for row in best.shown if (row[0]["spec"], row[0]["precision"]) == name and row[0]["weights"] != PREPARED]
    compared = [row for row in best.shown if row[0]["speedup"]]
    least = min(compared, key=lambda row: row[0]["speedup"], default=None)
    missing = _by_name([name for name in best.missing if name in SHOWN])
    return _environment().get_template("readme.md.j2").render(
        card=best, rows=rows + [row for row in [least] if row and row not in rows], least=least, missing=missing, others=cards[1:]
    )  # fmt: skip


def not_measured(card: str, statuses: list[Status]) -> list[str]:
    """The shipped packages without a record on a card, as `name (precisions)`."""
    return _by_name([(status.spec, status.precision) for status in statuses if status.gpu == card and status.state == "missing"])


def _superseded(record: Record, card: str) -> bool:
    try:
        now = picked(present_keys(record["path"], record["precision"], record["weights"] == PREPARED, record.get("batch")), card)
    except (SpecError, Refusal):
        return False
    return now not in (None, record["target"])


def states_of(card: str, records: list[Record], statuses: list[Status]) -> list[str]:
    """The state that today's sources give each of a card's records: the ledger's, and of what it does not list that of the record's own spec."""
    listed = {(s.spec, s.precision, s.target): s.state for s in statuses if s.gpu == card}
    known = [None if record["weights"] == PREPARED else listed.get((record["spec"], record["precision"], record["target"])) for record in records]
    return [state or state_today(record) for state, record in zip(known, records, strict=True)]


def state_today(record: Record) -> str:
    """The state of a package that is not in the index: its spec is read again; where it is gone or no longer served, its sources have changed."""
    try:
        return state_of(record, present_keys(record["path"], record["precision"], record["weights"] == PREPARED, record.get("batch")))
    except (SpecError, Refusal):
        return "changed"


def put_table(readme: Path, table: str) -> bool:
    """Replace what stands between the markers; True when the file changed. Raises ValueError when the markers are not there."""
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise ValueError(f"{readme} has no {BEGIN} ... {END}")
    new = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: f"{BEGIN}\n{table}\n{END}", text, flags=re.DOTALL)
    if new != text:
        readme.write_text(new, encoding="utf-8")
    return new != text


def claims(text: str) -> list[tuple[str, str, str, str, bool]]:
    """(card, system, precision, target, claimed to be verified) of every row of results in a Markdown text."""
    found, card = [], ""
    for line in text.splitlines():
        if heading := _CARD.match(line):
            card = heading[1] or heading[2]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) in (10, 12) and cells[1] in PRECISIONS:
            found.append((card, *cells[:3], cells[-1] == "yes"))
    return found


def _environment() -> jinja2.Environment:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    times = lambda value: "-" if value is None else f"**{value:.2f}x**"  # noqa: E731
    env.filters.update(times=times, state=_WORDS.get, peer=_peer, exp=lambda value: "-" if value is None else f"{value:.1e}", model_times=_model_times, sig=significant)
    env.globals["PREPARED"] = PREPARED
    return env


def significant(value: float | None) -> str:
    """A figure of four digits."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _model_times(record: Record) -> float | None:
    """How many times as fast a whole model is, the faster way of ours over the faster of PyTorch's; None where one was not timed."""
    ours, torchs = ([record["ms"][way] for way in ways if record["ms"].get(way)] for ways in (("ours", "ours_compile"), ("eager", "compile")))
    return min(torchs) / min(ours) if ours and torchs else None


def _peer(record: Record, which: str, field: str) -> str:
    """The name and time in milliseconds, or the error, of the peer that a record calls `which`."""
    name = record[which]
    if name is None:
        return "-"
    row = record["peers"][name]
    return f"{name}, {row['ms']:.4f}" if field == "ms" else f"{row['rel_error']:.1e}"


def _by_name(packages: list[tuple[str, str]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for spec, precision in packages:
        found.setdefault(spec, []).append(precision)
    return [f"{spec} ({', '.join(precisions)})" for spec, precisions in found.items()]


def _headline(spec: str) -> bool:
    return spec.removesuffix("_small") in HEADLINE
