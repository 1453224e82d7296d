"""The one-pass convolution on a GPU, through emitted packages and the runtime, against float64: the family, precisions, adversarial data."""

import math
from dataclasses import asdict

import pytest

torch = pytest.importorskip("torch")

from codegen.plan.conv_sm90a.geometry import Layout  # noqa: E402
from codegen.plan.conv_sm90a.route import CONV_SM90A  # noqa: E402
from codegen.targets import DEVICES  # noqa: E402
from tests.codegen.conv_cases import FAMILY, chain  # noqa: E402
from tests.codegen.forced import planned_by  # noqa: E402
from tests.codegen.gemm_promise import relative  # noqa: E402
from tests.codegen.gpu_models import built_convolution, exact, tf32_result  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"),
]

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
SHORT = ("pointwise", "empty_strips")  # their sums are too short for fp32 on tensor cores
CASES = {
    **{name: (data, None) for name, data in FAMILY.items()},
    "two_rounds": (chain(size=128, batch=140, after=({"clamp": {"min": 0.0, "max": 1.0}},)), None),
    "loads": (chain(size=128, batch=70, after=("relu",)), Layout(2, 2, bulk=False)),
    "cluster_4": (chain(size=64, batch=70, pool=2), Layout(4, 2)),
    "empty_strips": (chain(size=(105, 120), kernel=1, groups=4, pool=0, cout=16, batch=60), Layout(8, 2, bulk=False)),
}


@pytest.fixture(scope="module", params=[(n, p) for n in CASES for p in PRECISIONS if p != "fp32" or n not in SHORT], ids="-".join)
def built(request, tmp_path_factory):
    name, precision = request.param
    data, layout = CASES[name]
    folder = tmp_path_factory.mktemp(f"{name}_{precision}")
    knobs = asdict(layout) if layout else {}
    return built_convolution(folder, name, data, precision, lambda spec: planned_by(CONV_SM90A, spec, DEVICES["h100"], name == "two_rounds", **knobs))


@pytest.fixture(autouse=True)
def full_precision_eager(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def draw(spec, ours, kind=torch.randn, seed=2):
    return kind(spec.input_shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(next(ours.parameters()).dtype)


def allowed(spec, eager, x, reference):
    """What the precision promises on this input."""
    if spec.precision.name == "tf32":
        return max(1.1 * relative(tf32_result(eager, x, "conv"), reference), 3e-7)
    return max((1.1 if spec.precision.name == "fp32" else 1.05) * relative(eager(x), reference), 3e-7)


@pytest.mark.parametrize("kind", ["rand", "randn", "offset", "dark", "zeros", "outlier first", "outlier last", "bright first row", "beyond fp16 first"])
@torch.no_grad()
def test_error_is_within_the_promise(built, kind):
    spec, ours, eager = built
    x = draw(spec, ours, torch.rand if kind == "rand" else torch.randn)
    if kind == "offset":
        x = x + 10
    elif kind == "dark":
        x[:, :, : spec.input_shape[2] // 2] = 0.0
    elif kind == "outlier first":
        x[:, :, 0, 0] = 900.0
    elif kind == "outlier last":
        x[:, :, -1, -1] = 900.0
    elif kind == "bright first row":
        x[:, :, 0] += 900.0
    elif kind == "beyond fp16 first":
        if spec.precision.name == "fp16":
            pytest.skip("fp16 cannot hold it")
        x[:2, :, 0, 0] = 1e6
    elif kind == "zeros":
        x = torch.zeros_like(x)
    reference = exact(eager, x)
    assert relative(ours(x), reference) <= allowed(spec, eager, x, reference)


@torch.no_grad()
def test_error_on_constant_images_is_within_the_promise(built):
    """An image has one value a channel but for its edges, so its error is the luck of a few roundings: of many images together it is not."""
    spec, ours, eager = built
    draws = 12
    errors, limits = [], []
    for value in torch.linspace(0.3, 1.7, draws):
        x = torch.full_like(draw(spec, ours), float(value))
        reference = exact(eager, x)
        errors.append(relative(ours(x), reference))
        limits.append(allowed(spec, eager, x, reference))
    error, limit = (math.hypot(*values) for values in (errors, limits))
    # Each of n values is off by a rounding, so both means scatter by 1 / sqrt(2 n), their ratio by 1 / sqrt(n): three times that is luck.
    assert error <= limit * (1 + 3 / math.sqrt(draws * spec.channels))


@torch.no_grad()
def test_runs_are_bitwise_equal(built):
    spec, ours, _ = built
    x = draw(spec, ours)
    first = ours(x)
    assert all(torch.equal(first.view(torch.uint8), ours(x).view(torch.uint8)) for _ in range(3))


@torch.no_grad()
def test_infinity_and_nan_come_out_where_they_do_in_pytorch(built):
    spec, ours, eager = built
    x = draw(spec, ours, seed=3)
    x[0, 0, 3, 3] = float("nan")
    x[1, -1, 5, 0] = float("inf")
    x[2, 0, 5, 1], x[2, -1, 6, 2] = float("inf"), float("-inf")
    x[3, 0, -1, -1] = float("-inf")
    y, expected = ours(x), eager(x)
    assert torch.equal(torch.isnan(y), torch.isnan(expected))
    assert torch.equal(torch.isinf(y), torch.isinf(expected))
    finite = torch.isfinite(expected)
    tolerance = {"fp32": 1e-3, "tf32": 5e-2, "fp16": 2e-2, "bf16": 2e-1}[spec.precision.name]
    torch.testing.assert_close(y[finite].float(), expected[finite].float(), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_samples_that_fp16_cannot_hold_keep_their_accuracy(built):
    spec, ours, eager = built
    if spec.precision.itemsize == 2:
        pytest.skip("operands of 16 bits are taken as they are")
    x = draw(spec, ours)
    x[0] *= 1e5
    x[1] *= 1e-6
    x[2, 0, 4, 4] = 3e4
    x[3] *= 1e12
    x[4] = 0.0
    reference = exact(eager, x)
    y = ours(x)
    for sample in range(6):
        one = slice(sample, sample + 1)
        single = relative(eager(x)[one], reference[one])
        limit = 5e-7
        if spec.precision.name == "tf32":  # behind a bound a few values decide, which rounded operands carry from one end to the other
            limit = max(2e-3, 2 * relative(tf32_result(eager, x, "conv")[one], reference[one]))
        assert relative(y[one], reference[one]) <= max(1.1 * single, limit)


@torch.no_grad()
def test_weights_of_any_size_keep_their_accuracy(built):
    spec, ours, eager = built
    if spec.precision.name == "fp16":
        pytest.skip("fp16 cannot hold them")
    x = draw(spec, ours)
    kept = ours.conv.weight.clone()
    try:
        ours.conv.weight[:2] *= 1e-12
        ours.conv.weight[2:4] *= 1e7
        eager.conv.weight.copy_(ours.conv.weight)
        reference = exact(eager, x)
        error, limit = relative(ours(x), reference), allowed(spec, eager, x, reference)
    finally:
        ours.conv.weight.copy_(kept)
        eager.conv.weight.copy_(kept)
    assert error <= limit
