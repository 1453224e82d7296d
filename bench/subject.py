"""A package under test: the generated model, PyTorch's at the same precision, and the exact one in float64."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bench.machine import environment, precision_flags
from bench.packages import generate, load_package
from codegen.folder import write_if_different
from codegen.ir.fused_form import FusedSpec
from codegen.package import make_package
from codegen.plan import Refusal
from codegen.render import render
from codegen.spec import Spec, load_spec
from runtime import Package, RuntimeFailure, products
from runtime.launch import ALLOCATION
from runtime.library import SINGLE_ON_CPU, in_single, lacks_16_bits
from runtime.load import best_target

SEED = 42
CONV_CHUNK = 16  # samples whose float64 gradients are computed at once
EXACT_VALUES = 1 << 27  # of the largest float64 intermediate that is held at once: 1 GiB

Inputs = tuple[torch.Tensor, ...]
_dropout = functional.dropout


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


def emit(spec_path: str, precision: str | None = None, target: str | None = None, out: Path = Path("generated"), prepack: bool = False, algebra: bool = True) -> Emitted:
    """Generate a package and import it. With a `target` only that is emitted, into build/, and `out` stays as it is. `prepack` asks for
    prepared weights whatever the spec says; without `algebra` no chain is rewritten.

    Raises SpecError or Refusal.
    """
    spec = load_spec(spec_path, precision, prepack, algebra)
    if target is None:
        folder = generate(spec_path, precision, out=out, prepack=prepack, algebra=algebra)
    else:
        folder = Path("build/bench").absolute() / target / spec.package
        write_if_different(folder, render(make_package(spec, (target,))))
    return Emitted(spec, folder, load_package(folder))


def target_to_emit(spec_path: str, device: torch.device, asked: str | None) -> str | None:
    """The one target to emit for a measurement: what was `asked` for, on a CPU its own; None for all that the spec serves.

    Raises SpecError, and Refusal where nobody asked for the CPU's and the spec excludes it.
    """
    if asked or device.type != "cpu":
        return asked
    spec = load_spec(spec_path)
    if spec.targets and "cpu" not in spec.targets:
        raise Refusal(f"{spec.path} is for {', '.join(spec.targets)} alone and this runs on the CPU; it needs a GPU, or TARGETS=cpu to override the spec")
    return "cpu"


def target_for(emitted: Emitted, capability: tuple[int, int] | None, target: str | None) -> str:
    """The target that the loader would choose on a card of that capability; without one, the CPU's. One that was asked for is that one.

    Raises RuntimeFailure where none runs there.
    """
    if target or capability is None:
        return target or "cpu"
    package = next(size for size in Package(emitted.folder).sizes if size.manifest.batch == emitted.spec.batch)
    best = best_target(package, capability)
    if best is None:
        raise RuntimeFailure(f"no target of {emitted.label} runs on this card")
    return best.name


def emit_variant(spec: Spec, target: str, label: str, **changes) -> Emitted:
    """A package of `spec` with fields changed (`gemm="library"`), under build/bench/<label>/. Raises Refusal."""
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
    """`ours` beside eager PyTorch and the float64 reference, all with the same parameters, state and mode at any time.

    `ours` may be any module with the reference's state_dict. `eager` is the package's `Model`. Inputs are a tuple of tensors, x first.
    """

    def __init__(self, emitted: Emitted, ours: nn.Module, device: torch.device):
        self.emitted, self.spec, self.device, self.ours = emitted, emitted.spec, device, ours
        torch.manual_seed(SEED)
        self.eager = emitted.module.Model(*emitted.module.get_init_inputs()).to(device)
        self.initial = {key: value.clone() for key, value in self.eager.state_dict().items()}
        self._exact = copy.deepcopy(self.eager).double()
        self._loaded = self.initial
        self._masks = Masks(device)
        self._single = SingleOnCpu()

    def load(self, parameters: dict[str, torch.Tensor], training: bool = True) -> None:
        """Give all models these parameters and running statistics, the initial ones where there are none, and a mode."""
        self._loaded = self.initial | parameters
        for model in (self.ours, self.eager, self._exact):
            model.load_state_dict(self._loaded)
            model.train(training)

    def _begin(self, model: nn.Module) -> None:
        """Every run starts from the running statistics that were loaded, and draws the same masks."""
        for key, _, _ in self.spec.buffers:
            model.get_buffer(key).copy_(self._loaded[key])
        torch.manual_seed(SEED)

    def state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The running statistics of a model after its latest run."""
        return {key: model.get_buffer(key).clone() for key, _, _ in self.spec.buffers}

    def run_ours(self, inputs: Inputs) -> torch.Tensor:
        """The generated model's result for the whole batch; memory it may be handed is filled with garbage first."""
        poison_allocator(self.emitted, built_target(self.ours, self.spec.batch) if hasattr(self.ours, "_loaded") else None, self.device)
        with torch.no_grad():
            self._begin(self.ours)
            return self.ours(*inputs)

    def run_eager(self, inputs: Inputs, precision: str | None = None) -> torch.Tensor:
        """PyTorch's result at the spec's precision (or with TF32 as `precision` has it), for any number of rows. What it lacks in 16 bits on a CPU it
        computes in float32 (`eager_in_single`)."""
        with torch.no_grad(), precision_flags(precision or self.spec.precision.name), self._masks.drawn(), self._single, WithinStride():
            self._begin(self.eager)
            return self.eager(*inputs)

    @property
    def eager_in_single(self) -> tuple[str, ...]:
        """The operators that eager has computed in float32 so far, as PyTorch lacks them in the spec's 16 bits on a CPU."""
        return tuple(sorted(self._single.met))

    def run_eager_beside_exact_norm(self, inputs: Inputs, precision: str | None = None) -> torch.Tensor:
        """PyTorch's result as `run_eager` gives it, but for the norm, which is float64's, rounded once: that of an eager whose squares cannot exceed their range."""
        name = FusedSpec.of(self.spec).norm.name
        exact, norm = self._exact.get_submodule(name), self.eager.get_submodule(name)
        handle = norm.register_forward_hook(lambda module, given, result: exact(given[0].double()).to(result.dtype))
        try:
            return self.run_eager(inputs, precision)
        finally:
            handle.remove()

    def run_exact(self, inputs: Inputs) -> torch.Tensor:
        """The float64 result for any number of rows, with the masks of the latest eager run."""
        with torch.no_grad():
            self._begin(self._exact)
            with self._masks.again(), WithinStride(), WholeTails():
                return torch.cat([self._exact(*(given.double() for given in part)) for part in self._parts(inputs)])

    def run_tf32_model(self, inputs: Inputs) -> torch.Tensor:
        """What TF32 means: the producers' operands rounded to nearest at 10 mantissa bits, everything else in float64."""
        with RoundedProducts():
            return self.run_exact(inputs)

    def _parts(self, inputs: Inputs) -> Iterator[Inputs]:
        """The inputs a few samples at a time, as far as samples are independent, so that no float64 intermediate exceeds EXACT_VALUES."""
        apart = self.spec.rows_are_samples and not (self.spec.has_modes and self._exact.training)
        rows, largest = inputs[0].shape[0], max(math.prod(step.output_shape) for step in self.spec.chain)
        size = max(1, EXACT_VALUES * self.spec.batch // largest) if apart else rows
        for first in range(0, rows, size):
            yield tuple(given[first : first + size] if of.batched else given for given, of in zip(inputs, self.spec.inputs, strict=True))


class RoundedProducts(TorchFunctionMode):
    """Inside, every product of PyTorch's takes its operands rounded to TF32, whatever module or function calls it."""

    PRODUCTS = frozenset(
        (functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, *(getattr(functional, f"conv{kind}{rank}d") for kind in ("", "_transpose") for rank in (1, 2, 3)))
    )  # fmt: skip

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.PRODUCTS:
            args = (*(round_tf32(operand.float()).double() for operand in args[:2]), *args[2:])
        return func(*args, **(kwargs or {}))


def exact_gelu(v: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu with its small values. PyTorch adds 1 to an erf or a tanh that is -1 but for roundings, so that float64's own gelu is 0 below -8.3, and 0 / 0 no number."""
    if approximate == "tanh":
        return v * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))
    return v * 0.5 * torch.special.erfc(-v * math.sqrt(0.5))


class WholeTails(TorchFunctionMode):
    """Inside, gelu is exact_gelu."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not functional.gelu:
            return func(*args, **(kwargs or {}))
        return exact_gelu(*args, **(kwargs or {}))


class SingleOnCpu(TorchFunctionMode):
    """Inside, PyTorch computes in float32, and rounds once, what it lacks in 16 bits on a CPU, as library steps do. `met`: the names of such calls."""

    LACKED = {getattr(functional, name): name for name in SINGLE_ON_CPU}

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self.LACKED or not lacks_16_bits(args[0]):
            return func(*args, **kwargs)
        self.met.add(self.LACKED[func])
        return in_single(func, *args, **kwargs)


class WithinStride(TorchFunctionMode):
    """Inside, a transposed convolution whose output_padding cuDNN refuses is one that it takes, of the same values. Such are float64's and eager's on a GPU."""

    TRANSPOSED = frozenset(getattr(functional, f"conv_transpose{rank}d") for rank in (1, 2, 3))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.TRANSPOSED and len(args) > 5 and products.on_cuda(args[0]):  # torch's modules name none: input, weight, bias, stride, padding, output_padding, groups, dilation
            x, extra = products.within_stride(args[0], args[3], args[5])
            args = (x, *args[1:5], extra, *args[6:])
        return func(*args, **(kwargs or {}))


class Masks:
    """Dropout's masks of a run in one type, for a run in another, whose own draw would differ."""

    def __init__(self, device: torch.device):
        self._devices, self._masks = [device] if device.type == "cuda" else [], []

    @contextmanager
    def drawn(self):
        """Keep the masks that the block draws."""
        self._masks = []
        within = False

        def dropout(v, p=0.5, training=True, inplace=False):
            nonlocal within
            if within:  # torch's own function calls itself by its name where a mode looks at what functions get
                return _dropout(v, p, training, inplace)
            within = True
            try:
                if training:
                    with torch.random.fork_rng(self._devices):
                        self._masks.append(_dropout(torch.ones_like(v), p, True) != 0)
                return _dropout(v, p, training, inplace)
            finally:
                within = False

        with mock.patch.object(functional, "dropout", dropout):
            yield

    @contextmanager
    def again(self):
        """Use the kept masks in their order; a block that is no training has none."""
        masks = iter(self._masks)

        def dropout(v, p=0.5, training=True, inplace=False):
            return v * next(masks) / (1.0 - p) if training and p < 1 else v * 0.0 if training else v

        with mock.patch.object(functional, "dropout", dropout):
            yield


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
