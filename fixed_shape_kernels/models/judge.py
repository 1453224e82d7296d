"""Judging a generated chain on the model's own data: errors beside float64 and PyTorch, and times beside the model's modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bench.machine import precision_flags
from bench.metrics import compare
from bench.promise import Yardsticks, allowed_error, independent, margin
from bench.timing import interleaved
from codegen.spec import Spec

from .regions import kept_state

SECONDS = 0.3  # for the trials of one chain
SHIFT = 0.75  # standard deviations by which the second data lie beside the example's, and twice as far apart


@dataclass(frozen=True)
class Judged:
    """What was found: the largest relative error, why the chain is wrong (empty where it is right), and milliseconds of ours and of torch."""

    error: float
    wrong: str = ""
    ours_ms: float | None = None
    torch_ms: float | None = None


def judge(spec: Spec, ours: Callable[..., torch.Tensor], eager: nn.Module, inputs: Sequence[torch.Tensor], verify: bool) -> Judged:
    """Compare `ours` with `eager`, the model's own operators, on the example's data and on shifted ones; then time both where it is right.

    Without `verify` nothing is compared. Raises what the runtime raises.
    """
    worst = 0.0
    exact = copy.deepcopy(eager).double() if verify else None
    for name, data in (("the example", list(inputs)), ("shifted data", [_shifted(given) for given in inputs])) if verify else ():
        error, wrong = _compared(spec, ours, eager, exact, data)
        worst = max(worst, error)
        if wrong:
            return Judged(worst, f"on {name}: {wrong}")
    with torch.no_grad(), kept_state(eager):
        times = interleaved({"ours": lambda: ours(*inputs), "torch": lambda: eager(*inputs)}, inputs[0].device, SECONDS)
    return Judged(worst, "", times["ours"].ms, times["torch"].ms)


def _shifted(given: torch.Tensor) -> torch.Tensor:
    spread, middle = given.float().std(correction=0) if given.numel() > 1 else torch.ones(()), given.float().mean()
    return ((given.float() - middle) * 2.0 + middle + SHIFT * (spread + 1e-3)).to(given.dtype)


def _compared(spec: Spec, ours: Callable[..., torch.Tensor], eager: nn.Module, exact: nn.Module, inputs: list[torch.Tensor]) -> tuple[float, str]:
    """The relative error of ours, and what is wrong with it. Running statistics are compared too, and given back."""
    handed = lambda: [given.clone() for given in inputs]  # noqa: E731 - operators in place write over what they get
    with torch.no_grad(), precision_flags(spec.precision.name):
        with kept_state(eager):
            theirs = eager(*handed())
            their_state = [buffer.clone() for buffer in eager.buffers()]
        with kept_state(eager):  # ours has the same buffers
            made = ours(*handed())
            our_state = [buffer.clone() for buffer in eager.buffers()]
        with kept_state(exact):
            wanted = exact(*[given.double() for given in inputs])
            exact_state = [buffer.clone() for buffer in exact.buffers()]
    if made.shape != theirs.shape or made.dtype != theirs.dtype:
        return float("inf"), f"the result is {tuple(made.shape)} {made.dtype}, expected {tuple(theirs.shape)} {theirs.dtype}"
    measure = lambda result: compare(result, wanted, spec.precision.tolerance, None, theirs)  # noqa: E731
    found, yardstick = measure(made), measure(theirs)
    rounded = compare(wanted.to(theirs.dtype), wanted, spec.precision.tolerance, None).relative
    allowed = allowed_error(spec, Yardsticks(yardstick, yardstick, yardstick if spec.precision.name == "tf32" else None, rounded, 0.0)) * margin(1, independent(spec, made.numel()))
    if found.parity:
        return found.relative, found.parity
    if not found.relative <= allowed:
        return found.relative, f"relative error {found.relative:.1e}, {allowed:.1e} allowed"
    for mine, other, true in zip(our_state, their_state, exact_state, strict=True):
        if true.is_floating_point():
            off, beside = (compare(one, true, 0.0, None).relative for one in (mine, other))
            if off > 4 * max(beside, torch.finfo(mine.dtype).eps, allowed):
                return found.relative, f"running statistics are off by {off:.1e}"
        elif not torch.equal(mine, other):
            return found.relative, "a counter of running statistics differs"
    return found.relative, ""
