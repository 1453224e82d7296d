"""Products whose K several blocks share: the kernels that add their sums, as data. Templates: gemm/add_slices.cu.j2, gemm/end_slices.cu.j2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Constant, applies, called, unique_constants
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import FP32, Precision
from codegen.plan.model import Buffer, Kernel, Launch
from codegen.plan.shared.pointers import Pointer, PointerKernel
from codegen.plan.shared.values import LoadedOperand, ValueFunction, finish_product

SLICES = "sliced_sums"
ADD_THREADS = 256  # of a block


@dataclass(frozen=True)
class AddSlicesKernel(Kernel):
    """Sums of parts of K, `width` values a thread, which become the storage type; `ragged`: the last block has threads without any."""

    width: int = 4
    ragged: bool = False


@dataclass(frozen=True)
class EndSlicesKernel(PointerKernel):
    """The same at the end of a chain without a norm: `finish` applies the bias and the operators to every sum."""

    width: int = 4
    ragged: bool = False
    functions: tuple[str, ...] = ()  # the C functions that it calls
    finish: ValueFunction | None = None
    storage: Precision = FP32

    @property
    def operands(self) -> tuple[LoadedOperand, ...]:
        return self.finish.operands if self.finish else ()

    @property
    def vectors(self) -> tuple[LoadedOperand, ...]:
        """The parameters of a value for each channel."""
        return tuple(operand for operand in self.operands if operand.per_channel)

    @property
    def scalars(self) -> tuple[LoadedOperand, ...]:
        return tuple(operand for operand in self.operands if not operand.per_channel)

    @property
    def loads_single(self) -> bool:
        """Whether a thread loads one value of the storage type at a time."""
        return bool(self.vectors) and self.width == 1

    @property
    def accesses(self) -> tuple[tuple[Precision, list[int], list[int]], ...]:
        """(type, widths of loads, widths of stores) of the sums and of the chain's tensors."""
        if self.storage.dtype == FP32.dtype:
            return ((FP32, [self.width], [self.width]),)
        return (FP32, [self.width], []), (self.storage, [self.width] if self.vectors else [], [self.width])


def add_slices_kernel(spec: FusedSpec, slices: int) -> AddSlicesKernel:
    """The kernel that adds what the blocks of a tile left, in their order."""
    values = math.prod(spec.producer.output_shape)
    width = math.gcd(4, values)
    constants, blocks = _share(spec, slices, width)
    return AddSlicesKernel(
        name="add_slices", template="gemm/add_slices.cu.j2", arguments=(SLICES, "t0"), constants=constants, summary=f"adds the sums of {slices} parts of K",
        threads=ADD_THREADS, blocks=blocks, max_registers=64, width=width, ragged=values // width % ADD_THREADS != 0,
    )  # fmt: skip


def end_slices_kernel(spec: FusedSpec, slices: int) -> EndSlicesKernel:
    """The same of a chain without a norm, which ends here: bias, then operators."""
    values = math.prod(spec.producer.output_shape)
    width = math.gcd(4, spec.channels)
    constants, blocks = _share(spec, slices, width)
    items, finish = applies(spec, spec.before_norm), finish_product(spec)
    operands = finish.operands if finish else ()
    if any(operand.per_channel for operand in operands):
        constants += (Constant("kOutFeatures", str(spec.channels), "values of a row of y"),)
    pointers = (Pointer("float", "slices"), *(Pointer(spec.precision.c_type, operand.pointer) for operand in operands), Pointer(spec.result.c_type, "y", True))
    return EndSlicesKernel(
        name="end_slices", template="gemm/end_slices.cu.j2", arguments=(SLICES, *(operand.key for operand in operands), "y"),
        constants=(*constants, *unique_constants(items)), summary=f"adds the sums of {slices} parts of K and ends the chain",
        threads=ADD_THREADS, blocks=blocks, max_registers=64, pointers=pointers, width=width, ragged=values // width % ADD_THREADS != 0, functions=called(items),
        finish=finish, storage=spec.precision,
    )  # fmt: skip


def _share(spec: FusedSpec, slices: int, width: int) -> tuple[tuple[Constant, ...], int]:
    """The constants of sums in `slices` parts, and the blocks that add them."""
    values = math.prod(spec.producer.output_shape)
    blocks = math.ceil(values // width / ADD_THREADS)
    constants = (
        Constant("kSlices", str(slices), "parts of K, each with its own sums"),
        Constant("kWidth", str(width), "values of a thread"),
        Constant("kVectors", str(values // width), ("batch * out_features" if spec.spatial == 1 else f"{values} results") + " / kWidth"),
        Constant("kThreads", str(ADD_THREADS), "threads of a block"),
        Constant("kBlocks", str(blocks), "kVectors / kThreads, rounded up"),
    )
    return constants, blocks


def sliced_product(spec: FusedSpec, kernel: Kernel, slices: int) -> tuple[tuple[Launch, Launch], tuple[Buffer, ...]]:
    """The launches of a GEMM whose blocks share K and of the kernel that adds their sums, and the buffers in between.

    The sums become "t0", without the bias; of a chain without a norm they become "y", the result.
    """
    shape, adding = spec.producer.output_shape, add_slices_kernel if spec.has_norm else end_slices_kernel
    buffers = (Buffer(SLICES, (slices, *shape), "float32"), *((Buffer("t0", shape, spec.precision.dtype),) if spec.has_norm else ()))
    return (Launch(kernel, result=SLICES), Launch(adding(spec, slices))), buffers
