"""The convolution as a product for Hopper on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation/hopper_product.h, held to float64."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional
import yaml

from codegen.plan.conv_product_sm90a.route import CONV_PRODUCT_SM90A
from codegen.plan.model import Plan
from codegen.render import render_kernel
from codegen.spec import Spec, load_spec
from codegen.targets import DEVICES
from tests.codegen.conv_product_cases import CASES
from tests.codegen.emulated import DTYPES, SOON, compile_text, run_apart, without_wrappers
from tests.codegen.forced import request_for
from tests.codegen.gemm_promise import relative, round_to_tf32

pytestmark = pytest.mark.emulated

WRAPPERS = (
    "barrier_init", "barrier_init_done", "expect_bytes", "arrive", "try_wait", "wait", "copy_box", "copy_pixels", "copy_run", "fence_async", "prefetch_map", "give_registers", "take_registers",
    "wgmma_fence", "wgmma_commit", "wgmma_wait", "wgmma", "pin",
)  # fmt: skip
REPLACED = {
    'asm volatile("add.f32 %0, %0, %1;" : "+f"(total[i]) : "f"(sums[i]));': "total[i] += sums[i];",
    'asm volatile("" : "+r"(self.warpgroup), "+r"(self.warp), "+r"(self.lane));': "",
    "extern __shared__ __align__(1024) unsigned char memory[];": "unsigned char* const memory = emulation::shared_memory();",
}
TAILS = {"relu": torch.relu, "gelu": functional.gelu, "tanh": torch.tanh}


def compiled(found: Plan, folder: Path, edit=lambda text: text) -> None:
    """The plan's kernels as a library; `edit` changes their text, to see that a test notices."""
    text = "".join(without_wrappers(render_kernel(found, kernel), WRAPPERS) for kernel in found.kernels)
    for instructions, same in REPLACED.items():
        text = text.replace(instructions, same)
    text = re.sub(r' *asm volatile\("" : "\+r"\(feed\.ring\.stage\)\);[^\n]*', "", text)
    text = re.sub(r"(?<!config\.)\bgridDim\.x\b", "emulation::grid_size", text)
    compile_text(folder, f"const bool emulation::bf16_operands = {str(found.spec.precision.name == 'bf16').lower()};\n{edit(text)}", SOON, header="hopper_product.h")


def computed(found: Plan, folder: Path, x: torch.Tensor, values: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
    y = torch.full(found.spec.output_shape, float("nan"), dtype=DTYPES[found.spec.precision.dtype])
    buffers = {buffer.name: torch.full((buffer.size,), 0xFF, dtype=torch.uint8) for buffer in found.buffers}
    calls = [("emulated.so", step.kernel.function(found.target), step.arguments) for step in found.steps]
    run_apart(folder, calls, {"x": x, "y": y, **values, **buffers}, seed)
    return y


def reference(spec: Spec, x: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The chain in float64."""
    conv = spec.chain[0]
    keys = ("stride", "padding", "output_padding", "dilation")
    options = {key: conv.values[key] for key in keys if key in conv.values}
    bias = values.get("conv.bias")
    y = getattr(functional, conv.operator.name)(x.double(), values["conv.weight"].double(), None if bias is None else bias.double(), **options)
    for step in spec.chain[1:]:
        y = y * values["scale"].double() if step.operator.name == "mul" else TAILS[step.operator.name](y)
    return y


def drawn(spec: Spec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    values = {key: torch.randn(shape, generator=generator) / math.sqrt(max(1, math.prod(shape[1:]))) for key, shape in spec.parameters}
    stored = DTYPES[spec.precision.dtype]
    return torch.randn(spec.input_shape, generator=generator).to(stored), {key: value.to(stored) for key, value in values.items()}


def plans_of(folder: Path, name: str, precision: str = "fp32") -> tuple[Spec, dict[str, Plan]]:
    """A case's spec, and the plan of its first offer for each way to take the taps of a row."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(CASES[name], sort_keys=False))
    spec = load_spec(path, precision)
    asked = request_for(CONV_PRODUCT_SM90A, spec, DEVICES["h200"])
    first = {offer.choice.settings["row"]: offer for offer in reversed(CONV_PRODUCT_SM90A.offers(asked))}
    return spec, {row: CONV_PRODUCT_SM90A.plan(asked, offer) for row, offer in first.items()}


def offered(folder: Path, name: str, row: str, precision: str = "fp32") -> tuple[Spec, Plan]:
    spec, plans = plans_of(folder, name, precision)
    return spec, plans[row]


def errors_of(folder: Path, name: str, precision: str) -> dict[str, float]:
    """The relative error of a case's result for each way to take the taps of a row, the same bits with another order of threads."""
    spec, plans = plans_of(folder, name, precision)
    x, values = drawn(spec)
    expected, found = reference(spec, x, values), {}
    for row, plan in plans.items():
        own = folder / row
        own.mkdir()
        compiled(plan, own)
        first, second = (computed(plan, own, x, values, seed) for seed in (0, 5))
        assert torch.equal(first, second), row
        found[row] = float((first.double() - expected).norm() / expected.norm())
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_result_is_that_of_float64(tmp_path, name):
    found = errors_of(tmp_path, name, "fp32")
    assert found and all(error <= 3e-7 for error in found.values()), found


# The relative error of a result that is exact but for its operands' rounding (tf32) and its own.
ROUNDED = {"tf32": 3e-4, "fp16": 2.0**-11.5, "bf16": 2.0**-8.5}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ROUNDED)
def test_one_product_rounds_operands_or_the_result_alone(tmp_path, precision, name):
    found = errors_of(tmp_path, name, precision)
    assert found and all(error <= ROUNDED[precision] for error in found.values()), found


def test_all_ways_to_take_the_taps_of_a_row_are_met(tmp_path):
    assert {row for name in ("padded", "few_channels", "phases") for row in plans_of(tmp_path, name)[1]} == {"apart", "folded", "shared", "runs"}


def test_sums_of_one_sign_get_back_what_the_tensor_core_cuts_off(tmp_path):
    """Without that the error would be 1.2 times the TF32 model's."""
    spec, found = offered(tmp_path, "dilated", "apart", "tf32")
    compiled(found, tmp_path)
    x, values = drawn(spec)
    x, values = x.abs(), {key: value.abs() for key, value in values.items()}
    expected, y = reference(spec, x, values), computed(found, tmp_path, x, values, 0)
    model = reference(spec, round_to_tf32(x), {**values, "conv.weight": round_to_tf32(values["conv.weight"])})
    assert relative(y, expected) <= 1.05 * relative(model, expected)


@pytest.mark.parametrize(("name", "row"), [("pairs_of_taps", "apart"), ("eight_phases_few", "shared"), ("eight_phases_few", "runs"), ("flipped_few", "runs")])
@pytest.mark.parametrize("precision", ROUNDED)
def test_infinities_and_nans_of_one_product_come_out_where_they_belong(tmp_path, precision, name, row):
    spec, found = offered(tmp_path, name, row, precision)
    compiled(found, tmp_path)
    x, values = drawn(spec)
    x[0].view(-1)[7] = 6e4
    x[1].view(-1)[11] = float("inf")
    x[2].view(-1)[-5] = float("nan")
    expected, y = reference(spec, x, values), computed(found, tmp_path, x, values, 0)
    assert torch.equal(torch.isnan(y), torch.isnan(expected)) and torch.equal(torch.isinf(y), torch.isinf(expected.to(y.dtype)))
    finite = torch.isfinite(y)
    assert relative(y[finite], expected[finite]) <= ROUNDED[precision]


@pytest.mark.parametrize(("name", "row"), [("pairs_of_taps", "shared"), ("three_rows", "apart"), ("few_channels", "folded"), ("few_channels", "runs"), ("flipped", "runs"), ("few_results", "runs")])
def test_values_that_halves_cannot_carry_are_computed_again(tmp_path, name, row):
    spec, found = offered(tmp_path, name, row)
    compiled(found, tmp_path)
    x, values = drawn(spec)
    x[0] *= 1e-4
    x[0].view(-1)[7] = 1e7
    x[1].view(-1)[11] = float("inf")
    x[2].view(-1)[-5] = float("nan")
    expected, y = reference(spec, x, values), computed(found, tmp_path, x, values, 0)
    assert torch.equal(torch.isnan(y), torch.isnan(expected)) and torch.equal(torch.isinf(y), torch.isinf(expected))
    finite = torch.isfinite(expected)
    assert float((y.double() - expected)[finite].norm() / expected[finite].norm()) <= 3e-7


def test_a_wrong_place_in_a_stage_is_noticed(tmp_path):
    spec, found = offered(tmp_path, "padded", "shared")
    compiled(found, tmp_path, lambda text: re.sub(r"(kInputTapBytes = )128", r"\g<1>256", text))
    x, values = drawn(spec)
    y = computed(found, tmp_path, x, values, 0)
    assert not float((y.double() - reference(spec, x, values)).norm()) < 0.1
