"""Is the layer that a spec describes the layer that the file defines?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from codegen.from_module.creation import SEED, construct
from codegen.from_module.faults import Fault, first_line, line_of
from codegen.spec import Spec
from codegen.torch_text import module_lines, reference_lines

SAMPLES = 4
# Both sides compute in float64, so that x * sigmoid(x) and F.silu(x) agree to rounding, and a different operator does not.
TOLERANCE = 1e-9
SMALL = 2**20  # elements of a parameter whose gradient every family of data compares; of a larger one it follows from that of x and of the bias


def reference(spec: Spec) -> nn.Module:
    """The spec's Model, from the very lines that its package's model.py has, under SEED."""
    lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in module_lines(spec))]
    lines += ["    def forward(self, x):", *(f"        {line}" for line in reference_lines(spec)), "        return v"]
    names = {"torch": torch, "nn": nn, "F": F}
    exec(compile("\n".join(lines), "<the spec's Model>", "exec"), names)  # every name and number in these lines went through load_spec
    torch.manual_seed(SEED)
    return names["Model"]()


def weight_faults(original: nn.Module, ours: nn.Module, lines: dict[str, int]) -> list[Fault]:
    """Differences between the initial weights of the file's Model and the spec's, both fresh under SEED; `lines` says where attributes are created."""
    theirs, mine = original.state_dict(), ours.state_dict()
    if list(theirs) != list(mine):
        return [Fault(0, f"state_dict has the keys {', '.join(theirs)}; the spec's Model has {', '.join(mine)}")]
    faults = []
    for key, value in theirs.items():
        line = lines.get(key.split(".")[0], 0)
        if value.dtype != torch.float32:
            faults.append(Fault(line, f"{key} is {value.dtype}; write the file in float32 and choose the kernels' type with --precision"))
        elif value.shape != mine[key].shape:
            faults.append(Fault(line, f"{key} has the shape {tuple(value.shape)}; the spec's Model has {tuple(mine[key].shape)}"))
        elif not torch.equal(value, mine[key]):
            said = f"{key} starts with other values than PyTorch's own; the file fills it, or draws random numbers, in a way the grammar has no word for"
            faults.append(Fault(line, said))
    return faults


def result_faults(model: type, init: list, path: str, ours: nn.Module, x: torch.Tensor, spec: Spec) -> list[Fault]:
    """Differences between the two layers' results, and between the gradients of x and of every parameter, in float64.

    All parameters are moved off their initial values by the same amounts; then data of which a layer makes ties and values on its bounds.
    """
    original, _ = construct(model, init, path)
    original, ours, x = original.double(), ours.double(), x[:SAMPLES].double()
    ours.load_state_dict(original.state_dict(), assign=True)  # one memory for both: what is changed in one is changed in the other
    for family, (name, given) in enumerate(_data(original, x, spec)):
        for training in (True, False) if family == 0 else (True,):
            largest = None if family == 0 else SMALL
            try:
                expected = _results(original.train(training), given, largest)
            except Exception as error:  # whatever the file's forward raises is a fault of the file
                return [Fault(line_of(error, path), f"Model's forward or backward failed on {tuple(x.shape)}: {first_line(error)}")]
            said = _difference(expected, _results(ours.train(training), given, largest))
            if said:
                return [Fault(0, f"{said}, {name}{'' if training else ', in eval mode'}; the chain does not hold all that forward does")]
    return []


@torch.no_grad()
def _set(model: nn.Module, scale: float | None, shift: float | None, own: float | None) -> None:
    """Fill the scales and shifts of norms and the producer's bias, and Model's own parameters; what is None stays."""
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1 or "." not in key:
            value = own if "." not in key else shift if key.endswith(".bias") else scale
            if value is not None:
                parameter.fill_(value)


def _data(original: nn.Module, x: torch.Tensor, spec: Spec) -> Iterator[tuple[str, torch.Tensor]]:
    """(what it is, x) of each family of data, with the parameters of `original` set for it when it is taken."""
    generator = torch.Generator().manual_seed(SEED)
    parameters = list(original.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.rand(parameter.shape, generator=generator), alpha=0.5)
    yield "on random data", x
    # A norm whose scale is 0 gives its shift everywhere: ties in every reduction and window, and values on the bounds of what follows.
    numbers = {float(v) for step in spec.chain for v in step.values.values() if isinstance(v, float)}
    for number in sorted({0.0, 1.0, 3.0, -3.0, 6.0} | numbers):
        _set(original, 0.0, number, 0.0)
        yield f"where the norm gives {number}", x
        if any("." not in key for key, _ in original.named_parameters()):
            _set(original, None, None, 1.0)
            yield f"where the norm gives {number} and other parameters are 1", x
    _set(original, 30.0, 1.0, 2.0)
    yield "on large values", 10 * x - 5
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(parameter.mean()).sign_()
    yield "on small integers", x.round()
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    yield "on zeros", torch.zeros_like(x)


def _results(model: nn.Module, x: torch.Tensor, largest: int | None) -> dict[str, torch.Tensor | None]:
    """The model's result and the gradients that it gives, by name; None where there is none. Of parameters of more than `largest` elements, none."""
    given = x.clone().requires_grad_()
    with torch.enable_grad():
        y = model(given * 1)  # a value that a forward may overwrite
        found: dict[str, torch.Tensor | None] = {"the result": y.detach()}
        weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(SEED), dtype=y.dtype) + 0.5
        wanted = {"the gradient of x": given, **{f"the gradient of {key}": p for key, p in model.named_parameters() if largest is None or p.numel() <= largest}}
        gradients = torch.autograd.grad(y, list(wanted.values()), weights, allow_unused=True) if y.requires_grad else [None] * len(wanted)
    return found | dict(zip(wanted, gradients, strict=True))


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
