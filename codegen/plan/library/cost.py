"""How long torch's own GEMM or convolution takes, estimated, with the norm kernel behind it."""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.ir.flop import producer_flop
from codegen.plan.norm.cost import norm_ms
from codegen.plan.norm.flat import split_groups
from codegen.plan.shared.fitted import CONV_PRODUCTS, LEVEL2_PEERS, LIBRARY_SHAPES, MACHINE, SWEEP, Fitted
from codegen.targets import DeviceClass

# The vendor's half-precision GEMM by the alignment that its kernels need of K and N (8, 2 or 1 values): shares of the tensor cores' and of the memory's
# rate, and microseconds for a thousand k that a block goes through.
ALIGNED = {
    8: (Fitted(1.0, "share", LIBRARY_SHAPES), Fitted(0.72, "share", LIBRARY_SHAPES), Fitted(0.0, "us", LIBRARY_SHAPES)),
    2: (Fitted(0.14, "share", LIBRARY_SHAPES), Fitted(0.38, "share", LIBRARY_SHAPES), Fitted(2.5, "us", LIBRARY_SHAPES)),
    1: (Fitted(0.067, "share", LIBRARY_SHAPES), Fitted(0.125, "share", LIBRARY_SHAPES), Fitted(12.0, "us", LIBRARY_SHAPES)),
}
SERIAL_MS = Fitted(0.05, "ms", LIBRARY_SHAPES)  # that a block goes through k, at most: beyond, several share it
START_MS = Fitted(0.0065, "ms", LIBRARY_SHAPES)
FEW_ROWS = 8  # of x, up to which operands out of step go through a kernel for vectors
FEW_ROWS_SHARE = Fitted(0.28, "share", LIBRARY_SHAPES)  # of the memory's rate, which that kernel reaches

SINGLES = {  # the vendor's GEMM of fp32 operands, by whether TF32 is allowed: its rate as a share of the card's
    "fp32": Fitted(0.76, "share", MACHINE),
    "tf32": Fitted(0.77, "share", MACHINE),
}

# The library's convolution.
CORES_SHARE = Fitted(0.3, "share", SWEEP)  # of the CUDA cores' rate, which serve fp32 and few channels
TENSOR_SHARE = Fitted(0.35, "share", SWEEP)  # of the tensor cores' rate
TURNED_SHARE = Fitted(0.5, "share", SWEEP)  # of the memory's rate, at which the tensor cores' operands and results are turned around
FEW_CHANNELS = 8  # of x, up to which the CUDA cores serve
WHOLE_CHANNELS = 32  # of the result, below which tensor cores are partly idle
CORES_US = Fitted(6.5, "us", SWEEP)  # at least, on CUDA cores
CORES_K_US = Fitted(0.04, "us", SWEEP)  # for each k there
TENSOR_US = {4: Fitted(8.0, "us", SWEEP), 2: Fitted(14.0, "us", SWEEP)}  # at least, on tensor cores, by the bytes of a value
TENSOR_K_US = Fitted(0.003, "us", SWEEP)  # for each k there
GROUP_US = Fitted(7.0, "us", SWEEP)  # of each of conv2d's groups there
ODD_HALVES = Fitted(1.7, "ratio", SWEEP)  # times as long where channels, in or out, are no whole pieces of 16 bytes

# The same without a norm, in fp32 and for few channels: shares of the CUDA cores' rate, and of the memory's rate at which results leave on top.
FORWARD_SHARE = Fitted(0.62, "share", CONV_PRODUCTS)
BACK_SHARES = {  # of a transposed convolution, by whether its stride is 1, and its rank
    (True, 2): Fitted(0.85, "share", CONV_PRODUCTS),
    (True, 3): Fitted(0.3, "share", CONV_PRODUCTS),
    (False, 2): Fitted(0.16, "share", CONV_PRODUCTS),
    (False, 3): Fitted(0.14, "share", CONV_PRODUCTS),
}
LEAVING_SHARE = Fitted(0.2, "share", CONV_PRODUCTS)
# The same on tensor cores, by whether it is transposed: shares of their rate in TF32, which values of 16 bits are taken to have too.
TENSOR_SHARES = {False: Fitted(0.33, "share", LEVEL2_PEERS), True: Fitted(0.21, "share", LEVEL2_PEERS)}


def linear_ms(spec: FusedSpec, device: DeviceClass) -> float:
    """Milliseconds of the vendor's half-precision GEMM followed by the norm kernel: two launches, its result written and read, y written."""
    tail_bytes = math.prod(spec.output_shape) * (spec.precision.itemsize + spec.result.itemsize)
    return gemm_ms(spec, device) + tail_bytes / (device.hbm * 1e6) + device.launch_us / 1e3


def product_ms(spec: FusedSpec, device: DeviceClass) -> float:
    """Milliseconds of the library's product, then of one pass over its result where operators follow."""
    tail_bytes = 2 * math.prod(spec.output_shape) * spec.precision.itemsize
    product = plain_convolution_ms(spec, device) if spec.producer.operator.rank else gemm_ms(spec, device)
    return product + (tail_bytes / (device.hbm * 1e6) + device.launch_us / 1e3 if len(spec.chain) > 1 else 0.0)


def gemm_ms(spec: FusedSpec, device: DeviceClass) -> float:
    """Milliseconds of the vendor's GEMM alone, its launch included."""
    (m, k), n = spec.input_shape, spec.channels
    if spec.precision.itemsize == 4:
        rate = {"fp32": device.fp32, "tf32": device.tf32}[spec.precision.name] * SINGLES[spec.precision.name].on(device)
        return START_MS.on(device) + max(2.0 * m * n * k / (rate * 1e9), (m * k + n * k + m * n) * 4 / (device.hbm * 1e6))
    aligned = next(alignment for alignment in ALIGNED if math.gcd(k, n) % alignment == 0)
    rate, share, serial_ns = (number.on(device) for number in ALIGNED[aligned])
    multiply = 2.0 * m * n * k / (device.fp16 * (device.library_share if aligned == 8 else 1.0) * rate * 1e9)
    moved = (m * k + n * k + m * n) * spec.precision.itemsize
    if m <= FEW_ROWS:
        share = max(share, FEW_ROWS_SHARE.on(device))
    return START_MS.on(device) + max(multiply, moved / (device.hbm * share * 1e6), min(k * serial_ns / 1e6, SERIAL_MS.on(device)))


def plain_convolution_ms(spec: FusedSpec, device: DeviceClass) -> float:
    """Milliseconds of torch's convolution or transposed convolution of any rank, with its bias."""
    producer, rank, leaving = spec.producer, max(2, spec.producer.operator.rank), device.hbm * LEAVING_SHARE.on(device) * 1e6
    transposed, itemsize = producer.operator.transposed, spec.precision.itemsize
    left = math.prod(producer.output_shape) * itemsize / leaving
    if spec.precision.name != "fp32" and spec.input_shape[1] > FEW_CHANNELS and producer.values["groups"] == 1:
        rate = (device.fp16 if itemsize == 2 else device.tf32) * TENSOR_SHARES[transposed].on(device)
        filled = math.ceil(spec.input_shape[1] / WHOLE_CHANNELS) * WHOLE_CHANNELS / spec.input_shape[1]
        turned = 2 * math.prod(spec.input_shape) * itemsize / (device.hbm * TURNED_SHARE.on(device) * 1e6) if itemsize == 2 else 0.0
        return TENSOR_US[itemsize].on(device) / 1e3 + producer_flop(producer) * filled / (rate * 1e9) + turned + left
    if transposed:
        share, filled = BACK_SHARES[max(producer.values["stride"]) == 1, rank], 1.0
    else:
        share, filled = FORWARD_SHARE, math.ceil(spec.channels / WHOLE_CHANNELS) * WHOLE_CHANNELS / spec.channels
    multiply = producer_flop(producer) * filled / (device.fp32 * share.on(device) * 1e9)
    return CORES_US.on(device) / 1e3 + multiply + left


def conv_ms(spec: FusedSpec, device: DeviceClass) -> float:
    """Milliseconds of torch's convolution, then of the norm kernel, which reads its result and writes y."""
    return convolution_ms(spec, device) + norm_ms(spec, device, split_groups(spec, device.sms))


def convolution_ms(spec: FusedSpec, device: DeviceClass) -> float:
    """Milliseconds of torch's convolution alone."""
    result, weight = spec.producer.output_shape, spec.producer.parameters[0].shape
    k, itemsize = math.prod(weight[1:]), spec.precision.itemsize
    moved = (math.prod(spec.input_shape) + math.prod(result)) * itemsize / (device.hbm * TURNED_SHARE.on(device) * 1e6)
    groups = spec.producer.values["groups"]
    channels = result[1] // groups
    flop = 2.0 * math.prod(result) * k * math.ceil(channels / WHOLE_CHANNELS) * WHOLE_CHANNELS / channels
    if spec.precision.name == "fp32" or spec.input_shape[1] <= FEW_CHANNELS:
        conv = CORES_US.on(device) / 1e3 + max(flop / (device.fp32 * CORES_SHARE.on(device) * 1e9), moved, CORES_K_US.on(device) * k * groups / 1e3)
    else:
        rate = device.tf32 if spec.precision.name == "tf32" else device.fp16
        start = TENSOR_US[itemsize].on(device) + (GROUP_US.on(device) * groups if groups > 1 else 0.0)
        odd = ODD_HALVES.on(device) if itemsize == 2 and math.gcd(weight[1], channels) % 8 else 1.0
        multiply = flop / (rate * TENSOR_SHARE.on(device) * 1e9)
        conv = (start + TENSOR_K_US.on(device) * k) / 1e3 + odd * (multiply + (2 if itemsize == 2 else 1) * moved)
    return conv
