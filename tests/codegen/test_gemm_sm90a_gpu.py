"""The Hopper GEMM on a GPU, through emitted packages and the runtime, against float64: layouts, tails, precisions, adversarial data."""

from dataclasses import replace

import pytest
import yaml

torch = pytest.importorskip("torch")

from codegen.manifest import Package  # noqa: E402
from codegen.plan.gemm_sm90a.layout import Layout  # noqa: E402
from codegen.targets import DEVICES  # noqa: E402
from tests.codegen.forced import hopper_gemm  # noqa: E402
from tests.codegen.gemm_promise import relative  # noqa: E402
from tests.codegen.gpu_models import built_models, exact, tf32_result  # noqa: E402
from tests.fused import load_fused  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"),
]

MISH = ({"add": {"name": "bias", "shape": None}}, "hardtanh", "mish")
WEIGHT, INPUT, ALONE = (2, "weight"), (2, "input"), (1, "none")
# name, (batch, in_features, out_features, groups), before the norm, layout, prepack
CASES = [
    ("waits_in_place", (1024, 512, 4096, 8), (), None, False),
    ("several_units", (4096, 256, 4096, 8), (), None, False),
    ("waits_before_the_norm", (1024, 512, 4096, 8), MISH, None, False),
    ("strips", (1024, 1024, 4096, 128), MISH, None, False),
    ("pieces", (1024, 1024, 4096, 64), ("silu", *MISH), None, False),
    ("tails_weight", (200, 336, 320, 10), MISH, Layout(*WEIGHT, 1, "strips"), False),
    ("tails_input", (200, 336, 320, 5), MISH, Layout(*INPUT, 1, "strips"), False),
    ("alone", (130, 256, 640, 5), (), Layout(*ALONE, 1, "strips"), False),
    ("lanes", (200, 336, 328, 41), (), Layout(*INPUT, 1, "lanes"), False),
    ("norm_kernel", (200, 336, 320, 16), MISH, Layout(*WEIGHT, 1, "none"), False),
    ("slices", (200, 848, 320, 16), MISH, Layout(*WEIGHT, 1, "none", slices=3), False),
    ("slices_alone", (130, 1104, 333, 9), MISH, Layout(*ALONE, 1, "none", slices=2), False),
    ("exchange", (512, 512, 4096, 4), (), Layout(*INPUT, 4, "strips", exchange=True), False),
    ("prepared", (200, 336, 320, 10), MISH, Layout(*WEIGHT, 1, "strips"), True),
    ("odd_rows", (1024, 1031, 4096, 8), MISH, None, False),
    ("rows_of_eight", (300, 1000, 4096, 32), (), Layout(*WEIGHT, 1, "strips"), False),
    ("prepared_odd", (200, 339, 320, 10), (), Layout(*WEIGHT, 1, "strips"), True),
]
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
ALLOWED = {"fp16": 1.05, "bf16": 1.05, "fp32": 1.1, "tf32": 1.1}


def usable(name, precision):
    wide = precision in ("fp16", "bf16")
    if name in ("prepared", "odd_rows", "rows_of_eight", "prepared_odd"):
        return not wide  # halves need no preparation, and no conversion helps their rows
    return name != "exchange" or precision == "fp32"  # four tiles of 128 channels on each side


@pytest.fixture(scope="module", params=[(c, p) for c in CASES for p in PRECISIONS if usable(c[0], p)], ids=lambda item: f"{item[0][0]}-{item[1]}")
def built(request, tmp_path_factory):
    """(case's shape, precision, ModelNew and Model of the emitted package with the same random parameters on the GPU)."""
    (name, shape, before, layout, prepack), precision = request.param
    batch, k, n, groups = shape
    folder = tmp_path_factory.mktemp(f"{name}_{precision}")
    operators = [{"add": {"name": "bias", "shape": [n]}} if isinstance(op, dict) else op for op in before]
    chain = [{"linear": {"name": "gemm", "in_features": k, "out_features": n}}, *operators, {"group_norm": {"name": "norm", "num_groups": groups}}, "silu"]
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": f"layer_{name}", "batch": batch, "precision": precision, "chain": chain}, sort_keys=False))
    spec = replace(load_fused(path), prepack=prepack)
    plan = hopper_gemm(spec, DEVICES["h100"], layout=layout)
    return shape, precision, *built_models(Package(spec, (plan,)), folder)


def draw(ours, shape, kind=torch.rand, seed=2):
    dtype = next(ours.parameters()).dtype
    return kind(shape[0], shape[1], generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def peer(precision, eager, x):
    """What the precision's promise compares with."""
    return tf32_result(eager, x, "gemm") if precision == "tf32" else eager(x)


@torch.no_grad()
def test_error_is_within_the_promise(built):
    shape, precision, ours, eager = built
    x = draw(ours, shape)
    y, reference = ours(x), exact(eager, x)
    assert relative(y, reference) <= max(ALLOWED[precision] * relative(peer(precision, eager, x), reference), 3e-7)


@pytest.mark.parametrize("kind", ["outlier first", "outlier last", "far mean"])
@torch.no_grad()
def test_one_far_value_or_a_far_mean_spoils_nothing(built, kind):
    """The promise holds for the values beside the outliers alone, too: there it is lost where statistics start from an outlier."""
    shape, precision, ours, eager = built
    width = shape[2] // shape[3]
    kept = {key: value.clone() for key, value in ours.state_dict().items()}
    others = torch.ones(shape[2], dtype=torch.bool, device="cuda")
    try:
        if kind == "far mean":
            ours.gemm.weight *= 0.02
            ours.gemm.bias += 1e4  # tf32's rounded products are exact beside the float32 rounding of sums this far from zero
        else:
            at = 0 if kind == "outlier first" else width - 1
            ours.gemm.bias[at::width] = 3e4 if precision == "fp16" else 1e6
            others[at::width] = False
        eager.load_state_dict(ours.state_dict())
        x = draw(ours, shape, torch.randn)
        y, reference, peers = ours(x), exact(eager, x), (peer(precision, eager, x), eager(x))
    finally:
        ours.load_state_dict(kept)
        eager.load_state_dict(kept)
    for part in (slice(None), others):
        allowed = max(ALLOWED[precision] * max(relative(other[:, part], reference[:, part]) for other in peers), 3e-7)
        assert relative(y[:, part], reference[:, part]) <= allowed


@torch.no_grad()
def test_a_constant_group_is_constant(built):
    """Equal rows of W give equal sums wherever in a tile they are computed, so that the norm returns beta and not amplified rounding."""
    shape, precision, ours, eager = built
    kept = {key: value.clone() for key, value in ours.state_dict().items()}
    try:
        for key in ("gemm.weight", "gemm.bias", "bias"):
            if key in kept:
                ours.get_parameter(key).copy_(kept[key][:1].expand_as(kept[key]))
        eager.load_state_dict(ours.state_dict())
        x = draw(ours, shape, torch.randn)
        y, reference = ours(x), exact(eager, x)
    finally:
        ours.load_state_dict(kept)
        eager.load_state_dict(kept)
    assert relative(y, reference) <= {"fp16": 2.0**-11, "bf16": 2.0**-8}.get(precision, 3e-7)
    if precision in ("fp16", "bf16"):
        assert torch.equal(y, y[:1].expand_as(y)), "a constant's mean is not the constant, and other samples have other ones"


@torch.no_grad()
def test_runs_are_bitwise_equal(built):
    shape, _, ours, _ = built
    x = draw(ours, shape)
    assert torch.equal(ours(x).view(torch.uint8), ours(x).view(torch.uint8))


@torch.no_grad()
def test_infinity_and_nan_come_out_where_they_do_in_pytorch(built):
    shape, precision, ours, eager = built
    x = draw(ours, shape, torch.randn, 3)
    x[0, 3] = float("nan")
    x[1, 5] = float("inf")
    x[2, 5], x[2, 6] = float("inf"), float("-inf")
    x[3] = 0.0
    y, expected = ours(x), eager(x)
    assert torch.equal(torch.isnan(y), torch.isnan(expected))
    finite = torch.isfinite(expected)
    tolerance = {"fp32": 1e-3, "tf32": 5e-2, "fp16": 2e-2, "bf16": 1e-1}[precision]
    torch.testing.assert_close(y[finite].float(), expected[finite].float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("change", ["infinite", "large", "small", "vanishing", "wide", "faint", "sparse"])
@torch.no_grad()
def test_fp32_data_that_halves_cannot_carry_keep_their_accuracy(built, change):
    shape, precision, ours, eager = built
    if precision != "fp32":
        pytest.skip("a promise of fp32")
    x, weight = draw(ours, shape), ours.gemm.weight
    kept = weight.clone()
    try:
        if change == "infinite":
            weight[7, 3], weight[-1, 0] = float("inf"), float("nan")
        elif change == "large":
            weight[5] *= 1e6
            weight[9, 1] = 1e30
        elif change == "small":
            weight[:70] *= 1e-6
            weight[80] = 0.0
        elif change == "vanishing":
            weight[3] *= 1e-16
        elif change == "faint":  # beside a value that meets only zeros; the results keep their size, which operators before the norm may cut off
            x *= 2.0**20
            x[:, -1] = 0.0
            weight *= 2.0**-20
            weight[:70, -1] = 4.0
        elif change == "sparse":  # zeros are not faint
            weight[:, ::3] = 0.0
        else:
            x[3] *= 1e-20
            x[4] *= 1e15
            x[6] = 0.0
            x[8] *= 1e-38
        eager.gemm.weight.copy_(weight)
        y, single, reference = ours(x), eager(x), exact(eager, x)
    finally:
        weight.copy_(kept)
        eager.gemm.weight.copy_(kept)
    assert torch.equal(torch.isnan(y), torch.isnan(single))
    good = torch.isfinite(single) & torch.isfinite(reference)
    allowed = max(1.1 * relative(single[good], reference[good]), 3e-7)
    assert relative(y[good], reference[good]) <= allowed


@torch.no_grad()
def test_a_constant_group_gives_beta_exactly(built):
    shape, _, ours, _ = built
    width = shape[2] // shape[3]
    kept = {key: value.clone() for key, value in ours.state_dict().items()}
    try:
        ours.gemm.weight[:width] = 0.0
        for parameter in (ours.gemm.bias, getattr(ours, "bias", None)):
            if parameter is not None:
                parameter[:width] = 0.3
        y = ours(draw(ours, shape))
        expected = torch.nn.functional.silu(ours.norm.bias[:width].float()).to(y.dtype)
    finally:
        ours.load_state_dict(kept)
    spread = y[:, :width].float() - expected.float()
    assert float(spread.abs().max()) <= float(expected.float().abs().max()) * (2e-6 if y.dtype == torch.float32 else 4e-3)
    assert torch.equal(y[:, :width], y[:1, :width].expand(shape[0], width))
