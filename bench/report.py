"""`make report`: bench/results/ as a static page with pictures, in docs/results.md, as the README's table and in docs/kernels.md."""

from __future__ import annotations

from pathlib import Path

import click
import jinja2
from rich.console import Console

from bench import level2_page, pictures, store
from bench.kernel_tables import renewed
from bench.records import PREPARED, backward_keys, ledger, loaders_choice, read_all
from bench.store import KERNELBENCH, RESULTS, SWEEP, Record
from bench.sweep import summary
from bench.tables import cards_of, machine_of, not_measured, put_table, readme_table, results_page, significant, states_of
from codegen.numerics import PRECISIONS
from codegen.plan import Refusal
from codegen.spec import SpecError

TEMPLATES = Path(__file__).parent / "templates"


def _environment() -> jinja2.Environment:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    env.filters.update(
        sig=significant, exp=lambda value: "-" if value is None else f"{value:.1e}", times=lambda value: "-" if value is None else f"{value:.2f}x"
    )
    return env


def _pictures(records: list[Record], machine: dict, folder: Path) -> list[dict]:
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        {"svg": pictures.speedups(records, folder), "caption": "Speed-up by system and precision. 1 is as fast as PyTorch's best."},
        {"svg": pictures.roofline(records, machine, folder), "caption": "Roofline at this card's measured rates: ours filled, the fastest peer hollow."},
    ]
    for name in dict.fromkeys(r["spec"] for r in records):
        mine = [r for r in records if r["spec"] == name]
        made.append({"svg": pictures.error_against_time(mine, folder, name), "caption": "Error against time: ours filled, peers hollow, one colour a precision. Lower left is better."})
    return made


def _sweep(cases: list[Record], folder: Path) -> dict | None:
    """The sweep's part of a card's page; None where there was none."""
    if not cases:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    wrong = [case for case in cases if case["verified"] is False or case.get("failure")]
    return {
        "counts": summary.counts(cases), "cases": len(cases), "classes": summary.classes(cases),
        "slowest": [(case, summary.chain_of(case), summary.cause(case)) for case in summary.slowest(cases)],
        "wrong": [(case, summary.complaints(case)) for case in wrong], "svg": pictures.sweep(cases, folder) if summary.timed(cases) else None,
    }  # fmt: skip


def _backward_today(record: Record) -> str | None:
    """The key of a record's backward as its spec emits it now; None where there is none any more, as where the spec is gone."""
    try:
        return backward_keys(record["path"], record["precision"], record["weights"] == PREPARED).get(record["backward"]["target"])
    except (SpecError, Refusal):
        return None


def build(results: Path, out: Path) -> Path:
    """Write `out`/index.html and the pictures under `out`/<gpu>/; returns the page."""
    statuses = ledger(results)
    cards = []
    measured = read_all(results)
    for slug in sorted({*measured, *store.cards(results, SWEEP)}):
        records, cases = measured.get(slug, []), store.read(SWEEP, results, slug)
        machine = machine_of(results, slug, records or cases)
        for record, state in zip(records, states_of(slug, records, statuses), strict=True):
            record["state"] = state
            record["overhead_us"] = dict(sorted(record["overhead_us"].items(), key=lambda item: item[0] != "ours"))
            record["sorted_peers"] = sorted(record["peers"].items(), key=lambda item: item[1]["ms"])
            record.setdefault("verification", [])
            record.setdefault("backward", None)
            if record["backward"]:
                record["backward"]["changed"] = _backward_today(record) != record["backward"]["key"]
        order = list(PRECISIONS)
        runs = sorted(store.read(KERNELBENCH, results, slug), key=lambda run: (run["shapes"], run["problem"], order.index(run["precision"])))
        cards.append({
            "slug": slug, "name": machine["gpu"], "machine": machine, "records": records, "pictures": _pictures(loaders_choice(records), machine, out / slug) if records else [],
            "missing": not_measured(slug, statuses) if records else [],
            "kernelbench": runs, "sweep": _sweep(cases, out / slug),
        })  # fmt: skip
    cards.sort(key=lambda card: -sum(record["state"] == "verified" for record in card["records"]))
    out.mkdir(parents=True, exist_ok=True)
    page = out / "index.html"
    page.write_text(_environment().get_template("report.html.j2").render(cards=cards), encoding="utf-8")
    return page


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder of the records; default bench/results.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/report"), show_default=True)
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), default=Path("docs/results.md"), show_default=True, help="Write every table here.")
@click.option("--level2", type=click.Path(dir_okay=False, path_type=Path), default=Path("docs/level2.md"), show_default=True, help="Write KernelBench's level 2 here.")
@click.option("--readme", type=click.Path(dir_okay=False, path_type=Path), default=Path("README.md"), show_default=True, help="Put the table between its markers here.")
@click.option("--kernels", type=click.Path(dir_okay=False, path_type=Path), default=Path("docs/kernels.md"), show_default=True, help="Renew the rows that name records here.")
def main(results, out, page, level2, readme, kernels) -> None:
    """Write the page with pictures, docs/results.md, docs/level2.md, the README's table and the figures of docs/kernels.md."""
    with Console(stderr=True).status("drawing"):
        drawn = build(results, out)
    click.echo(f"{drawn} and pictures beside it")
    statuses = ledger(results)
    for status in statuses:
        if not status.verified:
            click.echo(f"{status.gpu}: {status.spec} {status.precision} ({status.target}) is " + ("timed alone, not verified" if status.state == "unverified" else f"unverified: {status.state}"))
    cards = cards_of(read_all(results), statuses, results)
    _renew(page, results_page(cards))
    _renew(level2, level2_page.page(results))
    if readme.is_file():
        try:
            changed = put_table(readme, readme_table(cards))
            click.echo(f"{readme}: table {'renewed' if changed else 'unchanged'}")
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    if kernels.is_file():
        _renew(kernels, renewed(kernels.read_text(encoding="utf-8"), results))


def _renew(path: Path, text: str) -> None:
    """Write a text where it differs from what is there, and say so."""
    changed = not path.is_file() or path.read_text(encoding="utf-8") != text
    if changed:
        store.write_text(path, text)
    click.echo(f"{path}: {'renewed' if changed else 'unchanged'}")
