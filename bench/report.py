"""`make report`: bench/results/ as a static page with pictures, and as the README's table."""

from __future__ import annotations

from pathlib import Path

import click
import jinja2

from bench import pictures
from bench.records import RESULTS, Record, ledger, loaders_choice, read, read_all
from bench.tables import put_table, readme_table

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


def build(results: Path, out: Path) -> Path:
    """Write `out`/index.html and the pictures under `out`/<gpu>/; returns the page."""
    statuses = ledger(results)
    states = {(s.gpu, s.spec, s.precision, s.target): s.state for s in statuses}
    cards = []
    for slug, records in read_all(results).items():
        machine = read(results / slug / "machine.json") or {**{k: records[0][k] for k in ("gpu", "torch", "cuda", "driver")}, "ceilings": records[0]["ceilings"]}
        for record in records:
            record["state"] = states.get((slug, record["spec"], record["precision"], record["target"]), "verified" if record["verified"] else "wrong")
            record["sorted_peers"] = sorted(record["peers"].items(), key=lambda item: item[1]["ms"])
            record.setdefault("verification", [])
        kernelbench = read(results / slug / "kernelbench.json")
        cards.append({
            "slug": slug, "name": machine["gpu"], "machine": machine, "records": records, "pictures": _pictures(loaders_choice(records), machine, out / slug),
            "missing": [f"{s.spec} {s.precision}" for s in statuses if s.gpu == slug and s.state == "missing"],
            "kernelbench": kernelbench["runs"] if kernelbench else [],
        })  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    page = out / "index.html"
    page.write_text(_environment().get_template("report.html.j2").render(cards=cards), encoding="utf-8")
    return page


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder of the records; default bench/results.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("build/report"), show_default=True)
@click.option("--readme", type=click.Path(dir_okay=False, path_type=Path), default=Path("README.md"), show_default=True, help="Put the table between its markers here.")
def main(results, out, readme) -> None:
    """Write the page, the pictures and the README's table."""
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


if __name__ == "__main__":
    main()
