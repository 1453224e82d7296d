"""Routes: the ways to compute a chain on a target. A route makes cheap offers for a request, and turns the chosen one into a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from codegen.ir.fused_form import FusedSpec
from codegen.plan.model import Plan, Refusal
from codegen.spec import Spec
from codegen.targets import DeviceClass, Target

Knob = int | str | bool


@dataclass(frozen=True)
class Choice:
    """A route and its settings as plain data: what the tuner records and a record forces.

    Settings may be left out: the choice then stands for the route's first offer that has those it names.
    """

    route: str
    knobs: tuple[tuple[str, Knob], ...] = ()

    @property
    def label(self) -> str:
        """`gemm_tf32x3_16x32_norm_kernel`: unique among a chain's offers, fit for a folder. Numbers of one and flags that are not set are left out."""
        shown = [name if value is True else f"{value}_{name}" if isinstance(value, int) else value for name, value in self.knobs if value is True or value not in (False, 1)]
        return "_".join([self.route, *shown])

    @property
    def settings(self) -> dict[str, Knob]:
        return dict(self.knobs)

    def covers(self, other: Choice) -> bool:
        """Does `other` have all that this choice names?"""
        return self.route == other.route and self.settings.items() <= other.settings.items()


@dataclass(frozen=True)
class Request:
    """What is to be planned: a chain for a target and a device class. `debug` bounds every wait; `forced` names the choice to take.

    `form` is the spec as routes see it, which serve chains of the fused form alone. Raises ValueError for another.
    """

    spec: Spec
    target: Target
    device: DeviceClass
    debug: bool = False
    forced: Choice | None = None

    @cached_property
    def form(self) -> FusedSpec:
        return FusedSpec.of(self.spec)


@dataclass(frozen=True)
class Offer:
    """A way to serve a request, without its kernels yet.

    `ms` is its estimate. Offers of one target are compared by `ms` x `weight`, those of different targets by `ms` x `across`: the margins that an
    estimate needs. `detail` is the family's own geometry, which only its plan reads.
    """

    choice: Choice
    ms: float
    weight: float = 1.0
    across: float = 1.0
    detail: object = None


@dataclass(frozen=True)
class Route:
    """A family of kernels: the targets and producers that it serves, and two functions.

    `offers` lists every way to serve a request, the one that the family prefers first; it raises Refusal where there is none. `plan` makes the
    plan of one of them. `title` names the route in a plan's reasons, `own` says that its product is ours and not the library's. `products` lists the
    producers that it serves without a norm too.
    """

    name: str
    title: str
    targets: frozenset[str]
    producers: frozenset[str]
    offers: Callable[[Request], tuple[Offer, ...]]
    plan: Callable[[Request, Offer], Plan]
    own: bool = True
    products: frozenset[str] = frozenset()

    def serves(self, request: Request) -> bool:
        """Is the route made for the request's target and producer?"""
        return request.target.name in self.targets and request.form.producer.operator.name in (self.producers if request.form.has_norm else self.products)


def refuse_kept(spec: Spec) -> None:
    """Raises Refusal where an operator takes an earlier result once more: kernels for Hopper keep no value beside the one they work on."""
    kept = [str(spec.chain[index].name) for index in sorted(spec.kept(spec.chain))]
    if kept:
        raise Refusal(f"{', '.join(kept)} is taken once more further on, and this target's kernels keep no value beside the one they work on; sm_80 serves it")
