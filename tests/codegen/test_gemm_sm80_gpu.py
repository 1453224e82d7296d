"""The sm_80 GEMM on a GPU, through emitted packages and the runtime, against float64: awkward sizes, every arithmetic, adversarial data."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from codegen.package import make_package  # noqa: E402
from tests.codegen.gemm_cases import ARITHMETICS, CASES  # noqa: E402
from tests.codegen.gemm_promise import (  # noqa: E402
    allowed_error,
    assert_specials_agree,
    relative,
    with_a_large_value,
    with_outliers,
    with_specials,
)
from tests.codegen.gpu_models import built_models, exact, tf32_result  # noqa: E402

pytestmark = pytest.mark.gpu


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


@contextlib.contextmanager
def outliers(built, kind):
    """Data of `kind`: "uniform", or with one channel of every group far above the others: "outlier_first" or "outlier" (see with_outliers)."""
    case, precision, _, ours, eager = built
    kept = eager.gemm.weight.clone()
    if kind != "uniform":
        for model in (ours, eager):
            model.gemm.weight.copy_(with_outliers(kept, case, precision, kind == "outlier_first"))
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
    rounded = tf32_result(eager, x, "gemm") if precision == "tf32" else None
    allowed = allowed_error(case, precision, arithmetic, eager(x), rounded, reference)
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
    x = with_specials(draw(ours, case, torch.randn, 3), precision)
    kept = eager.gemm.weight[0, 2].clone()
    try:
        for model in (ours, eager):
            model.gemm.weight[0, 2] = float("inf")
        y, expected = ours(x), eager(x)
    finally:
        for model in (ours, eager):
            model.gemm.weight[0, 2] = kept
    assert_specials_agree(y, expected, precision)


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
    x = with_a_large_value(draw(ours, case, torch.randn))
    kept = eager.gemm.weight.clone()
    try:
        for model in (ours, eager):
            model.gemm.weight[:, 0] = 0.0
        y, reference = ours(x), exact(eager, x)
    finally:
        for model in (ours, eager):
            model.gemm.weight.copy_(kept)
    assert relative(y[0], reference[0]) <= (1e-4 if arithmetic == "bf16x3" else 1e-5)
