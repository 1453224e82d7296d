"""What the cost models of several families count alike: a pass over memory, and costly operators."""

from __future__ import annotations

from codegen.ir.apply import applies, costly
from codegen.ir.fused_form import FusedSpec
from codegen.plan.shared.fitted import SWEEP, Fitted
from codegen.targets import DeviceClass

STREAMED = Fitted(0.6, "share", SWEEP)  # of the memory's rate, what a kernel reaches that reads once and writes once
EMPTY_US = Fitted(1.5, "us", SWEEP)  # of a kernel that does nothing


def pass_ms(moved: float, device: DeviceClass, busy: float = 1.0) -> float:
    """A launch, and so many bytes by a `busy` share of the SMs."""
    return (EMPTY_US.on(device) + device.launch_us) / 1e3 + moved / (device.hbm * STREAMED.on(device) * busy * 1e6)


def costly_operators(spec: FusedSpec) -> int:
    """Operators before the norm that take an exponential or more."""
    return sum(costly((item,)) for item in applies(spec, spec.before_norm))
