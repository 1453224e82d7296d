"""A package under test: the generated model, PyTorch's at the same precision, and the exact one in float64."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

from bench.machine import environment, precision_flags
from bench.packages import generate, load_package
from codegen.emit import make_package, write_if_different
from codegen.plan import PlanError
from codegen.render import render
from codegen.spec import Spec, load_spec
from runtime.launch import ALLOCATION

SEED = 42
CONV_CHUNK = 16  # samples whose float64 intermediates are held at once


@dataclass(frozen=True)
class Emitted:
    """A generated package on disk with the spec it came from; `sizes` are those of a range of batches, each with its own spec, inputs and manifest.

    `of_range` says that this is one of them.
    """

    spec: Spec
    folder: Path
    module: ModuleType | SimpleNamespace
    of_range: bool = False

    @property
    def sizes(self) -> tuple[Emitted, ...]:
        """Every batch of a range; this package alone where there is one batch."""
        return tuple(self.at(size.batch) for size in self.spec.sizes) if self.spec.batches else (self,)

    def at(self, batch: int) -> Emitted:
        """The package for one batch of its range; itself where there is one batch."""
        if not self.spec.batches:
            return self
        own = {name: getattr(self.module, name) for name in ("Model", "ModelNew", "get_init_inputs")}
        module = SimpleNamespace(**own, get_inputs=lambda: self.module.get_inputs(batch))
        return replace(self, spec=self.spec.at(batch), module=module, of_range=True)

    @property
    def batch(self) -> int | None:
        """The batch where it is one of a range, for records and names."""
        return self.spec.batch if self.of_range else None

    @property
    def label(self) -> str:
        """The package's name for a reader."""
        return self.spec.package + (f", batch {self.spec.batch}" if self.of_range else "")

    @property
    def manifest(self) -> dict:
        data = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        if "sizes" not in data:
            return data
        return data | next(size for size in data["sizes"] if size["batch"] == self.spec.batch)

    def key(self, target: str) -> str:
        """source_key of one target: what a measurement is evidence for."""
        return self.manifest["targets"][target]["source_key"]

    def prepares(self, target: str) -> bool:
        """Does this target multiply with prepared weights?"""
        return "prepare" in self.manifest["targets"][target]

    def floor(self, target: str) -> dict:
        """The plan's FLOP and bytes."""
        return self.manifest["plan"][target]["floor"]


def emit(spec_path: str, precision: str | None = None, target: str | None = None, out: Path = Path("generated"), prepack: bool = False) -> Emitted:
    """Generate a package and import it. With a `target` only that is emitted, into build/, and `out` stays as it is. `prepack` asks for
    prepared weights whatever the spec says.

    Raises SpecError or PlanError.
    """
    spec = load_spec(spec_path, precision, prepack)
    if target is None:
        folder = generate(spec_path, precision, out=out, prepack=prepack)
    else:
        folder = Path("build/bench").absolute() / target / spec.package
        write_if_different(folder, render(make_package(spec, (target,))))
    return Emitted(spec, folder, load_package(folder))


def target_to_emit(spec_path: str, device: torch.device, asked: str | None) -> str | None:
    """The one target to emit for a measurement: what was `asked` for, on a CPU its own; None for all that the spec serves.

    Raises SpecError, and PlanError where nobody asked for the CPU's and the spec excludes it.
    """
    if asked or device.type != "cpu":
        return asked
    spec = load_spec(spec_path)
    if spec.targets and "cpu" not in spec.targets:
        raise PlanError(f"{spec.path} is for {', '.join(spec.targets)} alone and this runs on the CPU; it needs a GPU, or TARGETS=cpu to override the spec")
    return "cpu"


def emit_variant(spec: Spec, target: str, label: str, **changes) -> Emitted:
    """A package of `spec` with fields changed (`gemm="library"`), under build/bench/<label>/. Raises PlanError."""
    changed = replace(spec, **changes)
    folder = Path("build/bench").absolute() / label / target / f"{spec.package}_b{spec.batch}"
    write_if_different(folder, render(make_package(changed, (target,))))
    return Emitted(changed, folder, load_package(folder))


def construct(emitted: Emitted, device: torch.device, target: str | None = None) -> nn.Module:
    """ModelNew with its initial weights (seed 42) on `device`, built for `target` where one is named."""
    names = target or ("cpu" if device.type == "cpu" else None)
    torch.manual_seed(SEED)
    if names is None:
        return emitted.module.ModelNew(*emitted.module.get_init_inputs()).to(device)
    with environment(TARGETS=names):
        return emitted.module.ModelNew(*emitted.module.get_init_inputs()).to(device)


def built_target(model: nn.Module, batch: int) -> str:
    """The target that a constructed ModelNew runs for a batch."""
    return next((target for (of, _), target in model._loaded.targets.items() if of == batch), model._loaded.built[0])


class Subject:
    """`ours` beside eager PyTorch and the float64 reference, all with the same parameters at any time.

    `ours` may be any module with the reference's state_dict. `eager` is the package's `Model`.
    """

    def __init__(self, emitted: Emitted, ours: nn.Module, device: torch.device):
        self.emitted, self.spec, self.device, self.ours = emitted, emitted.spec, device, ours
        torch.manual_seed(SEED)
        self.eager = emitted.module.Model(*emitted.module.get_init_inputs()).to(device)
        self.initial = {key: value.clone() for key, value in self.eager.state_dict().items()}
        self._exact = copy.deepcopy(self.eager).double()
        step = self.spec.producer
        self._weight = step.key(step.parameters[0])

    def load(self, parameters: dict[str, torch.Tensor]) -> None:
        """Give all models these parameters; an empty dict means the initial ones."""
        state = parameters or self.initial
        for model in (self.ours, self.eager, self._exact):
            model.load_state_dict(state)

    def run_ours(self, x: torch.Tensor) -> torch.Tensor:
        """The generated model's result for the whole batch; memory it may be handed is filled with garbage first."""
        poison_allocator(self.emitted, built_target(self.ours, self.spec.batch) if hasattr(self.ours, "_loaded") else None, self.device)
        with torch.no_grad():
            return self.ours(x)

    def run_eager(self, x: torch.Tensor, precision: str | None = None) -> torch.Tensor:
        """PyTorch's result at the spec's precision (or with TF32 as `precision` has it), for any number of rows."""
        with torch.no_grad(), precision_flags(precision or self.spec.precision.name):
            return self.eager(x)

    def run_eager_beside_exact_norm(self, x: torch.Tensor, precision: str | None = None) -> torch.Tensor:
        """PyTorch's result as `run_eager` gives it, but for the norm, which is float64's, rounded once: that of an eager whose squares cannot exceed their range."""
        exact = self._exact.get_submodule(self.spec.norm.name)
        norm = self.eager.get_submodule(self.spec.norm.name)
        handle = norm.register_forward_hook(lambda module, inputs, result: in_chunks(exact, inputs[0].double(), CONV_CHUNK).to(result.dtype))
        try:
            return self.run_eager(x, precision)
        finally:
            handle.remove()

    def run_exact(self, x: torch.Tensor) -> torch.Tensor:
        """The float64 result for any number of rows."""
        return self._chunked(x.double())

    def run_tf32_model(self, x: torch.Tensor) -> torch.Tensor:
        """What TF32 means: the producer's operands rounded to nearest at 10 mantissa bits, everything else in float64."""
        weight = self._exact.get_parameter(self._weight)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(round_tf32(self.eager.get_parameter(self._weight)))
            y = self._chunked(round_tf32(x).double())
            weight.copy_(kept)
        return y

    def _chunked(self, x: torch.Tensor) -> torch.Tensor:
        batch_first = self.spec.output_shape[0] == self.spec.batch
        with torch.no_grad():
            return in_chunks(self._exact, x, CONV_CHUNK if batch_first else x.shape[0])


def in_chunks(module: nn.Module, x: torch.Tensor, size: int) -> torch.Tensor:
    """The results of a module for `size` samples at a time where they are images, for all at once where they are rows."""
    return torch.cat([module(part) for part in x.split(size if x.dim() > 2 else x.shape[0])])


def round_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 values rounded to the nearest with 10 mantissa bits (ties to even); NaN and infinities stay."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def poison_allocator(emitted: Emitted, target: str | None, device: torch.device) -> None:
    """Fill memory of the sizes that a call will ask for with NaNs and give it back, so that reading before writing shows."""
    spec = emitted.spec
    sizes = [torch.Size(spec.output_shape).numel() * spec.precision.itemsize]
    if target is not None:
        temporaries = [buffer.get("bytes") or torch.Size(buffer["shape"]).numel() * 4 for buffer in emitted.manifest["targets"][target]["buffers"].values()]
        sizes += [*temporaries, sum(-(-size // ALLOCATION) * ALLOCATION for size in temporaries)]  # each alone, or all in one piece
    held = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes if size]
    del held
