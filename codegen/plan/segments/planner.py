"""What the kernels of a segment share on every target: the programs around the core, names, tensors and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from codegen.ir.apply import Constant
from codegen.ir.segment import Segment
from codegen.ir.window import Window
from codegen.numerics import float_literal
from codegen.ops import Kind
from codegen.plan.segments.kernel import Running, SegmentKernel, core_name, statistic_of, summary_of
from codegen.plan.segments.program import Program, Statements
from codegen.plan.shared.axes import AXES
from codegen.plan.shared.values import VECTOR_BYTES
from codegen.spec import Spec
from codegen.targets import DeviceClass, Target

EPSILON = 2.0**-23  # of rms_norm where it has no eps: that of float32, in which torch computes it at 16 bits too


class Planner:
    """Makes kernels of one segment."""

    def __init__(self, spec: Spec, segment: Segment, name: str, target: Target, device: DeviceClass) -> None:
        self.spec, self.segment, self.name, self.target, self.device = spec, segment, name, target, device
        self.precision = spec.precision
        self.core = segment.core
        self.core_name = core_name(segment.core) if segment.core else ""
        self.folds = segment.core is not None and segment.core.operator.kind in (Kind.REDUCTION, Kind.POOL)
        self.result, self.stored = segment.gives.name, segment.gives.storage
        self.count = math.prod(segment.shape)
        self.sms = max(1, device.sms)

    @property
    def widest(self) -> int:
        return VECTOR_BYTES // max(self.precision.itemsize, self.stored.itemsize)

    def before(self, width: int) -> Program:
        return self._before(width).program()

    def _before(self, width: int) -> Statements:
        made = Statements(self.spec, self.segment, width)
        made.source()
        made.steps(self.segment.before)
        return made

    def after(self, width: int) -> Program:
        return self._after(width).program()

    def _after(self, width: int) -> Statements:
        made = Statements(self.spec, self.segment, width)
        if self.core is not None:
            self._core(made)
        made.steps(self.segment.after)
        return made

    def _core(self, made: Statements) -> None:
        if self.folds:
            if any(step.tap == self.core.index and not step.taps_itself for step in self.segment.after):
                made.keep(self.core)
        else:
            made.normalise(self.core)

    def kernel(self, kind: str, before: Program, after: Program, extra: Sequence[str] = (), results: Sequence[str] | None = None, **more) -> SegmentKernel:
        """A kernel whose file is named by its kind; `extra` are buffers that it reads behind the tensors of its programs."""
        tensors = tuple(dict.fromkeys((*before.tensors, *after.tensors)))
        running: Running | None = more.get("running")
        state = running.keys if running else ()
        outputs = [self.result] if results is None else list(results)
        outputs += [f"state:{key}" for key in state[:2]]
        template = f"segments/{'segment.cpp' if self.target.language == 'cpp' else kind + '.cu'}.j2"
        finishes = kind != "map" and more.get("writes") != "partial"
        own = self.numbers(running) if finishes else []
        constants = tuple({c.name: c for c in (*more.pop("numbers", ()), *before.constants, *after.constants, *own)}.values())
        return SegmentKernel(
            name=f"{self.name}_{more.pop('label', kind)}", template=template,
            arguments=(*(tensor.argument for tensor in tensors), *extra, *state, *outputs), constants=constants,
            summary=f"{summary_of(self.segment)}: {more.pop('story')}", precision=self.precision, stored=self.stored, before=before, after=after, tensors=tensors,
            core=self.core_name, statistic=statistic_of(self.core_name) if self.core_name else "", folds=self.folds, **more,
        )  # fmt: skip

    def numbers(self, running: Running | None) -> list[Constant]:
        """Constants of statistics that a kernel finishes, and of running ones that it renews."""
        if self.core is None:
            return []
        found, name = [], self.core.operator.name
        if self.core_name in ("group_norm", "rms_norm"):
            given = self.core.values["eps"]
            found.append(Constant("kEps", float_literal(EPSILON if given is None else given), f"{name}'s eps", "float"))
        if running and running.momentum is not None:
            found.append(Constant("kMomentum", float_literal(running.momentum), f"{name}'s momentum: the share of the new statistics", "float"))
        return found

    @property
    def running(self) -> Running | None:
        core = self.core
        if core is None or core.operator.name != "batch_norm" or not core.buffers:
            return None
        momentum = core.values["momentum"]
        return Running(tuple(core.key(buffer) for buffer in core.buffers[: 3 if momentum is None else 2]), momentum)

    def window_numbers(self, window: Window, outputs: int) -> list[Constant]:
        name = self.core.operator.name
        numbers = [Constant("kOutputs", str(outputs), "results")]
        for axis, word in enumerate(AXES):
            numbers += [
                Constant(f"k{word}", str(window.input[axis]), f"{word.lower()} of the input"),
                Constant(f"kPooled{word}", str(window.output[axis]), f"{word.lower()} of the result"),
                Constant(f"kWindow{word}", str(window.size[axis]), f"{name}'s kernel size"),
                Constant(f"kStride{word}", str(window.stride[axis]), f"{name}'s stride"),
                Constant(f"kPadding{word}", str(window.padding[axis]), f"{name}'s padding"),
                Constant(f"kDilation{word}", str(window.dilation[axis]), f"{name}'s dilation"),
            ]
        return numbers


def divisor_of(window: Window) -> str:
    """C: what a window's sum is divided by, from the window's first places `depth`, `height` and `width`."""
    if window.divisor:
        return str(window.divisor)
    extents = []
    for axis, word in enumerate(AXES):
        first, size = f"first_{word.lower()}", f"k{word}"
        beyond = window.last(axis) > window.input[axis] + window.padding[axis]
        if not window.clipped(axis) or (window.counts_padding and not beyond):
            extents.append(f"kWindow{word}")
        elif window.counts_padding:
            extents.append(f"(least({first} + kWindow{word}, {size} + kPadding{word}) - {first})")
        else:
            extents.append(f"(least({first} + kWindow{word}, {size}) - most({first}, 0))")
    return " * ".join(extents)
