"""Is the layer that a spec describes the layer that the file defines?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from codegen.from_module.creation import SEED, construct
from codegen.from_module.faults import Fault, first_line, line_of
from codegen.from_module.text import Given
from codegen.spec import Spec
from codegen.torch_text import module_lines, reference_lines, value_variable

SAMPLES = 4
# Both sides compute in float64, so that x * sigmoid(x) and F.silu(x) agree to rounding, and a different operator does not.
TOLERANCE = 1e-9
SMALL = 2**20  # elements of a parameter whose gradient every family of data compares; of a larger one it follows from that of x and of the bias


def reference(spec: Spec) -> nn.Module:
    """The spec's Model, from the very lines that its package's model.py has, under SEED."""
    names_of = ", ".join(given.name for given in spec.inputs)
    lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in module_lines(spec))]
    lines += [f"    def forward(self, {names_of}):", *(f"        {line}" for line in reference_lines(spec)), f"        return {value_variable(spec)}"]
    names = {"torch": torch, "nn": nn, "F": F}
    exec(compile("\n".join(lines), "<the spec's Model>", "exec"), names)  # every name and number in these lines went through load_spec
    torch.manual_seed(SEED)
    return names["Model"]()


@dataclass(frozen=True)
class Print:
    """What tells a tensor of state from another."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: bytes


def prints(model: nn.Module) -> dict[str, Print]:
    """The state of a model, in its order, without its memory."""
    return {key: Print(value.dtype, tuple(value.shape), _digest(value)) for key, value in model.state_dict().items()}


def _digest(value: torch.Tensor) -> bytes:
    return hashlib.blake2b(value.detach().contiguous().flatten().view(torch.uint8).numpy().data).digest()


def weight_faults(theirs: dict[str, Print], mine: dict[str, Print], lines: dict[str, int]) -> list[Fault]:
    """Differences between the initial state of the file's Model and the spec's, both fresh under SEED; `lines` says where attributes are created."""
    if list(theirs) != list(mine):
        return [Fault(0, f"state_dict has the keys {', '.join(theirs)}; the spec's Model has {', '.join(mine)}")]
    faults = []
    for key, value in theirs.items():
        line = lines.get(key.split(".")[0], 0)
        if value.dtype not in (torch.float32, torch.int64) or value.dtype != mine[key].dtype:
            faults.append(Fault(line, f"{key} is {value.dtype}; write the file in float32 and choose the kernels' type with --precision"))
        elif value.shape != mine[key].shape:
            faults.append(Fault(line, f"{key} has the shape {value.shape}; the spec's Model has {mine[key].shape}"))
        elif value.digest != mine[key].digest:
            said = f"{key} starts with other values than PyTorch's own; the file fills it, or draws random numbers, in a way the grammar has no word for"
            faults.append(Fault(line, said))
    return faults


def draw(inputs: Iterable[Given], samples: int) -> list[torch.Tensor]:
    """Inputs filled as get_inputs does, of at most so many samples, in float64."""
    generator = torch.Generator().manual_seed(SEED)
    inputs = list(inputs)
    batch = inputs[0].shape[0]
    drawn = []
    for given in inputs:
        shape = (min(samples, batch), *given.shape[1:]) if given.shape[:1] == (batch,) else given.shape
        drawn.append((torch.rand if given.values == "rand" else torch.randn)(shape, generator=generator, dtype=torch.float64))
    return drawn


def result_faults(model: type, init: list, path: str, ours: nn.Module, xs: list[torch.Tensor], spec: Spec) -> tuple[list[Fault], bool]:
    """(differences, whether gradients were compared): the two layers' results, between the gradients of the inputs and of every parameter, and between the running statistics after
    each step of training, in float64.

    A Model whose forward overwrites what its own backward needs has no gradients to compare. All parameters are moved off their initial values by the same amounts; then data of which a layer makes ties and values on its bounds.
    """
    original, _ = construct(model, init, path)
    original, ours = original.double(), ours.double()
    ours.load_state_dict(original.state_dict(), assign=True)  # one memory for the parameters: what is changed in one is changed in the other
    for module in ours.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.clone()
    names, gradients = [given.name for given in spec.inputs], True
    for family, (name, given) in enumerate(_data(original, xs, spec)):
        for training in (True, True, False) if family == 0 else (True,):
            largest = None if family == 0 else SMALL
            try:
                expected = _results(original.train(training), given, names, largest)
            except Exception as error:  # whatever the file's forward raises is a fault of the file
                return [Fault(line_of(error, path), f"Model's forward or backward failed on {[tuple(x.shape) for x in given]}: {first_line(error)}")], gradients
            gradients = gradients and f"the gradient of {names[0]}" in expected
            said = _difference(expected, _results(ours.train(training), given, names, largest))
            if said:
                return [Fault(0, f"{said}, {name}{'' if training else ', in eval mode'}; the chain does not hold all that forward does")], gradients
    return [], gradients


@torch.no_grad()
def _set(model: nn.Module, scale: float | None, shift: float | None, own: float | None) -> None:
    """Fill the scales and shifts of norms and the producer's bias, and Model's own parameters; what is None stays."""
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1 or "." not in key:
            value = own if "." not in key else shift if key.endswith(".bias") else scale
            if value is not None:
                parameter.fill_(value)


def _data(original: nn.Module, xs: list[torch.Tensor], spec: Spec) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(what it is, the inputs) of each family of data, with the parameters of `original` set for it when it is taken."""
    generator = torch.Generator().manual_seed(SEED)
    parameters = list(original.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.rand(parameter.shape, generator=generator), alpha=0.5)
    yield "on random data", xs
    # A norm whose scale is 0 gives its shift everywhere: ties in every reduction and window, and values on the bounds of what follows.
    numbers = {float(v) for step in spec.chain for v in step.values.values() if isinstance(v, float)}
    for number in sorted({0.0, 1.0, 3.0, -3.0, 6.0} | numbers):
        _set(original, 0.0, number, 0.0)
        yield f"where the norm gives {number}", xs
        if any("." not in key for key, _ in original.named_parameters()):
            _set(original, None, None, 1.0)
            yield f"where the norm gives {number} and other parameters are 1", xs
    _set(original, 30.0, 1.0, 2.0)
    yield "on large values", [10 * x - 5 for x in xs]
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(parameter.mean()).sign_()
    yield "on small integers", [x.round() for x in xs]
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    yield "on zeros", [torch.zeros_like(x) for x in xs]


def _results(model: nn.Module, xs: list[torch.Tensor], names: list[str], largest: int | None) -> dict[str, torch.Tensor | None]:
    """The model's result, the gradients that it gives and its running statistics, by name; None where there is none. Of parameters of more than `largest`
    elements, none, nor of a Model that torch can't differentiate. Random numbers that a forward draws start at SEED."""
    given = [x.clone().requires_grad_() for x in xs]
    torch.manual_seed(SEED)
    with torch.enable_grad():
        y = model(*(x * 1 for x in given))  # values that a forward may overwrite
        found: dict[str, torch.Tensor | None] = {"the result": y.detach()}
        weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(SEED), dtype=y.dtype) + 0.5
        wanted = {f"the gradient of {name}": x for name, x in zip(names, given, strict=True)}
        wanted |= {f"the gradient of {key}": p for key, p in model.named_parameters() if largest is None or p.numel() <= largest}
        try:
            gradients = torch.autograd.grad(y, list(wanted.values()), weights, allow_unused=True) if y.requires_grad else [None] * len(wanted)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            wanted, gradients = {}, []  # forward overwrites what its own backward needs: Model has no gradients, only results
    state = {key: buffer.double().clone() for key, buffer in model.named_buffers()}
    return found | dict(zip(wanted, gradients, strict=True)) | state


def _difference(expected: dict[str, torch.Tensor | None], found: dict[str, torch.Tensor | None]) -> str | None:
    """The first difference of two layers' results in words."""
    for name, theirs in expected.items():
        mine = found[name]
        if theirs is None or mine is None:
            if (theirs is None) != (mine is None):
                return f"{name}: the file's Model gives {'none' if theirs is None else 'one'}, the spec's Model gives {'none' if mine is None else 'one'}"
            continue
        if theirs.shape != mine.shape:
            return f"Model gives {tuple(theirs.shape)}; the spec's Model gives {tuple(mine.shape)}"
        scale = max(1.0, float(theirs[theirs.isfinite()].abs().max()) if bool(theirs.isfinite().any()) else 1.0)
        if not torch.allclose(theirs / scale, mine / scale, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            error = float((theirs - mine).abs().nan_to_num(float("inf")).max())
            return f"{name} of the spec's Model differs from the file's by {error:.3g} (largest value {scale:.3g})"
    return None
