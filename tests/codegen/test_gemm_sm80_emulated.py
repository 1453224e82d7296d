"""The sm_80 GEMM and the norm kernels behind it without a GPU: the emitted sources in an emulation, against float64. Every tile, awkward sizes, every
arithmetic, adversarial data."""

import contextlib
import shutil

import pytest
import torch

from codegen.plan import plan
from codegen.plan.gemm.companions import SCALES
from codegen.plan.gemm.route import GEMM
from codegen.plan.stages.route import cut
from codegen.targets import TARGETS
from tests.codegen.emulated import call_for
from tests.codegen.forced import request_for
from tests.codegen.gemm_cases import ARITHMETICS, CASES, Case
from tests.codegen.gemm_promise import allowed_error, assert_specials_agree, relative, round_to_tf32, with_a_large_value, with_outliers, with_specials
from tests.codegen.gemm_sm80_emulated import Layer
from tests.codegen.gemm_sm80_entries import A100, ONE_EACH, branches, entries, layers_of, parameters

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


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


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@torch.no_grad()
def test_infinity_and_nan_come_out_where_they_do_in_pytorch(layers):
    precision, arithmetic, found = layers
    for case, layer in found:
        if case.batch < 8:
            continue  # needs a row for each kind of value
        x, weight = with_specials(draw(layer, torch.randn, 3), precision), layer.weight.clone()
        weight[0, 2] = float("inf")
        with weights(layer, weight):
            y, in_fp32 = layer(x), layer.in_fp32
            with torch.backends.mkldnn.flags(enabled=False):  # with AMX, oneDNN's bf16 product makes all of a row NaN that holds an infinity
                expected = layer.pytorch(x)
            assert_specials_agree(y, expected, precision, normed=case.groups > 0)
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
