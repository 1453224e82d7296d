"""codegen/tuned/<device class>.yaml: what was measured on a card of that class, and what the planner takes from it.

A file is a list of records, one for a spec's signature (its operators, sizes and precision): the card, torch, and each choice with its
milliseconds and error, or why it was rejected. Records are consulted where a plan names its device class, and never for the card that happens to be present.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from codegen.plan.route import Choice
from codegen.spec import Spec
from codegen.targets import TARGETS

FOLDER = Path(__file__).resolve().parent.parent / "tuned"
MARGIN = 0.98  # a target is given up for another whose measured time is below this share of its own
_SIZES = ("size", "axis", "count", "pair", "count_pair", "shape", "flag")  # types of arguments that a kernel's time depends on; bounds and factors are not


@dataclass(frozen=True)
class Decision:
    """What a record says of one target: the choice to plan, or why not to plan it; `why` in a sentence."""

    choice: Choice | None
    why: str


def signature(spec: Spec) -> str:
    """What the time of a spec's kernels depends on, in one line: precision, input, operators with their sizes, forced choices."""
    chain = []
    for step in spec.chain:
        kept = [a for a in step.operator.arguments if (a.type in _SIZES or isinstance(a.type, tuple)) and step.values[a.name] is not None]
        sizes = " ".join(f"{a.name}={_short(step.values[a.name])}" for a in kept)
        chain.append(f"{step.operator.name}({sizes})")
    forced = [f"{key}={value}" for key, value in (("math", spec.math), ("gemm", spec.gemm), ("prepack", spec.prepack or None)) if value]
    return " ".join([spec.precision.name, _short(spec.input_shape), *forced]) + ": " + " ".join(chain)


def _short(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)


def records(device: str) -> dict[str, dict[str, Any]]:
    """The records of a device class by signature; empty where nothing was measured."""
    return _read(FOLDER / f"{device}.yaml")


@functools.cache
def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    return {record["spec"]: record for record in yaml.safe_load(path.read_text(encoding="utf-8")) or []}


def write(device: str, kept: dict[str, dict[str, Any]]) -> Path:
    """Replace the records of a device class; equal records give equal bytes."""
    path = FOLDER / f"{device}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = "# Measured by make tune; consulted where a plan names this device class (DEVICE=). Milliseconds with a cold L2, error against float64.\n"
    text = head + yaml.safe_dump([kept[key] for key in sorted(kept)], sort_keys=False, default_flow_style=None, width=200)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    _read.cache_clear()
    return path


def choice_of(row: dict[str, Any]) -> Choice:
    """The choice that a record's row describes."""
    return Choice(row["route"], tuple(row.get("knobs", {}).items()))


def row_of(target: str, choice: Choice) -> dict[str, Any]:
    """A choice as a record's row."""
    return {"target": target, "route": choice.route, **({"knobs": choice.settings} if choice.knobs else {})}


def decide(spec: Spec, target: str, device: str) -> Decision | None:
    """What the device class's record says of `target`; None where it says nothing."""
    record = records(device).get(signature(spec))
    if record is None:
        return None
    right = sorted((row for row in record["candidates"] if "ms" in row), key=lambda row: row["ms"])
    here = [row for row in right if row["target"] == target]
    if not here:
        return None
    best, source = right[0], f"tuned/{device}.yaml, measured on {record['gpu']}"
    if TARGETS[target].rival and best["target"] != target and best["ms"] < MARGIN * here[0]["ms"]:
        return Decision(None, f"{best['target']} takes {best['ms']:.4f} ms and this target {here[0]['ms']:.4f} ms ({source})")
    others = f", the next best {here[1]['ms']:.4f} ms" if len(here) > 1 else ""
    chosen = choice_of(here[0])
    return Decision(chosen, f"{source}: {target}_{chosen.label} takes {here[0]['ms']:.4f} ms{others}")
