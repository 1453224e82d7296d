"""YAML -> Spec: `load_spec` finds and reads a file, and makes every check that a spec must stand, each fault reported where it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from codegen import numerics
from codegen.ops import ShapeError
from codegen.source_text import source_text
from codegen.spec.types import ELSEWHERE, MAX_ELEMENTS, MAX_SIZES, PREPACKED, Spec, SpecError
from codegen.spec.chain_reader import ChainReader
from codegen.spec.scalars import INVALID, meant, nearest
from codegen.spec.yaml_reader import Node, Problem, YamlError, read
from codegen.targets import TARGETS

_TOP = ("name", "batch", "precision", "input", "args", "defaults", "chain", "targets", "math", "gemm", "prepack", "pad_batch")
_INPUT_VALUES = ("rand", "randn")


def load_spec(path: str | Path, precision: str | None = None, prepack: bool = False) -> Spec:
    """Read and validate a spec file; `precision` overrides the file's, `prepack` asks for prepared weights where the file does not.

    Raises SpecError (all problems at once).
    """
    found, shown = resolve(str(path))
    spec = replace(read_spec(found, named(found, shown), precision), path=shown)
    return replace(spec, prepack=True, prepack_asked=True) if prepack and not spec.prepack else spec


def resolve(path: str) -> tuple[Path, str]:
    """Where a spec named on the command line lies (under the current folder, else under codegen/), and the name that sources show.

    The shown name is the same wherever the command runs: `specs/<file>` for a shipped spec, else the path from the current folder; of an
    absolute path elsewhere, or one with signs that no source may hold, `.../<file>`. Raises SpecError when there is no such file.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (Path(path), package / path):
        if candidate.is_file():
            return candidate, _shown(candidate, package)
    if Path(path).exists():
        what = "a folder" if Path(path).is_dir() else "no regular file"
        raise SpecError(path, [Problem(1, 1, f"is {what}; a spec is a YAML file, such as {', '.join(shipped()[:1])}")])
    raise SpecError(path, [Problem(1, 1, f"no such file here or under codegen/; shipped specs: {', '.join(shipped())}")])


def _shown(candidate: Path, package: Path) -> str:
    here = Path.cwd()
    if candidate.resolve().is_relative_to(package):
        shown = candidate.resolve().relative_to(package).as_posix()
    elif not candidate.is_absolute():
        shown = candidate.as_posix()
    else:
        shown = candidate.relative_to(here).as_posix() if candidate.is_relative_to(here) else f"{ELSEWHERE}{candidate.name}"
    plain = source_text(shown)
    return plain if plain == shown and not shown.startswith("-") else f"{ELSEWHERE}{source_text(candidate.name)}"


def named(found: Path, shown: str) -> str:
    """The name of the file at `found` for who is at the terminal: what sources show, where that leads to the file, else the whole path."""
    return str(found) if shown.startswith(ELSEWHERE) else shown


def shipped() -> list[str]:
    """The specs that come with the generator, as `specs/<name>.yaml`."""
    return sorted(f"specs/{p.name}" for p in (Path(__file__).parent.parent / "specs").glob("*.yaml"))


def read_spec(path: Path, shown: str, precision: str | None) -> Spec:
    """Read the file at `path`, named `shown` in messages. Raises SpecError with all problems."""
    try:
        root = read(path)
    except YamlError as error:
        raise SpecError(shown, error.problems) from None
    except OSError as error:
        raise SpecError(shown, [Problem(1, 1, f"cannot be read: {error.strerror}")]) from None
    return _Reader(root, shown).spec(precision)


class _Reader(ChainReader):
    """Walks one spec file."""

    def __init__(self, root: Node, shown: str) -> None:
        super().__init__()
        self.root, self.shown = root, shown
        self.arg_nodes: dict[str, Node] = {}
        self.targets_at: tuple[tuple[int, int], ...] = ()

    def spec(self, precision: str | None) -> Spec:
        if not self.root.is_mapping:
            self.fault(self.root, f"a spec is a mapping with the keys {', '.join(_TOP)}")
            raise SpecError(self.shown, self.problems)
        entries: dict[str, tuple[Node, Node]] = self.root.value
        nodes = {key: value for key, (_, value) in entries.items()}
        misspelt = set()
        for key, (key_node, _) in entries.items():
            if key not in _TOP:
                misspelt.add(meant(key, [word for word in _TOP if word not in entries]))
                self.fault(key_node, f"{key}: unknown key{nearest(key, _TOP)}")
        for key in ("name", "batch", "chain"):
            if key not in entries and key not in misspelt:
                self.fault(self.root, f"{key}: is missing")
        misspelt |= {"args", "defaults", "input"} - set(nodes) if None in misspelt else set()  # it may have meant what others refer to
        self.args_unclear = bool(misspelt & {"args", "defaults"})

        name = self.identifier(nodes["name"], "name") if "name" in nodes else INVALID
        marks = {**{p.suffix: "precision" for p in numerics.PRECISIONS.values() if p.suffix}, PREPACKED: "prepared weights"}
        suffix = next((suffix for suffix in marks if name is not INVALID and name.endswith(suffix)), None)
        if suffix:
            self.fault(nodes["name"], f"name: {name} ends in {suffix}, which marks a package's {marks[suffix]}; choose another name")
        batches = self.batches(nodes["batch"]) if "batch" in nodes else INVALID
        pad_batch = self.flag(nodes["pad_batch"], "pad_batch") if "pad_batch" in nodes else False
        batch = batches if batches is INVALID else batches[-1]
        chosen = self.word(nodes["precision"], "precision", numerics.PRECISIONS) if "precision" in nodes else "fp32"
        if precision is not None:
            if precision not in numerics.PRECISIONS:
                raise SpecError(self.shown, [Problem(1, 1, f"precision {precision!r}{nearest(precision, numerics.PRECISIONS)}")])
            overridden = precision != chosen
            chosen = precision
        else:
            overridden = False
        self.precision = numerics.FP32 if chosen is INVALID else numerics.PRECISIONS[chosen]
        values, spatial = self.input(nodes.get("input"), "input" in misspelt)
        for key in ("args", "defaults"):
            if key in nodes:
                self.read_args(nodes[key], key)
        targets = self.targets(nodes["targets"]) if "targets" in nodes else None
        math_node = nodes.get("math")
        math_choice = None
        if math_node is not None and chosen is not INVALID and not overridden:
            math_choice = self.word(math_node, f"math at {chosen}", numerics.MATH_CHOICES[chosen])
        gemm = self.word(nodes["gemm"], "gemm", ("library", "generated")) if "gemm" in nodes else None
        prepack = self.flag(nodes["prepack"], "prepack") if "prepack" in nodes else False
        chain = self.chain(nodes["chain"], batch, spatial, nodes.get("input")) if "chain" in nodes else ()
        read = "chain" in nodes and nodes["chain"].is_list and not self.use_unclear
        for unused in [a for a in self.args if read and a not in self.used_args]:
            self.fault(self.arg_nodes[unused], f"{unused}: is never used in the chain")
        if not self.problems and "chain" in nodes:
            self.check_names(chain, nodes["chain"])
        if self.problems:
            raise SpecError(self.shown, self.problems)
        ranged = len(batches) > 1 or pad_batch
        spec = Spec(
            name=name, path=source_text(self.shown), named=self.shown, batch=batch, precision=numerics.PRECISIONS[chosen], values=values, args=tuple(self.args.items()), chain=chain,
            targets=targets, math=math_choice, gemm=gemm, prepack=prepack, defaults=tuple(nodes["defaults"].value) if "defaults" in nodes else (),
            batches=batches if ranged else (), pad_batch=pad_batch, targets_at=self.targets_at,
        )  # fmt: skip
        self.check_sizes(spec, nodes)
        return spec

    def batches(self, node: Node) -> Any:
        """The batches in ascending order: one, or those of a list."""
        if not node.is_list:
            size = self.size(node, "batch")
            return size if size is INVALID else (size,)
        if not node.value:
            return self.fault(node, "batch: an empty list; expected an integer, or a list of them such as [1, 8, 64]")
        if len(node.value) > MAX_SIZES:
            return self.fault(node, f"batch: {len(node.value)} sizes; at most {MAX_SIZES} make one package, as each is compiled")
        found: dict[int, Node] = {}
        sound = True
        for item in node.value:
            size = self.size(item, "batch")
            if size is INVALID:
                sound = False
            elif size in found:
                sound = False
                self.fault(item, f"batch: {size} is listed twice, first on line {found[size].line}, column {found[size].column}")
            else:
                found[size] = item
        return tuple(sorted(found)) if sound else INVALID

    def check_sizes(self, spec: Spec, nodes: dict[str, Node]) -> None:
        """Refuse what holds for the largest batch of a range, with which the chain was read, and not for another."""
        listed = nodes["batch"].value if nodes["batch"].is_list else []
        for item in listed:
            try:
                spec.at(item.value)
            except ShapeError as error:
                self.fault(item, f"batch: {item.value} does not go with the chain: {error}")
        if spec.pad_batch and not spec.rows_are_samples:
            reason = "a parameter behind the reduction changes the result's shape, so that its first rows are not the first samples"
            self.fault(nodes["pad_batch"], f"pad_batch: {reason}")
        if self.problems:
            raise SpecError(self.shown, self.problems)

    def input(self, node: Node | None, misspelt: bool) -> tuple[Any, dict[str, Any]]:
        """(how x is filled, spatial sizes by name) from the optional `input:` mapping; sizes that a fault may stand for are INVALID."""
        unclear = {"height": INVALID, "width": INVALID}
        if node is None:
            return "rand", unclear if misspelt else {}
        if not node.is_mapping:
            self.fault(node, f"input: {node.describe()}; expected a mapping such as {{height: 128, width: 128, values: rand}}")
            return "rand", unclear
        values, spatial = "rand", {}
        for key, (key_node, value) in node.value.items():
            if key == "values":
                values = self.word(value, "input values", _INPUT_VALUES)
            elif key in ("height", "width"):
                spatial[key] = self.size(value, key)
            else:
                self.fault(key_node, f"{key}: unknown key of input{nearest(key, ('height', 'width', 'values'))}")
                spatial = unclear | spatial
        return values, spatial

    def read_args(self, node: Node, what: str) -> None:
        if not node.is_mapping:
            self.fault(node, f"{what}: {node.describe()}; expected a mapping from constructor argument to value")
            self.args_unclear = True
            return
        for key, (key_node, value) in node.value.items():
            if self.identifier(key_node, what) is INVALID:
                self.used_args.add(key)
            if key in self.arg_nodes:
                self.fault(key_node, f"{key}: is an argument on line {self.arg_nodes[key].line} already")
                continue
            self.arg_nodes[key] = key_node
            if value.is_list:
                self.args[key] = self.sizes(value, key)
            elif isinstance(value.value, bool):
                self.args[key] = value.value
            elif isinstance(value.value, int) and abs(value.value) <= MAX_ELEMENTS:
                self.args[key] = value.value
            else:
                self.args[key] = self.number(value, key)

    def targets(self, node: Node) -> Any:
        items = node.value if node.is_list else [node]
        chosen = [self.word(item, "targets", TARGETS) for item in items]
        if INVALID in chosen or not chosen:
            return None
        places = {name: (item.line, item.column) for name, item in reversed(list(zip(chosen, items, strict=True)))}
        unique = tuple(dict.fromkeys(chosen))
        self.targets_at = tuple(places[name] for name in unique)
        return unique
