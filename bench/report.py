"""`make report`: bench/results/ as a static page with pictures, as the README's table and in docs/kernels.md."""

from __future__ import annotations

from pathlib import Path

import click
import jinja2
from rich.console import Console

from bench import pictures
from bench.kernel_tables import renewed
from bench.records import PREPARED, RESULTS, SWEEP, Record, backward_keys, ledger, loaders_choice, read, read_all
from bench.sweep import summary
from bench.tables import not_measured, put_table, readme_table, state_today

TEMPLATES = Path(__file__).parent / "templates"


def _significant(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _environment() -> jinja2.Environment:
    env = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    env.filters.update(
        sig=_significant, exp=lambda value: "-" if value is None else f"{value:.1e}", times=lambda value: "-" if value is None else f"{value:.2f}x"
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


def _machine(record: Record) -> dict:
    """What machine.json would say, from a record made there."""
    return {key: record[key] for key in ("gpu", "torch", "cuda", "driver", "ceilings")}


def _sweep(results: Path, slug: str, folder: Path) -> dict | None:
    """The sweep's part of a card's page; None where there was none."""
    cases = summary.load(results, slug)["cases"]
    if not cases:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    wrong = [case for case in cases if case["verified"] is False or case.get("failure")]
    return {
        "counts": summary.counts(cases), "cases": len(cases), "classes": summary.classes(cases),
        "slowest": [(case, summary.chain_of(case), summary.cause(case)) for case in summary.slowest(cases)],
        "wrong": [(case, summary.complaints(case)) for case in wrong], "svg": pictures.sweep(cases, folder) if summary.timed(cases) else None,
    }  # fmt: skip


def build(results: Path, out: Path) -> Path:
    """Write `out`/index.html and the pictures under `out`/<gpu>/; returns the page."""
    statuses = ledger(results)
    states = {(s.gpu, s.spec, s.precision, s.target): s.state for s in statuses}
    cards = []
    measured = read_all(results)
    swept = [path.parent.name for path in results.glob(f"*/{SWEEP}")]
    for slug in sorted({*measured, *swept}):
        records = measured.get(slug, [])
        machine = read(results / slug / "machine.json") or _machine(records[0] if records else summary.load(results, slug))
        for record in records:
            known = None if record["weights"] == PREPARED else states.get((slug, record["spec"], record["precision"], record["target"]))
            record["state"] = known or (state_today(record) if record["weights"] == PREPARED else "verified" if record["verified"] else "wrong")
            record["sorted_peers"] = sorted(record["peers"].items(), key=lambda item: item[1]["ms"])
            record.setdefault("verification", [])
            record.setdefault("backward", None)
            if record["backward"]:
                today = backward_keys(record["path"], record["precision"], record["weights"] == PREPARED)
                record["backward"]["changed"] = today.get(record["backward"]["target"]) != record["backward"]["key"]
        kernelbench = read(results / slug / "kernelbench.json")
        cards.append({
            "slug": slug, "name": machine["gpu"], "machine": machine, "records": records, "pictures": _pictures(loaders_choice(records), machine, out / slug) if records else [],
            "missing": not_measured(slug, statuses) if records else [],
            "kernelbench": kernelbench["runs"] if kernelbench else [], "sweep": _sweep(results, slug, out / slug),
        })  # fmt: skip
    cards.sort(key=lambda card: -sum(record["state"] == "verified" for record in card["records"]))
    out.mkdir(parents=True, exist_ok=True)
    page = out / "index.html"
    page.write_text(_environment().get_template("report.html.j2").render(cards=cards), encoding="utf-8")
    return page


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder of the records; default bench/results.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/report"), show_default=True)
@click.option("--readme", type=click.Path(dir_okay=False, path_type=Path), default=Path("README.md"), show_default=True, help="Put the table between its markers here.")
@click.option("--kernels", type=click.Path(dir_okay=False, path_type=Path), default=Path("docs/kernels.md"), show_default=True, help="Renew the rows that name files here.")
def main(results, out, readme, kernels) -> None:
    """Write the page, the pictures, the README's table and the figures of docs/kernels.md."""
    with Console(stderr=True).status("drawing"):
        page = build(results, out)
    click.echo(f"{page} and pictures beside it")
    statuses = ledger(results)
    for status in statuses:
        if not status.verified:
            click.echo(f"{status.gpu}: {status.spec} {status.precision} ({status.target}) is unverified: {status.state}")
    if readme.is_file():
        try:
            changed = put_table(readme, readme_table(read_all(results), statuses))
            click.echo(f"{readme}: table {'renewed' if changed else 'unchanged'}")
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    if kernels.is_file():
        kernels.write_text(renewed(kernels.read_text(encoding="utf-8"), results), encoding="utf-8")
