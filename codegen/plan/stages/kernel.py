"""The kernels of stages as data: what templates/stages/* read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from codegen.ir.apply import Apply, Constant, applies, called, rounded, unique_constants
from codegen.ir.segment import Segment
from codegen.ir.window import COLUMNS, ROWS, window_of
from codegen.numerics import FP32, Precision
from codegen.ops import Kind, Shape
from codegen.plan.model import Kernel
from codegen.plan.shared.values import VECTOR_BYTES, LoadedOperand, loaded, register_limit, statements
from codegen.spec import Spec, Step
from codegen.targets import DeviceClass, Target

THREADS = 256  # of a block
WARP_WINDOW, MANY_WINDOW = 32, 256  # values of a pooling window from which on a warp takes it: the second where windows alone keep the card busy
MANY_THREADS = 512  # of an SM: that many windows do
SLICE_CHANNELS = 4  # of a slice, at least
BUSY_THREADS = 1024  # on an SM
ROW_VALUES = 16  # of a lane, about


@dataclass(frozen=True, kw_only=True)
class StageOperand(LoadedOperand):
    """A parameter of a stage: `value` is that of the one that result `index` meets, `offset` its place in the tensor, in C."""

    offset: str


@dataclass(frozen=True, kw_only=True)
class StageKernel(Kernel):
    """What templates/stages/* read. `stage`: see above; `reduction` is what windows and channels are folded by.

    `dtype` is the storage type, that of parameters; `source` and `result` are the types of the tensors, `offset` the place of the value that result `index` comes from ("spread"), `lines` the
    operators behind as C statements on v. `ragged`: threads may find nothing; `divisor`: of an average, in C; `clipped_rows` and `clipped_columns`:
    windows leave the plane.
    """

    stage: str
    reduction: str
    dtype: str
    source: Precision
    result: Precision
    lines: tuple[str, ...]
    operands: tuple[StageOperand, ...]
    applied: tuple[Apply, ...]
    width: int = 1
    offset: str = "index"
    ragged: bool = False
    lanes: int = 1
    slices: int = 1
    rows_per_block: int = 1
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    clipped_rows: bool = False
    clipped_columns: bool = False
    divisor: str = ""
    parallel: bool = True

    def file(self, target: Target) -> str:
        return f"{self.name}_{target.suffix}.{'cu' if target.language == 'cuda' else 'cpp'}"

    def operand_parameters(self, c_type: str, restrict: str = "") -> list[str]:
        """C parameters for the parameters' tensors, of the storage type `c_type`."""
        return [f"const {c_type}* {restrict}{operand.pointer}" for operand in self.operands]

    def parameters(self, c_type: str, restrict: str = "") -> list[str]:
        """C parameters of the kernel; `restrict` is empty for the launcher."""
        source, result = self.source.c_type, self.result.c_type
        return [f"const {source}* {restrict}input", *self.operand_parameters(c_type, restrict), f"{result}* {restrict}output"]

    def cpu_parameters(self, source: str, storage: str, result: str) -> list[str]:
        """The same in C++, with the types given."""
        return [f"const {source}* input", *self.operand_parameters(storage), f"{result}* output"]

    @property
    def names(self) -> list[str]:
        """What the launcher hands to the kernel."""
        return ["input", *(operand.pointer for operand in self.operands), "output"]

    @property
    def indexed(self) -> bool:
        """Do the operators behind need the result's place?"""
        return any("index" in operand.offset for operand in self.operands)

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that the operators and the reduction call."""
        return (*called(self.applied), *(("exponential",) if self.reduction == "logsumexp" else ()))

    @property
    def folds_wide(self) -> bool:
        """Is what is folded two numbers?"""
        return self.reduction in ("sum", "mean", "logsumexp")


def element_offset(shape: Shape, whole: Shape) -> str:
    """C: where in a contiguous tensor of `shape`, broadcast to `whole`, the element lies that meets element `index` of `whole`."""
    own = (1,) * (len(whole) - len(shape)) + tuple(shape)
    terms, at = [], 0
    while at < len(whole):
        if own[at] == 1:
            at += 1
            continue
        end = at
        while end < len(whole) and own[end] == whole[end]:
            end += 1
        inner, count, stride = math.prod(whole[end:]), math.prod(whole[at:end]), math.prod(own[end:])
        text = "index" + (f" / {inner}" if inner > 1 else "") + (f" % {count}" if math.prod(whole[:at]) > 1 else "")
        terms.append(text + (f" * {stride}" if stride > 1 else ""))
        at = end
    return " + ".join(terms) or "0"


def stage_kernel(
    spec: Spec, segment: Segment, name: str, source_name: str, result: Precision, target: Target, device: DeviceClass
) -> StageKernel:
    """The kernel of a segment, which reads the buffer `source_name` and gives values of the type `result`."""
    steps, lead, output = segment.steps, segment.steps[0], segment.gives.shape
    stage, reduction = _stage(segment)
    items = applies(spec, steps)
    shapes = dict(spec.parameters)
    operands = []
    for item in items:
        if item.operand:
            operand = loaded(item.operand)
            place = element_offset(shapes[operand.key], output)
            operands.append(StageOperand(operand.key, operand.pointer, operand.per_channel, value=operand.value, offset=place))
    kernel = StageKernel(
        name=name, template=f"stages/{'stage.cpp' if target.language == 'cpp' else stage + '.cu'}.j2",
        arguments=(source_name, *(o.key for o in operands), "y"), constants=(), summary=_summary(stage, segment), stage=stage, reduction=reduction,
        dtype=spec.precision.dtype, source=FP32, result=result, lines=statements(spec, steps), operands=tuple(operands), applied=items, parallel=math.prod(lead.input_shape) >= 32768,
    )  # fmt: skip
    made, sizes, launched = {"rows": _rows, "columns": _columns, "windows": _windows, "spread": _spread}[stage](kernel, lead, output, device)
    if target.language == "cpp":
        batch = [Constant("kBatch", str(lead.input_shape[0]), "batch")] if stage == "columns" else []
        made, sizes, launched = replace(made, threads=0, blocks=0, smem_bytes=0), [*batch, *sizes], []
    return replace(made, constants=(*sizes, *launched, *unique_constants(items)))


def _stage(segment: Segment) -> tuple[str, str]:
    """(stage, what windows and channels are folded by)."""
    if segment.kind is Kind.POOL:
        return "windows", "max" if segment.core.operator.name == "max_pool2d" else "sum"
    if segment.kind is Kind.REDUCTION:
        return "rows" if math.prod(segment.core.input_shape[2:]) == 1 else "columns", segment.core.operator.name
    return "spread", ""


def _summary(stage: str, segment: Segment) -> str:
    what = {"rows": "over the channels of a row", "columns": "over the channels of a position", "windows": "over windows", "spread": "to another shape"}[stage]
    lead = segment.core.operator.name if segment.core else "broadcast"
    rest = [step.operator.name for step in (segment.after if segment.core else segment.before)]
    return f"{lead} {what}" + (f", then {', '.join(rest)}" if rest else "")


# Each gives a stage's kernel, the sizes that every target's source needs, and what a launch on a GPU adds to them.


def _rows(kernel: StageKernel, lead: Step, output: Shape, device: DeviceClass) -> tuple[StageKernel, list[Constant], list[Constant]]:
    rows, channels = lead.input_shape[0], lead.input_shape[1]
    width = math.gcd(VECTOR_BYTES // kernel.source.itemsize, channels)
    vectors = channels // width
    lanes = min(THREADS, max(32, 1 << max(0, math.ceil(math.log2(max(1, channels / ROW_VALUES))))))
    per_block = THREADS // 2 // lanes if lanes == 32 else 1  # what warps of a row leave for each other lies in one place of a block
    threads, blocks = lanes * per_block, -(-rows // per_block)
    sizes = [Constant("kRows", str(rows), "batch"), Constant("kChannels", str(channels), "values of a row")]
    launched = [
        Constant("kWidth", str(width), f"values of one access: {width * kernel.source.itemsize} bytes"),
        Constant("kVectors", str(vectors), "kChannels / kWidth"),
        Constant("kLanes", str(lanes), "threads of a row"),
        Constant("kThreads", str(threads), "threads of a block"),
        Constant("kRowsPerBlock", str(per_block), "kThreads / kLanes"),
        Constant("kBlocks", str(blocks), "kRows / kRowsPerBlock" + rounded(rows % per_block != 0)),
    ]
    made = replace(
        kernel, width=width, lanes=lanes, rows_per_block=per_block, threads=threads, blocks=blocks, ragged=rows % per_block != 0,
        smem_bytes=0 if lanes == 32 else lanes // 32 * 8, max_registers=register_limit(threads, 2),
    )  # fmt: skip
    return made, sizes, launched


def _columns(kernel: StageKernel, lead: Step, output: Shape, device: DeviceClass) -> tuple[StageKernel, list[Constant], list[Constant]]:
    batch, channels = lead.input_shape[:2]
    plane = math.prod(lead.input_shape[2:])
    width = math.gcd(VECTOR_BYTES // max(kernel.source.itemsize, kernel.result.itemsize), plane)
    items = batch * plane // width
    slices = 1
    while slices < 8 and items * slices < max(1, device.sms) * BUSY_THREADS and channels >= 2 * slices * SLICE_CHANNELS:
        slices *= 2
    lanes = THREADS // slices
    blocks = -(-items // lanes)
    sizes = [
        Constant("kChannels", str(channels), "values of a position"),
        Constant("kPlane", str(plane), f"{' x '.join(map(str, lead.input_shape[2:]))} positions"),
    ]
    launched = [
        Constant("kWidth", str(width), "positions of a thread: neighbours"),
        Constant("kPlaneVectors", str(plane // width), "kPlane / kWidth"),
        Constant("kItems", str(items), f"{batch} samples x kPlaneVectors"),
        Constant("kLanes", str(lanes), "threads of a slice, each with positions of its own"),
        Constant("kSlices", str(slices), "parts of the channels that a block's threads share"),
        Constant("kThreads", str(THREADS), "kLanes x kSlices"),
        Constant("kBlocks", str(blocks), "kItems / kLanes" + rounded(items % lanes != 0)),
    ]
    made = replace(
        kernel, width=width, lanes=lanes, slices=slices, threads=THREADS, blocks=blocks, ragged=items % lanes != 0,
        smem_bytes=(slices - 1) * lanes * width * (8 if kernel.folds_wide else 4), max_registers=register_limit(THREADS, 2),
    )  # fmt: skip
    return made, sizes, launched


def _windows(kernel: StageKernel, lead: Step, output: Shape, device: DeviceClass) -> tuple[StageKernel, list[Constant], list[Constant]]:
    values = lead.values
    (_, _, height, columns), pooled = lead.input_shape, lead.output_shape[2:]
    size, stride, padding = values["kernel_size"], values["stride"], values["padding"]
    dilation = values.get("dilation", (1, 1))
    window = math.prod(size)
    outputs = math.prod(output)
    lanes = 32 if window >= (MANY_WINDOW if outputs >= device.sms * MANY_THREADS else WARP_WINDOW) else 1
    per_block = THREADS // lanes
    blocks = -(-outputs // per_block)
    sizes = [
        Constant("kHeight", str(height), "rows of a plane"),
        Constant("kRow", str(columns), "values of a row"),
        Constant("kPooledRow", str(pooled[1]), "results of a row"),
        Constant("kPooledPlane", str(math.prod(pooled)), f"{pooled[0]} x {pooled[1]} results of a plane"),
        Constant("kOutputs", str(outputs), "results"),
    ]
    for axis, name in enumerate(("Height", "Width")):
        sizes.append(Constant(f"kWindow{name}", str(size[axis]), f"{lead.operator.name}'s kernel_size"))
        sizes.append(Constant(f"kStride{name}", str(stride[axis]), f"{lead.operator.name}'s stride"))
        if padding[axis]:
            sizes.append(Constant(f"kPadding{name}", str(padding[axis]), f"{lead.operator.name}'s padding"))
        if dilation[axis] > 1:
            sizes.append(Constant(f"kDilation{name}", str(dilation[axis]), f"{lead.operator.name}'s dilation"))
    launched = [
        Constant("kWindow", str(window), "values of a window"),
        Constant("kLanes", str(lanes), "threads of a window"),
        Constant("kThreads", str(THREADS), "threads of a block"),
        Constant("kWindowsPerBlock", str(per_block), "kThreads / kLanes"),
        Constant("kBlocks", str(blocks), "kOutputs / kWindowsPerBlock" + rounded(outputs % per_block != 0)),
    ]
    clipped = tuple(window_of(lead).clipped(axis) for axis in (ROWS, COLUMNS))
    divisor = _divisor(lead, clipped) if lead.operator.name == "avg_pool2d" else ""
    made = replace(
        kernel, lanes=lanes, threads=THREADS, blocks=blocks, ragged=outputs % per_block != 0, padding=padding, dilation=dilation, clipped_rows=clipped[0],
        clipped_columns=clipped[1], divisor=divisor, max_registers=register_limit(THREADS, 2),
    )  # fmt: skip
    return made, sizes, launched


def _divisor(lead: Step, clipped: tuple[bool, bool]) -> str:
    """C: what a window's sum is divided by, from the window's corner (top, left)."""
    values = lead.values
    if values["divisor_override"] is not None:
        return f"{values['divisor_override']}"
    extents = []
    for axis, (name, first, size) in enumerate((("Height", "top", "kHeight"), ("Width", "left", "kRow"))):
        pad = f" + kPadding{name}" if values["padding"][axis] else ""
        last = (lead.output_shape[2 + axis] - 1) * values["stride"][axis] - values["padding"][axis] + values["kernel_size"][axis]
        beyond = last > lead.input_shape[2 + axis] + values["padding"][axis]
        if not clipped[axis] or (values["count_include_pad"] and not beyond):
            extents.append(f"kWindow{name}")
        elif values["count_include_pad"]:
            extents.append(f"least({first} + kWindow{name}, {size}{pad}) - {first}")
        else:
            inside = f"most({first}, 0)" if values["padding"][axis] else first
            extents.append(f"least({first} + kWindow{name}, {size}) - {inside}")
    return " * ".join(f"({extent})" if " " in extent else extent for extent in extents)


def _spread(kernel: StageKernel, lead: Step, output: Shape, device: DeviceClass) -> tuple[StageKernel, list[Constant], list[Constant]]:
    outputs = math.prod(output)
    width = math.gcd(VECTOR_BYTES // kernel.result.itemsize, outputs)
    blocks = -(-outputs // (THREADS * width))
    sizes = [Constant("kOutputs", str(outputs), f"{' x '.join(map(str, output))} results")]
    launched = [
        Constant("kWidth", str(width), "results of a thread: neighbours"),
        Constant("kThreads", str(THREADS), "threads of a block"),
        Constant("kBlocks", str(blocks), "kOutputs / (kThreads x kWidth)" + rounded(outputs % (THREADS * width) != 0)),
    ]
    made = replace(
        kernel, width=width, threads=THREADS, blocks=blocks, ragged=outputs % (THREADS * width) != 0, offset=element_offset(lead.input_shape, output),
        max_registers=register_limit(THREADS, 2),
    )  # fmt: skip
    return made, sizes, launched
