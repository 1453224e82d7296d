"""generated/index.yaml: the shipped packages as spec x precision, those with prepared weights, and the few that are checked in whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from codegen.spec.yaml_reader import read

EXEMPLARS = "exemplars"  # the folder of what is checked in whole, beside index.yaml
SOURCE_KEYS = "source_keys.jsonl"  # the hashes of all shipped packages, beside index.yaml


@dataclass(frozen=True)
class Exemplar:
    """A package that is checked in whole: its spec, precision, targets (none: all that serve it), and a word about what it shows."""

    spec: str
    precision: str
    shows: str
    targets: tuple[str, ...] = ()


def entries(out: Path) -> list[tuple[str, str]]:
    """(spec path, precision) of every shipped package in the index under `out`; empty where there is no index."""
    return [(item["spec"], precision) for item in _listed(out, "packages") for precision in item["precisions"]]


def prepared(out: Path) -> list[tuple[str, str]]:
    """(spec path, precision) of every shipped package that is generated with prepared weights as well."""
    return [(item["spec"], precision) for item in _listed(out, "packages") for precision in item.get("prepared", ())]


def exemplars(out: Path) -> list[Exemplar]:
    """The packages that are checked in whole, under `out`/exemplars."""
    return [Exemplar(item["spec"], item["precision"], item["shows"], tuple(item.get("targets", ()))) for item in _listed(out, "exemplars")]


def _listed(out: Path, name: str) -> list[dict]:
    path = out / "index.yaml"
    return read(path).plain().get(name) or [] if path.is_file() else []
