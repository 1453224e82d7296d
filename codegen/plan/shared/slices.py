"""Products whose K several blocks share: the kernel that adds their sums, as data. Template: gemm/add_slices.cu.j2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Constant
from codegen.plan.model import Buffer, Kernel, Launch
from codegen.spec import Spec

SLICES = "sliced_sums"
ADD_THREADS = 256  # of a block


@dataclass(frozen=True)
class AddSlicesKernel(Kernel):
    """Sums of parts of K, `width` values a thread, which become the storage type; `ragged`: the last block has threads without any."""

    width: int = 4
    ragged: bool = False


def add_slices_kernel(spec: Spec, slices: int) -> AddSlicesKernel:
    """The kernel that adds what the blocks of a tile left, in their order."""
    values = math.prod(spec.producer.output_shape)
    width = math.gcd(4, values)
    blocks = math.ceil(values // width / ADD_THREADS)
    constants = (
        Constant("kSlices", str(slices), "parts of K, each with its own sums"),
        Constant("kWidth", str(width), "values of a thread"),
        Constant("kVectors", str(values // width), ("batch * out_features" if spec.spatial == 1 else f"{values} results") + " / kWidth"),
        Constant("kThreads", str(ADD_THREADS), "threads of a block"),
        Constant("kBlocks", str(blocks), "kVectors / kThreads, rounded up"),
    )
    return AddSlicesKernel(
        name="add_slices", template="gemm/add_slices.cu.j2", arguments=(SLICES, "t0"), constants=constants, summary=f"adds the sums of {slices} parts of K",
        threads=ADD_THREADS, blocks=blocks, max_registers=64, width=width, ragged=values // width % ADD_THREADS != 0,
    )  # fmt: skip


def sliced_product(spec: Spec, kernel: Kernel, slices: int) -> tuple[tuple[Launch, Launch], tuple[Buffer, Buffer]]:
    """The launches of a GEMM whose blocks share K and of the kernel that adds their sums into "t0", without the bias, and both buffers."""
    sums = Buffer(SLICES, (slices, *spec.producer.output_shape), "float32")
    return (Launch(kernel, result=SLICES), Launch(add_slices_kernel(spec, slices))), (sums, Buffer("t0", spec.producer.output_shape, spec.precision.dtype))
