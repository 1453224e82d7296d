"""What generated/ holds in git: exemplars, whole, and the source keys of every shipped package. `make generate-all`, `make check-generated`.

A measurement is evidence for sources named by their key. So a changed line of source_keys.jsonl says which package needs new evidence.
"""

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path

import click

from codegen.folder import is_emitted, write_if_different
from codegen.index import EXEMPLARS, SOURCE_KEYS, Exemplar, entries, exemplars, prepared
from codegen.manifest import Package
from codegen.package import make_package
from codegen.plan import Refusal
from codegen.render import render
from codegen.spec import SpecError, load_spec


def source_keys(out: Path) -> list[dict]:
    """Of every shipped package the keys of its sources as emitted today, by target: those of the forward and of the backward.

    `prepack` says that its weights are prepared. Raises SpecError or Refusal.
    """
    shipped = [(spec, precision, False) for spec, precision in entries(out)] + [(spec, precision, True) for spec, precision in prepared(out)]
    found = []
    for path, precision, prepack in shipped:
        package = make_package(load_spec(path, precision, prepack))
        manifest = json.loads(render(package)["manifest.json"])
        keys = {part: {name: each["source_key"] for name, each in sorted(manifest.get(part, {}).items())} for part in ("targets", "backward")}
        found.append({"package": package.spec.package, "spec": path, "precision": precision, "prepack": prepack, **keys})
    return found


def package_of(exemplar: Exemplar) -> Package:
    """The plans of an exemplar. Raises SpecError or Refusal."""
    return make_package(load_spec(exemplar.spec, exemplar.precision), exemplar.targets)


def renew(out: Path) -> list[Path]:
    """Write the exemplars and the source keys under `out`; returns the files that changed. Raises SpecError or Refusal."""
    changed = []
    for exemplar in exemplars(out):
        package = package_of(exemplar)
        changed += write_if_different(out / EXEMPLARS / package.spec.package, render(package))
    text = _text_of(source_keys(out))
    if not (out / SOURCE_KEYS).is_file() or (out / SOURCE_KEYS).read_text(encoding="utf-8") != text:
        (out / SOURCE_KEYS).write_text(text, encoding="utf-8", newline="\n")
        changed.append(out / SOURCE_KEYS)
    return changed


def differences(out: Path) -> list[str]:
    """The differences between what is checked in under `out` and what the specs emit today, as text; none where all is current."""
    found, folders = [], set()
    for exemplar in exemplars(out):
        package = package_of(exemplar)
        folder = out / EXEMPLARS / package.spec.package
        folders.add(folder)
        found += _differences_of(folder, render(package))
    found += [f"{path}: is no exemplar of {out}/index.yaml; delete the folder" for path in sorted((out / EXEMPLARS).glob("*/")) if path not in folders]
    present = (out / SOURCE_KEYS).read_text(encoding="utf-8") if (out / SOURCE_KEYS).is_file() else ""
    return found + _diff(out / SOURCE_KEYS, present, _text_of(source_keys(out)))


def _text_of(keys: list[dict]) -> str:
    return "".join(json.dumps(each, separators=(",", ":")) + "\n" for each in keys)


def _differences_of(folder: Path, files: dict[str, str]) -> list[str]:
    """What differs between a package on disk and its `files` (texts by name)."""
    present = {path.name: path for path in sorted(folder.glob("*"))}
    found = [f"{path}: is no longer emitted" for name, path in present.items() if name not in files and name != "standalone.py" and is_emitted(path)]
    for name, text in files.items():
        found += _diff(folder / name, present[name].read_text(encoding="utf-8") if name in present else "", text)
    return found


def _diff(path: Path, present: str, wanted: str) -> list[str]:
    lines = difflib.unified_diff(present.splitlines(), wanted.splitlines(), f"{path} (checked in)", f"{path} (emitted)", lineterm="", n=1)
    return ["\n".join(list(lines)[:40])] if present != wanted else []


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", "checking", is_flag=True, help="Write nothing; fail where something differs from what the specs emit.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("generated"), show_default=True, help="The folder with index.yaml.")
def main(checking, out) -> None:
    """Renew what generated/ holds in git: the exemplars that index.yaml lists and the source keys of all its packages."""
    if not entries(out):
        raise click.ClickException(f"{out}/index.yaml lists no packages; run this in the repository, or name its folder with --out")
    count = f"{len(exemplars(out))} exemplars and the source keys of {len(entries(out)) + len(prepared(out))} packages"
    try:
        found = differences(out) if checking else renew(out)
    except SpecError as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    except Refusal as error:
        raise click.ClickException(str(error)) from None
    if checking and found:
        raise click.ClickException("checked-in files differ from what their specs emit; run make generate-all\n" + "\n".join(found))
    click.echo(f"{count} are what their specs emit" + ("" if checking else f" ({len(found)} files changed)" if found else " (unchanged)"))


if __name__ == "__main__":
    main()
