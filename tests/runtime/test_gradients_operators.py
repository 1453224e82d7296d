"""The emitted backward of the cpu target against float64 autograd: every operator, every precision, pooling, ties and awkward sizes."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests import tiers
from tests.codegen.backward_chains import build_backwards, check, elementwise_specs, operand_specs, pool_specs
from tests.codegen.cpu_chains import conv_chain, make_spec
from tests.codegen.test_cpu import ELEMENTWISE, POOLS

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"), pytest.mark.usefixtures("one_thread")]


@tiers.shares
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_before_and_after(tmp_path, name: str, share: str) -> None:
    """Every operator on both sides of the norm, and behind a pooling, at every precision."""
    for backward in build_backwards(tmp_path, tiers.share_of(share, ELEMENTWISE, name, elementwise_specs(tmp_path, name))):
        check(backward, backward.chain.source(scale=2.0))


def test_learnable_operands(tmp_path) -> None:
    def operands(prefix: str, shape: list[int]) -> list:
        kinds = {"mul": "scale", "add": "bias", "div": "divisor", "sub": "offset"}
        return [{kind: {"name": f"{prefix}_{name}", "shape": shape}} for kind, name in kinds.items()]

    def pools(shape: list[int]) -> list:
        last = {"max_pool2d": {"kernel_size": 2, "stride": 1}}
        return [{"max_pool2d": {"kernel_size": 2}}, *operands("between", shape), last, {"mul": {"name": "last", "shape": shape}}]

    for backward in build_backwards(tmp_path, operand_specs(tmp_path, operands, pools)):
        check(backward, backward.chain.source())


@tiers.shares
@pytest.mark.parametrize("name", POOLS)
def test_pooling(tmp_path, name: str, share: str) -> None:
    for backward in build_backwards(tmp_path, tiers.share_of(share, POOLS, name, pool_specs(tmp_path, name))):
        check(backward, backward.chain.source())


def test_equal_values_give_their_gradient_to_the_first(tmp_path) -> None:
    spec = make_spec(tmp_path, conv_chain([], ["relu", {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}], 4, 2, affine=False), 2, "fp32", (7, 7))
    (backward,) = build_backwards(tmp_path, [spec])
    source = backward.chain.source().round()  # few distinct values: most windows have several largest ones
    grad_y = torch.randn(spec.output_shape)
    eager, got = backward.pytorch(source, grad_y, torch.float32), backward.kernel(source, grad_y)
    torch.testing.assert_close(got["t0"], eager["t0"], rtol=1e-5, atol=1e-6)


def test_nan_and_infinity_stay_in_their_group(tmp_path) -> None:
    spec = make_spec(tmp_path, conv_chain(["mish"], [{"max_pool2d": {"kernel_size": 2}}], 6, 3), 3, "fp32", (4, 4))
    (backward,) = build_backwards(tmp_path, [spec])
    source, grad_y = backward.chain.source(), torch.ones(spec.output_shape)
    clean = backward.kernel(source, grad_y)["t0"]
    source[1, 2, 0, 0] = torch.nan
    got = backward.kernel(source, grad_y)["t0"]
    assert got[1, 2:4].isnan().any()
    got[1, 2:4] = clean[1, 2:4]
    assert torch.equal(got, clean)


def test_large_groups_and_the_heap(tmp_path) -> None:
    """Statistics in pieces, scratch on the heap, and every thread count: the same bits."""
    chain = conv_chain(["silu", {"mul": {"name": "m", "shape": [8, 1, 1]}}], [{"max_pool2d": {"kernel_size": 2}}, {"add": {"name": "a", "shape": [1]}}], 8, 2)
    specs = [make_spec(tmp_path, chain, 7, precision, (96, 101)) for precision in ("fp32", "bf16")]
    for backward in build_backwards(tmp_path, specs):
        assert backward.plan.kernels[0].on_heap and backward.plan.kernels[0].parallel
        source = backward.chain.source(offset=3.0)
        check(backward, source)
        grad_y = torch.randn(backward.chain.spec.output_shape).to(backward.chain.dtype)
        first = backward.kernel(source, grad_y, 1)
        for threads in (1, 2, 5):
            again = backward.kernel(source, grad_y, threads)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_names_that_could_collide(tmp_path) -> None:
    """Attributes named like functions and variables of the emitted source stay apart from them."""
    names = ("value", "grad", "mean", "rstd", "scale", "shift", "total", "plane", "winner", "pooled", "sums", "incoming", "gamma", "g", "v", "part", "slab")
    chain = conv_chain([*({"mul": {"name": n, "shape": [4, 1, 1]}} for n in names), "mish"], [{"max_pool2d": {"kernel_size": 3, "stride": 1}}], 4, 2)
    (backward,) = build_backwards(tmp_path, [make_spec(tmp_path, chain, 2, "fp32", (4, 4))])
    for parameter in backward.chain.module.parameters():
        parameter.data.abs_().add_(0.5)
    check(backward, backward.chain.source())
