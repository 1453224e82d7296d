"""The convolution as a product of windows and filters without a GPU: the emitted sources in an emulation, against float64. Strides, padding, dilation, groups,
channels that fill no piece, planes of any width, every kind of tile, slices of K."""

import contextlib
import functools
import itertools
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from codegen.numerics import ARITHMETICS
from codegen.plan.conv_gemm.route import CONV_GEMM, arithmetic_of, offer_of
from codegen.plan.conv_gemm.shape import Tiling, shape_of
from codegen.plan.gemm.tiles import tiles_for
from codegen.plan.model import Refusal
from codegen.plan.planner import plan
from codegen.spec import SpecError
from codegen.spec.reserved import BUFFERS
from codegen.targets import DEVICES, TARGETS
from tests.codegen.forced import planned_by, request_for
from tests.codegen.gemm_promise import relative, round_to_tf32
from tests.codegen.gemm_sm80_emulated import Layer, build
from tests.fused import load_fused

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

TARGET, H100 = TARGETS["sm_80"], DEVICES["h100"]
FOLDER = Path(__file__).resolve().parents[2] / "codegen/specs"
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
SCRATCH = tempfile.TemporaryDirectory(prefix="emulated-")  # of this process's libraries


@dataclass(frozen=True)
class Case:
    """A convolution and its norm. `kernel`, `size` and the options as in a spec."""

    batch: int
    channels: tuple[int, int]
    size: tuple[int, int]
    kernel: tuple[int, int]
    groups: int = 2  # of the norm
    before: tuple = ()
    after: tuple = ()
    options: tuple = ()

    def spec(self, folder, precision: str, name: str = "case", **keys):
        conv = {"name": "conv", "in_channels": self.channels[0], "out_channels": self.channels[1], "kernel_size": list(self.kernel), **dict(self.options)}
        chain = [{"conv2d": conv}, *self.before, {"group_norm": {"name": "norm", "num_groups": self.groups}}, *self.after]
        text = {"name": name, "batch": self.batch, "precision": precision, "input": {"height": self.size[0], "width": self.size[1]}, "chain": chain, **keys}
        path = folder / f"{name}_{precision}.yaml"
        path.write_text(json.dumps(text))
        return load_fused(str(path))


CASES = {
    "plain": Case(2, (32, 64), (10, 12), (3, 3), 8, before=("silu",), after=("sigmoid",)),
    "padded": Case(3, (37, 22), (7, 7), (3, 3), 2, options=(("padding", [1, 2]),)),
    "strided": Case(2, (66, 40), (17, 14), (2, 3), 5, options=(("stride", [3, 2]), ("padding", [1, 0]), ("dilation", [2, 1]), ("bias", False)), after=({"max_pool2d": {"kernel_size": 2}},)),
    "groups": Case(2, (72, 24), (8, 7), (2, 4), 3, options=(("groups", 2), ("padding", [0, 1]))),
    "pointwise": Case(25, (264, 136), (3, 4), (1, 1), 17, before=("tanh",)),
    "alone": Case(8, (300, 3), (5, 5), (4, 4), 1, options=(("padding", 2), ("stride", 3))),
    "wide": Case(1, (40, 260), (15, 19), (2, 4), 4, options=(("dilation", [1, 3]),)),
}
# Tiles, as (m, n), with the slices of K that each is tried with.
TILES = {
    "fp32": {"plain": [(64, 64, 1), (128, 64, 1)], "padded": [(32, 32, 1), (16, 32, 2)], "strided": [(64, 128, 1), (32, 64, 3)], "groups": [(16, 64, 1), (128, 128, 1)], "pointwise": [(16, 128, 1)],
             "alone": [(16, 32, 1), (16, 32, 4)], "wide": [(64, 256, 1), (32, 128, 1), (256, 64, 1), (16, 256, 1)]},
    "other": {"plain": [(64, 64, 1), (128, 128, 1)], "padded": [(32, 32, 1), (16, 32, 2)], "strided": [(64, 128, 1), (32, 64, 3)], "groups": [(16, 64, 1), (128, 64, 1)], "pointwise": [(16, 128, 1)],
              "alone": [(16, 32, 1), (16, 32, 4)], "wide": [(128, 256, 1), (256, 128, 1), (32, 128, 1), (16, 256, 1)]},
}  # fmt: skip


def with_tile(spec, arithmetic, tile, slices: int = 1):
    """The plan with a tile, also with slices that the planner would not cut."""
    request = request_for(CONV_GEMM, spec, H100)
    return CONV_GEMM.plan(request, offer_of(request, arithmetic, Tiling(tile, slices, 0.0)))


def made(folder, precision: str):
    """(case's name, plan) of every case and tile."""
    found = []
    for name, chosen in TILES["fp32" if precision == "fp32" else "other"].items():
        spec = CASES[name].spec(folder, precision, name)
        arithmetic = arithmetic_of(spec)
        for m, n, slices in chosen:
            tile = next(tile for tile in tiles_for(arithmetic) if (tile.m, tile.n) == (m, n))
            found.append((name, with_tile(spec, arithmetic, tile, slices)))
    return found


@functools.cache
def layers_of(precision: str, names: tuple[str, ...]) -> tuple[str, list[Layer]]:
    """(precision, layers) of these cases, compiled once as one library."""
    folder = Path(tempfile.mkdtemp(prefix=f"{precision}-", dir=SCRATCH.name))
    return precision, build(folder, [plan for name, plan in made(folder, precision) if name in names])


@pytest.fixture(params=[
    pytest.param(("fp16", ("padded",)), id="fp16-one", marks=pytest.mark.representative),
    *(pytest.param((precision, tuple(CASES)), id=precision, marks=pytest.mark.emulated) for precision in PRECISIONS),
])  # fmt: skip
def layers(request):
    """What `layers_of` gives: tiles whole and cut in slices for make test, everything for make test-all."""
    return layers_of(*request.param)


def label(layer: Layer) -> str:
    kernel = next(kernel for kernel in layer.plan.kernels if kernel.template == "conv_gemm/conv_gemm.cu.j2")
    return f"{layer.spec.name}, {kernel.tile.m}x{kernel.tile.n}, {kernel.slices} slices"


def draw(layer: Layer, kind=torch.randn, seed: int = 2) -> torch.Tensor:
    return kind(layer.spec.input_shape, generator=torch.Generator().manual_seed(seed)).to(layer.dtype)


def allowed(layer: Layer, precision: str, x: torch.Tensor, reference: torch.Tensor) -> float:
    eager = relative(layer.pytorch(x), reference) * (1.25 if reference.numel() < 1000 else 1.0)  # of few values the error is a matter of luck
    if precision == "tf32":
        return max(1.1 * max(relative(layer.pytorch(round_to_tf32(x), torch.float64, round_to_tf32(layer.weight)), reference), eager), 3e-7)
    return max(1.1 * eager, 3e-7) if precision == "fp32" else 1.05 * max(eager, relative(reference.to(layer.dtype), reference))


@torch.no_grad()
def test_error_is_within_the_promise(layers):
    """And blocks and threads in another order give the same bits, so none of them reads what another one has yet to write."""
    precision, found = layers
    for seed, layer in enumerate(found, 1):
        for kind in (torch.rand, torch.randn):
            x = draw(layer, kind)
            y, reference = layer(x), layer.pytorch(x, torch.float64)
            assert y.shape == reference.shape and not layer.in_fp32, label(layer)
            assert relative(y, reference) <= allowed(layer, precision, x, reference), f"{label(layer)}: {relative(y, reference):.2e}"
        assert torch.equal(y.view(torch.uint8), layer(x, seed=seed).view(torch.uint8)), label(layer)


@torch.no_grad()
def test_samples_of_any_size_keep_their_digits(layers):
    """What is far from 1 is multiplied as well as what is near it: nothing is scaled."""
    precision, found = layers
    if precision in ("fp16", "bf16"):
        return
    for layer in found:
        x = draw(layer)
        x[:: 2] *= 2.0**50
        x[1::2] *= 2.0**-30
        kept = layer.weight.clone()
        layer.weight.mul_(2.0**-20)
        y, reference = layer(x), layer.pytorch(x, torch.float64)
        limit = allowed(layer, precision, x, reference)
        layer.weight.copy_(kept)
        assert relative(y, reference) <= limit and not layer.in_fp32, label(layer)


@torch.no_grad()
def test_infinity_and_nan_come_out_where_they_do_in_pytorch(layers):
    precision, found = layers
    for layer in found:
        if layer.spec.batch < 2:
            continue
        x = draw(layer)
        x[0, 1, 2, 2] = float("inf")
        x[1, 0, 1, 1] = float("nan")
        y, expected = layer(x), layer.pytorch(x)
        assert torch.equal(torch.isnan(y), torch.isnan(expected)) and torch.equal(torch.isinf(y), torch.isinf(expected)), label(layer)
        assert (layer.in_fp32 > 0) == (precision == "fp32"), label(layer)
        fine = ~torch.isnan(expected)
        if fine.any():
            assert torch.allclose(y[fine].float(), expected[fine].float(), atol=0.05, rtol=0.05), label(layer)


@pytest.mark.emulated
@torch.no_grad()
def test_an_infinite_product_before_a_bound(tmp_path):
    """hardtanh makes infinities finite again, so nothing may have become NaN on the way."""
    spec = Case(2, (40, 16), (6, 6), (3, 3), 4, before=("hardtanh",)).spec(tmp_path, "fp32", "bounded")
    tile = next(tile for tile in tiles_for(ARITHMETICS["tf32x3"]) if (tile.m, tile.n) == (32, 32))
    (layer,) = build(tmp_path, [with_tile(spec, ARITHMETICS["tf32x3"], tile)])
    x = draw(layer)
    x[0, 3, 2, 2] = float("inf")
    y, reference = layer(x), layer.pytorch(x, torch.float64)
    assert torch.isfinite(reference).all() and relative(y, reference) <= 1e-6 and layer.in_fp32


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tile_is_chosen_and_every_bit_of_k_has_one_owner(tmp_path, precision):
    for name, case in CASES.items():
        spec = case.spec(tmp_path, precision, name)
        shape = shape_of(spec)
        request = request_for(CONV_GEMM, spec, H100)
        offers = CONV_GEMM.offers(request)
        assert [round(offer.ms, 5) for offer in offers] == sorted(round(offer.ms, 5) for offer in offers)
        for offer in offers[:4]:
            planned = CONV_GEMM.plan(request, offer)
            kernel = next(kernel for kernel in planned.kernels if kernel.template == "conv_gemm/conv_gemm.cu.j2")
            known = {constant.name: constant.text for constant in kernel.constants}
            covered = kernel.slices * int(known["kStageCount"]) * int(known["kStageK"])
            assert shape.k <= covered and (kernel.slices - 1) * int(known["kStageCount"]) * int(known["kStageK"]) < shape.k
            assert kernel.ragged_k == (covered != shape.k) and kernel.smem_bytes <= TARGET.smem_bytes
            assert kernel.epilogue.pitch % 16 in (4, 12) and kernel.epilogue.round_rows % kernel.epilogue.vector == 0


def test_short_sums_in_fp32_and_foreign_arithmetics_are_refused(tmp_path):
    with pytest.raises(Refusal, match="too short"):
        planned_by(CONV_GEMM, Case(1, (8, 8), (5, 5), (3, 3)).spec(tmp_path, "fp32", "few"), H100)
    with pytest.raises(Refusal, match="ffma"):
        planned_by(CONV_GEMM, CASES["plain"].spec(tmp_path, "fp32", "forced", math="ffma"), H100)
    assert arithmetic_of(CASES["plain"].spec(tmp_path, "tf32", "finer", math="tf32x3")).parts == 2


def test_what_the_cases_meet():
    """Of every choice of the templates both sides."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = [k for p in PRECISIONS for _, plan in made(Path(folder), p) for k in plan.kernels if k.template == "conv_gemm/conv_gemm.cu.j2"]
    for name in ("ragged_m", "ragged_n", "ragged_k", "padded", "grouped", "sliced", "layered", "raster_remainder"):
        assert {bool(getattr(kernel, name)) for kernel in kernels} == {True, False}, name
    assert {kernel.guard_copy(kernel.tile.m) for kernel in kernels} == {True, False} and {kernel.epilogue.vector for kernel in kernels} >= {1, 2, 4}
    assert {kernel.epilogue.round_rows == kernel.tile.m for kernel in kernels} == {True, False}


@pytest.mark.parametrize("name", ["pixels", "weight_rows", "sliced_sums", "kept", "part_statistics", "x_split"])
def test_a_parameter_cannot_take_the_name_of_a_buffer(tmp_path, name):
    """The runtime finds both by name: a parameter called pixels had the convolution's pixels written over it, and over what lies behind it."""
    with pytest.raises(SpecError, match="meaning of its own"):
        Case(2, (32, 64), (5, 5), (3, 3), after=({"mul": {"name": name, "shape": [64, 1, 1]}},)).spec(tmp_path, "fp16", "named")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_buffer_has_a_reserved_name(tmp_path, precision):
    specs = [load_fused(str(path), precision) for path in sorted(FOLDER.glob("*.yaml"))] + [case.spec(tmp_path, precision, name) for name, case in CASES.items()]
    for spec, target in itertools.product([*specs, *(replace(spec, prepack=True) for spec in specs)], ("sm_80", "sm_90a")):
        with contextlib.suppress(Refusal):
            assert {b.name for b in plan(spec, target).buffers if ":" not in b.name} <= BUFFERS
