"""The cpu target: torch's own GEMM or convolution, then one C++ function that does everything after it, a group of one sample at a time.

A group's values lie next to each other in memory, and a group is small against a core's cache. So each thread takes whole groups: it reads the
values from memory once, applies what comes before the norm, forms the statistics, normalises, applies the rest, pools and writes the result.
What one operator leaves for the next never goes further than a scratch array of the thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Apply, Constant, applies, called, kept_name, parameter_keys, unique_constants
from codegen.ir.operand import c_identifier
from codegen.ir.window import ROWS, window_of
from codegen.ir.fused_form import FusedSpec
from codegen.plan.model import Kernel
from codegen.spec import Step

STACK_VALUES = 65536  # scratch on a thread's stack up to 256 KB, half of the smallest default stack (macOS); above it, from the heap
PIECE = 4096  # values whose two passes of statistics stay in the first-level cache: 16 KB
SHORT_ROW = 64  # columns below which a row makes too short a loop: a channel is then normalised in one
PARALLEL_ELEMENTS = 32768  # below, waking threads costs more than they save; PyTorch's own grain size


@dataclass(frozen=True)
class Scratch:
    """A thread's array of 4-byte values: its name, the constexpr that holds its size, the size, its type and what it holds."""

    name: str
    size_name: str
    size: int
    c_type: str
    comment: str


@dataclass(frozen=True)
class Pool:
    """One max_pool2d and the operators after it. Identifiers carry `suffix`: "" for the first pooling, "2" for the second, ...

    `source` is the scratch array that it reads, None where values are normalised as they are read; `target` the one it fills, None for y.
    `keeps` names its result for operators that take it once more. `height` and `width` name the constants of the input's size. Windows slide over a row of `row_size` maxima, whose first input column
    stands behind the padding; `clipped`: they may leave the input at the top or the bottom.
    """

    suffix: str
    comment: str
    source: str | None
    target: str | None
    ops: tuple[Apply, ...]
    height: str
    width: str
    row: str
    row_size: int
    clipped: bool
    padded: bool
    margin_left: bool
    dilated: bool
    constants: tuple[Constant, ...]
    keeps: str | None = None


@dataclass(frozen=True)
class CpuKernel(Kernel):
    """What templates/cpu/chain.cpp.j2 reads beyond the common part.

    `after`: the operators between the norm and the first pooling or the end. `flat`: one value per channel at the norm, so that the loop over a
    group's values is one over channels. `buffered`: the group's values are kept as floats in scratch, else they are read where torch left
    them. `pieces`: how many parts the statistics are formed in. `plane`: a channel is normalised once into scratch and then pooled, as
    windows overlap or rows are short. `parallel`: worth more than one thread. `result` is the type of y. Results that operators take once more: `keeps_product` by those
    before the norm, `keeps_norm` by those up to the pooling, and `keeps_input` is the norm's input, which these take as an argument.
    """

    dtype: str = "float32"
    result: str = "float32"
    story: str = ""
    before: tuple[Apply, ...] = ()
    after: tuple[Apply, ...] = ()
    gamma: str | None = None
    beta: str | None = None
    flat: bool = False
    buffered: bool = False
    pieces: int = 1
    pools: tuple[Pool, ...] = ()
    plane: bool = False
    scratch: tuple[Scratch, ...] = ()
    on_heap: bool = False
    parallel: bool = True
    keeps_product: str | None = None
    keeps_input: str | None = None
    keeps_norm: str | None = None

    @property
    def half(self) -> bool:
        return self.dtype != "float32"

    @property
    def storage(self) -> str:
        """The C type of a stored value."""
        return c_type_of(self.dtype)

    @property
    def result_type(self) -> str:
        """That of a value of y."""
        return c_type_of(self.result)

    @property
    def after_ops(self) -> tuple[Apply, ...]:
        return (*self.after, *(op for pool in self.pools for op in pool.ops))

    @property
    def all_ops(self) -> tuple[Apply, ...]:
        return (*self.before, *self.after_ops)

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that it calls."""
        return called(self.all_ops)

    @property
    def before_varies(self) -> bool:
        return any(op.operand and op.operand.per_channel for op in self.before)

    @property
    def reads_channels(self) -> bool:
        return bool(self.gamma or self.beta or any(op.operand and op.operand.per_channel for op in self.all_ops))

    @property
    def pointers(self) -> tuple[str, ...]:
        """C names of the launcher's tensors. The suffix keeps a spec's names apart from the function's own."""
        return tuple(name if name in ("t0", "y") else _pointer(name) for name in self.arguments)

    @property
    def signature(self) -> str:
        return wrapped([f"{self.result_type}* y" if name == "y" else f"const {self.storage}* {name}" for name in self.pointers], "    ")

    @property
    def call(self) -> str:
        return wrapped(list(self.pointers), "              ")

    @property
    def scratch_argument(self) -> str:
        """The last argument of run_group's call: the thread's part of the heap's scratch, where there is one."""
        if not self.on_heap:
            return ""
        return ", scratch" + (" + kScratch * omp_get_thread_num()" if self.parallel else "")


def wrapped(items: list[str], indent: str, width: int = 100) -> str:
    """The items with commas between them, on as many lines as it takes."""
    lines = [""]
    for i, item in enumerate(items):
        if lines[-1] and len(lines[-1]) + len(item) > width:
            lines.append("")
        lines[-1] += item + (", " if i < len(items) - 1 else "")
    return f"\n{indent}".join(line.rstrip() for line in lines)


def c_type_of(dtype: str) -> str:
    return "float" if dtype == "float32" else "std::uint16_t"


def _pointer(key: str) -> str:
    return f"{c_identifier(key)}_data"


def cpu_kernel(spec: FusedSpec, name: str = "chain") -> CpuKernel:
    """The one kernel of the cpu target, `name` its namespace's stem."""
    gamma, beta = map(_pointer, spec.affine) if spec.affine else (None, None)
    before, runs, pool_steps = applies(spec, spec.before_norm), [applies(spec, run) for run in spec.runs], spec.pools
    ops = (*before, *(op for run in runs for op in run))
    half = spec.precision.itemsize == 2
    buffered = half or bool(before)
    plane = bool(pool_steps) and (_overlaps(pool_steps[0]) or pool_steps[0].input_shape[3] < SHORT_ROW)
    pools = tuple(_pool(spec, i, step, runs[i + 1], plane, i == len(pool_steps) - 1) for i, step in enumerate(pool_steps))
    scratch = _scratch(spec, buffered, plane, pools)
    held = sum(item.size for item in scratch)
    elements = math.prod(spec.norm.input_shape)
    pieces = math.ceil(spec.group_size / PIECE)
    keys = tuple(dict.fromkeys((*parameter_keys(before), *spec.affine, *parameter_keys(ops))))
    return CpuKernel(
        name=name, template="cpu/chain.cpp.j2", arguments=("t0", *keys, "y"), constants=_constants(spec, ops, pools, scratch, pieces),
        summary=f"everything after torch's {spec.producer.operator.name}, one group of one sample at a time", notes=_notes(spec, buffered, plane, pools, held),
        dtype=spec.precision.dtype, result=spec.result.dtype, before=before, after=runs[0], gamma=gamma, beta=beta,
        story=_story(spec), flat=spec.spatial == 1 and not pools, buffered=buffered, pieces=pieces, pools=pools, plane=plane, scratch=scratch,
        on_heap=held > STACK_VALUES, parallel=elements >= PARALLEL_ELEMENTS, keeps_product=_kept(spec, spec.before_norm, 0),
        keeps_input=_kept(spec, spec.after_norm, spec.norm.index - 1), keeps_norm=_kept(spec, spec.after_norm, spec.norm.index),
    )  # fmt: skip


def _kept(spec: FusedSpec, steps: tuple[Step, ...], index: int) -> str | None:
    """The C name of the result in place `index`, where some of `steps` take it once more."""
    return kept_name(spec.chain[index]) if index in spec.kept(steps) else None


def _story(spec: FusedSpec) -> str:
    """What happens to a group, in order."""
    words = [*(step.operator.name for step in spec.before_norm), "statistics", "normalise", *(step.operator.name for step in spec.after_norm), "store"]
    return ", ".join(words)


def pool_suffix(index: int) -> str:
    """What tells the names of one pooling from the next's: "", "2", "3", ..."""
    return str(index + 1) if index > 0 else ""


def _overlaps(pool: Step) -> bool:
    """May two windows of a pooling share a row?"""
    return pool.values["dilation"][0] * (pool.values["kernel_size"][0] - 1) >= pool.values["stride"][0]


def _pool(spec: FusedSpec, index: int, step: Step, ops: tuple[Apply, ...], plane: bool, last: bool) -> Pool:
    suffix, previous = pool_suffix(index), pool_suffix(index - 1)
    values = step.values
    (_, _, height, width), (_, _, out_height, out_width) = step.input_shape, step.output_shape
    (kernel_h, kernel_w), (stride_h, stride_w) = values["kernel_size"], values["stride"]
    (padding_h, padding_w), (dilation_h, dilation_w) = values["padding"], values["dilation"]
    stem = f"kPool{suffix}"
    reach = (out_width - 1) * stride_w + dilation_w * (kernel_w - 1) + 1  # columns that windows touch, padding included
    constants = [
        Constant(f"{stem}KernelHeight", str(kernel_h), "max_pool2d's kernel_size"),
        Constant(f"{stem}KernelWidth", str(kernel_w), "max_pool2d's kernel_size"),
        Constant(f"{stem}StrideHeight", str(stride_h), "max_pool2d's stride"),
        Constant(f"{stem}StrideWidth", str(stride_w), "max_pool2d's stride"),
    ]
    if dilation_h != 1 or dilation_w != 1:
        constants.append(Constant(f"{stem}DilationHeight", str(dilation_h), "max_pool2d's dilation"))
        constants.append(Constant(f"{stem}DilationWidth", str(dilation_w), "max_pool2d's dilation"))
    if padding_h:
        constants.append(Constant(f"{stem}PaddingHeight", str(padding_h), "max_pool2d's padding"))
    if padding_w:
        constants.append(Constant(f"{stem}PaddingWidth", str(padding_w), "max_pool2d's padding"))
    constants.append(Constant(f"kPooledHeight{suffix}", str(out_height), _count_text(out_height, height, kernel_h, stride_h, padding_h, dilation_h, values["ceil_mode"])))
    constants.append(Constant(f"kPooledWidth{suffix}", str(out_width), _count_text(out_width, width, kernel_w, stride_w, padding_w, dilation_w, values["ceil_mode"])))
    return Pool(
        suffix=suffix, comment="max_pool2d" + (f" number {suffix}" if suffix else ""),
        source=("plane" if plane else None) if index == 0 else f"pooled{previous}", target=None if last else f"pooled{suffix}", ops=ops,
        height="kHeight" if index == 0 else f"kPooledHeight{previous}", width="kWidth" if index == 0 else f"kPooledWidth{previous}",
        row=f"row_max{suffix}", row_size=max(reach, padding_w + width), clipped=window_of(step).clipped(ROWS), padded=padding_h > 0, margin_left=padding_w > 0,
        dilated=dilation_h != 1 or dilation_w != 1, constants=tuple(constants), keeps=_kept(spec, spec.chain[step.index + 1 :], step.index),
    )  # fmt: skip


def _count_text(count: int, size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> str:
    """How `count` windows come about. Rounded up, PyTorch leaves out a last one that would start behind the input's end, in the padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    text = f"({size}{f' + 2 * {padding}' if padding else ''} - {f'{dilation} * ({kernel} - 1) - 1' if dilation != 1 else kernel}) / {stride} + 1"
    if not ceil_mode:
        return text
    return f"{text}, rounded up" + (", without the window that would start in the padding" if -(-span // stride) + 1 > count else "")


def _scratch(spec: FusedSpec, buffered: bool, plane: bool, pools: tuple[Pool, ...]) -> tuple[Scratch, ...]:
    """A thread's arrays, in the order in which they are filled."""
    items = []
    if buffered:
        items.append(Scratch("value", "kGroupSize", spec.group_size, "float", "the group's values before the norm"))
    if plane:
        items.append(Scratch("plane", "kSpatial", spec.spatial, "std::int32_t", "one channel behind the norm, ordered"))
    for pool, step in zip(pools, spec.pools, strict=True):
        items.append(Scratch(pool.row, f"kRow{pool.suffix}", pool.row_size, "std::int32_t", "maxima over a window's rows, one for each column"))
        if pool.target:
            size = math.prod(step.output_shape[2:])
            items.append(Scratch(pool.target, f"kPooled{pool.suffix}", size, "std::int32_t", "one channel behind a pooling, ordered"))
    return tuple(items)


def _constants(spec: FusedSpec, ops: tuple[Apply, ...], pools: tuple[Pool, ...], scratch: tuple[Scratch, ...], pieces: int) -> tuple[Constant, ...]:
    norm = spec.norm.operator.name
    items = [
        Constant("kBatch", str(spec.batch), "batch"),
        Constant("kNumGroups", str(spec.num_groups), "group_norm's num_groups" if norm == "group_norm" else f"{norm}: groups of a sample"),
        Constant("kGroupChannels", str(spec.group_channels), "channels / kNumGroups"),
    ]
    if len(spec.norm.input_shape) == 4:
        height, width = spec.norm.input_shape[2:]
        if pools:
            items.append(Constant("kHeight", str(height), "rows behind the convolution"))
            items.append(Constant("kWidth", str(width), "columns behind the convolution"))
        items.append(Constant("kSpatial", str(spec.spatial), "kHeight * kWidth" if pools else f"{height} * {width}, behind the convolution"))
    items.append(Constant("kGroupSize", str(spec.group_size), "kGroupChannels" + (" * kSpatial" if len(spec.norm.input_shape) == 4 else "")))
    if pieces > 1:
        items.append(Constant("kPiece", str(PIECE), "values of a piece for statistics: 16 KB, in the first-level cache"))
    items.append(Constant("kEps", repr(spec.norm.values["eps"]), f"{norm}'s eps", "double"))
    for pool in pools:
        items += pool.constants
        items.append(Constant(f"kRow{pool.suffix}", str(pool.row_size), f"columns that windows slide over: {pool.width} and the margin"))
        if pool.target:
            count = f"kPooledHeight{pool.suffix} * kPooledWidth{pool.suffix}"
            size = next(item.size for item in scratch if item.name == pool.target)
            items.append(Constant(f"kPooled{pool.suffix}", str(size), count))
    if pools:
        items.append(Constant("kOutputSize", str(math.prod(spec.output_shape[1:]) // spec.num_groups), "values of y from a group"))
    if sum(item.size for item in scratch) > STACK_VALUES:
        size = -(-4 * sum(item.size for item in scratch) // 64) * 64
        why = f"bytes a thread needs: 4 * ({' + '.join(item.size_name for item in scratch)}), in whole cache lines"
        items.append(Constant("kScratch", str(size), why, "std::size_t"))
    return (*items, *unique_constants(ops))


def _notes(spec: FusedSpec, buffered: bool, plane: bool, pools: tuple[Pool, ...], held: int) -> tuple[str, ...]:
    kb = spec.group_size * 4 / 1024
    notes = [f"a thread takes whole groups: {spec.batch * spec.num_groups} of {spec.group_size} values ({kb:.4g} KB as float)"]
    if buffered:
        notes.append("the group's values stay in a float scratch array, so that operators before the norm are computed once")
    if plane:
        why = "windows overlap" if _overlaps(spec.pools[0]) else "rows are short"
        notes.append(f"{why}: a channel is normalised once into scratch, then pooled")
    elif pools:
        notes.append("windows share no row: values are normalised as they are pooled and the normalised tensor is never written")
    if held:
        notes.append(f"{4 * held / 1024:.4g} KB of scratch a thread, on {'the heap' if held > STACK_VALUES else 'its stack'}")
    return tuple(notes)
