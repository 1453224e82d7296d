"""The direct convolution on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation, held to float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional

from codegen.plan.conv_direct.kernel import SUM_PRODUCTS
from codegen.plan.conv_direct.route import CONV_DIRECT, LONGEST_SUM
from codegen.plan.model import Plan, Refusal
from codegen.spec import Spec, load_spec
from codegen.targets import DEVICES
from tests.codegen.conv_product_cases import CASES as PRODUCTS
from tests.codegen.conv_product_cases import product, scale
from tests.codegen.emulated import SOON, compile_text, emulated_text, run_apart
from tests.codegen.forced import planned_by

TAILS = {"relu": torch.relu, "gelu": functional.gelu, "tanh": torch.tanh}
CASES = {
    **PRODUCTS,
    "chunks": product(3, 10, 24, 3, (7, 11, 36), padding=1),
    "channel_tail": product(2, 3, 21, 3, (13, 70), padding=1, tail=(scale(21, 2), "tanh")),
    "narrow": product(2, 4, 16, 3, (9, 7), padding=1),
    "one_result": product(1, 2, 5, 4, 4, tail=()),
    "two_phases_narrow": product(2, 3, 16, 3, (6, 9), transposed=True, stride=2, padding=1),
    "three_phases_wide": product(2, 3, 12, 5, (6, 9), transposed=True, stride=3, padding=2),
    "too_long": product(2, 512, 8, 3, (5, 6), batch=1),
    "too_many_taps": product(2, 1, 8, 12, (14, 15), batch=1),
    "turned_around": product(2, 3, 16, 3, (5, 45), transposed=True, stride=2, padding=1),
}
PRECISE = {"fp32": 3e-7, "tf32": 3e-7, "fp16": 6e-4, "bf16": 5e-3}  # of the result, rounded as it is stored


def taps_of(data: dict[str, Any]) -> int:
    """Products of a result with a channel of x, where no phase leaves any out."""
    ((name, conv),) = data["chain"][0].items()
    kernel = conv["kernel_size"]
    return math.prod(kernel) if isinstance(kernel, list) else kernel ** int(name[-2])


def channels_of(data: dict[str, Any]) -> int:
    return next(iter(data["chain"][0].values()))["in_channels"]


LONG = {name: data for name, data in CASES.items() if channels_of(data) * taps_of(data) > LONGEST_SUM or taps_of(data) > SUM_PRODUCTS}
SHORT = {name: data for name, data in CASES.items() if name not in LONG}


def planned(folder: Path, name: str, precision: str) -> tuple[Spec, Plan]:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(CASES[name], sort_keys=False))
    spec = load_spec(path, precision)
    return spec, planned_by(CONV_DIRECT, spec, DEVICES["h200"])


@pytest.mark.parametrize("name", LONG)
def test_sums_that_fp32_would_add_badly_are_refused(tmp_path, name):
    with pytest.raises(Refusal, match="longer than fp32 adds"):
        planned(tmp_path, name, "fp32")


def drawn(spec: Spec) -> dict[str, torch.Tensor]:
    """x and the parameters, in the storage type."""
    generator, dtype = torch.Generator().manual_seed(3), getattr(torch, spec.precision.dtype)
    values = {key: torch.randn(shape, generator=generator) / math.sqrt(max(1, math.prod(shape[1:]))) for key, shape in spec.parameters}
    return {key: value.to(dtype) for key, value in {"x": torch.randn(spec.input_shape, generator=generator), **values}.items()}


def reference(spec: Spec, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The chain in float64."""
    conv, exact = spec.chain[0], {key: value.double() for key, value in values.items()}
    options = {key: conv.values[key] for key in ("stride", "padding", "output_padding", "dilation") if key in conv.values}
    y = getattr(functional, conv.operator.name)(exact["x"], exact["conv.weight"], exact.get("conv.bias"), **options)
    for step in spec.chain[1:]:
        y = y * exact["scale"] if step.operator.name == "mul" else TAILS[step.operator.name](y)
    return y


def computed(found: Plan, folder: Path, values: dict[str, torch.Tensor], seed: int = 0) -> torch.Tensor:
    (step,) = found.steps
    y = torch.full(found.spec.output_shape, float("nan"), dtype=values["x"].dtype)
    run_apart(folder, [("emulated.so", step.kernel.function(found.target), step.arguments)], {**values, "y": y}, seed)
    return y


@pytest.mark.emulated
@pytest.mark.parametrize("name", SHORT)
def test_every_result_is_that_of_float64(tmp_path, name):
    spec, found = planned(tmp_path, name, "fp32")
    compile_text(tmp_path, emulated_text(found), SOON, header="ptx.h")
    values = drawn(spec)
    expected = reference(spec, values)
    first, second = (computed(found, tmp_path, values, seed) for seed in (0, 5))
    assert torch.equal(first, second)
    assert float((first.double() - expected).norm() / expected.norm()) <= PRECISE["fp32"]


@pytest.mark.emulated
@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
@pytest.mark.parametrize("name", ["chunks", "channel_tail", "turned_around"])
def test_other_precisions_sum_in_fp32(tmp_path, name, precision):
    spec, found = planned(tmp_path, name, precision)
    compile_text(tmp_path, emulated_text(found), SOON, header="ptx.h")
    values = drawn(spec)
    expected = reference(spec, values)
    assert float((computed(found, tmp_path, values).double() - expected).norm() / expected.norm()) <= PRECISE[precision]


@pytest.mark.representative
def test_infinity_and_nan_come_out_where_they_belong(tmp_path):
    spec, found = planned(tmp_path, "two_phases_narrow", "fp32")
    compile_text(tmp_path, emulated_text(found), SOON, header="ptx.h")
    values = drawn(spec)
    values["x"][0].view(-1)[7] = float("inf")
    values["x"][2].view(-1)[-5] = float("nan")
    expected, y = reference(spec, values), computed(found, tmp_path, values)
    assert torch.equal(torch.isnan(y), torch.isnan(expected)) and torch.equal(torch.isinf(y), torch.isinf(expected))
    finite = torch.isfinite(expected)
    assert float((y.double() - expected)[finite].norm() / expected[finite].norm()) <= PRECISE["fp32"]
