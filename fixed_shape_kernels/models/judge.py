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
from bench.subject import RoundedProducts
from bench.timing import interleaved
from bench.verify import State, state_problems
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
    """The relative error of ours, and what is wrong with it, by the promise of the spec's precision. Running statistics are compared too, and given back."""

    def computed(run: Callable[..., torch.Tensor], of: nn.Module, given: Sequence[torch.Tensor], precision: str) -> tuple[torch.Tensor, State]:
        """The result, and the buffers of `of` behind it; operators in place write over copies."""
        with torch.no_grad(), precision_flags(precision), kept_state(of):
            result = run(*[one.clone() for one in given])
            return result, {name: buffer.clone() for name, buffer in of.named_buffers()}

    name, wide = spec.precision.name, [given.double() for given in inputs]
    theirs, their_state = computed(eager, eager, inputs, name)
    made, our_state = computed(ours, eager, inputs, name)  # ours has the same buffers
    wanted, exact_state = computed(exact, exact, wide, name)
    if made.shape != theirs.shape or made.dtype != theirs.dtype:
        return float("inf"), f"the result is {tuple(made.shape)} {made.dtype}, expected {tuple(theirs.shape)} {theirs.dtype}"
    measure = lambda result: compare(result, wanted, spec.precision.tolerance, None, theirs)  # noqa: E731
    found, yardstick, single, modelled = measure(made), measure(theirs), None, None
    if name == "tf32":
        single = measure(computed(eager, eager, inputs, "fp32")[0])
        with RoundedProducts():
            modelled = measure(computed(exact, exact, wide, name)[0])
    by = Yardsticks(yardstick, single or yardstick, modelled, compare(wanted.to(theirs.dtype), wanted, spec.precision.tolerance, None).relative, 0.0)
    allowed = allowed_error(spec, by) * margin(1, independent(spec, made.numel()))
    problems = [found.parity] if found.parity else []
    problems += [] if found.relative <= allowed else [f"relative error {found.relative:.1e}, {allowed:.1e} allowed"]
    return found.relative, "; ".join(problems + state_problems(our_state, their_state, exact_state))
