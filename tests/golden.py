"""The golden record: a hash of what the generator emits and explains, for shipped specs, a benchmark's and random ones.

    python -m tests.golden        renews tests/golden.json (make golden)

A case is a spec at one precision for a target and a device class. Its hash is made of one piece for each emitted file and one for the explanation, in the
order of their names, so that a difference can be traced to a file. A spec that a target refuses is known by the sentence of the refusal.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from bench.sweep.draw import LARGE, SMALL
from codegen.numerics import PRECISIONS
from codegen.package import make_package
from codegen.plan import Refusal
from codegen.render import render
from codegen.report import explain
from codegen.spec import Spec, benchmark, load_spec, shipped
from codegen.targets import DEVICES
from tests.fused_draw import draw

RECORD = Path(__file__).with_name("golden.json")
DRAWN = 300  # random specs
SEED = 18
DIGITS = 6  # of a file's piece
EXPLANATION, REFUSAL = "explanation", "refusal"


@dataclass(frozen=True)
class Case:
    """A name and the texts behind it: `make` gives them by file name."""

    name: str
    make: Callable[[], dict[str, str]]


def texts(spec: Spec, targets: tuple[str, ...], device: str | None) -> dict[str, str]:
    """Every emitted file and the explanation of every plan; of a spec that cannot be served, the sentence alone."""
    try:
        package = make_package(spec, targets, device)
    except Refusal as refusal:
        return {REFUSAL: str(refusal)}
    skipped = [f"not for {name}: {reason}" for name, reason in package.skipped]
    return {**render(package), EXPLANATION: "\n".join([explain(plan) for plan in package.plans] + skipped)}


def shipped_cases() -> Iterator[Case]:
    """Shipped specs at every precision: for the default targets, for each target of each device class, with prepared weights, and as a range of batches."""
    for path in shipped():
        for precision in PRECISIONS:
            spec, name = load_spec(path, precision), f"{Path(path).stem} {precision}"
            yield Case(f"{name} default", partial(texts, spec, (), None))
            for device in DEVICES.values():
                for target in device.targets:
                    yield Case(f"{name} {target} {device.name}", partial(texts, spec, (target,), device.name))
            yield Case(f"{name} prepack", partial(texts, load_spec(path, precision, prepack=True), (), None))
            for gemm in ("library", "generated"):
                yield Case(f"{name} {gemm}", partial(texts, replace(spec, gemm=gemm), (), None))
            if path.endswith("_small.yaml"):
                yield Case(f"{name} range", partial(texts, replace(spec, batches=(1, spec.batch), pad_batch=True), (), None))


def drawn_cases(count: int = DRAWN) -> Iterator[Case]:
    """Random specs, every other one large: in turn for the default targets and for each CUDA device class. A shorter run has the first of a longer one."""
    devices = [None, *(name for name in DEVICES if name != "host")]
    with tempfile.TemporaryDirectory() as folder:
        for index in range(count):
            spec, device = draw(SEED, index, LARGE if index % 2 else SMALL, Path(folder)), devices[index // 2 % len(devices)]
            yield Case(f"drawn {index:03d} {device or 'default'}", partial(texts, spec, (), device))


def benchmark_cases() -> Iterator[Case]:
    """The specs of KernelBench's second level for a Hopper card, at fp32 and in turn at another precision: chains in parts."""
    others = [name for name in PRECISIONS if name != "fp32"]
    for number, path in enumerate(benchmark()):
        for precision in ("fp32", others[number % len(others)]):
            yield Case(f"level2 {Path(path).stem} {precision}", partial(texts, load_spec(path, precision), (), "h200"))


def cases() -> Iterator[Case]:
    """All cases of the record, one after the other: they are many, and each is made when its turn comes."""
    yield from shipped_cases()
    yield from benchmark_cases()
    yield from drawn_cases()


def pieces(made: dict[str, str]) -> dict[str, str]:
    """The piece of each text, by name in alphabetical order."""
    return {name: hashlib.sha256(made[name].encode()).hexdigest()[:DIGITS] for name in sorted(made)}


def hashed(made: dict[str, str]) -> str:
    """The hash of a case: its pieces in order."""
    return "".join(pieces(made).values())


def recorded() -> dict[str, str]:
    """The hashes of the record by case."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def difference(case: Case, expected: str | None) -> str | None:
    """In a sentence, which texts of a case differ from the record; None where none does."""
    found = pieces(case.make())
    if expected is None:
        return f"{case.name}: is not in {RECORD.name}; it emits {', '.join(found)}"
    before = [expected[at : at + DIGITS] for at in range(0, len(expected), DIGITS)]
    if before == list(found.values()):
        return None
    if len(before) != len(found):
        return f"{case.name}: {len(before)} texts were recorded, and now there are {len(found)}: {', '.join(found)}"
    changed = [name for name, piece in zip(found, before, strict=True) if found[name] != piece]
    return f"{case.name}: {', '.join(changed)} differ{'s' if len(changed) == 1 else ''}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", "checking", is_flag=True, help="Write nothing; list the cases that differ from the record.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Also write the texts of every case that differs, to compare them.")
def main(checking: bool, folder: Path | None) -> None:
    """Renew tests/golden.json from what the generator emits now, and say which cases changed."""
    known = recorded() if RECORD.is_file() else {}
    made: dict[str, str] = {}
    changed = []
    for case in cases():
        files = case.make()
        made[case.name] = hashed(files)
        if made[case.name] != known.get(case.name):
            changed.append(case.name)
            click.echo(difference(case, known.get(case.name)))
            for name, text in files.items() if folder else ():
                place = folder / case.name.replace(" ", "_")
                place.mkdir(parents=True, exist_ok=True)
                (place / name).write_text(text, encoding="utf-8")
    gone = [name for name in known if name not in made]
    click.echo(f"{len(made)} cases, {len(changed)} changed, {len(gone)} gone")
    if checking:
        raise SystemExit(bool(changed or gone))
    RECORD.write_text(json.dumps(made, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
