"""What norm kernels do to one value: the chain's operators as C functions of a value and of its channel's parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from codegen.ir.apply import Apply, Constant, applies, called, kept_name, unique_constants
from codegen.ir.operand import Operand, c_identifier
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import Precision, float_literal
from codegen.ops import Kind
from codegen.plan.model import Kernel
from codegen.spec import Spec, Step

VECTOR_BYTES = 16  # the widest access of a thread
REGISTERS_PER_SM = 65536


@dataclass(frozen=True, kw_only=True)
class LoadedOperand(Operand):
    """An operand that a kernel loads: `value` is the C name of one channel's value."""

    value: str


@dataclass(frozen=True)
class ValueFunction:
    """`float <name>(float v, <arguments>, <the operands' values>)`: `lines` are its C statements on v."""

    name: str
    comment: str
    lines: tuple[str, ...]
    operands: tuple[LoadedOperand, ...]
    arguments: tuple[str, ...] = ()

    @property
    def parameters(self) -> list[str]:
        """C parameters."""
        return ["float v", *(f"float {name}" for name in (*self.arguments, *(operand.value for operand in self.operands)))]

    def call(self, value: str) -> str:
        """C: the function's result for a value, where each operand's lies in the variable of its name."""
        return f"{self.name}({', '.join([value, *(operand.value for operand in self.operands)])})"

    def vector_parameters(self, width: str, c_type: str) -> list[str]:
        """C parameters of the same function on `width` consecutive values, the first being the group's `index`-th."""
        place = ["int first_channel", "int index"] if self.operands else []
        pointers = (f"const {c_type}* {operand.pointer}" for operand in self.operands)
        return [f"float (&v)[{width}]", *place, *(f"float {name}" for name in self.arguments), *pointers]


@dataclass(frozen=True, kw_only=True)
class NormKernel(Kernel):
    """What all norm kernels share.

    `entry` is the CUDA kernel's name; `input` and `output` the C names of its tensors, the same one in place; `operands` its parameter
    tensors in the launcher's order; `width` the values of one access, and `io_widths` all widths for which load and store are needed;
    `channel_mode` says how a vector of values meets its parameters: "vector" (one channel each), "uniform" (one channel for all) or
    "element" (found value by value). `groups` counts the groups of all samples, `min_blocks` the blocks that must fit on an SM. `storage` is the
    type of the parameters, `source` and `result` those of the input and the output.
    """

    entry: str
    input: str
    output: str
    operands: tuple[LoadedOperand, ...]
    applied: tuple[Apply, ...]
    prepare: ValueFunction | None
    finish: ValueFunction | None
    width: int
    io_widths: tuple[int, ...]
    channel_mode: str
    groups: int
    min_blocks: int
    storage: Precision
    source: Precision
    result: Precision

    statistics: str = ""  # "reads", "writes" or nothing: what the kernel does with a buffer of statistics

    @property
    def functions(self) -> tuple[str, ...]:
        """The C functions that it calls."""
        return called(self.applied)

    @property
    def loads_parameters(self) -> bool:
        """Are parameters loaded as many at a time as values?"""
        return self.channel_mode == "vector" and any(operand.per_channel for operand in self.operands)

    def accesses(self, loads: Sequence[int], stores: Sequence[int], parameters: Sequence[int]) -> list[tuple[Precision, list[int], list[int]]]:
        """(type, widths of loads, widths of stores) of every type that is accessed, from the widths for the input, the output and the parameters."""
        found: dict[str, tuple[Precision, set[int], set[int]]] = {}
        for precision, place, widths in ((self.source, 1, loads), (self.storage, 1, parameters), (self.result, 2, stores)):
            if widths:
                found.setdefault(precision.dtype, (precision, set(), set()))[place].update(widths)
        return [(precision, sorted(own), sorted(given)) for precision, own, given in found.values()]

    @property
    def in_place(self) -> bool:
        return self.input == self.output

    def device_parameters(self, c_type: str) -> list[str]:
        """Parameters of the CUDA kernel. In place, input and output are one tensor, and nothing may assume that it does not change."""
        first = f"{self.result.c_type}* {self.input}" if self.in_place else f"const {self.source.c_type}* __restrict__ {self.input}"
        listed = [first, *(f"const {c_type}* __restrict__ {operand.pointer}" for operand in self.operands)]
        if not self.in_place and self.statistics != "writes":
            listed.append(f"{self.result.c_type}* __restrict__ {self.output}")
        return listed + {"reads": ["const float4* __restrict__ statistics"], "writes": ["float4* __restrict__ statistics"]}.get(self.statistics, [])

    def host_parameters(self, c_type: str) -> list[str]:
        """The same pointers as the launcher takes them."""
        return [parameter.replace("__restrict__ ", "") for parameter in self.device_parameters(c_type)]

    @property
    def names(self) -> list[str]:
        """What the launcher hands to the kernel."""
        return [parameter.split()[-1] for parameter in self.host_parameters("float")]


def vector_width(precision: Precision, *lengths: int) -> int:
    """Values of the widest access to a tensor of that type that every one of `lengths` is a multiple of."""
    return math.gcd(VECTOR_BYTES // precision.itemsize, *lengths)


def tensor_types(spec: FusedSpec, source: str) -> dict[str, Precision]:
    """The types of a kernel's tensors. The input has that of y where it lies there."""
    return dict(storage=spec.precision, source=spec.result if source == "y" else spec.precision, result=spec.result)


def channel_mode(spatial: int, width: int) -> str:
    return "vector" if spatial == 1 else "uniform" if spatial % width == 0 else "element"


def norm_operands(spec: FusedSpec) -> tuple[LoadedOperand, ...]:
    """gamma and beta, or nothing where the norm is not affine."""
    return tuple(LoadedOperand(key, f"p_{name}", value=f"c_{name}") for key, name in zip(spec.affine, ("gamma", "beta"), strict=False))


def named_operand(key: str, per_channel: bool = True) -> LoadedOperand:
    """The operand of a state_dict key. A prefix keeps every name apart from the kernels' own, a suffix from the norm's gamma and beta."""
    word = c_identifier(key)
    word += "_" if word.rstrip("_") in ("gamma", "beta") else ""
    return LoadedOperand(key, f"p_{word}", per_channel, value=f"c_{word}")


def loaded(operand: Operand) -> LoadedOperand:
    """The parameter that an applied operator takes, as kernels load it."""
    return named_operand(operand.key, operand.per_channel)


def statements(spec: Spec, steps: Sequence[Step]) -> tuple[str, ...]:
    """The element-wise steps as C statements on v; what a later one takes once more is kept, a pooling's result too."""
    items, kept = iter(applies(spec, steps)), spec.kept(steps)
    lines: list[str] = []
    for step in steps:
        if step.operator.kind is Kind.ELEMENTWISE:
            item = next(items)
            lines.append(f"v = {item.apply('v', loaded(item.operand).value if item.operand else None)};  // {item.comment}")
        if step.index in kept:
            lines.append(keep_line(step))
    return tuple(lines)


def keep_line(step: Step, value: str = "v") -> str:
    """C: the step's result, kept for an operator that takes it once more."""
    return f"const float {kept_name(step)} = {value};"


def kept_in_front(spec: Spec, steps: Sequence[Step], first: int, value: str = "v") -> tuple[str, ...]:
    """The line that keeps the result of the step in place `first` where `steps`, which come after it, take it once more."""
    return (keep_line(spec.chain[first], value),) if first in spec.kept(steps) else ()


def _operands(items: Sequence[Apply]) -> tuple[LoadedOperand, ...]:
    return tuple(loaded(item.operand) for item in items if item.operand)


def prepare_function(spec: FusedSpec, apply_before: bool, producer_bias: str | None) -> ValueFunction | None:
    """From the producer's value to the norm's input; None where they are the same."""
    items = applies(spec, spec.before_norm) if apply_before else ()
    bias = named_operand(producer_bias) if producer_bias else None
    steps = spec.before_norm if apply_before else ()
    lines = (f"v = v + {bias.value};  // {spec.producer.operator.name}'s bias",) if bias else ()
    lines += kept_in_front(spec, steps, 0) + statements(spec, steps)
    operands = ((bias,) if bias else ()) + _operands(items)
    return ValueFunction("prepare_value", "The norm's input, from the producer's value.", lines, operands) if lines else None


def finish_product(spec: FusedSpec) -> ValueFunction | None:
    """From a sum to the result of a product without a norm: bias and operators; None where there are none."""
    function = prepare_function(spec, True, spec.bias)
    return function and replace(function, name="finish", comment="The operators behind the product, for one value.")


def normalise_lines(spec: FusedSpec) -> tuple[str, ...]:
    affine = ("v = fmaf(v, c_gamma, c_beta);",) if norm_operands(spec) else ()
    kept_input = kept_in_front(spec, spec.after_norm, spec.norm.index - 1)
    return (*kept_input, "v = (__fsub_rn(v, mean) - mean_rest) * rstd;", *affine, *kept_in_front(spec, spec.after_norm, spec.norm.index))


def finish_function(spec: FusedSpec, steps: Sequence[Step], name: str, comment: str) -> ValueFunction:
    """The norm, whose mean is `mean` + `mean_rest`, and the element-wise `steps` after it."""
    items = applies(spec, steps)
    return ValueFunction(name, comment, normalise_lines(spec) + statements(spec, steps), norm_operands(spec) + _operands(items), ("mean", "mean_rest", "rstd"))


def follow_function(spec: Spec, steps: Sequence[Step], name: str, comment: str) -> ValueFunction | None:
    """The element-wise `steps` alone; None where there are none."""
    items = applies(spec, steps)
    if not items:
        return None
    return ValueFunction(name, comment, kept_in_front(spec, steps, steps[0].index - 1) + statements(spec, steps), _operands(items))


def chain_items(spec: FusedSpec, apply_before: bool) -> tuple[Apply, ...]:
    """Every element-wise operator that the kernel applies."""
    return applies(spec, (*(spec.before_norm if apply_before else ()), *spec.after_norm))


def unique_operands(*functions: ValueFunction | None) -> tuple[LoadedOperand, ...]:
    """The operands of all functions in order, each once."""
    return tuple({operand.key: operand for function in functions if function for operand in function.operands}.values())


def shape_constants(spec: FusedSpec, operands: Sequence[LoadedOperand] | None = None) -> list[Constant]:
    """The group's shape, with derivations: what a kernel with these parameter tensors needs to find channels, or all of it."""
    by_channel = operands is None or any(operand.per_channel for operand in operands)
    listed = []
    if operands is None or operands:
        listed.append(Constant("kNumGroups", str(spec.num_groups), "groups of a sample"))
        listed.append(Constant("kGroupChannels", str(spec.group_channels), f"{spec.channels} channels / kNumGroups"))
    if spec.spatial == 1 and operands is not None:  # each value is a channel of its own
        return [*listed, Constant("kGroupSize", str(spec.group_size), "values of a group: one contiguous span")]
    positions = " x ".join(str(size) for size in spec.norm.input_shape[2:])
    if by_channel:
        listed.append(Constant("kPlane", str(spec.spatial), f"{positions} positions of a channel"))
    return [*listed, Constant("kGroupSize", str(spec.group_size), f"{spec.group_channels} channels x {positions}: one contiguous span")]


def norm_constants(spec: FusedSpec, items: Sequence[Apply]) -> list[Constant]:
    return [
        Constant("kEps", float_literal(spec.norm.values["eps"]), f"{spec.norm.operator.name}'s eps, added to the variance", "float"),
        *unique_constants(items),
    ]


def register_limit(threads: int, min_blocks: int) -> int:
    """Registers a thread may use so that `min_blocks` blocks fit on an SM: each of its four parts has a quarter of them, for whole warps."""
    warps = -(-threads // 32) * min_blocks
    return min(255, REGISTERS_PER_SM // 4 // (32 * -(-warps // 4)) // 8 * 8)


def blocks_within(threads: int, registers: int) -> int:
    """Blocks that fit on an SM, at least one, where a thread has `registers`."""
    return max(1, REGISTERS_PER_SM // 4 // (32 * registers) * 4 // -(-threads // 32))


def shares(results: int, round_results: int, wanted: int) -> tuple[int, int]:
    """(blocks that share a group of `results`, results of each): about `wanted` blocks, whole rounds of `round_results` each but for the last."""
    share = -(-results // (max(1, wanted) * round_results)) * round_results
    return -(-results // share), share


def share_constants(slices: int, share: int) -> tuple[Constant, Constant]:
    """What norm/parts.cuh.j2's share_of_group reads."""
    return (
        Constant("kSlices", str(slices), "blocks that share a group"),
        Constant("kSliceSize", str(share), "kPooledSize / kSlices, rounded up to whole rounds of a block: results of a block"),
    )


def tensor_names(source: str) -> tuple[str, str]:
    """C names of the input and the output tensor: one name in place."""
    return ("values", "values") if source == "y" else ("input", "output")


def launch_arguments(source: str, operands: Sequence[LoadedOperand]) -> tuple[str, ...]:
    """The launcher's pointers: the input, the parameters, the output (once, first, in place)."""
    keys = tuple(operand.key for operand in operands)
    return ("y", *keys) if source == "y" else (source, *keys, "y")
