"""What a linear chain's error may be (docs/numerics.md), and data that break careless kernels: for the sm_80 GEMM's tests, on a GPU and in the emulation."""

from __future__ import annotations

import torch

from tests.codegen.gemm_cases import Case

# Beside eager PyTorch's own error.
ALLOWED = {"fp16": 1.05, "bf16": 1.05, "fp32": 1.1}


def relative(y: torch.Tensor, reference: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the reference."""
    return float((y.double() - reference).norm() / reference.norm())


def round_to_tf32(t: torch.Tensor) -> torch.Tensor:
    return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def allowed_error(case: Case, precision: str, arithmetic: str, eager: torch.Tensor, rounded: torch.Tensor | None, reference: torch.Tensor) -> float:
    """The largest relative error that keeps the promise.

    `eager`: PyTorch's result at the precision (fp32 for tf32); `rounded`: the result in float64 of operands rounded to TF32, which tf32 alone needs.
    A bf16 split is asked for, not promised.
    """
    if precision == "tf32":
        return max(1.1 * relative(rounded, reference), 1.1 * relative(eager, reference), 3e-7)
    peer = max(relative(eager, reference), relative(reference.to(eager.dtype), reference))
    allowed = 2e-5 if arithmetic == "bf16x3" else max(ALLOWED[precision] * peer, 3e-7)
    if case.in_features < 256 and arithmetic.endswith("x3"):
        allowed = max(allowed, 2e-6)  # the planner takes fused multiply-adds here: short sums do not average the dropped product away
    return allowed


def with_outliers(weight: torch.Tensor, case: Case, precision: str, first: bool) -> torch.Tensor:
    """`weight` with one channel of every group (the first, or one inside) larger than the others by several orders of magnitude.

    Its weights are made positive, as x shall be: the sum does not cancel, so that its rounding is small beside every other channel's value.
    In fp16 the large sum stays below its largest value, 65504, or PyTorch's own result is not a number: the sum is near
    in_features * 0.5 (mean of x) * 0.5 / sqrt(in_features) (mean of the weights) = sqrt(in_features) / 4 times the factor.
    """
    width = case.out_features // (case.groups or 1)
    factor = {"fp32": 1e6, "tf32": 1e6, "bf16": 1e3, "fp16": min(1e3, 4e4 / (case.in_features**0.5 / 4))}[precision]
    row = slice(0 if first else width // 3, None, width)
    made = weight.clone()
    made[row] = made[row].abs() * factor
    return made


def with_specials(x: torch.Tensor, precision: str) -> torch.Tensor:
    """`x` of at least 8 rows with one row for each kind of value that a product may lose: NaN, an infinity, two that cancel, zeros, and in fp32 values
    that 16-bit parts cannot hold."""
    made = x.clone()
    made[0, 3] = float("nan")
    made[1, 5] = float("inf")
    made[2, 5], made[2, 6] = float("inf"), float("-inf")
    made[3] = 0.0
    if precision == "fp32":
        made[4] *= 1e-30
        made[5, 7] = 1e8
        made[6] *= 1e12
    return made


def assert_specials_agree(y: torch.Tensor, expected: torch.Tensor, precision: str, normed: bool = True) -> None:
    """NaN and infinities stand where PyTorch has them, the other values are close: of rows that no norm scales, beside the row's largest."""
    assert torch.equal(torch.isnan(y), torch.isnan(expected))
    assert torch.equal(torch.isinf(y), torch.isinf(expected))
    finite = torch.isfinite(expected)
    tolerance = {"fp32": 1e-3, "tf32": 5e-2, "fp16": 2e-2, "bf16": 1e-1}[precision]
    if not normed:
        largest = expected.float().where(finite, 0.0).abs().amax(1, keepdim=True).clamp_min(1.0)
        y, expected = y.float() / largest, expected.float() / largest
    torch.testing.assert_close(y[finite].float(), expected[finite].float(), rtol=tolerance, atol=tolerance)


def with_a_large_value(x: torch.Tensor) -> torch.Tensor:
    """`x` with a first row of few values, the first of them so large that 16-bit parts which hold it lose the others."""
    made = x.clone()
    made[0] = 0.0
    made[0, :5] = torch.tensor([1.7e12, 1.3, 2.7, -0.9, 0.4])
    return made
