"""The three calls of the face: `generate`, `explain` and `load`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from bench.packages import load_package
from codegen.emit import read_spec_or_package, write_package
from codegen.manifest import Package
from codegen.package import make_package
from codegen.report import explain as explain_plan
from codegen.spec import ELSEWHERE, Spec, SpecError, load_spec
from codegen.targets import DEVICES, TARGETS

SpecLike = str | Path | Mapping[str, Any]
"""A spec: a YAML file's path (`specs/default.yaml` finds the shipped one), YAML text of several lines, or a mapping."""

GIVEN = "<spec>"  # names a spec without a file in messages


class _Plain(yaml.SafeDumper):
    """Writes plain data alone, and a list that stands in two places twice: a spec has no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def read(spec: SpecLike, precision: str | None = None, prepack: bool = False, algebra: bool = True) -> Spec:
    """Read and check a spec of any form.

    Raises SpecError, whose lines of a mapping are those of the mapping written as YAML, and TypeError where a mapping
    holds what YAML does not.
    """
    if isinstance(spec, Mapping):
        try:
            text = yaml.dump(dict(spec), Dumper=_Plain, sort_keys=False)
        except (yaml.YAMLError, RecursionError) as error:
            raise TypeError(f"a spec holds numbers, words, lists and mappings alone: {error.args[0]}") from None
        return _from_text(text, precision, prepack, algebra)
    if isinstance(spec, str) and "\n" in spec:
        return _from_text(spec, precision, prepack, algebra)
    return read_spec_or_package(str(spec), precision, prepack, algebra)


def _from_text(text: str, precision: str | None, prepack: bool, algebra: bool) -> Spec:
    """The spec in YAML text. Sources name it as one from elsewhere, so that its package's spec.yaml makes it again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "given.yaml"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")  # the reader refuses what is no text
        try:
            spec = load_spec(path, precision, prepack, algebra)
        except SpecError as error:
            raise SpecError(GIVEN, error.problems) from None
    return replace(spec, path=f"{ELSEWHERE}{spec.name}.yaml", named=GIVEN)


def plan_package(
    spec: Spec, targets: str | Iterable[str] = (), device_class: str | None = None, debug: bool = False
) -> Package:
    """The plans of a spec for `targets`, else the spec's own, else all that serve it.

    Raises Refusal where none can be made, ValueError for an unknown name.
    """
    chosen = (targets,) if isinstance(targets, str) else tuple(targets)
    for name in chosen:
        _known(name, TARGETS, "target")
    if device_class is not None:
        _known(device_class, DEVICES, "device class")
    return make_package(spec, chosen, device_class, debug)


def _known(name: str, table: Mapping[str, Any], what: str) -> None:
    if name not in table:
        raise ValueError(f"{name!r} is no {what}; there are {', '.join(table)}")


def generate(
    spec: SpecLike, *, precision: str | None = None, prepack: bool = False, algebra: bool = True,
    targets: str | Iterable[str] = (), device_class: str | None = None,
    out: str | Path = "generated", standalone: bool = False, debug: bool = False, force: bool = False,
) -> Path:  # fmt: skip
    """Write the package of a spec into a folder of its name under `out`, and return that folder.

    `precision` (fp32, tf32, fp16, bf16) and `prepack` override the spec's own; without `algebra` no chain is
    rewritten. `targets` names what to emit for, else
    the spec's own, else all that serve it. `device_class` is the class of card to plan for, else each target's default.
    `standalone` adds standalone.py, which imports nothing of ours; `debug` bounds the waits of sm_90a. A folder that
    holds something else is replaced only with `force`.

    Raises SpecError for a wrong spec, TypeError for a mapping that is none, Refusal where no kernel serves it or the
    folder holds something else, ValueError for an unknown name, OSError where nothing can be written.
    """
    package = plan_package(read(spec, precision, prepack, algebra), targets, device_class, debug)
    return write_package(package, Path(out), standalone, force).folder


def explain(
    spec: SpecLike | Any, *example: Any, precision: str | None = None, prepack: bool = False, algebra: bool = True,
    targets: str | Iterable[str] = (), device_class: str | None = None, debug: bool = False, apart: Iterable[Any] = (),
) -> Any:  # fmt: skip
    """The plan of a spec as text, one part a target: kernels, tiles, memory, floor in milliseconds, and the reasons.

    Arguments and errors are those of `generate`. Of a model (a torch.nn.Module, with the arguments of one call behind it) the report
    that `optimize` would begin with: its chains and their plans, with nothing compiled. `apart` is that of `optimize`.
    """
    if hasattr(spec, "named_modules"):
        from .models import explain_model

        return explain_model(spec, *example, precision=precision, apart=tuple(apart))
    if example or apart:
        raise TypeError("explain takes further arguments, and `apart`, behind a model alone")
    return describe(plan_package(read(spec, precision, prepack, algebra), targets, device_class, debug))


def describe(package: Package) -> str:
    """The plans of a package as text, and the targets that it has none for."""
    return "\n".join(
        [explain_plan(plan) for plan in package.plans]
        + [f"not for {name}: {reason}" for name, reason in package.skipped]
    )


def load(package_or_spec: SpecLike, **options: Any) -> ModuleType:
    """Import a package, given its folder or its spec, and return its module.

    The module holds `ModelNew`, `Model` (the same layer in plain PyTorch), `get_inputs` and `get_init_inputs`:
    `load("layer.yaml").ModelNew`. It is the module, for a model cannot be constructed without `get_init_inputs` nor
    compared without `Model`. Of a spec the package is generated first, as `generate` does with the same `options`; its
    sources stay in the folder. Kernels are compiled when a ModelNew is constructed.

    Raises what `generate` raises, and ValueError for a folder that holds no package, or options beside one.
    """
    if isinstance(package_or_spec, str | Path) and "\n" not in str(package_or_spec) and Path(package_or_spec).is_dir():
        folder = Path(package_or_spec)
        if not all((folder / name).is_file() for name in ("__init__.py", "model.py", "manifest.json")):
            raise ValueError(f"{folder} holds no generated package; fsk.load takes such a folder, or a spec")
        if options:
            raise ValueError(f"{', '.join(options)}: options are for a spec, and {folder} is a package already")
        return load_package(folder)
    return load_package(generate(package_or_spec, **options))
