"""The sm_80 GEMM and the norm kernels behind it without a GPU: the emitted sources in an emulation, against float64. Every tile, awkward sizes, every
arithmetic, adversarial data."""

import contextlib
import functools
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from codegen.numerics import ARITHMETICS as NAMED
from codegen.plan import plan
from codegen.plan.gemm.companions import SCALES
from codegen.plan.gemm.kernel import GemmKernel
from codegen.plan.gemm.route import GEMM
from codegen.plan.gemm.tiles import tiles_for
from codegen.plan.planner import planned
from codegen.plan.route import Choice, Request
from codegen.plan.stages.route import cut
from codegen.targets import DEVICES, TARGETS
from tests.codegen.emulated import call_for
from tests.codegen.forced import planned_by, request_for
from tests.codegen.gemm_cases import ARITHMETICS, CASES, Case, bias
from tests.codegen.gemm_promise import allowed_error, assert_specials_agree, relative, round_to_tf32, with_a_large_value, with_outliers, with_specials
from tests.codegen.gemm_sm80_emulated import Layer, build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

A100 = DEVICES["a100"]
TAPS = {"before": ({"tanh": {"name": "act"}}, {"add": {"from": "gemm", "name": "sum"}}), "after": ("silu", {"mul": {"from": "norm"}}, {"add": {"from": "sum"}})}
SMALL = {
    case.name: case
    for case in (
        *CASES,
        Case("groups_cut", 70, 130, 170, 10, before=(bias(1), "silu"), after=({"mul": {"value": 0.5}},), linear={"bias": False}),
        Case("block_a_group", 9, 72, 2048, 1, before=(bias(2048), "hardtanh")),
        Case("taps", 20, 48, 64, 8, **TAPS),
        Case("wide_taps", 20, 48, 640, 2, **TAPS),
        Case("tall", 265, 72, 264, 11, before=(bias(264), "tanh"), after=({"mul": {"name": "gain", "shape": [264]}},)),
        Case("whole", 128, 256, 256, 4, after=({"add": {"name": "shift", "shape": [1]}},), linear={"bias": False}),
        Case("low_groups", 275, 24, 40, 5, after=("silu",), norm={"affine": False}),
        Case("folded", 20, 48, 300, 1, before=("silu",), after=("silu", {"mean": {"dim": 1}})),
        Case("row_folded", 35, 77, 51, 1, after=({"logsumexp": {"dim": 1}}, {"mul": {"name": "gain", "shape": [1]}})),
        Case("row_mean", 70, 48, 128, 1, before=("silu",), after=("silu", {"add": {"value": 0.5}}, {"mean": {"dim": 1}}), linear={"bias": False}, norm={"affine": False}),
        Case("reduced", 20, 48, 64, 8, after=("silu", {"mean": {"dim": 1}})),
        Case("tiles_merged", 3, 16, 8448, 1, before=(bias(1), "relu"), after=("sigmoid",)),
        Case("tiles_alone", 3, 16, 8448, 1, after=("sigmoid",)),
        Case("blocks_share_a_group", 2, 8, 36008, 1),
        Case("longer_than_registers", 3, 33000, 16, 2),
        Case("saturated", 70, 136, 170, 1, before=("hardswish", "sigmoid", "hardswish"), after=("silu",)),
        Case("few_costly", 4, 48, 16872, 1, before=("elu", "celu"), after=("softplus", "elu", "tanh")),
        Case("product", 70, 130, 170, 0, (bias(170), "silu", {"add": {"from": "gemm"}}, {"mul": {"name": "gain", "shape": [1]}})),
        Case("product_alone", 35, 77, 51, 0, linear={"bias": False}),
        Case("product_sliced", 20, 20011, 52, 0, ({"mul": {"name": "gain", "shape": [1]}}, "silu", {"mul": {"from": "gemm"}}, bias(52))),
        Case("slices_odd", 7, 3863, 51, 3, before=("relu",), after=("sigmoid",)),
        Case("slices_even", 16, 4096, 64, 4, linear={"bias": False}),
        Case("slices_half", 35, 2050, 66, 3, before=(bias(66), "silu")),
        Case("slices_long", 7, 20011, 51, 3, before=("relu",)),
        Case("slices_words", 16, 16390, 66, 3, linear={"bias": False}),
        Case("slices_reduced", 32, 3863, 64, 1, before=("selu",), after=({"max": {"dim": 1}}, "tanh")),
    )
}


@dataclass(frozen=True)
class Entry:
    """A case with a tile, whether the chain ends in the GEMM, how many blocks share a tile and whether rows are copied first; without a tile the planner chooses, for a card of
    `sms` SMs."""

    name: str
    tile: tuple[int, int] | None = None
    finished: bool = True
    slices: int | None = None
    sms: int = A100.sms
    aligned: bool = False

    @property
    def case(self) -> Case:
        return SMALL[self.name]

    def plan(self, folder, precision, arithmetic):
        spec = self.case.spec(folder, precision, arithmetic)
        if self.tile is None:
            return planned(Request(spec, TARGETS["sm_80"], replace(A100, sms=self.sms)))
        if not self.case.groups:
            return planned_by(GEMM, spec, A100, math=arithmetic, tile="{}x{}".format(*self.tile), slices=self.slices or 1, aligned=self.aligned)
        end = "one_kernel" if self.finished else "norm_kernel"
        knobs = (("math", arithmetic), ("tile", "{}x{}".format(*self.tile)), ("slices", self.slices or 1), ("aligned", self.aligned), ("end", end))
        return plan(spec, "sm_80", "a100", forced=Choice("gemm", knobs))


# Every arithmetic has a table of tiles: what comes with each, as (case, whether the chain ends in the GEMM).
BY_TILE = {
    (128, 256): [("tall", True)], (256, 128): [("tall", True)], (256, 64): [("tall", True)], (64, 256): [("tall", True)], (128, 128): [("whole", True)],
    (128, 64): [("whole", True)], (64, 128): [("odd_pitch", True), ("row_mean", True)], (64, 64): [("odd_pitch", False), ("groups_cut", True), ("row_folded", True)], (32, 128): [("group_100", True)],
    (32, 64): [("taps", True)], (32, 32): [("groups_cut", False)], (16, 256): [("tiles_merged", False)], (16, 128): [("group_3", True)],
    (16, 64): [("taps", True), ("row_folded", True)], (16, 32): [("low_groups", True), ("one_row", True)],
}  # fmt: skip
BF16_TILES = ((128, 128), (64, 128), (64, 64), (32, 128), (16, 256), (16, 32))  # some of those of fp16, whose kernels are the same but for the type
# What no tile leads to: longer chains, norm kernels for longer groups, blocks that share a tile, all that splitting once a block has.
LONGER = (Entry("wide_taps"), Entry("block_a_group"), Entry("folded"), Entry("reduced"))
SLICED = (Entry("slices_odd", (64, 64), False, 16), Entry("slices_even", (16, 32), False, 8), Entry("slices_reduced", (16, 32), False, 8))
PRODUCTS = (Entry("product", (64, 64)), Entry("product_alone", (64, 64)))
SLICED_PRODUCT = (Entry("product_sliced", (64, 64), slices=16),)
SLICED_HALVES = (
    Entry("slices_long", (64, 64), False, 32), Entry("slices_long", (32, 32), False, 16, aligned=True), Entry("odd_pitch", (64, 128), True, aligned=True),
    Entry("odd_pitch", (16, 32), False, aligned=True), Entry("slices_words", (16, 32), False, 13), Entry("slices_reduced", (32, 64), False, 8),
)  # fmt: skip
ONCE = (
    Entry("whole", (64, 64)), Entry("taps", (64, 64)), Entry("one_row", (64, 64)), Entry("groups_cut", (64, 64), False),
    Entry("tiles_merged", (64, 256), False), Entry("odd_pitch", (128, 128)),
)  # fmt: skip
FURTHER = {
    "fp16": (*LONGER, *PRODUCTS, *SLICED_PRODUCT, *SLICED_HALVES, Entry("saturated", (64, 64), False), Entry("tiles_alone", (16, 256), False), Entry("few_costly"), Entry("blocks_share_a_group")),
    "bf16": (*PRODUCTS, *SLICED_HALVES, Entry("saturated", (64, 64), False), Entry("tiles_alone", (16, 256), False), Entry("blocks_share_a_group", sms=1)),  # in front of the kernel that streams
    "tf32": (*LONGER, *PRODUCTS, *SLICED, *SLICED_PRODUCT),
    "fp16x3": (*LONGER, *PRODUCTS, *ONCE, Entry("longer_than_registers")),
    "tf32x3": (*LONGER, *PRODUCTS, *SLICED_PRODUCT, *SLICED, Entry("slices_half", (16, 32), False, 4)),
    "bf16x3": (),
    "ffma": (*LONGER, *PRODUCTS),
}
# An entry for each of the templates, with what it needs in front of it and behind it.
ONE_EACH = {
    "fp16": (Entry("slices_words", (16, 32), False, 13), Entry("odd_pitch", (16, 32), False, aligned=True)), "fp16x3": (Entry("groups_cut", (64, 64), False),), "tf32x3": (Entry("taps", (32, 64)),),
    "ffma": (Entry("row_folded", (16, 64)),),
}  # fmt: skip
FOLDER = tempfile.TemporaryDirectory(prefix="emulated-")  # of this process's libraries
# What the templates of a GEMM decide by, as it stands in a plan.
KERNEL_FLAGS = (
    "ragged_m", "ragged_n", "ragged_k", "ragged_outputs", "raster_remainder", "finished", "statistics", "layered", "sliced", "copy_bytes", "rounds",
    "uses_to_float",
)  # fmt: skip
KERNEL_PARTS = ("bias", "affine", "before", "after", "scalars", "loads_channels", "fold")
OTHERS = {"gemm/row_scale.cu.j2": ("vector", "held", "ragged"), "gemm/add_slices.cu.j2": ("width", "ragged"), "gemm/end_slices.cu.j2": ("width", "ragged")}


def entries(arithmetic):
    tiles = BF16_TILES if arithmetic == "bf16" else [(tile.m, tile.n) for tile in tiles_for(NAMED[arithmetic])]
    return [*(Entry(name, tile, finished) for tile in tiles for name, finished in BY_TILE[tile]), *FURTHER[arithmetic]]


def branches(planned):
    """What the kernels' templates decide by: (template, name, value)."""
    found = set()
    for kernel in planned.kernels:
        template, taken = kernel.template, {name: getattr(kernel, name) for name in OTHERS.get(kernel.template, ())}
        if isinstance(kernel, GemmKernel):
            e, tile = kernel.epilogue, kernel.tile
            taken = {name: getattr(kernel, name) for name in KERNEL_FLAGS} | {name: bool(getattr(kernel, name)) for name in KERNEL_PARTS}
            taken |= {name: getattr(e, name) for name in ("vector", "ragged_lanes", "ragged_items")} | {"team": e.team > 1, "spans": e.spans > 1}
            taken |= {"row_bytes": tile.row_bytes, "guard_x": kernel.guard_copy(tile.m), "guard_w": kernel.guard_copy(tile.n)}
            taken |= {"asks_for_memory": kernel.smem_bytes > 48 * 1024, "one_round": e.round_rows == tile.m, "one_vector": e.vectors_per_lane == 1}
        found |= {(template, "", ""), *((template, *item) for item in taken.items())}
    return found


@pytest.mark.slow
def test_every_tile_and_every_branch_that_the_cases_take_on_a_gpu_is_emulated(tmp_path):
    emulated, taken = set(), set()
    for precision, arithmetic in ARITHMETICS:
        emulated |= {branch for entry in entries(arithmetic) for branch in branches(entry.plan(tmp_path, precision, arithmetic))}
        for case in CASES:
            spec = case.spec(tmp_path, precision, arithmetic)
            head, _ = cut(spec, TARGETS["sm_80"])
            for offer in GEMM.offers(request_for(GEMM, head, A100)):
                taken |= branches(plan(spec, "sm_80", "a100", forced=offer.choice))
    assert not (left := {branch for branch in taken if branch[0].startswith("gemm/")} - emulated), sorted(map(str, left))
    assert {f"norm/group_norm_{kind}.cu.j2" for kind in ("warp", "block", "stream", "statistics", "apply")} <= {template for template, *_ in emulated}


@functools.cache
def layers_of(arithmetic: str, one: bool):
    """(precision, arithmetic, [(case, layer)]): the entries of an arithmetic, or those of ONE_EACH, compiled once as one library."""
    precision = next(p for p, a in ARITHMETICS if a == arithmetic)
    folder = Path(tempfile.mkdtemp(prefix=f"emulated-{arithmetic}-", dir=FOLDER.name))
    chosen = ONE_EACH[arithmetic] if one else entries(arithmetic)
    found = build(folder, [entry.plan(folder, precision, arithmetic) for entry in chosen])
    return precision, arithmetic, [(entry.case, layer) for entry, layer in zip(chosen, found, strict=True)]


def parameters(*arithmetics: str, one: tuple[str, ...] = ()) -> list:
    """Values of the fixture `layers`: a few entries of the arithmetics in `one` for make test, all of `arithmetics` for make test-all."""
    values = [(arithmetic, True) for arithmetic in one] + [(arithmetic, False) for arithmetic in arithmetics]
    marks = {True: pytest.mark.representative, False: pytest.mark.emulated}
    return [pytest.param(value, id=value[0] + ("-one" if value[1] else ""), marks=marks[value[1]]) for value in values]


@pytest.fixture(params=parameters(*(arithmetic for _, arithmetic in ARITHMETICS), one=tuple(ONE_EACH)))
def layers(request):
    """What `layers_of` gives of an arithmetic."""
    return layers_of(*request.param)


def only(*arithmetics):
    """These alone are tested."""
    return pytest.mark.parametrize("layers", parameters(*arithmetics), indirect=True)


def draw(layer: Layer, kind=torch.rand, seed: int = 2) -> torch.Tensor:
    return kind(layer.spec.input_shape, generator=torch.Generator().manual_seed(seed)).to(layer.dtype)


@contextlib.contextmanager
def weights(layer: Layer, weight: torch.Tensor):
    """The producer has this weight meanwhile."""
    kept = layer.weight.clone()
    layer.weight.copy_(weight)
    try:
        yield
    finally:
        layer.weight.copy_(kept)


def weight_of(layer: Layer, case: Case, precision: str, kind: str) -> torch.Tensor:
    if kind in ("outlier_first", "outlier"):
        return with_outliers(layer.weight, case, precision, kind == "outlier_first")
    if kind == "offset":
        # A row's mean is x's sum times what is added; the spread of its values is a third (see with_outliers on their sizes).
        times = {"fp32": 1000.0, "tf32": 1000.0, "fp16": 30.0, "bf16": 8.0}[precision]
        return layer.weight + times / 3 / (case.in_features / 2)
    return layer.weight.clone()


def splits(rows: torch.Tensor) -> torch.Tensor:
    """Whether two fp16 parts hold a row of fp32 values (docs/numerics.md): its values are finite, and few are small beside many that are near the largest."""
    k = rows.shape[1]
    magnitudes = rows.double().abs()
    largest = magnitudes.amax(1, keepdim=True)
    exponent = torch.frexp(largest.clamp_min(2.0**-127)).exponent - 1  # of the least normal number's, or less
    scaled = magnitudes * torch.exp2((14.0 - exponent).clamp_max(126.0))
    small, near = ((scaled < 0.25) & (scaled > 0)).sum(1), (scaled >= 16).sum(1)
    return torch.isfinite(rows).all(1) & ((small == 0) | ((small <= max(4, k // 1024)) & (near >= max(256, k // 16))))


def blocks_beyond_parts(layer: Layer, x: torch.Tensor) -> int:
    """The blocks that meet a row of x or W of finite values which parts of fp16 cannot hold, where the layer has them."""
    if not any(kernel.template == "gemm/row_scale.cu.j2" for kernel in layer.plan.kernels):
        return 0
    kernel = layer.gemm
    columns = kernel.epilogue.span * kernel.epilogue.spans
    x_lost, w_lost = ~splits(x), ~splits(layer.weight)
    in_x = [bool(x_lost[row : row + kernel.tile.m].any()) for row in range(0, x.shape[0], kernel.tile.m)]
    in_w = [bool(w_lost[column : column + kernel.tile.n].any()) for column in range(0, layer.spec.channels, columns)]
    return sum(a or b for a in in_x for b in in_w)


@pytest.mark.parametrize("kind", ["uniform", "outlier_first", "outlier", "offset"])
@torch.no_grad()
def test_error_is_within_the_promise(layers, kind):
    """And blocks and threads in another order give the same bits, so none of them reads what another one has yet to write."""
    precision, arithmetic, found = layers
    for seed, (case, layer) in enumerate(found, 1):
        if kind == "offset" and (arithmetic == "bf16x3" or case.name == "one_row"):
            continue  # 16 bits of a weight are not promised to resolve it, and the error of eight values is a matter of luck
        x = draw(layer)
        with weights(layer, weight_of(layer, case, precision, kind)):
            y, in_fp32, reference = layer(x), layer.in_fp32, layer.pytorch(x, torch.float64)
            assert y.shape == reference.shape and y.dtype == x.dtype
            rounded = layer.pytorch(round_to_tf32(x), torch.float64, round_to_tf32(layer.weight)) if precision == "tf32" else None
            allowed = allowed_error(case, precision, arithmetic, layer.pytorch(x), rounded, reference)
            assert relative(y, reference) <= allowed, f"{layer.name}: {relative(y, reference):.2e}, allowed {allowed:.2e}"
            assert in_fp32 == blocks_beyond_parts(layer, x), layer.name
            if kind == "uniform":
                assert torch.equal(y.view(torch.uint8), layer(x, seed=seed).view(torch.uint8)), layer.name


@torch.no_grad()
def test_infinity_and_nan_come_out_where_they_do_in_pytorch(layers):
    precision, arithmetic, found = layers
    for case, layer in found:
        if case.batch < 8:
            continue  # needs a row for each kind of value
        x, weight = with_specials(draw(layer, torch.randn, 3), precision), layer.weight.clone()
        weight[0, 2] = float("inf")
        with weights(layer, weight):
            y, in_fp32, expected = layer(x), layer.in_fp32, layer.pytorch(x)
            assert_specials_agree(y, expected, precision)
            assert (in_fp32 > 0) == arithmetic.endswith("x3"), layer.name
            assert arithmetic != "fp16x3" or in_fp32 == blocks_beyond_parts(layer, x), layer.name


@torch.no_grad()
def test_groups_whose_squares_exceed_fp32_are_normalised(layers):
    """All values of a sample are large, or one is; the other samples, whose groups may share a warp with theirs, stay what they are."""
    precision, arithmetic, found = layers
    if precision == "fp16":
        return  # its values stay below 65504
    close = 1e-4 if arithmetic == "bf16x3" else {"fp32": 3e-6, "tf32": 5e-3, "bf16": 3e-2}[precision]
    for case, layer in found:
        if not case.groups:
            continue
        x = draw(layer, torch.randn)
        x[0] *= 1e36
        if case.batch > 2:
            x[2, 3] = 3e38
        y, reference = layer(x), layer.pytorch(x, torch.float64)
        assert torch.isfinite(y).all(), layer.name
        for rows in (slice(0, 1), slice(2, 3), slice(3, None)):
            if len(y[rows]):
                assert relative(y[rows], reference[rows]) <= close, f"{layer.name}: {relative(y[rows], reference[rows]):.2e}"


@torch.no_grad()
def test_a_constant_group_gives_beta_exactly(layers):
    precision, _, found = layers
    for case, layer in found:
        if not case.groups or "taps" in case.name or "reduced" in case.name or "fold" in case.name or case.name == "row_mean":
            continue  # the group's own values are added to it, or its channels to one another
        width = case.out_features // case.groups
        kept = {key: value.clone() for key, value in layer.module.state_dict().items()}
        x = draw(layer)
        # Far above the other group's: what rounding left of such a mean shows in a difference from it.
        layer.weight[:width] = (50 if precision == "fp16" else 1e7) * layer.weight[0].clone()
        for parameter in (layer.module.gemm.bias, getattr(layer.module, "bias", None)):
            if parameter is not None:
                parameter[:width] = parameter[0].clone()
        y = layer(x)
        # Zero weights and biases give a constant group without any rounding.
        layer.weight[:width] = 0.0
        expected = layer(x)
        layer.module.load_state_dict(kept)
        assert torch.equal(y[:, :width], expected[:, :width]), layer.name


@torch.no_grad()
def test_a_mean_far_above_the_spread_costs_the_values_no_bits(layers):
    """Every row of x picks a column of W, so that the product is exact, and of numbers that the storage type holds: the error is the norm's alone."""
    precision, arithmetic, found = layers
    base, step = {"fp32": (4096.0, 1 / 64), "tf32": (1024.0, 1.0), "fp16": (1024.0, 1.0), "bf16": (128.0, 1.0)}[precision]
    for case, layer in found:
        if case.before not in ((), ("relu",)) or arithmetic == "bf16x3":
            continue  # other operators round, and so does a split that holds 16 bits
        steps = torch.randint(0, 100, layer.weight.shape, generator=torch.Generator().manual_seed(4))
        x = torch.eye(case.in_features, dtype=layer.dtype)[torch.arange(case.batch) % case.in_features]
        kept = {key: value.clone() for key, value in layer.module.state_dict().items()}
        layer.weight.copy_(base + step * steps)
        if layer.module.gemm.bias is not None:
            layer.module.gemm.bias.zero_()
        y, reference = layer(x), layer.pytorch(x, torch.float64)
        layer.module.load_state_dict(kept)
        allowed = max(3e-7, 1.05 * relative(reference.to(y.dtype), reference))
        assert relative(y, reference) <= allowed, f"{layer.name}: {relative(y, reference):.2e}, allowed {allowed:.2e}"


@only("fp16x3", "bf16x3", "tf32x3", "ffma")
@torch.no_grad()
def test_small_values_count_where_a_weight_cancels_the_large_one(layers):
    _, arithmetic, found = layers
    for _, layer in found:
        x, weight = with_a_large_value(draw(layer, torch.randn)), layer.weight.clone()
        weight[:, 0] = 0.0
        with weights(layer, weight):
            y, reference = layer(x), layer.pytorch(x, torch.float64)
            assert relative(y[0], reference[0]) <= (1e-4 if arithmetic == "bf16x3" else 1e-5), layer.name
            assert layer.in_fp32 == blocks_beyond_parts(layer, x) and (layer.in_fp32 > 0) == (arithmetic == "fp16x3"), layer.name


@pytest.mark.parametrize(("large", "small", "of_weights"), [(2.0**40, 2.0**-40, 1.0), (2.0**110, 2.0**95, 2.0**-100)])
@only("fp16x3", "tf32x3")
@torch.no_grad()
def test_rows_of_any_size_are_multiplied_by_tensor_cores(layers, large, small, of_weights):
    """Powers of two take rows of x, and W's groups, far apart and out of fp16's range; what large and small factors make together is in fp32's range.
    Sums below 2^-80 may have come of factors too small for two parts of TF32, so their blocks are computed again."""
    faint = layers[1] == "tf32x3" and of_weights < 2.0**-80
    for case, layer in layers[2]:
        x, weight = draw(layer), layer.weight * of_weights
        x[1::3] *= large
        x[2::3] *= small
        weight.view(case.groups or 1, -1)[::2] *= 2.0**10
        with weights(layer, weight):
            y, reference, eager = layer(x), layer.pytorch(x, torch.float64), layer.pytorch(x)
            assert faint or layer.in_fp32 == blocks_beyond_parts(layer, x), layer.name
            for rows in (slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)):
                if len(y[rows]):
                    allowed = max(1.1 * relative(eager[rows], reference[rows]), 2e-6 if case.in_features < 256 else 3e-7)
                    assert relative(y[rows], reference[rows]) <= allowed, layer.name


@only("fp16x3", "tf32x3", "bf16x3", "ffma")
@torch.no_grad()
def test_factors_near_the_smallest_of_fp32_keep_their_bits(layers):
    """x of 1e-37 and 1e-40 makes sums of 1e-31 and 1e-34, which have all their bits."""
    for case, layer in layers[2]:
        if case.before or case.after:
            continue
        x = draw(layer) * 1e-37
        x[0] *= 1e-3
        weight = layer.weight * 2.0**20
        with weights(layer, weight):
            kept = {key: value.clone() for key, value in layer.module.state_dict().items()}
            for key, value in layer.module.state_dict().items():
                if key.endswith("bias"):
                    value.zero_()
            y, reference, eager = layer(x), layer.pytorch(x, torch.float64), layer.pytorch(x)
            layer.module.load_state_dict(kept)
            for rows in (slice(0, 1), slice(1, None)):
                if len(y[rows]):
                    allowed = max(1.1 * relative(eager[rows], reference[rows]), 2e-6)
                    assert relative(y[rows], reference[rows]) <= allowed, f"{layer.name}: {relative(y[rows], reference[rows]):.2e}, allowed {allowed:.2e}"


@only("fp16x3", "tf32x3")
@torch.no_grad()
def test_large_factors_that_meet_only_zeros_leave_zeros(layers):
    """The product of such rows' inverse scales is beyond fp32's range, which times zero would be NaN."""
    for _, layer in layers[2]:
        x, weight = draw(layer) * 2.0**100, layer.weight * 2.0**100
        x[:, ::2], weight[:, 1::2] = 0.0, 0.0
        with weights(layer, weight):
            y, lost, expected = layer(x), blocks_beyond_parts(layer, x), layer.pytorch(x, torch.float64)
            assert (y - expected).norm() <= 1e-6 * expected.norm() and layer.in_fp32 == lost, layer.name


def rows_at_the_limits(k: int) -> torch.Tensor:
    """Rows of k values at the limits of the rule for what fp16 parts hold."""
    few, many = max(4, k // 1024), max(256, k // 16)

    def row(near: int, small: int, largest: float = 1.0) -> torch.Tensor:
        """So many values near the largest, itself and others that are 2^4 when scaled, and so many just below 2^-2; the others are 2^-2."""
        parts = (1, 1.0), (near - 1, 2.0**-10), (small, 0.99 * 2.0**-16), (k - near - small, 2.0**-16)
        return largest * torch.cat([torch.full((count,), value) for count, value in parts])

    rows = [row(1, 0), row(1, 1), row(k, 0), torch.zeros(k), row(1, 0, 2.0**-140), row(1, 0, 1.99 * 2.0**127), row(1, 0, 1.5 * 2.0**-110)]
    if k > many + few:
        rows += [row(many, few), row(many - 1, few), row(many, few + 1), row(many, few, 1.5 * 2.0**90), row(many, few, 2.0**-90)]
    rows += [torch.where(torch.arange(k) == k - 1, torch.tensor(special), row(1, 0)) for special in (float("inf"), -float("inf"), float("nan"), -0.0)]
    return torch.stack(rows)


@only("fp16x3")
@torch.no_grad()
def test_scales_are_the_powers_of_two_that_docs_numerics_tells(layers):
    """Every row of x, and of W, has the scale that brings its largest value to [2^14, 2^15), at most 2^126, or NaN where fp16 parts cannot hold it."""
    for case, layer in layers[2]:
        rows = rows_at_the_limits(case.in_features)
        x, weight = (rows[torch.arange(first, first + count) % len(rows)] for first, count in ((0, case.batch), (7, case.out_features)))
        with weights(layer, weight):
            layer(x)
        for scales, values in zip(layer.buffers[SCALES].split([case.batch, case.out_features]), (x, weight), strict=True):
            held = splits(values)
            assert torch.equal(torch.isnan(scales), ~held), layer.name
            largest = values[held].double().abs().amax(1)
            expected = torch.exp2((15.0 - torch.frexp(largest).exponent).clamp_max(126.0)).where(largest > 0, torch.tensor(1.0, dtype=torch.float64))
            assert torch.equal(scales[held].double(), expected), layer.name


def test_operands_of_an_instruction_come_in_the_order_of_its_text():
    assert call_for('"cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a)') == "ptx::cvt_rn_f16x2_f32(pair, b, a)"
    assert call_for('"cp.async.wait_group %0;" ::"n"(kPending) : "memory"') == "ptx::cp_async_wait_group(kPending)"
    assert call_for('"cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared + part * 8), "l"(f(a, (b))), "r"(bytes)') == (
        "ptx::cp_async_ca_shared_global(shared + part * 8, f(a, (b)), 8, bytes)"
    )
