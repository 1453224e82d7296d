"""Reductions over channels, average pooling, broadcasts: by the cpu target's kernels against PyTorch, and as sm_80 and sm_90a plan them."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codegen.ir.fused_form import departure
from codegen.manifest import manifest_text
from codegen.ops import broadcast
from codegen.package import make_package
from codegen.plan import Refusal, plan
from codegen.plan.stages.kernel import element_offset
from codegen.render import render, render_kernel
from codegen.spec import Spec, SpecError
from codegen.standalone import render_standalone
from tests import tiers
from tests.codegen.chains_emulated import build_emulated
from tests.codegen.cpu_chains import build, conv_chain, linear_chain, make_spec
from tests.codegen.test_chains import POOL, TAPS, conv, linear
from tests.codegen.test_cpu import PRECISIONS, check

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
REDUCTIONS = ("min", "max", "sum", "mean", "logsumexp")
TAIL = [{"mul": {"name": "factor", "shape": [1]}}, "tanh"]
# A sum over channels of normalised values nearly cancels, so its relative error is the norm's, magnified.
STEEPER = {"sum": 8.0, "mean": 8.0}
AVERAGES = {
    "plain": ({"kernel_size": 2}, (7, 9)),
    "wide": ({"kernel_size": [3, 5], "stride": [3, 2]}, (11, 13)),
    "padded": ({"kernel_size": 3, "stride": 2, "padding": 1}, (9, 8)),
    "inside": ({"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}, (9, 8)),
    "ceil": ({"kernel_size": 3, "stride": 2, "ceil_mode": True}, (8, 10)),
    "ceil_padded": ({"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True}, (7, 8)),
    "ceil_inside": ({"kernel_size": [2, 3], "stride": 3, "padding": 1, "ceil_mode": True, "count_include_pad": False}, (7, 8)),
    "divisor": ({"kernel_size": 3, "padding": [0, 1], "divisor_override": 7}, (9, 8)),
    "global": ({"kernel_size": [6, 7]}, (6, 7)),
}


def reduced(name: str, keepdim: bool, tail: list) -> list:
    return [{name: {"name": "folded", "keepdim": keepdim}}, *tail]


@needs_gxx
@tiers.shares
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_over_channels(tmp_path, name: str, share: str) -> None:
    specs = []
    for precision, keepdim in itertools.product(PRECISIONS, (True, False)):
        specs.append(make_spec(tmp_path, linear_chain(["tanh"], reduced(name, keepdim, TAIL), 60, 5), 301, precision))
        specs.append(make_spec(tmp_path, conv_chain([], ["gelu", *reduced(name, keepdim, [])], 12, 3), 2, precision, (19, 17)))
        specs.append(make_spec(tmp_path, conv_chain([], reduced(name, keepdim, ["relu", {"add": {"from": "folded"}}]), 12, 3), 20, precision, (3, 5)))
    for chain in build(tmp_path, tiers.share_of(share, REDUCTIONS, name, specs)):
        check(chain, chain.source(2.0), steeper=STEEPER.get(name, 1.0))


def check_nan_and_infinity(chain, source) -> None:
    """The first two channels that are reduced hold NaN and infinities, in all combinations."""
    for values in itertools.product((1.0, torch.nan, torch.inf, -torch.inf), repeat=2):
        chain.module.m.data[:2] = torch.tensor(values)[:, None, None]
        exact, got = chain.pytorch(source, torch.float64), chain.kernel(source)
        assert torch.equal(got.isnan(), exact.isnan()) and torch.equal(got[got.isinf()].double(), exact[exact.isinf()])
        finite = exact.isfinite()
        torch.testing.assert_close(got[finite].double(), exact[finite], rtol=1e-4, atol=1e-5)


@needs_gxx
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_nan_and_infinity(tmp_path, name: str) -> None:
    """A norm's own NaN and infinities, made by a parameter behind it, one channel after the other."""
    after = [{"mul": {"name": "m", "shape": [4, 1, 1]}}, *reduced(name, False, [])]
    (chain,) = build(tmp_path, [make_spec(tmp_path, conv_chain([], after, 4, 2), 2, "fp32", (3, 3))])
    source = chain.source()
    check_nan_and_infinity(chain, source)
    chain.module.m.data[:] = -torch.inf
    exact, got = chain.pytorch(source.abs(), torch.float64), chain.kernel(source.abs())
    assert torch.equal(got.double(), exact) or torch.equal(got.isnan(), exact.isnan())


def average_specs(folder: Path, name: str, edit: Callable[[list], list] = list) -> list[Spec]:
    """A kind of average between other operators, one order of them in each precision; `edit` changes the chains."""
    arguments, size = AVERAGES[name]
    average = {"avg_pool2d": {"name": "average", **arguments}}
    tails = (["silu", average, {"mul": {"name": "scale", "shape": [6, 1, 1]}}], [average, "tanh", {"add": {"from": "average"}}], [average, "relu", {"max_pool2d": {"kernel_size": 1}}])
    return [make_spec(folder, edit(conv_chain([], tail, 6, 3)), 2, precision, size) for precision, tail in zip(PRECISIONS, tails, strict=True)]


@needs_gxx
@tiers.shares
@pytest.mark.parametrize("name", AVERAGES)
def test_average_pooling(tmp_path, name: str, share: str) -> None:
    for chain in build(tmp_path, tiers.share_of(share, AVERAGES, name, average_specs(tmp_path, name))):
        check(chain, chain.source(), steeper=4.0)


@needs_gxx
def test_stages_behind_each_other(tmp_path) -> None:
    pools = [{"max_pool2d": {"kernel_size": 3, "stride": 1}}, "silu", {"avg_pool2d": {"kernel_size": 2}}, {"max_pool2d": {"kernel_size": 2, "ceil_mode": True}}]
    tail = [*pools, {"add": {"name": "shift", "shape": [1]}}, {"max": {"keepdim": True}}, {"add": {"name": "spread", "shape": [5, 1, 1]}}, "tanh"]
    specs = [make_spec(tmp_path, conv_chain([], tail, 8, 2), 3, precision, (12, 13)) for precision in PRECISIONS]
    for chain in build(tmp_path, specs):
        assert chain.spec.output_shape == (3, 5, 3, 3)
        check(chain, chain.source(), steeper=2.0)


BROADCASTS = {
    "problem_75": (True, [[1, 60, 1, 1]], (1, 60, 301, 1)),
    "rows": (True, [[60]], (301, 60)),
    "vector": (False, [[301]], (301,)),
    "matrix": (False, [[5, 1]], (5, 301)),
    "twice": (True, [[3, 1, 1], [1, 4]], (3, 301, 4)),
    "same": (True, [[301, 1], [1]], (301, 1)),
}


def broadcast_chain(name: str) -> list:
    """Parameters that give a folded value another shape."""
    keepdim, shapes, _ = BROADCASTS[name]
    adds = [{("mul" if i else "add"): {"name": f"p{i}", "shape": shape}} for i, shape in enumerate(shapes)]
    return linear_chain([], [{"min": {"keepdim": keepdim}}, "tanh", *adds, "silu"], 60, 5)


@needs_gxx
@tiers.shares
@pytest.mark.parametrize("name", BROADCASTS)
def test_parameters_that_change_the_shape(tmp_path, name: str, share: str) -> None:
    specs = [make_spec(tmp_path, broadcast_chain(name), 301, precision) for precision in PRECISIONS]
    for chain in build(tmp_path, tiers.share_of(share, BROADCASTS, name, specs)):
        assert chain.spec.output_shape == BROADCASTS[name][2]
        check(chain, chain.source(), steeper=2.0)


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=5), st.integers(0, 4))
def test_offsets_of_broadcast_elements(dims: list[tuple[int, bool]], dropped: int) -> None:
    whole = tuple(size for size, _ in dims)
    shape = tuple(size if kept else 1 for size, kept in dims)[min(dropped, len(dims) - 1) :]
    places = torch.arange(math.prod(shape)).view(shape).expand(whole).flatten().tolist()
    text = element_offset(shape, whole).replace("/", "//")
    assert [eval(text, {"index": index}) for index in range(math.prod(whole))] == places
    assert broadcast(shape, whole) == whole


def without_bias(chain: list) -> list:
    (word, arguments), = chain[0].items()
    return [{word: {**arguments, "bias": False}}, *chain[1:]]


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(REDUCTIONS))
def test_emulated_reductions(tmp_path, name: str) -> None:
    """sm_80's kernels: rows of a warp and of a block, columns in slices and not, ragged and whole."""
    specs = []
    for precision in ("fp16", "bf16"):
        for channels, batch in ((60, 13), (1024, 5), (2048, 3)):
            specs.append(make_spec(tmp_path, without_bias(linear_chain([], reduced(name, True, TAIL), channels, 4)), batch, precision))
    for precision, (channels, size) in zip((*PRECISIONS, "fp32"), ((12, (19, 17)), (64, (3, 5)), (65, (8, 8)), (8, (3, 5))), strict=True):
        specs.append(make_spec(tmp_path, without_bias(conv_chain([], reduced(name, False, ["relu", {"add": {"from": "folded"}}]), channels, 1)), 5, precision, size))
    for chain in build_emulated(tmp_path, specs):
        check(chain, chain.source(2.0), steeper=STEEPER.get(name, 1.0))
    source = chain.source()
    source[0, 0, 0, 0] = torch.nan
    check(chain, source, steeper=STEEPER.get(name, 1.0))


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(REDUCTIONS, "logsumexp"))
def test_emulated_reductions_where_the_norm_holds_rows(tmp_path, name: str) -> None:
    """A group is a row: it is folded by the few lanes, the warp or the block that have normalised it, and never written. The last warps and accesses may be empty."""
    specs = []
    for (channels, batch), precision in itertools.product(((6, 301), (77, 33), (512, 5), (1999, 3), (8192, 2)), ("fp16", "bf16")):
        tail = ["silu", *reduced(name, channels % 2 == 0, [{"mul": {"name": "factor", "shape": [1]}}, "tanh"])]
        specs.append(make_spec(tmp_path, without_bias(linear_chain(["gelu"], tail, channels, 1)), batch, precision))
    wide = [{name: {"keepdim": True}}, {"mul": {"name": "spread", "shape": [40]}}, "tanh"]
    specs.append(make_spec(tmp_path, without_bias(linear_chain([], wide, 300, 1, affine=False)), 7, "bf16"))
    for chain in build_emulated(tmp_path, specs):
        first, *others = chain.plan.kernels
        assert first.fold.reduction == name and not any(kernel.name.endswith(f"channel_{name}") for kernel in others)
        assert not any(buffer.name == "stage:0" for buffer in chain.plan.buffers)
        check(chain, chain.source(2.0), steeper=STEEPER.get(name, 1.0), chance=1.3)
        source = chain.source()
        source[0, 1] = torch.nan
        got = chain.kernel(source)
        assert torch.equal(got.isnan(), chain.pytorch(source).isnan())


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(REDUCTIONS))
def test_emulated_reductions_of_nan_and_infinity(tmp_path, name: str) -> None:
    after = [{"mul": {"name": "m", "shape": [4, 1, 1]}}, *reduced(name, False, [])]
    (chain,) = build_emulated(tmp_path, [make_spec(tmp_path, without_bias(conv_chain([], after, 4, 2)), 2, "fp32", (3, 3))])
    check_nan_and_infinity(chain, chain.source())


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(AVERAGES))
def test_emulated_average_pooling(tmp_path, name: str) -> None:
    for chain in build_emulated(tmp_path, average_specs(tmp_path, name, without_bias)):
        check(chain, chain.source(), steeper=4.0)


@pytest.mark.emulated
@needs_gxx
def test_emulated_pooled_groups_that_blocks_share(tmp_path) -> None:
    """Few groups, too long for a block each: their statistics by many blocks, then windows of normalised values by many more, the last with a part of a share."""
    pool = {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}}
    tails = (["gelu", pool, {"mul": {"name": "scale", "shape": [6, 1, 1]}}], [{"add": {"name": "shift", "shape": [6, 1, 1]}}, pool, "tanh"], [pool, {"mean": {}}])
    specs = [make_spec(tmp_path, without_bias(conv_chain(["mish"], tail, 6, 2)), 1, precision, size) for precision, tail, size in
             zip(PRECISIONS, tails, ((150, 151), (211, 209), (212, 215)), strict=True)]  # fmt: skip
    for chain in build_emulated(tmp_path, specs):
        assert [kernel.name.partition("_")[2] for kernel in chain.plan.kernels[:2]] == ["group_norm_statistics", "group_norm_pool"]
        check(chain, chain.source(offset=2.0), steeper=4.0)
        source = chain.source()
        source[0, 1, 7, 9] = torch.nan
        assert torch.equal(chain.kernel(source).isnan(), chain.pytorch(source).isnan())


@pytest.mark.representative
@needs_gxx
def test_emulated_stages_behind_each_other(tmp_path) -> None:
    pools = [{"max_pool2d": {"kernel_size": 3, "stride": 1}}, "silu", {"max_pool2d": {"kernel_size": 2, "padding": 1, "dilation": 2}}, {"avg_pool2d": {"kernel_size": 2}}]
    tail = [*pools, {"add": {"name": "shift", "shape": [1]}}, {"max": {"keepdim": True}}, {"add": {"name": "spread", "shape": [5, 1, 1]}}, "tanh"]
    specs = [make_spec(tmp_path, without_bias(conv_chain([], tail, 8, 2)), 3, precision, (12, 13)) for precision in PRECISIONS]
    for chain in build_emulated(tmp_path, specs):
        check(chain, chain.source(), steeper=2.0)


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(BROADCASTS))
def test_emulated_broadcasts(tmp_path, name: str) -> None:
    specs = [make_spec(tmp_path, without_bias(broadcast_chain(name)), 301, precision) for precision in ("fp16", "bf16")]
    for chain in build_emulated(tmp_path, specs):
        assert chain.kernel(chain.source()).shape == BROADCASTS[name][2]
        check(chain, chain.source(), steeper=2.0)


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(TAPS))
def test_emulated_results_taken_once_more(tmp_path, name: str) -> None:
    """By the norm kernels that hold a group in a warp, in a block or not at all, and by those that pool."""
    specs = [make_spec(tmp_path, without_bias(linear(name, channels, 2)), 3, precision) for channels, precision in ((60, "fp16"), (4096, "bf16"))]
    specs += [make_spec(tmp_path, without_bias(conv(name, tail)), 2, precision, (9, 20)) for precision, tail in (("fp32", ()), ("fp16", (POOL,)), ("fp32", (POOL,)))]
    specs.append(make_spec(tmp_path, without_bias(conv(name, (), 2, 1)), 1, "fp32", (190, 200)))
    for chain in build_emulated(tmp_path, specs):
        check(chain, chain.source(), steeper=2.0 if name == "squared" else 1.0)


CHAINS = [
    (linear_chain([], ["silu", {"min": {"keepdim": True}}, {"add": {"name": "bias", "shape": [1, 512, 1, 1]}}], 512, 8), None),
    (linear_chain([], [{"logsumexp": {}}], 3 * 8192, 1), None),
    (conv_chain(["relu"], ["tanh", {"sum": {"keepdim": True}}, "relu"], 64, 8), (30, 32)),
    (conv_chain([], [{"add": {"from": "conv"}}, {"mean": {}}], 33, 3), (5, 7)),
    (conv_chain([], [{"max_pool2d": {"kernel_size": 2}}, {"avg_pool2d": {"kernel_size": 3, "padding": 1, "ceil_mode": True}}, {"max": {}}], 64, 8), (30, 32)),
    (conv_chain([], ["silu", {"avg_pool2d": {"kernel_size": 7, "count_include_pad": False, "padding": 3}}, {"mul": {"name": "m", "shape": [64, 1, 1]}}], 64, 8), (30, 32)),
]


def planned(tmp_path, number: int, precision: str, target: str):
    chain, size = CHAINS[number]
    if size is None:
        chain[0]["linear"]["in_features"] = 1024
    return plan(make_spec(tmp_path, chain, 160, precision, size), target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("number", range(len(CHAINS)))
def test_cuda_plans_end_in_stages(tmp_path, number: int, precision: str, target: str) -> None:
    """Every step's tensors are there, each buffer is written before it is read, and y is written last."""
    try:
        found = planned(tmp_path, number, precision, target)
    except Refusal as error:
        assert target == "sm_90a" and len(str(error)) > 40
        return
    known = {"x", "t0", *(key for key, _ in found.spec.parameters), *(buffer.name for buffer in found.buffers)}
    for step in found.steps:
        assert {name for name in step.arguments if name} <= known | {"y"}
    assert found.steps[-1].arguments[-1] == "y" and sum("y" in step.arguments for step in found.steps) == 1
    for kernel in found.kernels:
        text = render_kernel(found, kernel)
        assert text == render_kernel(found, kernel) and "double" not in text and kernel.smem_bytes <= found.target.smem_bytes


def test_a_package_with_stages_is_whole(tmp_path) -> None:
    chain, _ = CHAINS[0]
    chain[0]["linear"]["in_features"] = 1024
    package = make_package(make_spec(tmp_path, chain, 160), ("cpu", "sm_80"))
    files = render(package)
    assert {"cpu.cpp", "channel_min_cpu.cpp", "broadcast_cpu.cpp", "channel_min_sm80.cu", "broadcast_sm80.cu"} <= set(files)
    assert {"broadcast_backward_cpu.cpp", "channel_min_backward_cpu.cpp", "cpu_backward.cpp"} <= set(files)
    assert {"broadcast_backward_sm80.cu", "channel_min_backward_sm80.cu", "backward_sm80.cu"} <= set(files)
    assert [plan.target.name for plan in package.backward_plans] == ["cpu", "sm_80"] and "grad:stage:1" in manifest_text(package, files)
    text = render_standalone(package, files)
    assert "stage_0 = torch.empty((160, 512)" in text and "stage:" not in text


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ([{"min": {}}, {"add": {"name": "p", "shape": [3, 1]}}], "does not broadcast with"),
        ([{"min": {}}, {"add": {"from": "conv"}}], r"\(2, 8, 8, 8\) does not broadcast with the value\'s \(2, 8, 8\)"),
        ([{"avg_pool2d": {"kernel_size": 9}}], "does not fit"),
        ([{"avg_pool2d": {"kernel_size": 2, "padding": 2}}], "more than half"),
    ],
)
def test_what_no_stage_takes(tmp_path, after: list, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(tmp_path, conv_chain([], after, 8, 2), 2, "fp32", (8, 8))


IN_PARTS = [
    ([], [{"min": {"dim": 2}}], "min is no reduction over channels alone"),
    ([], [{"min": {}}, {"max": {}}], "max follows a reduction"),
    ([], [{"min": {"keepdim": True}}, {"max_pool2d": {"kernel_size": 2}}], "max_pool2d follows a reduction"),
    ([], [{"min": {"name": "least", "keepdim": True}}, {"add": {"name": "p", "shape": [8, 1, 1]}}, {"add": {"from": "least"}}], "add takes a result of another shape"),
    ([{"max": {"dim": 3, "keepdim": True}}], [], "max comes before a norm"),
]


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
@pytest.mark.parametrize(("before", "after", "reason"), IN_PARTS)
def test_stages_in_another_order_are_computed_in_parts(tmp_path, before: list, after: list, reason: str, target: str) -> None:
    spec = make_spec(tmp_path, conv_chain(before, after, 8, 2), 2, "fp32", (8, 8))
    assert departure(spec.chain) == reason
    assert any(line.startswith("parts, ") and reason in line for line in plan(spec, target).why)


def test_a_norm_behind_a_reduction_needs_the_channels_that_are_left(tmp_path) -> None:
    with pytest.raises(SpecError, match=r"group_norm takes \(batch, channels, ...\), the input here is \(2,\)"):
        make_spec(tmp_path, linear_chain([{"max": {}}], [], 8, 2), 2)


@pytest.mark.parametrize(
    ("before", "window", "apart"),
    [("silu", {"kernel_size": 3, "stride": 1}, True), ("silu", {"kernel_size": 3, "stride": 2}, False), ("relu", {"kernel_size": 3, "stride": 1}, False), ("mish", {"kernel_size": 4}, False)],
)
def test_windows_that_share_costly_values_follow_the_norm(tmp_path, before: str, window: dict, apart: bool) -> None:
    """40 groups with selu, elu and hardswish before windows of 3 x 3, one apart, took 57 us in one kernel, which computed every value nine times."""
    spec = make_spec(tmp_path, conv_chain([before], [{"max_pool2d": window}, "tanh"], 16, 8), 5, "tf32", (53, 54))
    made = plan(spec, "sm_80", "h200")
    assert made.kernels[-1].name.startswith("max_pool2d") == apart
    assert plan(spec, "cpu").kernels[-1].name.startswith("max_pool2d") is False
