"""The sm_80 GEMM on a GPU, through emitted packages and the runtime, against float64: awkward sizes, every arithmetic, adversarial data."""

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")

from codegen.emit import make_package  # noqa: E402
from tests.codegen.gemm_cases import ARITHMETICS, CASES  # noqa: E402
from tests.codegen.gpu_models import built_models  # noqa: E402

pytestmark = pytest.mark.gpu

# What the promise allows beside eager PyTorch's own error (docs/numerics.md); a bf16 split is asked for, not promised.
ALLOWED = {"fp16": 1.05, "bf16": 1.05, "fp32": 1.1}


@pytest.fixture(scope="module", params=[(c, *a) for c in CASES for a in ARITHMETICS], ids=lambda item: f"{item[0].name}-{item[2]}")
def built(request, tmp_path_factory):
    """(case, precision, arithmetic, ModelNew and Model of the emitted package with the same random parameters on the GPU)."""
    case, precision, arithmetic = request.param
    folder = tmp_path_factory.mktemp(f"{case.name}_{arithmetic}")
    spec = case.spec(folder, precision, arithmetic)
    return case, precision, arithmetic, *built_models(make_package(spec, ("sm_80",)), folder)


def draw(ours, case, kind=torch.rand, seed=2):
    dtype = next(ours.parameters()).dtype
    return kind(case.batch, case.in_features, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def exact(eager, x):
    """The chain in float64."""
    with torch.no_grad():
        return copy.deepcopy(eager).double()(x.double())


def relative(y, reference):
    return float((y.double() - reference).norm() / reference.norm())


def round_to_tf32(t):
    return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@contextlib.contextmanager
def outliers(built, kind):
    """Makes one channel of every group (the first, or one inside) larger than the others by several orders of magnitude.

    Its weights are made positive, as x is: the sum does not cancel, so that its rounding is small beside every other channel's value.
    In fp16 the large sum stays below its largest value, 65504, or PyTorch's own result is not a number: the sum is near
    in_features * 0.5 (mean of x) * 0.5 / sqrt(in_features) (mean of the weights) = sqrt(in_features) / 4 times the factor.
    """
    case, precision, _, ours, eager = built
    kept = eager.gemm.weight.clone()
    width = case.out_features // case.groups
    factor = {"fp32": 1e6, "tf32": 1e6, "bf16": 1e3, "fp16": min(1e3, 4e4 / (case.in_features**0.5 / 4))}[precision]
    if kind != "uniform":
        for model in (ours, eager):
            row = slice(0 if kind == "outlier_first" else width // 3, None, width)
            model.gemm.weight[row] = model.gemm.weight[row].abs() * factor
    try:
        yield
    finally:
        for model in (ours, eager):
            model.gemm.weight.copy_(kept)


@pytest.mark.parametrize("kind", ["uniform", "outlier_first", "outlier"])
@torch.no_grad()
def test_error_is_within_the_promise(built, kind):
    with outliers(built, kind):
        check_error(*built)


def check_error(case, precision, arithmetic, ours, eager):
    x = draw(ours, case)
    y, reference = ours(x), exact(eager, x)
    assert y.shape == reference.shape and y.dtype == x.dtype
    error = relative(y, reference)
    if precision == "tf32":
        rounded = copy.deepcopy(eager)
        rounded.gemm.weight.copy_(round_to_tf32(rounded.gemm.weight))
        allowed = max(1.1 * relative(exact(rounded, round_to_tf32(x)), reference), 1.1 * relative(eager(x), reference), 3e-7)
    else:
        peer = max(relative(eager(x), reference), relative(reference.to(y.dtype), reference))
        allowed = max(ALLOWED[precision] * peer, 3e-7)
    if arithmetic == "bf16x3":
        allowed = 2e-5
    if case.in_features < 256 and arithmetic.endswith("x3"):
        allowed = max(allowed, 2e-6)  # the planner takes fused multiply-adds here: short sums do not average the dropped product away
    assert error <= allowed, (error, allowed)


@torch.no_grad()
def test_runs_are_bitwise_equal(built):
    case, _, _, ours, _ = built
    x = draw(ours, case)
    assert torch.equal(ours(x).view(torch.uint8), ours(x).view(torch.uint8))


@torch.no_grad()
def test_infinity_and_nan_come_out_where_they_do_in_pytorch(built):
    case, precision, _, ours, eager = built
    if case.batch < 8:
        pytest.skip("needs a row for each kind of value")
    x = draw(ours, case, torch.randn, 3)
    x[0, 3] = float("nan")
    x[1, 5] = float("inf")
    x[2, 5], x[2, 6] = float("inf"), float("-inf")
    x[3] = 0.0
    if precision == "fp32":
        x[4] *= 1e-30
        x[5, 7] = 1e8
        x[6] *= 1e12
    kept = eager.gemm.weight[0, 2].clone()
    try:
        for model in (ours, eager):
            model.gemm.weight[0, 2] = float("inf")
        y, expected = ours(x), eager(x)
    finally:
        for model in (ours, eager):
            model.gemm.weight[0, 2] = kept
    assert torch.equal(torch.isnan(y), torch.isnan(expected))
    assert torch.equal(torch.isinf(y), torch.isinf(expected))
    finite = torch.isfinite(expected)
    tolerance = {"fp32": 1e-3, "tf32": 5e-2, "fp16": 2e-2, "bf16": 1e-1}[precision]
    torch.testing.assert_close(y[finite].float(), expected[finite].float(), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_a_constant_group_gives_beta_exactly(built):
    case, _, _, ours, _ = built
    width = case.out_features // case.groups
    kept = {key: value.clone() for key, value in ours.state_dict().items()}
    ours.gemm.weight[:width] = 50 * ours.gemm.weight[0].clone()
    for parameter in (ours.gemm.bias, getattr(ours, "bias", None)):
        if parameter is not None:
            parameter[:width] = parameter[0].clone()
    try:
        y = ours(draw(ours, case))
        # Zero weights and biases give a constant group without any rounding.
        ours.gemm.weight[:width] = 0.0
        expected = ours(draw(ours, case))
    finally:
        ours.load_state_dict(kept)
    assert torch.equal(y[:, :width], expected[:, :width])


@torch.no_grad()
def test_small_values_count_where_a_weight_cancels_the_large_one(built):
    case, precision, arithmetic, ours, eager = built
    if precision != "fp32":
        pytest.skip("values of fp32's range")
    x = draw(ours, case, torch.randn)
    x[0] = 0.0
    x[0, :5] = torch.tensor([1.7e12, 1.3, 2.7, -0.9, 0.4])
    kept = eager.gemm.weight.clone()
    try:
        for model in (ours, eager):
            model.gemm.weight[:, 0] = 0.0
        y, reference = ours(x), exact(eager, x)
    finally:
        for model in (ours, eager):
            model.gemm.weight.copy_(kept)
    assert relative(y[0], reference[0]) <= (1e-4 if arithmetic == "bf16x3" else 1e-5)
