"""The convolution as a product on Hopper, through emitted packages and the runtime, against float64: every form, and data that halves cannot carry.

The forms of one product alone, in less than a minute: `-k one_product`.
"""

import copy
import tempfile
from pathlib import Path

import pytest
import yaml

torch = pytest.importorskip("torch")

from codegen.manifest import Package  # noqa: E402
from codegen.plan.conv_product_sm90a.route import CONV_PRODUCT_SM90A  # noqa: E402
from codegen.plan.product_norm.route import CONV_PRODUCT_NORM  # noqa: E402
from codegen.spec import load_spec  # noqa: E402
from codegen.targets import DEVICES  # noqa: E402
from tests.codegen.conv_product_cases import CASES, NORMED  # noqa: E402
from tests.codegen.forced import request_for  # noqa: E402
from tests.codegen.gemm_promise import relative  # noqa: E402
from tests.codegen.gpu_models import built_models, tf32_result  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"),
]


@pytest.fixture(autouse=True)
def full_precision_eager(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def asked_for(folder, name, precision, debug):
    """(spec, route, request) of a case."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump((CASES | {"normed": NORMED})[name] | {"name": f"product_{name}"}, sort_keys=False))
    spec = load_spec(path, precision)
    route = CONV_PRODUCT_NORM if name == "normed" else CONV_PRODUCT_SM90A
    return spec, route, request_for(route, spec, DEVICES["h200"], debug=debug)


def offered(name):
    """How many offers a case has."""
    with tempfile.TemporaryDirectory() as folder:
        _, route, asked = asked_for(Path(folder), name, "fp32", debug=False)
        return len(route.offers(asked))


@pytest.fixture(scope="module", params=[(name, number) for name in CASES for number in range(offered(name))], ids=lambda item: f"{item[0]}-{item[1]}")
def built(request, tmp_path_factory):
    """(spec, ModelNew, Model) of a case by each of its offers."""
    name, number = request.param
    folder = tmp_path_factory.mktemp(f"{name}_{number}")
    spec, route, asked = asked_for(folder, name, "fp32", debug=number == 0)
    return spec, *built_models(Package(spec, (route.plan(asked, route.offers(asked)[number]),)), folder)


def draw(spec, kind=torch.randn):
    return kind(spec.input_shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda")


def exact(eager, x):
    """The result in float64, on the processor: its sums meet no value outside their windows."""
    return copy.deepcopy(eager).cpu().double()(x.cpu().double()).cuda()


def kinds_of(spec):
    x = draw(spec)
    outlier = x * 1e-4
    outlier.view(-1)[7] = 1e7
    dark = x.clone()
    dark[0] *= 1e-30
    return {
        "randn": x, "rand": draw(spec, torch.rand), "sparse": torch.relu(x - 1.5), "tiny": x * 1e-30, "outlier": outlier, "dark sample": dark,
    }  # fmt: skip


@torch.no_grad()
def test_error_is_within_the_promise(built):
    spec, ours, eager = built
    for kind, x in kinds_of(spec).items():
        reference = exact(eager, x)
        limit = max(1.1 * relative(eager(x), reference), 3e-7)
        for sample in range(spec.batch):
            error = float((ours(x)[sample].double() - reference[sample]).norm() / reference[sample].norm().clamp_min(1e-300))
            assert error <= 1.5 * limit, (kind, sample)
        assert relative(ours(x), reference) <= limit, kind


@torch.no_grad()
def test_infinity_and_nan_come_out_where_they_belong(built):
    spec, ours, eager = built
    x = draw(spec)
    x[0].view(-1)[11] = float("inf")
    x[-1].view(-1)[-5] = float("nan")
    reference, y = exact(eager, x), ours(x)
    assert torch.equal(torch.isnan(y), torch.isnan(reference)) and torch.equal(torch.isinf(y), torch.isinf(reference))
    finite = torch.isfinite(reference)
    assert relative(y[finite], reference[finite]) <= 5e-7


@torch.no_grad()
def test_filters_of_any_size_keep_their_accuracy(built):
    """One of them 1e20 times as large, one as small, one with a value that dwarfs all others."""
    spec, ours, eager = built
    models = [copy.deepcopy(model) for model in (ours, eager)]
    channels = int(spec.chain[0].operator.transposed)
    for model in models:
        weight = model.conv.weight.transpose(0, channels)
        weight[0] *= 1e20
        weight[1] *= 1e-20
        weight[(2,) + (0,) * (weight.ndim - 1)] = 1e9
    x = draw(spec)
    reference, y, theirs = exact(models[1], x), models[0](x), models[1](x)
    for channel in range(4):
        size = reference[:, channel].norm().clamp_min(1e-300)
        error, allowed = ((v[:, channel].double() - reference[:, channel]).norm() / size for v in (y, theirs))
        assert float(error) <= max(2 * float(allowed), 4e-7), channel


@torch.no_grad()
def test_nothing_comes_of_zeros(built):
    spec, ours, eager = built
    x = torch.zeros(spec.input_shape, device="cuda")
    assert torch.allclose(ours(x), eager(x), rtol=1e-6, atol=0.0)


@torch.no_grad()
def test_runs_are_bitwise_equal(built):
    spec, ours, _ = built
    x = draw(spec)
    first = ours(x)
    assert all(torch.equal(first, ours(x)) for _ in range(3))


# One product: (precision, case, row of taps). Between them every way to lay out taps, phases, pairs of results and single ones. The first of each precision is a
# debug build, whose waits are bounded.
ONE_PRODUCT = (
    ("fp16", "padded", "shared"), ("fp16", "phases", "shared"), ("fp16", "eight_phases", "shared"), ("fp16", "all_at_once", "apart"), ("fp16", "few_channels", "folded"),
    ("fp16", "normed", "shared"), ("bf16", "three_axes", "shared"), ("bf16", "odd_width", "shared"),
    ("tf32", "padded", "shared"), ("tf32", "pairs_of_taps", "shared"), ("tf32", "eight_phases_few", "apart"),
    ("fp16", "padded", "runs"), ("fp16", "phases", "runs"), ("fp16", "few_results", "runs"), ("bf16", "flipped_few", "runs"), ("bf16", "eight_phases_few", "runs"),
    ("bf16", "odd_width", "runs"), ("tf32", "few_channels", "runs"), ("tf32", "three_axes", "runs"),
)  # fmt: skip


@pytest.fixture(scope="module", params=ONE_PRODUCT, ids="-".join)
def one_product(request, tmp_path_factory):
    """(spec, ModelNew, Model) of a case with one product."""
    precision, name, row = request.param
    folder = tmp_path_factory.mktemp(f"{name}_{precision}_{row}")
    first = next(case for case in ONE_PRODUCT if case[0] == precision)
    spec, route, asked = asked_for(folder, name, precision, debug=request.param == first)
    found = next(offer for offer in route.offers(asked) if offer.choice.settings["row"] == row)
    return spec, *built_models(Package(spec, (route.plan(asked, found),)), folder)


def stored(spec, x):
    return x.to(getattr(torch, spec.precision.dtype))


@torch.no_grad()
def test_one_product_keeps_the_promise(one_product):
    spec, ours, eager = one_product
    for kind, x in kinds_of(spec).items():
        x = stored(spec, x)
        if spec.precision.itemsize == 2 and not bool(torch.isfinite(eager(x)).all()):
            continue  # beyond fp16's range
        reference, y = exact(eager, x), ours(x)
        if not bool(reference.to(x.dtype).any()):
            assert torch.equal(y, torch.zeros_like(y)), kind  # below fp16's range
            continue
        if spec.precision.name == "tf32":
            limit = max(1.1 * relative(tf32_result(copy.deepcopy(eager).cpu(), x.cpu(), "conv").cuda(), reference), 3e-7)
        else:
            limit = 1.05 * max(relative(eager(x), reference), relative(reference.to(x.dtype), reference))
        assert y.dtype == x.dtype and relative(y, reference) <= limit, kind


@torch.no_grad()
def test_one_product_keeps_infinities_nans_and_zeros_and_repeats_itself(one_product):
    spec, ours, eager = one_product
    x = stored(spec, draw(spec))
    first = ours(x)
    assert all(torch.equal(first, ours(x)) for _ in range(20))
    x[0].view(-1)[11] = float("inf")
    x[-1].view(-1)[-5] = float("nan")
    reference, y = exact(eager, x).to(x.dtype), ours(x)
    assert torch.equal(torch.isnan(y), torch.isnan(reference)) and torch.equal(torch.isinf(y), torch.isinf(reference))
    zeros = torch.zeros_like(x)  # a norm of equal values is 0, of which eager leaves what the mean rounds off
    torch.testing.assert_close(ours(zeros), exact(eager, zeros).to(x.dtype), rtol=0.0, atol=1e-12)
