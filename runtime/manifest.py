"""``manifest.json`` as typed values, read and validated."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .library import NAMES

MANIFEST_FORMAT = 1
RANGE_FORMAT = 2  # of a package for several batches, which holds for each what a package for one does
# The targets that the generator can emit for, as far as a machine is concerned: the arch and the least compute capability, None for the host's own.
TARGETS: dict[str, tuple[str | None, tuple[int, int] | None]] = {"cpu": (None, None), "sm_80": ("native", (8, 0)), "sm_90a": ("sm_90a", (9, 0))}

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(cu|cpp)")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARCH = re.compile(r"native|sm_[0-9]+[a-z]?")


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (elements) and dtype (torch's name without ``torch.``) of one tensor; ``batched``: an input that has a row a sample."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    batched: bool = True


@dataclass(frozen=True)
class Buffer:
    """A temporary of one call: ``nbytes`` of raw memory, or a tensor of ``shape`` and ``dtype``."""

    name: str
    nbytes: int | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class LaunchStep:
    """Call the emitted ``function`` with the pointers of ``args`` (None is a null pointer)."""

    function: str
    args: tuple[str | None, ...]


@dataclass(frozen=True)
class LibraryStep:
    """Call torch's own ``call`` (a row of ``library``) on ``args`` and keep the result as ``out``, further results as ``also``."""

    call: str
    args: tuple[str | None, ...]
    out: str
    options: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


Step = LaunchStep | LibraryStep


@dataclass(frozen=True)
class TargetManifest:
    """One target of a package: what to compile, how, for which devices, and the steps of one forward call.

    ``arch`` is None for ``cpu``, ``native`` for "compile for the device's own architecture", else a fixed one.
    ``min_capability`` is the least compute capability for ``native``; a fixed architecture with a letter (``sm_90a``)
    runs on exactly that capability. ``prepare`` are steps that read parameters alone and fill the buffers ``prepared``:
    done once for given parameters where those are kept, else at the beginning of a call. Sizes of a package with the same
    ``layout`` prepare the same. ``training`` are the steps of training where they differ from ``steps``.
    """

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...]
    source_key: str
    arch: str | None
    min_capability: tuple[int, int] | None
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    prepare: tuple[LaunchStep, ...] = ()
    prepared: tuple[str, ...] = ()
    layout: str = ""
    training: tuple[Step, ...] = ()

    @property
    def functions(self) -> dict[str, int]:
        """The launchers by name, each with the number of pointers it takes."""
        return {step.function: len(step.args) for step in (*self.prepare, *self.steps, *self.training) if isinstance(step, LaunchStep)}

    def runs_on(self, capability: tuple[int, int] | None) -> bool:
        """Whether a device of this compute capability (None: the CPU) can run the target."""
        if capability is None or self.arch is None:
            return capability is None and self.arch is None
        if self.is_for_one_capability:
            return capability == _capability_of(self.arch)
        return capability >= self.least_capability

    @property
    def is_for_one_capability(self) -> bool:
        """Whether its code runs on devices of exactly one compute capability."""
        return self.arch is not None and self.arch != "native" and self.arch[-1].isalpha()

    @property
    def least_capability(self) -> tuple[int, int]:
        """The lowest compute capability that runs this CUDA target."""
        return self.min_capability or _capability_of(self.name)


@dataclass(frozen=True)
class Backward:
    """The generated part of a target's backward: from the gradient of y to those of ``gradients``.

    ``target`` says what to compile and launch, apart from the forward's sources. ``saved`` are the tensors that it needs of a
    forward, the first of them the result of the library step ``producer``: the forward's, which keeps it, or where ``recomputes`` is set one of the
    backward's own. ``gradients`` starts with that tensor and goes on with the parameters behind it. In the steps a gradient
    bears the name that ``gradient_of`` gives.
    """

    target: TargetManifest
    saved: tuple[TensorSpec, ...]
    gradients: tuple[TensorSpec, ...]
    producer: LibraryStep
    recomputes: bool


@dataclass(frozen=True)
class Reference:
    """The whole chain by torch's operators, in evaluation and in training: what gradients are taken of where none are generated.

    ``results`` are the further results of training's forward: running statistics under the name ``state:<key>``, dropout's masks.
    """

    steps: tuple[LibraryStep, ...]
    training: tuple[LibraryStep, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(name for step in self.training for name in step.also)


def gradient_of(name: str) -> str:
    """The name of a tensor's gradient in the steps of a backward."""
    return f"grad:{name}"


@dataclass(frozen=True)
class Manifest:
    """All of ``manifest.json`` but the plan, which is explanation and stays a plain dictionary.

    Of a package for several batches ``sizes`` are the manifests of the single ones, in ascending order, and this one is the
    largest's, with targets that hold the sources and launchers of all sizes. Of a package for one batch it is the only one.
    ``skipped`` gives the reason of each target that was left out as it cannot serve the layer, in a range any of its batches.
    ``batches`` are all that the package was made for; ``pad_batch``: another one runs the next larger of them. ``others`` are the
    inputs behind the first, ``arguments`` the names of all in ``forward``; ``state`` are buffers that steps read; ``reference``
    stands where no backward is generated.
    """

    name: str
    spec: str
    regenerate: str
    batch: int
    precision: str
    init_args: tuple[tuple[str, Any], ...]
    input: TensorSpec
    output: TensorSpec
    parameters: tuple[TensorSpec, ...]
    targets: Mapping[str, TargetManifest]
    plan: Mapping[str, Any]
    backward: Mapping[str, Backward] = field(default_factory=dict)
    prepack: bool = False
    sizes: tuple["Manifest", ...] = ()
    batches: tuple[int, ...] = ()
    pad_batch: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict)
    others: tuple[TensorSpec, ...] = ()
    arguments: tuple[str, ...] = ("x",)
    state: tuple[TensorSpec, ...] = ()
    reference: Reference | None = None

    @property
    def operands(self) -> tuple[TensorSpec, ...]:
        """What operators take behind the first input: other inputs, parameters, state."""
        return (*self.others, *self.parameters, *self.state)


def read_manifest(data: dict) -> Manifest:
    """The manifest of a package for one batch or for several. Raises KeyError, TypeError, ValueError or AttributeError where it is not valid."""
    return _manifest(data) if data["format"] == MANIFEST_FORMAT else _range(data)


def _capability_of(arch: str) -> tuple[int, int]:
    """The compute capability that an architecture's name stands for: ``sm_90a`` -> (9, 0)."""
    digits = re.fullmatch(r"sm_([0-9]+)([0-9])[a-z]?", arch)
    if digits is None:
        raise ValueError(f"{arch!r} is not the name of a CUDA architecture such as sm_80")
    return int(digits[1]), int(digits[2])


def _manifest(data: dict) -> Manifest:
    inputs = data.get("inputs") or [data["input"]]
    reference = data.get("reference")
    manifest = Manifest(
        name=_match(_IDENTIFIER, data["name"], "name"),
        spec=str(data["spec"]),
        regenerate=str(data["regenerate"]),
        batch=int(data["batch"]),
        precision=str(data["precision"]),
        init_args=tuple((str(key), _as_tuples(value)) for key, value in data["init_args"]),
        input=_tensor(inputs[0].get("name", "x"), inputs[0]),
        output=_tensor("y", data["output"]),
        parameters=tuple(_tensor(entry["key"], entry) for entry in data["parameters"]),
        targets={name: _target(name, entry) for name, entry in data["targets"].items()},
        plan=data.get("plan", {}),
        prepack=bool(data.get("prepack", False)),
        skipped={str(name): str(reason) for name, reason in data.get("skipped", {}).items()},
        others=tuple(_tensor(entry["name"], entry) for entry in inputs[1:]),
        arguments=tuple(_match(_IDENTIFIER, entry.get("argument", "x"), "argument") for entry in inputs),
        state=tuple(_tensor(entry["key"], entry) for entry in data.get("state", ())),
        reference=None if reference is None else Reference(_library_steps(reference["steps"]), _library_steps(reference.get("training", ()))),
    )
    for target in manifest.targets.values():
        _check_names(manifest, target)
    backward = {name: _backward(manifest, name, entry) for name, entry in data.get("backward", {}).items()}
    return replace(manifest, backward=backward, batches=(manifest.batch,))


def _range(data: dict) -> Manifest:
    """The manifest of a package for several batches."""
    pads = bool(data["pad_batch"])
    sizes = sorted((_manifest({**data, **entry}) for entry in data["sizes"]), key=lambda size: size.batch)
    batches = tuple(size.batch for size in sizes)
    if not batches or len(set(batches)) < len(batches):
        raise ValueError(f"its sizes are for the batches {batches}, and each has to be there once")
    for size in sizes:
        if size.input.shape[:1] != (size.batch,) or size.input.shape[1:] != sizes[-1].input.shape[1:]:
            raise ValueError(f"the size for batch {size.batch} takes an input of {size.input.shape}")
        if pads and (size.output.shape[:1] != (size.batch,) or size.output.shape[1:] != sizes[-1].output.shape[1:]):
            raise ValueError(f"it pads batches, and the rows of its result {size.output.shape} are not samples")
    sizes = [replace(size, batches=batches, pad_batch=pads) for size in sizes]
    backward: dict[str, list[Backward]] = {}
    for size in sizes:
        for name, entry in size.backward.items():
            backward.setdefault(name, []).append(entry)
    targets = _together([target for size in sizes for target in size.targets.values()])
    return replace(
        sizes[-1],
        sizes=tuple(sizes),
        targets=targets,
        skipped={name: reason for size in sizes for name, reason in size.skipped.items() if name not in targets},
        plan={},
        backward={
            name: replace(entries[-1], target=next(iter(_together([entry.target for entry in entries]).values())))
            for name, entries in backward.items()
        },
    )


def _together(targets: list[TargetManifest]) -> dict[str, TargetManifest]:
    """By name, what several sizes have of a target as one: the sources and the launchers of all."""
    found: dict[str, TargetManifest] = {}
    for target in targets:
        other = found.setdefault(target.name, target)
        if other is target:
            continue
        if (other.flags, other.arch, other.min_capability) != (target.flags, target.arch, target.min_capability):
            raise ValueError(f"its sizes compile {target.name} in different ways")
        if set(other.functions) & set(target.functions):
            raise ValueError(f"two of its sizes have a launcher of one name for {target.name}")
        found[target.name] = replace(
            other, sources=tuple(dict.fromkeys((*other.sources, *target.sources))), source_key="", buffers=(), steps=(*other.steps, *target.steps),
            prepare=(*other.prepare, *target.prepare), prepared=(),
        )  # fmt: skip
    return found


def _backward(manifest: Manifest, name: str, data: dict) -> Backward:
    """The backward entry of target ``name``."""
    forward = manifest.targets[name]
    target = _target(name, {**data, "arch": forward.arch, "min_capability": forward.min_capability})
    if not isinstance(data["saved"], list) or not data["saved"]:
        raise ValueError(f"the backward of {name} has no list of what it saves: the package was made by another version, and has to be made again")
    saved = tuple(_tensor(entry["name"], entry) for entry in data["saved"])
    product = saved[0]
    recompute = data.get("recompute")
    producer = (
        next((step for step in forward.steps if isinstance(step, LibraryStep) and step.out == product.name), None)
        if recompute is None
        else _step(recompute)
    )
    if producer is None:
        raise ValueError(f"the backward of {name} saves {product.name!r}, which no library step of the forward gives")
    if not isinstance(producer, LibraryStep) or producer.out != product.name:
        raise ValueError(f"the backward of {name} computes {product.name!r} again by a step that does not give it")
    written = {buffer.name for buffer in forward.buffers} | {step.out for step in forward.steps if isinstance(step, LibraryStep)}
    for entry in saved[1:]:
        if recompute is not None or entry.name not in written:
            raise ValueError(f"the backward of {name} saves {entry.name!r}, which the forward does not keep")
    parameters = {parameter.name: parameter for parameter in manifest.parameters}
    gradients = (product, *(parameters[key] for key in data["gradients"]))
    known = {*(entry.name for entry in saved), gradient_of("y"), *parameters, *(gradient_of(entry.name) for entry in gradients)}
    known |= {buffer.name for buffer in target.buffers}
    for step in target.steps:
        for argument in step.args:
            if argument is not None and argument not in known:
                raise ValueError(f"a step of the backward of {name} uses {argument!r}, which nothing defines")
    for argument in producer.args:
        if argument is not None and argument != manifest.input.name and argument not in parameters:
            raise ValueError(f"the backward of {name} computes {product.name!r} again from {argument!r}, which nothing defines")
    return Backward(replace(target, name=f"{name}-backward"), saved, gradients, producer, recompute is not None)


def _target(name: str, data: dict) -> TargetManifest:
    arch = data.get("arch")
    if arch is None and name != "cpu":
        raise ValueError(f"target {name} lacks arch")
    if arch is not None:
        _match(_ARCH, arch, f"arch of {name}")
    capability = data.get("min_capability")
    prepare = data.get("prepare", {"buffers": (), "steps": ()})
    return TargetManifest(
        name=name,
        sources=tuple(_match(_FILE_NAME, source, f"source of {name}") for source in data["sources"]),
        flags=tuple(str(flag) for flag in data["flags"]),
        source_key=str(data["source_key"]),
        arch=arch,
        min_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        buffers=tuple(_buffer(key, entry) for key, entry in data.get("buffers", {}).items()),
        steps=tuple(_step(entry) for entry in data["steps"]),
        training=tuple(_step(entry) for entry in data.get("training", ())),
        prepare=tuple(_step(entry) for entry in prepare["steps"]),
        prepared=tuple(prepare["buffers"]),
        layout=str(prepare.get("layout", "")),
    )


def _library_steps(entries) -> tuple[LibraryStep, ...]:
    steps = tuple(map(_step, entries))
    if not all(isinstance(step, LibraryStep) for step in steps):
        raise ValueError("a reference launches a kernel; it consists of library steps")
    return steps


def _step(data: dict) -> Step:
    args = tuple(data["args"])
    if "launch" in data:
        return LaunchStep(_match(_IDENTIFIER, data["launch"], "launch"), args)
    if data["library"] not in NAMES:
        raise ValueError(f"library step {data['library']!r} is none of {', '.join(sorted(NAMES))}")
    options = {key: _as_tuples(value) for key, value in data.items() if key not in ("library", "args", "out", "also")}
    return LibraryStep(data["library"], args, data["out"], options, tuple(data.get("also", ())))


def _buffer(name: str, data: dict) -> Buffer:
    if "bytes" in data:
        return Buffer(name, nbytes=int(data["bytes"]))
    return Buffer(name, shape=tuple(data["shape"]), dtype=data["dtype"])


def _tensor(name: str, data: dict) -> TensorSpec:
    return TensorSpec(name, tuple(int(size) for size in data["shape"]), str(data["dtype"]), bool(data.get("batched", True)))


def _check_names(manifest: Manifest, target: TargetManifest) -> None:
    """Every name a step uses must exist, and be written before it is read."""
    buffers = {buffer.name for buffer in target.buffers}
    for name in target.prepared:
        if name not in buffers:
            raise ValueError(f"target {target.name} prepares {name!r}, which is none of its buffers")
    for step in target.prepare:
        for name in step.args:
            if not isinstance(step, LaunchStep) or name not in (*target.prepared, *(entry.name for entry in manifest.parameters), None):
                raise ValueError(f"a preparing step of target {target.name} is no launch, or uses {name!r}, which is neither a parameter nor prepared")
    for steps in (target.steps, target.training):
        known = {manifest.input.name, "y", *(entry.name for entry in manifest.operands)}
        for step in steps:
            for name in step.args:
                if name is not None and name not in known and name not in buffers:
                    raise ValueError(f"a step of target {target.name} uses {name!r}, which nothing defines")
            if isinstance(step, LibraryStep):
                if step.out in target.prepared:
                    raise ValueError(f"a step of target {target.name} writes {step.out!r}, which is prepared")
                known |= {step.out, *step.also}


def _as_tuples(value):
    return tuple(_as_tuples(entry) for entry in value) if isinstance(value, list) else value


def _match(pattern: re.Pattern, text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"{what} is {text!r}, which is not allowed there")
    return text
