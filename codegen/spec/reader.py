"""YAML -> Spec: `load_spec` finds and reads a file, and makes every check that a spec must stand, each fault reported where it is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from codegen import numerics
from codegen.ops import OPERATORS, PARAMETER, Kind, ShapeError
from codegen.spec.chain_reader import MAX_RANK, ChainReader, Inputs, words_within
from codegen.source_text import source_text
from codegen.spec.scalars import INVALID, meant, nearest
from codegen.spec.types import ELSEWHERE, MAX_ELEMENTS, MAX_SIZES, PREPACKED, Input, Spec, SpecError, Step
from codegen.spec.yaml_reader import Node, Problem, YamlError, read
from codegen.targets import TARGETS

LIBRARY = ("allow", "producers", "forbid")  # what torch's library may compute
_TOP = ("name", "batch", "precision", "input", "inputs", "args", "defaults", "chain", "targets", "math", "gemm", "library", "algebra", "prepack", "pad_batch", "unused", "ignored", "created")
_INPUT_VALUES = ("rand", "randn")
HOLDERS = {"parameter": PARAMETER, **{name: row for name, row in OPERATORS.items() if row.kind in (Kind.PRODUCER, Kind.NORM)}}  # of what `unused` lists
SPATIAL = ("length", "depth", "height", "width")


def load_spec(path: str | Path, precision: str | None = None, prepack: bool = False, algebra: bool = True) -> Spec:
    """Read and validate a spec file; `precision` overrides the file's, `prepack` asks for prepared weights where the file does not, and
    without `algebra` no chain is rewritten.

    Raises SpecError (all problems at once).
    """
    found, shown = resolve(str(path))
    spec = replace(read_spec(found, named(found, shown), precision), path=shown)
    if not algebra and spec.algebra:
        spec = replace(spec, algebra=False, algebra_asked=True)
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


def benchmark() -> list[str]:
    """The specs of KernelBench's second level that come with the generator, by number, as `specs/kernelbench/level2/<number>_<name>.yaml`."""
    folder = Path(__file__).parent.parent / "specs" / "kernelbench" / "level2"
    return [f"specs/kernelbench/level2/{p.name}" for p in sorted(folder.glob("*.yaml"), key=lambda p: int(p.name.split("_")[0]))]


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
        self.filled: dict[str, str] = {}  # of inputs, by name
        self.unbatched: dict[str, Node] = {}  # where each says that it has no samples
        self.input_nodes: dict[str, Node] = {}

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
        given = Inputs(unsound=True) if misspelt & {"input", "inputs"} else self.inputs(nodes, batch)
        ranged = pad_batch is True or (batches is not INVALID and len(batches) > 1)
        if ranged and given.first in self.unbatched:
            reason = "comes first, and its rows tell which of several batches runs; give it samples, or one batch without pad_batch"
            self.fault(self.unbatched[given.first], f"batched: {given.first} {reason}")
        for key in ("args", "defaults"):
            if key in nodes:
                self.read_args(nodes[key], key)
        targets = self.targets(nodes["targets"]) if "targets" in nodes else None
        math_node = nodes.get("math")
        math_choice = None
        if math_node is not None and chosen is not INVALID and not overridden:
            math_choice = self.word(math_node, f"math at {chosen}", numerics.MATH_CHOICES[chosen])
        gemm = self.word(nodes["gemm"], "gemm", ("library", "generated")) if "gemm" in nodes else None
        library = self.word(nodes["library"], "library", LIBRARY) if "library" in nodes else None
        if library == "forbid" and gemm == "library":
            self.fault(nodes["library"], "library: forbid contradicts gemm: library")
        algebra = self.flag(nodes["algebra"], "algebra") if "algebra" in nodes else True
        prepack = self.flag(nodes["prepack"], "prepack") if "prepack" in nodes else False
        chain = self.chain(nodes["chain"], batch, given) if "chain" in nodes else ()
        unused = self.unused(nodes["unused"], batch) if "unused" in nodes else ()
        ignored = self.names(nodes["ignored"], "ignored", self.args) if "ignored" in nodes else ()
        self.used_args |= set(ignored)
        read = "chain" in nodes and nodes["chain"].is_list and not self.use_unclear
        for unused in [a for a in self.args if read and a not in self.used_args]:
            self.fault(self.arg_nodes[unused], f"{unused}: is never used in the chain")
        if not self.problems and "chain" in nodes:
            self.check_names(chain, nodes["chain"], unused, nodes.get("unused"))
            created = self.order(chain, unused, nodes["created"]) if "created" in nodes else ()
            self.check_inputs(chain, given)
        if self.problems:
            raise SpecError(self.shown, self.problems)
        spec = Spec(
            name=name, path=source_text(self.shown), named=self.shown, batch=batch, precision=numerics.PRECISIONS[chosen], inputs=self.listed(given, chain), args=tuple(self.args.items()), chain=chain,
            targets=targets, math=math_choice, gemm=gemm, library=None if library == "allow" else library, algebra=algebra, prepack=prepack, defaults=tuple(nodes["defaults"].value) if "defaults" in nodes else (),
            batches=batches if ranged else (), pad_batch=pad_batch, targets_at=self.targets_at, unused=unused, ignored=ignored, created=created,
        )  # fmt: skip
        self.check_sizes(spec, nodes)
        return spec

    def unused(self, node: Node, batch: Any) -> tuple[Step, ...]:
        """What state_dict holds and no operator reads: parameters, and operators that have some."""
        if not node.is_list or not node.value:
            self.fault(node, f"unused: {node.describe()}; expected a list such as [{{parameter: {{name: bias, shape: [64, 1, 1]}}}}]")
            return ()
        steps = [self.dead(item, batch) for item in node.value]
        return tuple(step for step in steps if step)

    def dead(self, item: Node, batch: Any) -> Step | None:
        takes = None
        if item.is_mapping and len(item.value) == 1:
            ((_, arguments),) = item.value.values()
            if arguments.is_mapping and "takes" in arguments.value:
                takes = self.sizes(arguments.value["takes"][1], "takes")
                rest = {key: value for key, value in arguments.value.items() if key != "takes"}
                item = replace(item, value={key: (where, replace(arguments, value=rest)) for key, (where, _) in item.value.items()})
        self.used_args |= words_within(item)
        parsed = self.operator(item, HOLDERS)
        if parsed is None or takes is INVALID or batch is INVALID:
            return None
        operator, name, values, sources, place = parsed
        if values is None:
            return None
        if operator.kind is Kind.PRODUCER:
            shape = (batch, values[operator.takes], *(values["kernel_size"] if operator.rank else ()))
        elif takes is None and operator.name != "parameter":
            self.fault(place, f"{operator.name}: its parameters follow from what it would take; give that of a sample, as in takes: [64, 32, 32]")
            return None
        else:
            shape = (batch, *(takes or ()))
        try:
            return Step(operator, name, values, shape, operator.shape(values, shape), sources)
        except ShapeError as error:
            self.fault(place, str(error))
            return None

    def items(self, node: Node, what: str) -> list[Node]:
        """The items of a list, or the one that stands for itself. A list of none is a fault: as a choice it would be another than no list at all."""
        if node.is_list and not node.value:
            self.fault(node, f"{what}: an empty list; list at least one, or leave {what} out")
        return node.value if node.is_list else [node]

    def names(self, node: Node, what: str, known: Iterable[str]) -> tuple[str, ...]:
        """A list of names out of `known`, each once."""
        items = self.items(node, what)
        found = [self.word(item, what, known) for item in items]
        for item, name in zip(items, found, strict=True):
            if name is not INVALID and found.count(name) > 1:
                self.fault(item, f"{what}: {name} is listed twice")
        return () if INVALID in found else tuple(found)

    def order(self, chain: tuple[Step, ...], unused: tuple[Step, ...], node: Node) -> tuple[str, ...]:
        """The order of creation, which names every holder of parameters or state."""
        holders = [step.name for step in (*chain, *unused) if step.parameters or step.buffers or step.module]
        given = self.names(node, "created", holders)
        missing = [name for name in holders if name not in given]
        if given and missing:
            self.fault(node, f"created: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in it, and it gives the whole order")
        return given

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
            reason = "an operator joins samples, moves them from the first axis or takes a parameter or input along it"
            self.fault(nodes["pad_batch"], f"pad_batch: {reason}: more rows would change the others or not fit")
        if self.problems:
            raise SpecError(self.shown, self.problems)

    def inputs(self, nodes: dict[str, Node], batch: Any) -> Inputs:
        """The inputs from `input:` (of the one that the chain starts with) or `inputs:` (several, by name)."""
        if "input" in nodes and "inputs" in nodes:
            self.fault(nodes["inputs"], "inputs: give either input, of one, or inputs, of several by name")
        if "inputs" in nodes:
            return self.several(nodes["inputs"], batch)
        node = nodes.get("input")
        if node is None:
            return Inputs()
        shape, spatial, sound = self.input(node, "x", batch, SPATIAL)
        return Inputs("x", {} if shape is None else {"x": shape}, spatial, node, not sound)

    def several(self, node: Node, batch: Any) -> Inputs:
        if not node.is_mapping or not node.value:
            self.fault(node, f"inputs: {node.describe()}; expected a mapping such as {{x: {{shape: [320, 64, 64]}}, residual: {{shape: [320, 64, 64]}}}}")
            return Inputs(node=node, unsound=True)
        shapes, spatial, sound = {}, {}, True
        for number, (name, (name_node, value)) in enumerate(node.value.items()):
            sound &= self.input_name(name_node, "inputs") is not INVALID
            self.input_nodes[name] = name_node
            shape, sizes, fine = self.input(value, name, batch, () if number else SPATIAL)
            sound &= fine
            if shape is not None:
                shapes[name] = shape
            elif number and fine:
                sound = False
                self.fault(value, f"{name}: needs its shape, that of a sample: {name}: {{shape: [320, 64, 64]}}")
            spatial |= sizes
        return Inputs(next(iter(node.value)), shapes, spatial, node, not sound)

    def input(self, node: Node, name: str, batch: Any, axes: tuple[str, ...]) -> tuple[Any, dict[str, int], bool]:
        """(shape with the batch or None, spatial sizes, soundness) of one input's mapping, in which `axes` may stand."""
        if not node.is_mapping:
            self.fault(node, f"input: {node.describe()}; expected a mapping such as {{height: 128, width: 128, values: rand}}")
            return None, {}, False
        spatial: dict[str, Any] = {}
        shape, batched, before = None, True, len(self.problems)
        for key, (key_node, value) in node.value.items():
            if key == "values":
                self.filled[name] = self.word(value, "input values", _INPUT_VALUES)
            elif key == "shape":
                shape, shape_node = self.sizes(value, "shape"), value
            elif key == "batched":
                batched = self.flag(value, "batched")
                if batched is False:
                    self.unbatched[name] = value
            elif key in axes:
                spatial[key] = self.size(value, key)
            else:
                self.fault(key_node, f"{key}: unknown key of input{nearest(key, (*axes, 'shape', 'values', 'batched'))}")
        if shape is not None and spatial:
            self.fault(node, f"input: shape gives {' and '.join(spatial)} already")
        if isinstance(shape, tuple) and len(shape) + bool(batched) > MAX_RANK:
            self.fault(shape_node, f"shape: {len(shape) + bool(batched)} axes{' with that of the samples' if batched else ''}; a value has at most {MAX_RANK}")
        if len(self.problems) > before or batch is INVALID:
            return None, {}, False
        return shape if shape is None or not batched else (batch, *shape), spatial, True

    def check_inputs(self, chain: tuple[Step, ...], given: Inputs) -> None:
        """Refuse inputs that nothing reads."""
        read = {step.reads for step in chain} | {given.first}
        for name, node in self.input_nodes.items():
            if name not in read:
                self.fault(node, f"{name}: no operator reads this input; name it in a `from:`")

    def listed(self, given: Inputs, chain: tuple[Step, ...]) -> tuple[Input, ...]:
        shapes = {given.first: chain[0].input_shape} | given.shapes if chain else given.shapes
        return tuple(Input(name, shape, self.filled.get(name, "rand"), name not in self.unbatched) for name, shape in shapes.items())

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
                self.args[key] = self.integers(value, key, -MAX_ELEMENTS, MAX_ELEMENTS)
            elif isinstance(value.value, bool):
                self.args[key] = value.value
            elif isinstance(value.value, int) and abs(value.value) <= MAX_ELEMENTS:
                self.args[key] = value.value
            else:
                self.args[key] = self.number(value, key)

    def targets(self, node: Node) -> Any:
        items = self.items(node, "targets")
        chosen = [self.word(item, "targets", TARGETS) for item in items]
        if INVALID in chosen or not chosen:
            return None
        places = {name: (item.line, item.column) for name, item in reversed(list(zip(chosen, items, strict=True)))}
        unique = tuple(dict.fromkeys(chosen))
        self.targets_at = tuple(places[name] for name in unique)
        return unique
