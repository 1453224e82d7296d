"""The report of a model: one row for every chain and for everything that was left alone, as a table, as JSON, and as a page."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import jinja2
from rich.console import Console
from rich.table import Table

REPLACED, FOUND = "replaced", "found"  # `found`: what explain says of a chain that kernels serve
COLOURS = {
    REPLACED: "#2e7d32", FOUND: "#1565c0", "slower": "#8d6e00", "refused": "#8d6e00", "wrong": "#c62828", "failed": "#c62828", "unsupported": "#757575",
    "not traced": "#757575", "no backward": "#8d6e00",
}  # fmt: skip
_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
)


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
        most = max((value for row in self.rows for value in (row.ours_ms, row.torch_ms) if value), default=1.0)
        return _PAGES.get_template("report.html.j2").render(report=self, most=most, colours=COLOURS)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


class NotReplaced(RuntimeError):
    """Something stayed as it was although `strict` was asked for; the message is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report
