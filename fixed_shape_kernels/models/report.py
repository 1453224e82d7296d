"""The report of a model: one row for every chain and for everything that was left alone, as a table, as JSON, and as a page."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

REPLACED, FOUND = "replaced", "found"  # `found`: what explain says of a chain that kernels serve
LEFT = ("slower", "wrong", "unsupported", "not traced", "refused", "failed", "off")
COLOURS = {REPLACED: "#2e7d32", FOUND: "#1565c0", "slower": "#8d6e00", "wrong": "#c62828", "failed": "#c62828", "refused": "#8d6e00", "unsupported": "#757575", "not traced": "#757575", "off": "#757575"}


@dataclass
class Row:
    """A chain, or an operator or a module that stays as it is. Times are of one call, in milliseconds; `error` is the largest relative one."""

    path: str
    chain: str
    status: str
    why: str = ""
    where: str = ""
    shapes: str = ""
    precision: str = ""
    plan: str = ""
    estimated_ms: float | None = None
    ours_ms: float | None = None
    torch_ms: float | None = None
    error: float | None = None

    @property
    def gain(self) -> float | None:
        """How many times as fast as the model's own modules."""
        return self.torch_ms / self.ours_ms if self.ours_ms and self.torch_ms else None


@dataclass
class Report:
    """What became of a model's chains. `model` is its class; `before_ms` and `after_ms` are of the whole model on the example."""

    model: str
    device: str
    rows: list[Row] = field(default_factory=list)
    before_ms: float | None = None
    after_ms: float | None = None

    @property
    def chains(self) -> list[Row]:
        """The rows that are chains of the grammar."""
        return [row for row in self.rows if row.plan]

    @property
    def replaced(self) -> list[Row]:
        return [row for row in self.rows if row.status == REPLACED]

    @property
    def summary(self) -> str:
        """The last line of the table."""
        if found := [row for row in self.rows if row.status == FOUND]:
            return f"{len(found)} of {len(self.chains)} chains can be served by kernels"
        times = f", {self.before_ms:.3g} -> {self.after_ms:.3g} ms" if self.before_ms and self.after_ms else ""
        return f"{len(self.replaced)} of {len(self.chains)} chains replaced{times}"

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self) | {"summary": self.summary}, indent=1) + "\n"

    def __str__(self) -> str:
        console = Console(width=150, record=True, file=io.StringIO())
        console.print(self.table(), soft_wrap=False)
        return console.export_text() + self.summary

    def table(self) -> Table:
        """The rows for a terminal."""
        table = Table(title=f"{self.model} on {self.device}", title_justify="left")
        for name, right in (("module", False), ("chain", False), ("shapes", False), ("plan", False), ("estimate ms", True), ("ours ms", True), ("torch ms", True), ("error", True), ("status", False)):
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for row in self.rows:
            status = row.status + (f": {row.why}" if row.why else "") + (f" ({row.where})" if row.where and row.status not in (REPLACED, FOUND) else "")
            table.add_row(row.path, row.chain, row.shapes, row.plan, *(_number(value) for value in (row.estimated_ms, row.ours_ms, row.torch_ms)), "" if row.error is None else f"{row.error:.1e}", status)
        return table

    def to_html(self) -> str:
        """A page of its own: the model's parts in order, each with what runs it, and bars of the time before and after."""
        return page(self)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


class NotReplaced(RuntimeError):
    """Something stayed as it was although `strict` was asked for; the message is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #212121; background: #fff }
h1 { font-size: 1.4rem } .sum { font-size: 1.1rem; margin-bottom: 1rem }
.row { border-left: .5rem solid var(--c); margin: .35rem 0; padding: .35rem .8rem; background: #f6f6f6 }
.row b { margin-right: .6rem } .row code { color: #37474f } .why { color: #616161; font-size: .9rem }
.bar { height: .55rem; margin: .15rem 0; border-radius: .2rem } .torch { background: #b0bec5 } .ours { background: var(--c) }
.tag { float: right; color: var(--c); font-weight: 600 }
@media (prefers-color-scheme: dark) { body { background: #16181b; color: #e4e4e4 } .row { background: #22262b } .row code { color: #b0bec5 } .why { color: #9e9e9e } }
"""


def page(report: Report) -> str:
    """The report as HTML; every text of the model is escaped."""
    most = max((value for row in report.rows for value in (row.ours_ms, row.torch_ms) if value), default=1.0)
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">', f"<title>{html.escape(report.model)}</title>", f"<style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(report.model)} on {html.escape(report.device)}</h1>", f'<p class="sum">{html.escape(report.summary)}</p>', *_blocks(report.rows, most), "</body></html>", "",
    ])  # fmt: skip


def _blocks(rows: Iterable[Row], most: float) -> Iterable[str]:
    for row in rows:
        colour = COLOURS.get(row.status, "#757575")
        gain = f" {row.gain:.2f}x" if row.gain else ""
        yield f'<div class="row" style="--c:{colour}"><span class="tag">{html.escape(row.status)}{gain}</span><b>{html.escape(row.path)}</b><code>{html.escape(row.chain)}</code>'
        about = ", ".join(filter(None, (row.shapes, row.precision, row.plan, f"error {row.error:.1e}" if row.error is not None else "")))
        yield f'<div class="why">{html.escape(about)}</div>' if about else ""
        for name, value in (("torch", row.torch_ms), ("ours", row.ours_ms)):
            if value:
                yield f'<div class="bar {name}" style="width:{max(0.5, 100 * value / most):.1f}%" title="{name} {value:.4g} ms"></div>'
        if row.why or row.where:
            yield f'<div class="why">{html.escape(" ".join(filter(None, (row.why, f"({row.where})" if row.where else ""))))}</div>'
        yield "</div>"
