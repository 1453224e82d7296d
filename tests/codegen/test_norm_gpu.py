"""Norm kernels on a GPU against float64: awkward shapes, all storage types, adversarial data."""

import pytest

torch = pytest.importorskip("torch")

from tests.codegen import norm_harness as harness  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or harness.find_nvcc() is None, reason="needs a CUDA GPU and nvcc")]


@pytest.fixture(scope="module", params=[(c, p) for c in harness.ALL_CASES for p in ("fp32", "fp16", "bf16")], ids=lambda item: f"{item[0].name}-{item[1]}")
def built(request, tmp_path_factory):
    case, precision = request.param
    folder = tmp_path_factory.mktemp(case.name)
    plan = case.plan(folder, precision)
    major, minor = torch.cuda.get_device_capability()
    generator = torch.Generator("cuda").manual_seed(1)
    return case, plan, harness.build(plan, folder, f"sm_{major}{minor}"), harness.parameters(plan.spec, generator), generator


def both(built, kind):
    """(y, eager y of the storage type, float64 y) for data of a kind."""
    case, plan, library, values, generator = built
    result = harness.draw(plan.spec, kind, generator)
    y = harness.compute(case, plan, library, result, values)
    again = harness.compute(case, plan, library, result, values)
    assert torch.equal(y.view(torch.uint8), again.view(torch.uint8)), "two runs differ"
    options = dict(from_bias=case.size is not None and not case.in_place, from_before=not case.in_place)
    eager = harness.reference(plan.spec, result, values, dtype=harness.DTYPES[plan.spec.precision.dtype], **options)
    return y, eager, harness.reference(plan.spec, result, values, dtype=torch.float64, **options)


@pytest.mark.parametrize("kind", ["normal", "offset", "outlier_first", "outlier"])
def test_error_is_within_the_promise(built, kind):
    y, eager, exact = both(built, kind)
    spec = built[1].spec
    error, peer = harness.relative_error(y, exact), harness.relative_error(eager, exact)
    rounding = 2.0 ** -(spec.precision.mantissa_bits + 1)
    allowed = max(1.1 * peer, 3e-7) if spec.precision.itemsize == 4 else max(1.05 * peer, 1.05 * rounding)
    assert error <= allowed, (error, peer)


def test_groups_whose_squares_exceed_fp32_are_normalised(built):
    spec = built[1].spec
    if spec.precision.name == "fp16":
        return  # whose values stay below 65504
    y, _, exact = both(built, "beyond")
    rounding = max(2.0 ** -(spec.precision.mantissa_bits + 1), 5e-7)
    assert torch.isfinite(y).all() and harness.relative_error(y, exact) <= 1.05 * rounding


def test_a_constant_group_gives_beta(built):
    case, plan, library, values, generator = built
    spec = plan.spec
    if case.size is not None and not case.in_place or any(step.parameters for step in spec.before_norm):
        values = {key: torch.zeros_like(v) if key in ("conv.bias", "bias") else v for key, v in values.items()}
    result = harness.draw(spec, "constant", generator)
    y = harness.compute(case, plan, library, result, values)
    # Where the norm's input is constant its output is beta; an input of zeros gives that without rounding.
    zeros = torch.zeros_like(result)
    expected = harness.compute(case, plan, library, zeros, values)
    assert torch.equal(y, expected)


def test_nan_and_infinity_go_where_pytorch_sends_them(built):
    y, eager, exact = both(built, "special")
    assert torch.equal(torch.isnan(y), torch.isnan(exact))
    finite = ~torch.isnan(exact)
    tolerance = 4e-3 if y.dtype == torch.float16 else 3e-2 if y.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(y.double()[finite], exact[finite], rtol=tolerance, atol=tolerance)
