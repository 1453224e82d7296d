"""The one-pass convolution for Hopper in an emulation: its errors against float64 beside eager's, NaN, the route for data out of fp16's range, and that no
wait is endless: several samples a cluster, short and empty strips, warpgroups that take turns, column tiles."""

import dataclasses

import pytest
import torch
import yaml

from bench.subject import round_tf32
from codegen.plan.conv_sm90a.geometry import Layout
from codegen.plan.conv_sm90a.route import CONV_SM90A
from codegen.targets import DEVICES
from tests import tiers
from tests.codegen.conv_cases import FAMILY, chain
from tests.codegen.conv_sm90a_emulated import Emulated
from tests.codegen.emulated import DTYPES
from tests.codegen.forced import planned_by
from tests.codegen.norm_harness import reference, relative_error
from tests.fused import load_fused

# name -> (chain, samples, SMs of the card, which decide how many samples a cluster takes, layout)
CASES = {
    "before": (FAMILY["before"], 2, 2, None),
    "padded": (FAMILY["padded"], 3, 4, None),
    "channel_tiles": (FAMILY["channel_tiles"] | {"input": {"height": 30, "width": 40}}, 2, 2, None),
    "column_tiles": (FAMILY["column_tiles"] | {"input": {"height": 12, "width": 160}}, 3, 4, Layout(2, 2)),
    "odd_width": (FAMILY["odd_width"], 3, 4, None),
    "no_pool": (FAMILY["no_pool"], 4, 2, None),
    "pointwise": (FAMILY["pointwise"], 3, 2, None),
    "one_group": (FAMILY["one_group"], 3, 2, None),
    "turns": (chain(size=34, after=({"clamp": {"min": 0.0, "max": 1.0}},)), 5, 4, Layout(2, 2, bulk=False)),
    "empty_strips": (chain(size=(105, 24), kernel=1, groups=4, pool=0, cout=16), 2, 9, Layout(8, 2)),
}
ONE_PRODUCT = ("pointwise", "empty_strips", "channel_tiles")  # their sums are too short for fp32, or their weights too many
QUICK = ("one_group", "no_pool", "turns")  # small enough for every kind
KINDS = ("normal", "offset", "constant", "zeros", "outlier", "bright row", "beyond fp16", "squares beyond fp32", "dead channel", "nan")


def draw(shape, kind):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    if kind == "offset":
        x += 10
    elif kind in ("constant", "zeros"):
        x = torch.full_like(x, 0.7 if kind == "constant" else 0.0)
    elif kind == "outlier":
        x[:, :, 0, 0] = 900.0
    elif kind == "bright row":
        x[:, :, 0] += 900.0
    elif kind == "beyond fp16":
        x[0, :, 0, 0] = 1e6
        x[1] *= 1e-6
    elif kind == "squares beyond fp32":
        x[0] *= 1e33
        x[1, :, 0, 0] = 3e37
    elif kind == "dead channel":
        x[:, -1] = 0.0
    elif kind == "nan":
        x[0, 0, 3, 3] = float("nan")
    return x


def chain_result(spec, x, values, dtype):
    padding = spec.producer.values["padding"]
    return reference(spec, torch.nn.functional.conv2d(x.to(dtype), values["conv.weight"].to(dtype), padding=padding), values, "conv.bias" in values, True, dtype)


def parameters(spec):
    """The convolution's as PyTorch draws them, the others normal, a gamma of 0 and signs of both kinds among them."""
    torch.manual_seed(0)
    values = {key: torch.randn(shape) for key, shape in spec.parameters}
    cout, cin, *kernel = values["conv.weight"].shape
    values["conv.weight"] = torch.nn.Conv2d(cin, cout, tuple(kernel)).weight.detach()
    if "conv.bias" in values:
        values["conv.bias"] *= 0.1
    values["norm.weight"][0] = 0.0
    return {key: value.to(DTYPES[spec.precision.dtype]).contiguous() for key, value in values.items()}


@pytest.mark.parametrize(
    ("name", "precision"),
    tiers.emulated(
        [
            *((name, "tf32" if name in ONE_PRODUCT else "fp32") for name in CASES),
            *((name, p) for name in ("before", "padded", "turns") for p in ("tf32", "fp16", "bf16")),
        ],
        ("one_group", "fp32"),
    ),
)
def test_errors_keep_the_promise(tmp_path, name, precision):
    data, batch, sms, layout = CASES[name]
    path = tmp_path / "case.yaml"
    path.write_text(yaml.safe_dump(data | {"batch": batch}))
    spec = load_fused(path, precision)
    device = dataclasses.replace(DEVICES["h100"], sms=sms)
    emulated = Emulated(planned_by(CONV_SM90A, spec, device, **(dataclasses.asdict(layout) if layout else {})), tmp_path)
    values = parameters(spec)
    for kind in KINDS if precision == "fp32" and name in QUICK else ("normal", "outlier", "nan", *(("squares beyond fp32",) if precision != "fp16" else ())):
        x = draw(spec.input_shape, kind).to(DTYPES[spec.precision.dtype])
        if kind == "dead channel":
            values["conv.weight"][:, -1] = 1e4
        y, exact, eager = emulated(x, values), *(chain_result(spec, x, values, dtype) for dtype in (torch.float64, torch.float32))
        finite = torch.isfinite(exact)
        assert torch.equal(torch.isfinite(y), finite), kind
        if kind == "squares beyond fp32":
            assert finite.all()
            eager = exact.float()  # whose own squares are infinite
        error = relative_error(y[finite], exact[finite])
        limit = {"fp32": max(1.1 * relative_error(eager[finite], exact[finite]), 3e-7), "fp16": 5e-4, "bf16": 4e-3}.get(precision)
        if precision == "tf32":
            coarse = values | {"conv.weight": round_tf32(values["conv.weight"])}
            limit = 1.1 * relative_error(chain_result(spec, round_tf32(x), coarse, torch.float64)[finite], exact[finite])
        assert error <= limit, f"{kind}: {error:.2e}, allowed {limit:.2e}"


def of_turns(folder, precision, batch):
    """(spec, its emulated kernel) of the case whose warpgroups take turns, on two SMs."""
    path = folder / "case.yaml"
    path.write_text(yaml.safe_dump(CASES["turns"][0] | {"batch": batch}))
    spec = load_fused(path, precision)
    return spec, Emulated(planned_by(CONV_SM90A, spec, dataclasses.replace(DEVICES["h100"], sms=2)), folder)


@pytest.mark.emulated
def test_weights_of_any_size_keep_their_accuracy(tmp_path):
    spec, emulated = of_turns(tmp_path, "fp32", batch=2)
    values = parameters(spec)
    values["conv.weight"][:2] *= 1e-12
    values["conv.weight"][2:4] *= 1e7
    values["conv.weight"][4] = 0.0
    x = draw(spec.input_shape, "normal")
    assert relative_error(emulated(x, values), chain_result(spec, x, values, torch.float64)) <= 3e-7


@pytest.mark.emulated
def test_a_large_half_beside_small_weights_costs_them_nothing(tmp_path):
    """It meets zeros in x. Scaled down with it, weights of a tenth would become subnormal halves: 3.9e-4 instead of 2.1e-4 without an operator before the norm."""
    spec, emulated = of_turns(tmp_path, "fp16", batch=2)
    values, x = parameters(spec), draw(spec.input_shape, "normal").half()
    values["conv.weight"][::2, -1], x[:, -1] = 6e4, 0.0
    exact = chain_result(spec, x, values, torch.float64)
    assert relative_error(emulated(x, values), exact) <= 1.05 * relative_error(exact.half(), exact)


@pytest.mark.emulated
def test_one_far_value_does_not_hide_that_the_others_are_faint(tmp_path):
    """Values of 1e-5 lose digits in two fp16 parts scaled by 64; where they are nearly all of a sample, it is computed in fp32. Without that: 2e-6."""
    spec, emulated = of_turns(tmp_path, "fp32", batch=1)
    values = parameters(spec)
    values |= {"norm.bias": torch.zeros_like(values["norm.bias"]), "conv.bias": values["conv.bias"] * 1e-5}
    x = draw(spec.input_shape, "normal") * 1e-5
    x[:, :, 0, 0] = 1.0
    beside = (slice(None), slice(None), slice(2, None), slice(2, None))
    assert relative_error(emulated(x, values)[beside], chain_result(spec, x, values, torch.float64)[beside]) <= 2.0**-21
