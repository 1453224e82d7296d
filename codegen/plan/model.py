"""What a plan is: kernels (one translation unit each), the steps that run them, the memory they need and the floor they face."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from codegen.ir.apply import Constant
from codegen.spec import Spec, Step
from codegen.targets import DeviceClass, Target


class Refusal(Exception):
    """A valid spec that this target or device class has no kernel for; the message says why and what to do."""


class LeftToRival(Refusal):
    """A spec that another target for the same cards serves as well or better."""


@dataclass(frozen=True)
class Kernel:
    """One translation unit. Subclasses add the numbers their template reads.

    `name` is the file stem and namespace (`gemm` -> gemm_sm80.cu, namespace gemm_sm80, function gemm_sm80_launch); `template` the file
    under templates/; `arguments` the launcher's pointers in order: parameter keys, "x", "y" or buffer names.
    """

    name: str
    template: str
    arguments: tuple[str, ...]
    constants: tuple[Constant, ...]
    summary: str
    smem_bytes: int = 0
    max_registers: int = 255
    threads: int = 0
    blocks: int = 0
    notes: tuple[str, ...] = ()

    portable: ClassVar[bool] = False  # the same text for every CUDA target

    def file(self, target: Target) -> str:
        if target.language == "cuda":
            return f"{self.name}_{target.suffix}.cu"
        return f"{target.suffix}.cpp" if self.name == "chain" else f"{self.name}_{target.suffix}.cpp"

    def namespace(self, target: Target) -> str:
        return f"{self.name}_{target.suffix}"

    def function(self, target: Target) -> str:
        return f"{self.name}_{target.suffix}_launch"


@dataclass(frozen=True)
class Buffer:
    """A temporary of one call: a tensor (shape and dtype) or raw bytes."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    bytes: int = 0

    @property
    def size(self) -> int:
        """In bytes."""
        return self.bytes or math.prod(self.shape) * {"float32": 4, "float16": 2, "bfloat16": 2}[self.dtype]


@dataclass(frozen=True)
class Launch:
    """A step that launches one of our kernels.

    One that reads parameters alone may be done ahead of calls: `prepares` names the buffers that it fills, which are then kept. `result`
    is where the kernel's y goes: a buffer, where other steps follow that the kernel knows nothing of. `part` is the chain that the kernel
    knows, where that is a part of the whole; `names` are then the whole's for the kernel's pointers, which keep their own in its text.
    """

    kernel: Kernel
    prepares: tuple[str, ...] = ()
    result: str = "y"
    part: Spec | None = None
    names: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The kernel's pointers, with what takes the place of its result."""
        return self.names or tuple(self.result if name == "y" else name for name in self.kernel.arguments)

    def apart(self, prefix: str) -> Launch:
        """The same by a kernel whose name, and with it its file and symbols, begins with `prefix`."""
        return replace(self, kernel=replace(self.kernel, name=f"{prefix}_{self.kernel.name}"))


@dataclass(frozen=True)
class Library:
    """A step that runs torch's own operator, `operation` as the operator table calls it.

    The arguments are the value, parameters (None where one is left out), then a second value; `also` names further results: new running
    statistics, a dropout's mask. `computes` is the chain's step, where the chain is planned in parts.
    """

    operation: str
    arguments: tuple[str | None, ...]
    out: str
    options: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    computes: Step | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Floor:
    """The least a device can need: FLOP over rate, bytes over bandwidth. Milliseconds; 0 where the device's figures are unknown."""

    flop: float
    bytes: float
    compute_ms: float
    memory_ms: float

    @property
    def ms(self) -> float:
        return max(self.compute_ms, self.memory_ms)


@dataclass(frozen=True)
class Plan:
    """Everything that rendering needs for one target. `why` holds the planner's reasons, one sentence each.

    `training` are the steps of training where they differ from those of evaluation, `steps`. `algebra` names the passes that rewrote the chain.
    """

    spec: Spec
    target: Target
    device: DeviceClass
    steps: tuple[Launch | Library, ...]
    buffers: tuple[Buffer, ...]
    floor: Floor
    why: tuple[str, ...]
    training: tuple[Launch | Library, ...] = ()
    algebra: tuple[str, ...] = ()

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Each kernel's launch, once, whether evaluation or training launches it."""
        return tuple({step.kernel.name: step for step in (*self.steps, *self.training) if isinstance(step, Launch)}.values())

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(step.kernel for step in self.launches)

    @property
    def library(self) -> tuple[str, ...]:
        """The operators that torch's library computes, in order."""
        return tuple(step.operation for step in self.steps if isinstance(step, Library))

    @property
    def preparing(self) -> tuple[Launch, ...]:
        """The steps that depend on parameters alone and may be done ahead of calls; they come first."""
        return tuple(step for step in self.steps if isinstance(step, Launch) and step.prepares)

    @property
    def prepared(self) -> tuple[str, ...]:
        """The buffers that preparing steps fill."""
        return tuple(name for step in self.preparing for name in step.prepares)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of temporaries allocated per call, prepared buffers left out."""
        return sum(buffer.size for buffer in self.buffers if buffer.name not in self.prepared)

    @property
    def prepared_bytes(self) -> int:
        """Bytes of prepared buffers; a call that cannot use what was prepared allocates as many."""
        return sum(buffer.size for buffer in self.buffers if buffer.name in self.prepared)
