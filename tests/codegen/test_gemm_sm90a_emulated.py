"""The Hopper GEMM in an emulation, against float64 with the promises of docs/numerics.md: every way to lay a chain out, tails, several units a CTA,
far, constant and faint data, NaN; the same bits whatever the order of the threads and however many SMs there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from bench.subject import round_tf32
from codegen.numerics import FP32
from codegen.plan.gemm_sm90a.kernel import GemmSm90aKernel
from codegen.plan.gemm_sm90a.layout import Form, Layout
from codegen.targets import DEVICES
from tests.codegen.emulated import DTYPES
from tests.codegen.forced import hopper_gemm
from tests.codegen.gemm_cases import Case, bias
from tests.codegen.gemm_sm90a_emulated import Emulated
from tests.codegen.norm_harness import reference, relative_error

WIDE = Form(False, 1, 128, 256, 4, 0)  # more samples than channels
WEIGHT, INPUT, ALONE = (2, "weight"), (2, "input"), (1, "none")


@dataclass(frozen=True)
class Example:
    """A chain in the precisions that lay it out differently; no `layout`, no `form`: the planner's choice. `gives`: fp32 results, as stages behind it take them;
    `looks`: whether what looks for data that halves cannot carry is tried on all kinds of them, for which the layout makes no difference; `cards`: whether
    a card of more SMs must give the same bits."""

    case: Case
    precisions: tuple[str, ...]
    layout: Layout | None = None
    form: Form | None = None
    prepack: bool = False
    gives: bool = False
    looks: bool = False
    cards: bool = False


def mish(n: int) -> tuple:
    return (bias(n), "hardtanh", "mish")


# On a card of two SMs: several units of work for each CTA.
EXAMPLES = (
    Example(Case("waits_before_the_norm", 256, 272, 1024, 2, mish(1024), ("silu",)), ("fp32", "fp16"), cards=True),
    Example(Case("strips", 256, 576, 512, 16, mish(512), ("silu",)), ("fp32", "bf16"), looks=True),
    Example(Case("pieces", 256, 272, 512, 8, ("silu", *mish(512)), ("silu",)), ("tf32",), looks=True),
    Example(Case("tails_weight", 200, 336, 320, 10, mish(320), ("silu",)), ("tf32", "fp16"), Layout(*WEIGHT, 1, "strips")),
    Example(
        Case("tails_input", 200, 336, 320, 5, mish(320), ({"mul": {"name": "gain", "shape": [1]}},)),
        ("fp32", "bf16"), Layout(*INPUT, 1, "strips"), looks=True,
    ),
    Example(Case("alone", 130, 576, 640, 5, linear={"bias": False}, norm={"affine": False}), ("fp32",), Layout(*ALONE, 1, "strips")),
    Example(Case("lanes", 200, 336, 328, 41, after=("relu",)), ("fp32", "fp16"), Layout(*INPUT, 1, "lanes")),
    Example(Case("norm_kernel", 200, 336, 320, 16, mish(320), ("silu",)), ("fp32", "bf16"), Layout(*WEIGHT, 1, "none")),
    Example(Case("slices", 200, 848, 320, 16, mish(320), ("silu",)), ("fp32", "tf32", "bf16"), Layout(*WEIGHT, 1, "none", slices=3), looks=True),
    Example(Case("slices_alone", 130, 783, 333, 9, ("silu",)), ("fp32",), Layout(*ALONE, 1, "none", slices=2), looks=True),
    Example(Case("slices_odd_result", 300, 1112, 285, 1, ("mish",)), ("fp16",), Layout(*INPUT, 1, "none", slices=4), WIDE),
    Example(Case("slices_converted", 300, 1111, 285, 1, ("mish",)), ("tf32",), Layout(*WEIGHT, 1, "none", slices=4), WIDE, looks=True),
    Example(Case("odd_result", 200, 336, 333, 9, ("silu",), ("silu",)), ("fp16", "bf16")),
    Example(Case("odd_rows", 150, 272, 1030, 1, after=("relu",), linear={"bias": False}), ("fp16",)),
    Example(Case("odd_rows_alone", 150, 272, 1030, 2, before=("silu",), linear={"bias": False}, norm={"affine": False}), ("bf16",)),
    Example(Case("exchange", 256, 256, 1024, 1, after=("silu",)), ("fp32",), Layout(*INPUT, 4, "strips", exchange=True)),
    Example(Case("exchange_at_once", 256, 336, 1024, 2, ("relu",), ("silu",)), ("bf16",), Layout(*INPUT, 1, "strips", exchange=True)),
    Example(Case("exchange_waits", 256, 272, 1024, 1, ("relu",), ("relu",)), ("fp16",), Layout(*INPUT, 2, "strips", exchange=True)),
    Example(Case("waits_in_y", 256, 272, 1024, 1, after=("relu",)), ("bf16",), Layout(*WEIGHT, 4, "strips")),
    Example(Case("both_warpgroups", 256, 336, 512, 2, ("silu",), ("gelu",)), ("fp16",)),
    Example(Case("product", 200, 336, 328, 0, ({"mul": {"name": "gain", "shape": [328]}}, "silu", {"add": {"from": "gemm"}}, "mish")), ("fp32", "tf32", "fp16", "bf16"), cards=True),
    Example(Case("product_alone", 130, 272, 333, 0, linear={"bias": False}), ("fp32",), Layout(*ALONE, 1, "none"), looks=True),
    Example(Case("product_converted", 150, 333, 320, 0, (bias(320), "gelu")), ("fp32", "tf32"), Layout(*INPUT, 1, "none")),
    Example(Case("product_sliced", 130, 783, 333, 0, (bias(333), "silu", {"mul": {"from": "gemm"}})), ("fp32",), Layout(*ALONE, 1, "none", slices=2), looks=True),
    Example(Case("product_sliced_halves", 300, 1112, 288, 0, ("mish", {"mul": {"name": "gain", "shape": [1]}})), ("fp16", "bf16"), Layout(*INPUT, 1, "none", slices=4), WIDE),
    Example(Case("gives", 256, 272, 512, 16, after=("silu",)), ("bf16",), gives=True),
    Example(Case("prepared", 200, 333, 320, 10, mish(320), ("silu",)), ("fp32",), Layout(*WEIGHT, 1, "strips"), prepack=True, looks=True),
    Example(Case("prepared_exchange", 256, 336, 1024, 2, after=("silu",)), ("tf32",), prepack=True, looks=True),
)  # fmt: skip
CHANNEL_KINDS = ("outlier first", "outlier last", "far mean", "equal rows", "zero rows", "twins")
WEIGHT_KINDS = ("infinite", "large", "vanishing", "sparse")
FAINT_KINDS = ("faint", "partly faint", "small")
EVERYTHING = {"all": (slice(None),)}


class Built:
    """An example in the emulation, its parameters, and what its result is judged by."""

    def __init__(self, example: Example, precision: str, folder: Path, sms: int = 2, edit=lambda text: text) -> None:
        spec = replace(example.case.spec(folder, precision, None), prepack=example.prepack, gives=FP32 if example.gives else None)
        plan = hopper_gemm(spec, replace(DEVICES["h100"], sms=sms), form=example.form, layout=example.layout)
        self.spec, self.kernel = spec, next(kernel for kernel in plan.kernels if isinstance(kernel, GemmSm90aKernel))
        self.dtype, self.single = DTYPES[spec.precision.dtype], spec.precision.itemsize == 4
        self.run = Emulated(plan, folder, edit)

    def parameters(self) -> dict[str, torch.Tensor]:
        """The producer's as PyTorch draws them, the others normal."""
        torch.manual_seed(0)
        values = {key: torch.randn(shape) for key, shape in self.spec.parameters}
        n, k = values["gemm.weight"].shape
        for key, drawn in torch.nn.Linear(k, n).named_parameters():
            if f"gemm.{key}" in values:
                values[f"gemm.{key}"] = drawn.detach()
        return {key: value.to(self.dtype).contiguous() for key, value in values.items()}

    def draw(self, kind=torch.randn) -> torch.Tensor:
        return kind(self.spec.input_shape, generator=torch.Generator().manual_seed(2)).to(self.dtype)

    def chain(self, x: torch.Tensor, values: dict[str, torch.Tensor], dtype: torch.dtype, in_order: bool = False) -> torch.Tensor:
        """By PyTorch's operators; `in_order`: with sums in the order of K, as eager on a GPU adds them up."""
        weight, added = values["gemm.weight"].to(dtype), values.get("gemm.bias", torch.zeros(1)).to(dtype)
        if in_order:
            sums = torch.zeros(len(x), len(weight), dtype=dtype)
            for of_x, of_weight in zip(x.to(dtype).T, weight.T):
                sums.addr_(of_x, of_weight)
        else:
            sums = torch.nn.functional.linear(x.to(dtype), weight)
        return reference(self.spec, sums + added, values, False, True, dtype)

    def check(self, x: torch.Tensor, values: dict[str, torch.Tensor], parts: dict[str, tuple]) -> torch.Tensor:
        """y, whose NaN and infinities must stand where they should and whose error must be within the promise in each part (an index of y)."""
        y, exact, eager = self.run(x, values), self.chain(x, values, torch.float64), self.chain(x, values, self.dtype)
        rounded = exact.to(y.dtype).double()
        assert torch.equal(torch.isnan(y), torch.isnan(rounded)), "NaN"
        infinite = torch.isinf(rounded)
        assert torch.equal(y[infinite].double(), rounded[infinite]), "infinities"
        models = [eager, self.chain(x, values, self.dtype, in_order=True)] if self.single else [eager]
        if self.spec.precision.name == "tf32":
            models.append(self.chain(round_tf32(x), values | {"gemm.weight": round_tf32(values["gemm.weight"])}, torch.float64))
        elif not self.single:
            models.append(rounded)
        for name, part in parts.items():
            finite = torch.isfinite(rounded[part]) & torch.isfinite(eager[part])
            if not finite.any():
                continue
            error, *others = (relative_error(of[part][finite], exact[part][finite]) for of in (y, *models))
            allowed = max(1.1 * max(others), 3e-7) if self.single else 1.05 * max(others)
            assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"
        return y

    def groups(self, kinds: tuple[str, ...]) -> Iterator[list[tuple[str, slice]]]:
        """[(kind, its channels)] a run, a group for each kind."""
        width, count = self.spec.group_channels, self.spec.num_groups
        for first in range(0, len(kinds), count):
            yield [(kind, slice(i * width, (i + 1) * width)) for i, kind in enumerate(kinds[first : first + count])]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def ordinary_values_and_any_order_of_threads(built: Built) -> None:
    x, values = built.draw(torch.rand), built.parameters()
    y = built.check(x, values, EVERYTHING)
    for seed in (1, 2, 3, 7):
        assert same_bits(y, built.run(x, values, seed)), f"another result with seed {seed}"


def far_values_and_constant_groups(built: Built) -> None:
    """Beside an outlier the promise holds for the other channels alone, too."""
    for kinds in built.groups(CHANNEL_KINDS):
        values, x = built.parameters(), built.draw()
        weight, added, parts = values["gemm.weight"], values.get("gemm.bias"), {}
        for kind, channels in kinds:
            parts[kind] = (slice(None), channels)
            first, last = channels.start, channels.stop - 1
            if kind == "far mean" and added is not None:
                weight[channels] *= 0.02
                added[channels] += 1e4
            elif kind.startswith("outlier") and added is not None:
                added[first if kind == "outlier first" else last] = 3e4 if built.dtype == torch.float16 else 1e6
                parts[f"beside an {kind}"] = (slice(None), slice(first + 1, last + 1) if kind == "outlier first" else slice(first, last))
            elif kind in ("equal rows", "zero rows"):
                weight[channels] = weight[first].clone() if kind == "equal rows" else 0.0
                for key in {"gemm.bias", "bias"} & values.keys():
                    values[key][channels] = values[key][first].clone()
            elif kind == "twins":
                for key in values.keys() - {"gain"}:
                    values[key][last] = values[key][first]
        y = built.check(x, values, parts)
        for kind, channels in kinds:
            group = y[:, channels]
            if kind == "zero rows":
                assert same_bits(group, group[:1].repeat(len(y), 1)), "a group's constant depends on the sample"
            if kind == "twins" and built.kernel.statistics != "lanes":  # each of which merges in an order of its own
                assert same_bits(group[:, 0], group[:, -1]), "equal channels of a group are normalised differently"


def samples_of_any_size_and_nan(built: Built) -> None:
    values, x = built.parameters(), built.draw()
    x[0, 3], x[1, 5], x[2, 5], x[2, 6] = float("nan"), float("inf"), float("inf"), float("-inf")
    x[3] = 0.0
    if built.single:
        x[4:7] *= torch.tensor([[1e-20], [1e15], [1e-38]])
    built.check(x, values, {"others": (slice(7, None),)})


def groups_whose_squares_exceed_fp32(built: Built) -> None:
    """All values of a sample are large, or one is; the other samples stay what they are."""
    values, x = built.parameters(), built.draw()
    x[0] *= 1e36
    x[9, 3] = 3e38
    y, exact = built.run(x, values), built.chain(x, values, torch.float64)
    assert torch.isfinite(y).all()
    close = {"fp32": 2e-6, "tf32": 4e-3, "bf16": 2e-2}[built.spec.precision.name]
    for rows in (slice(0, 1), slice(9, 10), slice(10, None)):
        assert relative_error(y[rows], exact[rows]) <= close, relative_error(y[rows], exact[rows])


def weights_of_any_size(built: Built) -> None:
    for kinds in built.groups(WEIGHT_KINDS):
        values, x = built.parameters(), built.draw()
        weight = values["gemm.weight"]
        for kind, channels in kinds:
            first = channels.start
            if kind == "infinite":
                weight[first, 3], weight[channels.stop - 1, 0] = float("inf"), float("nan")
            elif kind == "large":
                weight[first] *= 1e6
                weight[first + 1, 1] = 1e30
            elif kind == "vanishing":
                weight[first] *= 1e-16
                weight[first + 1] = 0.0
            elif kind == "sparse":  # zeros are not faint
                weight[channels, ::3] = 0.0
        built.check(x, values, {kind: (slice(None), channels) for kind, channels in kinds})


def samples_of_which_only_the_smallest_values_count(built: Built) -> None:
    """The others meet zeros."""
    for kind in ("far", "many small", "few near"):
        values, x = built.parameters(), built.draw()
        large = x.shape[1] - 32
        values["gemm.weight"][:, :large] = 0.0
        values["gemm.weight"] *= 2.0**3
        if kind == "far":
            x[:, 0] = 1.7e12
        elif kind == "many small":
            x[:, :large] *= 2.0**20
        else:
            x[:, :100] *= 2.0**20
            x[:, 100:large] = x[:, large + 4 :] = 0.0
        built.check(x, values, {kind: (slice(None),)})


def faint_weights(built: Built) -> None:
    """Some beside others that meet zeros."""
    for kinds in (*built.groups(FAINT_KINDS), *built.groups(("narrow",))):
        narrow = kinds[0][0] == "narrow"  # all weights near the smallest that are not faint
        values, x = built.parameters(), built.draw() * 2.0 ** (16 if narrow else 20)
        weight = values["gemm.weight"]
        some = weight.shape[1] // 7  # an eighth is too many
        x[:, some:] = 0.0
        for kind, channels in kinds:
            if narrow:
                weight[channels] = torch.sign(weight[channels]) * (1 + torch.rand_like(weight[channels])) * 2.0**-18
                continue
            weight[channels, : some if kind == "partly faint" else None] *= 2.0**-20
            if kind == "faint":
                weight[channels, -1] = 4.0
        built.check(x, values, {kind: (slice(None), channels) for kind, channels in kinds})


def tier_of(name: str, precision: str) -> pytest.MarkDecorator:
    """The mark of an example: W through registers, and halves that a norm of their own follows, are what make test runs."""
    return pytest.mark.representative if (name, precision) in (("lanes", "fp32"), ("odd_rows", "fp16")) else pytest.mark.emulated


@pytest.mark.parametrize(("example", "precision"), [pytest.param(e, p, id=f"{e.case.name}-{p}", marks=tier_of(e.case.name, p)) for e in EXAMPLES for p in e.precisions])
def test_promises(example, precision, tmp_path):
    built = Built(example, precision, tmp_path)
    if example.cards:
        (tmp_path / "larger").mkdir()
        larger = Built(replace(example, layout=built.kernel.layout), precision, tmp_path / "larger", sms=6)
        assert same_bits(*(each.run(each.draw(), each.parameters()) for each in (built, larger))), "the number of SMs changes the result"
    ordinary_values_and_any_order_of_threads(built)
    far_values_and_constant_groups(built)
    samples_of_any_size_and_nan(built)
    if built.spec.has_norm and built.spec.precision.name != "fp16":
        groups_whose_squares_exceed_fp32(built)
    if built.single:
        weights_of_any_size(built)
    if built.single and example.looks:
        samples_of_which_only_the_smallest_values_count(built)
        faint_weights(built)


RINGS = {
    "none": ("W full", "W full"),
    "W is free before its last values are read": ("if (piece == kPieces - 1) feed.release_weight(stage);", "if (piece == 0) feed.release_weight(stage);"),
    "W is not waited for": ('wait(feed.shared.full(kWeight, feed.weight.stage), feed.weight.parity, "W full");', ""),
    "x is not waited for": ('wait(feed.shared.full(kInput, feed.input.stage), feed.input.parity, "x full");', ""),
    "x is free while it is multiplied": ("if (piece == kInFlight - 1) feed.release();", "if (piece == 0) feed.release();"),
    "words are written anew while they are multiplied": ("wgmma_wait<kInFlight>();", "wgmma_wait<4>();"),
    "x does not wait for its kernel": ("  wait_for_previous_kernel();\n  Ring ring;", "  Ring ring;"),
}


@pytest.mark.emulated
@pytest.mark.parametrize("mistake", RINGS)
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_mistakes_in_the_rings_are_noticed(mistake, precision, tmp_path):
    """The emulation leaves NaN where nothing may be relied on, and stops where a stage is filled too early."""
    right, wrong = RINGS[mistake]

    def edit(text: str) -> str:
        assert text.count(right) == 1, f"{right} stands {text.count(right)} times"
        return text.replace(right, wrong)

    built = Built(Example(Case("mistake", 256, 576, 512, 16, mish(512), ("silu",)), (precision,)), precision, tmp_path, edit=edit)
    with nullcontext() if mistake == "none" else pytest.raises(AssertionError):
        for seed in range(8):
            y = built.run(built.draw(), built.parameters(), seed)
            assert torch.isfinite(y).all(), "values that nobody has written"
