"""The CUDA backward without a GPU: its plan, its text, nvcc's opinion, and its arithmetic in an emulation against float64 autograd."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from codegen.plan.backward.cpu import SUMS
from codegen.plan.backward.cuda import WINDOWS, WINNERS
from codegen.plan.model import Library
from codegen.render import render_kernel
from codegen.spec import load_spec
from tests import tiers
from tests.codegen.backward_chains import check, elementwise_specs, operand_specs, pool_specs
from tests.codegen.backward_cuda import build_emulated, planned
from tests.codegen.cpu_chains import conv_chain, linear_chain, make_spec
from tests.codegen.test_compile import PACKAGES
from tests.codegen.test_cpu import ELEMENTWISE, POOLS
from tests.compile_matrix import faults

FACTOR = 1.5  # of eager's error: sums over a group are in fp32, as they are in eager
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.nvcc
@pytest.mark.parametrize(("path", "precision"), PACKAGES, ids=[f"{Path(path).stem}-{precision}" for path, precision in PACKAGES])
def test_source_compiles_without_spills(path, precision, tmp_path):
    plan = planned(load_spec(path, precision))
    assert not (found := [text for kernel in plan.kernels for text in faults(plan, kernel, tmp_path)]), "\n".join(found)


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_a_linear_plan(tmp_path) -> None:
    plan = planned(load_spec("specs/default.yaml"))
    recompute, launch = plan.steps
    assert recompute == Library("linear", ("x", "gemm.weight", "gemm.bias"), "t0", {})
    assert launch.kernel.arguments == (
        "t0", "group_norm.weight", "group_norm.bias", "grad:y", "grad:t0", "grad:group_norm.weight", "grad:group_norm.bias", SUMS,
    )  # fmt: skip
    assert launch.kernel.flat and launch.kernel.teams == 1 and launch.kernel.blocks == 64 * 16
    assert [(b.name, b.bytes) for b in plan.buffers] == [(SUMS, 4 * 64 * 2 * 8192)]
    assert "137 GFLOP" in plan.why[0] and "33.6 MB" in plan.why[0]


def test_a_convolution_plan() -> None:
    plan = planned(load_spec("specs/conv2d_groupnorm_scale_maxpool_clamp.yaml"))
    recompute, launch = plan.steps
    assert recompute.operation == "conv2d" and recompute.options == {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
    assert launch.kernel.arguments[-3:] == (SUMS, WINNERS, WINDOWS) and launch.kernel.channel_teams == 1
    slabs = launch.kernel.blocks // 16
    assert [b.bytes for b in plan.buffers] == [4 * slabs * 3 * 64, 4 * slabs * 64 * 31 * 31, 4 * slabs * 64 * 31 * 31]


@pytest.mark.parametrize(
    ("chain", "batch", "spatial", "teams", "channel_teams"),
    [
        (linear_chain([], [], 256, 1), 5, None, 8, 1), (linear_chain([], [], 514, 2), 5, None, 1, 1), (conv_chain([], [], 8, 2), 5, (8, 8), 8, 1),
        (conv_chain([], [], 8, 1), 5, (16, 16), 1, 8), (conv_chain([], [], 2, 1), 5, (32, 16), 1, 1),
    ],
)  # fmt: skip
def test_teams_follow_the_shape(tmp_path, chain, batch, spatial, teams, channel_teams) -> None:
    kernel = planned(make_spec(tmp_path, chain, batch, "fp32", spatial)).kernels[0]
    assert (kernel.teams, kernel.channel_teams) == (teams, channel_teams)
    assert kernel.blocks == -(-kernel.items // teams)


def test_nothing_in_the_text_depends_on_chance() -> None:
    for path, precision in PACKAGES:
        plan = planned(load_spec(path, precision))
        for text in (render_kernel(plan, kernel) for kernel in plan.kernels):
            assert "atomic" not in text and "torch" not in text.split("#include")[1] and "double" not in text


# ---- arithmetic -----------------------------------------------------------------------------------------------------


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(ELEMENTWISE, "mish"))
def test_elementwise_before_and_after(tmp_path, name: str) -> None:
    """Every operator on both sides of the norm, and in front of and behind a pooling."""
    for backward in build_emulated(tmp_path, elementwise_specs(tmp_path, name)):
        check(backward, backward.chain.source(scale=2.0), FACTOR)


def operands(prefix: str, shape: list[int]) -> list:
    return [{"mul": {"name": f"{prefix}_scale", "shape": shape}}, {"add": {"name": f"{prefix}_bias", "shape": shape}}]


@pytest.mark.emulated
@needs_gxx
def test_learnable_operands(tmp_path) -> None:
    pools = lambda shape: [{"max_pool2d": {"kernel_size": 2}}, *operands("last", shape)]  # noqa: E731
    for backward in build_emulated(tmp_path, operand_specs(tmp_path, operands, pools)):
        check(backward, backward.chain.source(), FACTOR)


@pytest.mark.representative
@needs_gxx
def test_every_kind_of_team(tmp_path) -> None:
    """Groups of a warp and of a block, channels of a warp and of a block, with and without a pooling, a last slab that is shorter."""

    def around(shape: list[int]) -> tuple[list, list]:
        return [*operands("before", shape), "silu"], operands("after", shape)

    specs = [make_spec(tmp_path, linear_chain(*around([c]), c, g), batch, precision) for c, g, batch, precision in
             ((256, 8, 3, "fp32"), (600, 2, 3, "bf16"), (1540, 1, 2, "fp32"), (2048, 2048 // 2, 9, "fp16"))]  # fmt: skip
    for channels, groups, size in ((6, 3, (9, 11)), (20, 2, (12, 11)), (4, 2, (25, 26))):
        before, after = around([channels, 1, 1])
        specs.append(make_spec(tmp_path, conv_chain(before, after, channels, groups), 3, "fp32", size))
        pool = {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}
        specs.append(make_spec(tmp_path, conv_chain(before, [*after, pool, *operands("last", [1])], channels, groups), 3, "fp32", size))
    for backward in build_emulated(tmp_path, specs):
        check(backward, backward.chain.source(offset=3.0), FACTOR)


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(POOLS))
def test_pooling(tmp_path, name: str) -> None:
    for backward in build_emulated(tmp_path, pool_specs(tmp_path, name)):
        check(backward, backward.chain.source(), FACTOR)


@pytest.mark.emulated
@needs_gxx
def test_equal_values_and_nan(tmp_path) -> None:
    """The first of several largest values gets the gradient, the last of several NaN; a NaN stays in its group."""
    pool = {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}
    spec = make_spec(tmp_path, conv_chain([], ["relu", pool], 4, 2, affine=False), 2, "fp32", (7, 7))
    (backward,) = build_emulated(tmp_path, [spec])
    source = backward.chain.source().round()
    grad_y = torch.randn(spec.output_shape)
    eager, got = backward.pytorch(source, grad_y, torch.float32), backward.kernel(source, grad_y)
    torch.testing.assert_close(got["t0"], eager["t0"], rtol=1e-5, atol=1e-6)
    source[1, 2, 0, 0] = torch.nan
    spoilt = backward.kernel(source, grad_y)["t0"]
    assert spoilt[1, 2:4].isnan().any()
    spoilt[1, 2:4] = got["t0"][1, 2:4]
    assert torch.equal(spoilt, got["t0"])


@pytest.mark.emulated
@needs_gxx
def test_names_that_could_collide(tmp_path) -> None:
    """Attributes named like functions and variables of the emitted source stay apart from them."""
    names = ("value", "gradient", "mean", "rstd", "slab_sums", "shift", "totals", "numbers", "winner", "windows", "sums", "incoming", "gamma", "g", "v",
             "group", "back", "before_norm", "after_norm", "channel", "top", "h", "w", "i", "c")  # fmt: skip
    chain = conv_chain([*({"mul": {"name": n, "shape": [4, 1, 1]}} for n in names), "mish"], [{"max_pool2d": {"kernel_size": 3, "stride": 1}}], 4, 2)
    (backward,) = build_emulated(tmp_path, [make_spec(tmp_path, chain, 2, "fp32", (4, 4))])
    for parameter in backward.chain.module.parameters():
        parameter.data.abs_().add_(0.5)
    check(backward, backward.chain.source(), FACTOR)
