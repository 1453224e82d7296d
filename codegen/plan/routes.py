"""The routes through a target, and the choice among them.

    cpu      torch's GEMM or convolution, then one C++ pass
    sm_80    our GEMM with the whole chain in its epilogue; our GEMM, then the norm kernel; torch's GEMM or convolution, then the norm kernel;
             our convolution, which keeps a value of each pooling window and statistics, then a kernel that normalises them;
             our convolution as a product of windows and filters, then the norm kernel
    sm_90a   one wgmma kernel for the whole chain, of a linear or of a convolution

What no fused kernel takes (a reduction, average pooling, a second pooling) follows in small kernels of its own: see stages.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from codegen.ir.fused_form import departure
from codegen.numerics import ARITHMETICS
from codegen.plan import tuned
from codegen.plan.candidates import CONVOLUTIONS, Candidate
from codegen.plan.conv_estimates import hopper_ms, library_ms, norm_ms, one_pass_ms
from codegen.plan.conv_gemm.kernel import plan_conv_gemm
from codegen.plan.conv_sm80.kernel import plan_conv_sm_80
from codegen.plan.conv_sm90a.kernel import plan_conv_sm_90a
from codegen.plan.cpu.kernel import plan_cpu
from codegen.plan.floor import floor
from codegen.plan.gemm.choice import tile_choices
from codegen.plan.gemm.route import choose_arithmetic, gemm_ms, plan_gemm
from codegen.plan.gemm_sm90a.route import hopper_linear_ms, plan_sm_90a
from codegen.plan.model import Buffer, Library, Plan, PlanError
from codegen.plan.norm.route import plan_norm, plan_norm_of_product
from codegen.plan.parts import parts_of, plan_parts
from codegen.plan.stages.route import first_stage, head_of, plan_stages
from codegen.spec import Spec
from codegen.targets import DEVICES, TARGETS, DeviceClass, Target

# The vendor's half-precision GEMM by the alignment that its kernels need of K and N (8, 2 or 1 values), as 27 shapes took it on an H200 (cuBLAS 13):
# shares of the tensor cores' and the memory's rate, and nanoseconds for each k that a block goes through.
LIBRARY_GEMM = {8: (1.0, 0.72, 0.0), 2: (0.14, 0.38, 2.5), 1: (0.067, 0.125, 12.0)}
LIBRARY_SERIAL_MS = 0.05  # that a block goes through k, at most: beyond, several share it
LIBRARY_START_MS = 0.0065
LIBRARY_ROWS, LIBRARY_ROWS_SHARE = 8, 0.28  # up to so many rows of x, operands out of step go through a kernel for vectors at this share of the memory's rate

OTHER_MARGIN = 0.95  # sm_80's kernels, or the library's, are preferred to Hopper's where their estimate is below this share of the other
LIBRARY_MARGIN = 0.95  # our GEMM is preferred to the vendor's when its estimate is below this share of the vendor's

LIBRARY_CONVOLUTION = "torch's convolution, then the norm kernel"
CONVOLUTION_SHARES = {"library": 1.0, "one_pass": 0.9, "windows": 1.0}  # by which estimates are multiplied to be compared: that of one pass was too high for the shipped chains


def plan(spec: Spec, target: str, device: str | None = None, debug: bool = False, candidate: Candidate | None = None) -> Plan:
    """The plan of `spec` for a target and a device class (None: the target's default). Raises PlanError.

    Where a class is named, what codegen/tuned/ holds of it decides between the planner's candidates; a `candidate` (of `candidates`) forces one.
    `debug` bounds every wait of the kernels that wait for others; it changes nothing elsewhere.
    """
    if target not in TARGETS:
        raise PlanError(f"target {target!r} is unknown; there are {', '.join(TARGETS)}")
    chosen = TARGETS[target]
    name = device or chosen.default_device
    if name not in DEVICES or target not in DEVICES[name].targets:
        able = [d.name for d in DEVICES.values() if target in d.targets]
        raise PlanError(f"device class {name!r} does not go with target {target}; for it there are {', '.join(able)}")
    decision = tuned.decide(spec, target, name) if device and candidate is None else None
    if decision:
        if decision.candidate is None:
            raise PlanError(decision.why)
        found = _planned(spec, chosen, DEVICES[name], debug, decision.candidate)
        return replace(found, why=(decision.why, *found.why))
    return _planned(spec, chosen, DEVICES[name], debug, candidate)


def plan_for_class(spec: Spec, target: str, device: DeviceClass) -> Plan:
    """The plan for a class of card that DEVICES does not list. Raises PlanError."""
    return _planned(spec, TARGETS[target], device, False, None)


def _planned(spec: Spec, target: Target, device: DeviceClass, debug: bool, candidate: Candidate | None) -> Plan:
    if departure(spec.chain) is not None:
        made = plan_parts(
            spec, target, device, lambda part: _planned(part, target, device, debug, candidate),
            functools.partial(Plan, spec, target, device, floor=floor(spec, device)),
        )  # fmt: skip
        if target.name == "sm_90a" and not any(part.fused for part in parts_of(spec)):
            raise PlanError("none of this target's kernels serves a part of the chain; sm_80 has the same library steps")
        return made
    first = first_stage(spec, target)
    if first is not None:
        return plan_stages(spec, _planned(head_of(spec, first), target, device, debug, candidate), first)
    if target.name == "sm_90a":
        return _sm_90a(spec, target, device, debug, candidate is not None or spec.gemm == "generated")
    return _cpu(spec, target, device) if target.name == "cpu" else _sm_80(spec, target, device, candidate)


def _cpu(spec: Spec, target: Target, device: DeviceClass) -> Plan:
    return plan_cpu(spec, target, device)


def _sm_80(spec: Spec, target: Target, device: DeviceClass, candidate: Candidate | None) -> Plan:
    if spec.producer.operator.name == "conv2d":
        return _conv_sm_80(spec, target, device, candidate.gemm if candidate is not None else spec.gemm)
    if candidate is not None and candidate.gemm == "library":
        return _library_route(spec, target, device, ("torch's GEMM, then the norm kernel",))
    if candidate is not None and candidate.tile is not None:
        return _generated_linear(spec, target, device, candidate)[0]
    library_ms = library_linear_ms(spec, device)
    ours = _generated_linear(spec, target, device)
    if spec.gemm is not None:
        return _library_route(spec, target, device, ("gemm: library asked for",)) if spec.gemm == "library" else ours[0]
    route, ours_ms = ours
    if spec.precision.dtype == "float32":
        return route
    if ours_ms < library_ms * LIBRARY_MARGIN:
        return route
    return _library_route(
        spec, target, device,
        (f"torch's GEMM, then the norm kernel: {library_ms:.3f} ms estimated, against {ours_ms:.3f} ms with mma.sync in our own",),
    )  # fmt: skip


@dataclass(frozen=True)
class _Ways:
    """sm_80's ways to serve a convolution: estimates of those that can, the plans of ours, and why others cannot."""

    ms: dict[str, float]
    plans: dict[str, Plan]
    reasons: dict[str, str]

    @property
    def compared(self) -> dict[str, float]:
        """The estimates as they are compared."""
        return {way: ms * CONVOLUTION_SHARES[way] for way, ms in self.ms.items()}

    @property
    def fastest(self) -> str:
        return min(self.compared, key=self.compared.get)


def _conv_ways(spec: Spec, target: Target, device: DeviceClass, wanted: str | None) -> _Ways:
    """`wanted` is "library", "generated" (any of our own), one of CONVOLUTIONS, or nothing. Raises PlanError where no way is left."""
    ways = _Ways({"library": library_ms(spec, device)} if wanted in (None, "library") else {}, {}, {})
    for name in CONVOLUTIONS if wanted in (None, "generated") else [wanted] if wanted in CONVOLUTIONS else []:
        try:
            ways.plans[name], ways.ms[name] = _own_conv(name, spec, target, device)
        except PlanError as reason:
            ways.reasons[name] = str(reason)
    if not ways.ms:
        raise PlanError(f"gemm: {wanted} asks for a convolution of our own, which cannot be: {'; '.join(ways.reasons.values())}; gemm: library can")
    return ways


def _conv_sm_80(spec: Spec, target: Target, device: DeviceClass, wanted: str | None) -> Plan:
    """The fastest, by estimate, of the ways that are wanted and serve the chain."""
    ways = _conv_ways(spec, target, device, wanted)
    name = ways.fastest
    refused = tuple(f"not {CONVOLUTIONS[way]}: {reason}" for way, reason in ways.reasons.items())
    others = ", ".join(f"{ms:.3f} ms with {CONVOLUTIONS.get(way, LIBRARY_CONVOLUTION)}" for way, ms in ways.ms.items() if way != name)
    compared = f"{CONVOLUTIONS.get(name, LIBRARY_CONVOLUTION)}: " + (f"{ways.ms[name]:.3f} ms estimated, against {others}" if others else "asked for" if wanted else "the only way")
    if name == "library":
        return _library_route(spec, target, device, (compared, *refused))
    return replace(ways.plans[name], why=(*ways.plans[name].why, compared, *refused))


def _own_conv(name: str, spec: Spec, target: Target, device: DeviceClass) -> tuple[Plan, float]:
    """Our convolution of CONVOLUTIONS for mma.sync and its estimate, the norm's included. Raises PlanError."""
    if name == "windows":
        ours, front_ms = plan_conv_gemm(spec, target, device)
        return ours, front_ms + norm_ms(spec, device)
    ours = plan_conv_sm_80(spec, target, device)
    return ours, one_pass_ms(spec, device, ours)


def sm_80_conv_ms(spec: Spec, device: DeviceClass) -> float:
    """Estimate, as it is compared, of what sm_80 takes for a chain that starts with `conv2d`, on any card that runs it."""
    return min(_conv_ways(spec, TARGETS["sm_80"], device, None).compared.values())


def _sm_90a(spec: Spec, target: Target, device: DeviceClass, debug: bool, forced: bool) -> Plan:
    """One kernel for the whole chain; unless `forced`, only where sm_80's ways are estimated to take longer."""
    kept = [str(spec.chain[index].name) for index in sorted(spec.kept(spec.chain))]
    if kept:
        raise PlanError(f"{', '.join(kept)} is taken once more further on, and this target's kernels keep no value beside the one they work on; sm_80 serves it")
    if spec.producer.operator.name == "conv2d":
        found = plan_conv_sm_90a(spec, target, device, debug=debug)
        if not forced:
            _refuse_slower("one kernel for the whole chain", hopper_ms(spec, device, found), sm_80_conv_ms(spec, device), "convolution")
        return found

    found = plan_sm_90a(spec, target, device, debug=debug)
    if not forced:
        _refuse_slower("Hopper's tiles", hopper_linear_ms(spec, target, device), sm_80_linear_ms(spec, device), "GEMM")
    return found


def _refuse_slower(what: str, ours_ms: float, other_ms: float, library: str) -> None:
    if other_ms < ours_ms * OTHER_MARGIN:
        raise PlanError(f"{what} would take {ours_ms:.3f} ms, estimated, against {other_ms:.3f} ms with sm_80's kernels or torch's {library}")


def sm_80_linear_ms(spec: Spec, device: DeviceClass) -> float:
    """Estimate of what sm_80's kernels take for a chain that starts with `linear`, on any card that runs them."""
    ours = _generated_linear(spec, TARGETS["sm_80"], device)[1]
    return ours if spec.precision.dtype == "float32" else min(ours, library_linear_ms(spec, device))


def library_linear_ms(spec: Spec, device: DeviceClass) -> float:
    """Estimate of the vendor's half-precision GEMM followed by the norm kernel: two launches, its result written and read, y written."""
    tail_bytes = math.prod(spec.output_shape) * (spec.precision.itemsize + spec.result.itemsize)
    return library_gemm_ms(spec, device) + tail_bytes / (device.hbm * 1e6) + device.launch_us / 1e3


def library_gemm_ms(spec: Spec, device: DeviceClass) -> float:
    """Estimate of the vendor's half-precision GEMM alone, its launch included."""
    (m, k), n = spec.input_shape, spec.channels
    aligned = next(alignment for alignment in LIBRARY_GEMM if math.gcd(k, n) % alignment == 0)
    rate, share, serial_ns = LIBRARY_GEMM[aligned]
    multiply = 2.0 * m * n * k / (device.fp16 * (device.library_share if aligned == 8 else 1.0) * rate * 1e9)
    moved = (m * k + n * k + m * n) * spec.precision.itemsize
    if m <= LIBRARY_ROWS:
        share = max(share, LIBRARY_ROWS_SHARE)
    return LIBRARY_START_MS + max(multiply, moved / (device.hbm * share * 1e6), min(k * serial_ns / 1e6, LIBRARY_SERIAL_MS))


def _generated_linear(spec: Spec, target: Target, device: DeviceClass, candidate: Candidate | None = None) -> tuple[Plan, float]:
    """Our GEMM, and the norm kernel behind it unless the chain ends in the GEMM; with the estimated time of the planner's own choice."""
    arithmetic = choose_arithmetic(spec, device) if candidate is None else ARITHMETICS[candidate.math]
    gemm = plan_gemm(spec, target, device, arithmetic, None if candidate is None else _recorded_tile(spec, device, candidate))
    steps, buffers, why = gemm.steps, gemm.buffers, gemm.why
    estimate = gemm_ms(spec, device, arithmetic)
    if not gemm.finished:
        if gemm.sliced:
            tail = plan_norm_of_product(spec, target, device)
        else:
            tail = _norm(spec, target, device, source="y", apply_before=gemm.bare, producer_bias=None, statistics=gemm.statistics)
        steps, buffers, why = steps + tail.steps, buffers + tail.buffers, why + tail.why
        estimate += 2 * math.prod(spec.output_shape) * spec.result.itemsize / (device.hbm * 1e6) + device.launch_us / 1e3
    rate = {"fp32": device.fp32, "tf32": device.tf32, "fp16": device.fp16, "bf16": device.fp16}[arithmetic.operand]
    bound = floor(spec, device, len(arithmetic.products), rate)
    return Plan(spec, target, device, steps, buffers, bound, why), estimate


def _recorded_tile(spec: Spec, device: DeviceClass, candidate: Candidate) -> "Choice":  # noqa: F821
    """The tile that the candidate names."""
    for choice in tile_choices(spec, device, ARITHMETICS[candidate.math]):
        named = (candidate.tile, candidate.finished, candidate.slices or 1, bool(candidate.aligned))
        if ((choice.tile.m, choice.tile.n), choice.finished, choice.slices, choice.aligned) == named:
            return choice
    raise PlanError(
        f"the planner has no {candidate.label} any more; measure again (make tune SPEC={spec.named or spec.path}) or take the record out of tuned/{device.name}.yaml"
    )


def _library_route(spec: Spec, target: Target, device: DeviceClass, why: tuple[str, ...]) -> Plan:
    """Torch's own GEMM or convolution into a temporary, then the norm kernel with everything after it."""
    producer = spec.producer
    keys = {parameter.suffix: producer.key(parameter) for parameter in producer.parameters}
    conv = producer.operator.name == "conv2d"
    if not conv and spec.precision.dtype == "float32":
        raise PlanError(
            f"gemm: library at {spec.precision.name} would depend on torch's global TF32 switch; use gemm: generated, or precision fp16 or bf16"
        )
    # cuDNN's convolution is called without its bias: the call that names its TF32 mode takes none, and the norm kernel adds it for nothing.
    bias_in_tail = keys.get("bias") if conv else None
    options = {key: producer.values[key] for key in ("stride", "padding", "dilation", "groups")} if conv else {}
    if conv:
        options["allow_tf32"] = spec.precision.name == "tf32"
    library = Library(producer.operator.name, ("x", keys["weight"], None if conv else keys.get("bias")), "t0", options)
    tail = _norm(spec, target, device, source="t0", apply_before=True, producer_bias=bias_in_tail, statistics=None)
    temporary = Buffer("t0", producer.output_shape, spec.precision.dtype)
    rate = {"fp32": device.fp32, "tf32": device.tf32}.get(spec.precision.name, device.fp16)
    return Plan(spec, target, device, (library, *tail.steps), (temporary, *tail.buffers), floor(spec, device, 1, rate), why + tail.why)


def _norm(spec: Spec, target: Target, device: DeviceClass, **source) -> "NormPlan":  # noqa: F821

    return plan_norm(spec, target, device, **source)
