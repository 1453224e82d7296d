"""Judging generated chains on the model's own data: errors beside float64 and PyTorch, and times beside what would run in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from bench.machine import precision_flags
from bench.metrics import compare
from bench.promise import FP32_FLOOR, Yardsticks, allowed_error, independent, margin
from bench.subject import RoundedProducts
from bench.timing import interleaved
from bench.verify import State, state_problems
from codegen.spec import Spec
from runtime import RuntimeFailure
from runtime.errors import GradientError

from ..progress import steps
from .building import Candidate
from .chains import Chain
from .regions import Region, Watched, kept_state
from .report import REPLACED
from .seen import Seen, same_randomness, traced_otherwise

SECONDS = 0.3  # for the trials of one chain
SHIFT = 0.75  # standard deviations by which the second data lie beside the example's, and twice as far apart
GRADIENTS = 3.0  # times PyTorch's own error: a value beside a corner of relu or max may fall on its other side, and then carries all of a gradient's error

Rival = Callable[[Chain, Sequence[torch.Tensor]], Callable[..., torch.Tensor]]


@dataclass(frozen=True)
class Judged:
    """What was found: the largest relative error, why the chain is wrong (empty where it is right), and milliseconds of ours and of torch."""

    error: float
    wrong: str = ""
    ours_ms: float | None = None
    torch_ms: float | None = None


class Verdicts(Protocol):
    """What is known of chains without another look, by package."""

    def find(self, candidate: Candidate) -> Judged | None: ...

    def note(self, candidate: Candidate, found: Judged) -> None: ...


class Judge:
    """The judge of a model's chains: compares each with float64 and times it beside what would run in its place.

    `min_gain` is how many times as fast a chain has to be, `verify` whether anything is compared. With `training` gradients are compared, too, and a
    forward is timed with its backward. `rival` gives what is timed in the place of the model's own modules, from a chain and its inputs. Chains of one
    package are timed once. `known` are verdicts that hold without another look; those that are found are noted there.
    """

    def __init__(self, min_gain: float, verify: bool, training: bool, rival: Rival | None = None, known: Verdicts | None = None) -> None:
        self.min_gain, self.verify, self.training, self.rival, self.known = min_gain, verify, training, rival, known
        self.times: dict[str, Judged] = {}

    def chosen(self, candidates: Sequence[Candidate], seen: Mapping[Region, Seen]) -> list[Candidate]:
        """Those that are right and faster; what was found is noted in the rows. Each region runs on its arguments, and that is what the chains get.

        A region whose graph gives something else than the module gave is left alone.
        """
        chosen: list[Candidate] = []
        regions: dict[Region, list[Candidate]] = {}
        for candidate in candidates:
            regions.setdefault(candidate.chain.region, []).append(candidate)
        bar = steps(candidates, "judging")
        for region, of_region in regions.items():
            run = lambda *watched, region=region: Watched(region.root, region.graph, *watched).run(*(value.clone() for value in seen[region].arguments))  # noqa: E731
            with torch.no_grad(), kept_state(region.module), same_randomness(seen[region]):
                otherwise = traced_otherwise(run(), seen[region])
            if otherwise:
                for candidate in of_region:
                    next(bar, None)
                    candidate.row.status, candidate.row.why = "not traced", otherwise
                continue
            waiting = {candidate.chain.nodes[0]: candidate for candidate in of_region}
            wanted = {used for candidate in of_region for used in candidate.chain.takes}
            values: dict[fx.Node, torch.Tensor] = {}

            def reached(node: fx.Node, waiting=waiting, values=values) -> None:
                if node in waiting:
                    next(bar, None)
                    if self.passes(waiting[node], [values[used].clone() for used in waiting[node].chain.takes]):
                        chosen.append(waiting[node])

            def computed(node: fx.Node, value: Any, wanted=wanted, values=values) -> None:
                if node in wanted:
                    values[node] = value

            with torch.no_grad(), kept_state(region.module), torch.random.fork_rng():
                run(reached, computed)
        return chosen

    def passes(self, candidate: Candidate, inputs: Sequence[torch.Tensor]) -> bool:
        """Is the chain right and faster on these inputs? What was found is noted in its row."""
        chain, package = candidate.chain, candidate.chain.spec.package
        try:
            found = self.known.find(candidate) if self.known else None
            if found is None:
                error, wrong = compared(chain.spec, candidate.model, chain.eager, inputs, self.training) if self.verify else (0.0, "")
                found = replace(self.times[package], error=error) if package in self.times and not wrong else Judged(error, wrong)
                if found.ours_ms is None and not wrong:
                    found = self.times[package] = replace(found, **self._timed(candidate, inputs))
                if self.known:
                    self.known.note(candidate, found)
        except GradientError as failure:
            candidate.row.status, candidate.row.why = "no backward", first_line(failure)
            return False
        except (RuntimeFailure, torch.OutOfMemoryError) as failure:
            candidate.row.status, candidate.row.why = "failed", first_line(failure)
            return False
        return self._ruled(candidate, found)

    def _ruled(self, candidate: Candidate, found: Judged) -> bool:
        row = candidate.row
        row.error, row.ours_ms, row.torch_ms = found.error, found.ours_ms, found.torch_ms
        if found.wrong:
            row.status, row.why = "wrong", found.wrong
        elif row.gain < self.min_gain:
            row.status, row.why = "slower", f"{row.gain:.2f}x, {self.min_gain:g} wanted"
        else:
            row.status = REPLACED
        return row.status == REPLACED

    def _timed(self, candidate: Candidate, inputs: Sequence[torch.Tensor]) -> dict[str, float]:
        """Milliseconds of ours and of its rival on these inputs."""
        chain = candidate.chain
        with torch.set_grad_enabled(self.training), kept_state(chain.eager):  # under the switches that the user set
            given = [one.detach().requires_grad_(self.training) for one in inputs]
            calls = {"ours": candidate.model, "torch": self.rival(chain, given) if self.rival else chain.eager}
            if self.training:
                direction = torch.ones(chain.spec.output_shape, dtype=inputs[0].dtype, device=inputs[0].device)
                wanted = _differentiable(given, chain.eager)
                run = {name: lambda call=call: torch.autograd.grad(call(*given), wanted, direction, allow_unused=True) for name, call in calls.items()}
            else:
                run = {name: lambda call=call: call(*given) for name, call in calls.items()}
            times = interleaved(run, inputs[0].device, SECONDS)
        return {"ours_ms": times["ours"].ms, "torch_ms": times["torch"].ms}


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def compared(spec: Spec, ours: Callable[..., torch.Tensor], eager: nn.Module, inputs: Sequence[torch.Tensor], training: bool = False) -> tuple[float, str]:
    """The largest relative error of ours on the example's data and on shifted ones, and what is wrong with it. Raises what the runtime raises."""
    worst, exact = 0.0, copy.deepcopy(eager).double()
    for name, data in (("the example", list(inputs)), ("shifted data", [_shifted(given) for given in inputs])):
        error, wrong = _compared(spec, ours, eager, exact, data)
        worst = max(worst, error)
        wrong = wrong or (training and _gradients_compared(spec, ours, eager, exact, data))
        if wrong:
            return worst, f"on {name}: {wrong}"
    return worst, ""


def _differentiable(inputs: Sequence[torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    """The inputs, and the parameters of a module that ask for gradients."""
    return [*inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]


def _gradients_compared(spec: Spec, ours: Callable[..., torch.Tensor], eager: nn.Module, exact: nn.Module, inputs: Sequence[torch.Tensor]) -> str:
    """What is wrong with the gradients of ours for the inputs and for every parameter: each may have GRADIENTS times the error of PyTorch's."""
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(spec.output_shape, generator=draw, dtype=torch.float64)

    def gradients(run: Callable[..., torch.Tensor], of: nn.Module, given: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        given = [one.detach().clone().requires_grad_() for one in given]
        with torch.enable_grad(), precision_flags(spec.precision.name), kept_state(of):
            y = run(*(one.view_as(one) for one in given))  # operators in place take no leaf
            return list(torch.autograd.grad(y, _differentiable(given, of), direction.to(y.device, y.dtype), allow_unused=True))

    try:
        theirs = gradients(eager, eager, inputs)
    except RuntimeError:  # it overwrites what its own backward needs: there is nothing to be right about
        return "the model's own backward fails"
    wanted = gradients(exact, exact, [given.double() for given in inputs])
    made = gradients(ours, eager, inputs)
    names = [*(f"input {number}" for number in range(len(inputs))), *(name for name, parameter in eager.named_parameters() if parameter.requires_grad)]
    for name, mine, yours, right in zip(names, made, theirs, wanted, strict=True):
        if mine is None or right is None:
            if mine is not right and bool((mine if right is None else right).any()):
                return f"the gradient of {name} is missing, or there is one too many"
            continue
        yardstick = compare(yours, right, spec.precision.tolerance, None).relative
        rounding = max(compare(right.to(yours.dtype), right, spec.precision.tolerance, None).relative, FP32_FLOOR)
        found = compare(mine, right, spec.precision.tolerance, None, yours)
        if found.parity or not found.relative <= GRADIENTS * max(yardstick, rounding):
            return f"the gradient of {name}: {found.parity or f'relative error {found.relative:.1e}, {GRADIENTS * max(yardstick, rounding):.1e} allowed'}"
    return ""


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
    found, yardstick, single, modelled, states = measure(made), measure(theirs), None, None, [their_state]
    if name == "tf32":
        single = measure(computed(eager, eager, inputs, "fp32")[0])
        with RoundedProducts():
            result, state = computed(exact, exact, wide, name)
        modelled, states = measure(result), [their_state, state]
    by = Yardsticks(yardstick, single or yardstick, modelled, compare(wanted.to(theirs.dtype), wanted, spec.precision.tolerance, None).relative, 0.0)
    allowed = allowed_error(spec, by) * margin(1, independent(spec, made.numel()))
    problems = [found.parity] if found.parity else []
    problems += [] if found.relative <= allowed else [f"relative error {found.relative:.1e}, {allowed:.1e} allowed"]
    return found.relative, "; ".join(problems + state_problems(our_state, states, exact_state))
