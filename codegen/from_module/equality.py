"""Is the layer that a spec describes the layer that the file defines?"""

from __future__ import annotations

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


def output_faults(model: type, init: list, path: str, ours: nn.Module, x: torch.Tensor) -> list[Fault]:
    """Differences between the two outputs for the first samples of x, all parameters moved off their initial values by the same amounts."""
    original, _ = construct(model, init, path)
    original, ours, x = original.double(), ours.double(), x[:SAMPLES].double()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=generator), alpha=0.5)
        ours.load_state_dict(original.state_dict())
        try:
            expected = original(x.clone())
        except Exception as error:  # whatever the file's forward raises is a fault of the file
            return [Fault(line_of(error, path), f"Model's forward failed on {tuple(x.shape)}: {first_line(error)}")]
        result = ours(x)
    if expected.shape != result.shape:
        return [Fault(0, f"Model gives {tuple(expected.shape)} for {tuple(x.shape)}; the spec's Model gives {tuple(result.shape)}")]
    scale = max(1.0, float(expected.abs().max()))
    error = float((expected - result).abs().max())
    if not error <= TOLERANCE * scale:
        return [Fault(0, f"the spec's Model differs from the file's by {error:.3g} (largest value {scale:.3g}); the chain does not hold all that forward does")]
    return []
