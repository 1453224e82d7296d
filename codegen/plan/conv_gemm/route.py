"""The convolution as a product for mma.sync: windows of pixels, gathered on their way into shared memory, times the filters.

Any stride, padding, dilation and groups. x and the weights are first copied to where a pixel's channels are neighbours (channels_last.cu.j2); the product
(conv_gemm.cu.j2) leaves what torch's convolution would, without the bias, and the norm kernels follow.
"""

from __future__ import annotations

import math

from codegen.ir.fused_form import FusedSpec
from codegen.numerics import ARITHMETICS, Arithmetic
from codegen.ops import Shape
from codegen.plan.conv_gemm.cost import tilings
from codegen.plan.conv_gemm.kernel import PIXELS, channels_last_kernel, conv_gemm_kernel
from codegen.plan.conv_gemm.shape import PIECE_BYTES, Tiling, shape_of
from codegen.plan.floor import floor
from codegen.plan.gemm.companions import WEIGHT_ROWS
from codegen.plan.gemm.tiles import SINGLE
from codegen.plan.model import Buffer, Launch, Plan, Refusal
from codegen.plan.norm.cost import norm_ms
from codegen.plan.norm.flat import split_groups
from codegen.plan.norm.route import plan_norm_of_product
from codegen.plan.route import Choice, Offer, Request, Route
from codegen.plan.shared.slices import SLICES, add_slices_kernel
from codegen.targets import DeviceClass

MATH = {"fp32": "tf32x3", "tf32": "tf32", "fp16": "fp16", "bf16": "bf16"}
LEAST_K = 256  # of tf32x3, zeros of padded channels counted: it leaves out the product of the lower parts, which shorter sums do not average away
INDICES = 1 << 31  # fewer pieces, results and copying threads than an int counts


def arithmetic_of(spec: FusedSpec) -> Arithmetic:
    """How the product is computed at the spec's precision. Raises Refusal for a forced arithmetic that it does not have and for fp32 sums that are too short."""
    wanted = MATH[spec.precision.name]
    served = (None, wanted, "tf32x3") if spec.precision.name == "tf32" else (None, wanted)
    if spec.math not in served:
        raise Refusal(f"math: {spec.math} is not among the convolution's arithmetics for {spec.precision.name} as a product of windows and filters")
    arithmetic = ARITHMETICS[spec.math or wanted]
    if arithmetic.parts == 2 and shape_of(spec).k < LEAST_K:
        raise Refusal(f"sums of {shape_of(spec).k} products are too short for {arithmetic.name}, which leaves out the products of the lower parts")
    return arithmetic


def _check_sizes(spec: FusedSpec, shape: Shape) -> None:
    """Raises Refusal where an index would leave an int."""
    pixels = math.prod(spec.input_shape) // spec.input_shape[1] * shape.groups * shape.pieces
    if max(pixels + math.prod(spec.input_shape[3:]) * shape.pieces, shape.m + max(tile.m for tile in SINGLE), spec.channels * shape.k, pixels * 2) >= INDICES:
        raise Refusal("x, the filters or the result have more pieces than an int counts")


def offers(request: Request) -> tuple[Offer, ...]:
    """Every tile, and K in slices, the least estimated time first. Raises Refusal where the shape or the arithmetic is not served."""
    arithmetic = arithmetic_of(request.form)
    _check_sizes(request.form, shape_of(request.form))
    return tuple(offer_of(request, arithmetic, tiling) for tiling in tilings(request.form, request.device, arithmetic))


def offer_of(request: Request, arithmetic: Arithmetic, tiling: Tiling) -> Offer:
    """The offer of a tiling, the norm's kernels included."""
    tile = tiling.tile
    knobs = (("math", arithmetic.name), ("tile", f"{tile.m}x{tile.n}"), ("slices", tiling.slices))
    return Offer(Choice("conv_gemm", knobs), tiling.ms + norm_ms(request.form, request.device, split_groups(request.form, request.device.sms)), detail=(arithmetic, tiling))


def plan(request: Request, offer: Offer) -> Plan:
    """The plan of an offer: copies, the product, the sum of slices, the norm's kernels."""
    spec, target, device = request.form, request.target, request.device
    arithmetic, choice = offer.detail
    shape = shape_of(spec)
    why = _why(spec, device, arithmetic, choice, shape)
    gemm = conv_gemm_kernel(spec, arithmetic, choice, why)
    tail = plan_norm_of_product(spec, target, device)
    copies = (
        Buffer(PIXELS, (spec.batch, *spec.input_shape[2:], shape.groups * shape.pieces * PIECE_BYTES // spec.precision.itemsize), spec.precision.dtype),
        Buffer(WEIGHT_ROWS, (spec.channels, shape.k), spec.precision.dtype),
        Buffer("t0", spec.producer.output_shape, spec.precision.dtype),
    )
    steps: tuple[Launch, ...] = (Launch(channels_last_kernel(spec)), Launch(gemm, result=SLICES if choice.slices > 1 else "t0"))
    if choice.slices > 1:
        steps += (Launch(add_slices_kernel(spec, choice.slices)),)
        copies += (Buffer(SLICES, (choice.slices, *spec.producer.output_shape), "float32"),)
    rate = device.tf32 if arithmetic.operand == "tf32" else device.fp16
    bound = floor(spec, device, len(arithmetic.products), rate)
    return Plan(spec, target, device, (*steps, *tail.steps), (*copies, *tail.buffers), bound, (*why, *tail.why))


def _why(spec: FusedSpec, device: DeviceClass, arithmetic: Arithmetic, choice: Tiling, shape: Shape) -> tuple[str, ...]:
    tile = choice.tile
    blocks = math.ceil(shape.m / tile.m) * math.ceil(shape.n / tile.n) * choice.slices * shape.groups
    reasons = [
        f"the convolution as a product of {shape.m} windows of {shape.k} values and {shape.n} filters" + (f", {shape.groups} groups" if shape.groups > 1 else ""),
        f"{arithmetic.name}, {arithmetic.summary}: {'asked for' if spec.math else f'what {spec.precision.name} allows'}",
        f"tiles of {tile.m}x{tile.n}: {blocks} blocks on {device.sms} SMs, {choice.ms:.3f} ms estimated with the copies",
    ]
    if choice.slices > 1:
        reasons.append(f"a tile's K is cut into {choice.slices} parts, a block each, for SMs that whole tiles would leave idle; their sums are added in front of the norm kernel")
    return tuple(reasons)


CONV_GEMM = Route(
    "conv_gemm", "the convolution as a product of windows and filters, then the norm kernel", frozenset({"sm_80"}), frozenset({"conv2d"}), offers, plan,
)  # fmt: skip
