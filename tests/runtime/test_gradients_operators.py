"""The emitted backward of the cpu target against float64 autograd: every operator, every precision, pooling, ties and awkward sizes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from codegen.plan.backward import plan_backward
from codegen.plan.model import Launch
from codegen.render import render_kernel
from codegen.targets import DEVICES, TARGETS
from tests.codegen.backward_chains import Backward, check
from tests.codegen.cpu_chains import Chain, conv_chain, linear_chain, make_spec
from tests.codegen.test_cpu import ELEMENTWISE, POOLS, PRECISIONS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(folder: Path, specs: list) -> list[Backward]:
    """The backwards of `specs`, compiled together with the target's flags; a warning is a failure."""
    made, texts = [], []
    for i, spec in enumerate(specs):
        plan = plan_backward(spec, TARGETS["cpu"], DEVICES["host"])
        plan = replace(plan, steps=(Launch(replace(plan.kernels[0], name=f"backward{i}")),))
        made.append(Backward(Chain(spec, seed=i), plan))
        texts.append(render_kernel(plan, plan.kernels[0]))
    (folder / "backward.cpp").write_text("\n".join(texts))
    command = ["g++", *TARGETS["cpu"].flags, "-shared", "-fPIC", "-o", "backward.so", "backward.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and not result.stderr, result.stderr
    for backward in made:
        backward.library = ctypes.CDLL(str(folder / "backward.so"))
    return made


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_before_and_after(tmp_path, name: str) -> None:
    """Every operator on both sides of the norm, and behind a pooling, at every precision."""
    op = ELEMENTWISE[name]
    specs = [make_spec(tmp_path, linear_chain([op], [op], 7 * width, 7), 5, precision) for precision, width in zip(PRECISIONS, (17, 5, 48))]
    pooled = [op, {"max_pool2d": {"kernel_size": 2}}, op]
    specs.append(make_spec(tmp_path, conv_chain([op], pooled, 6, 3), 3, "fp32", (6, 7)))
    for backward in build(tmp_path, specs):
        check(backward, backward.chain.source(scale=2.0))


def test_learnable_operands(tmp_path) -> None:
    """Arithmetic with a tensor: a value per channel or one for all; before the norm, behind it, and behind a pooling; values needed or not."""

    def operands(prefix: str, shape: list[int]) -> list:
        kinds = {"mul": "scale", "add": "bias", "div": "divisor", "sub": "offset"}
        return [{kind: {"name": f"{prefix}_{name}", "shape": shape}} for kind, name in kinds.items()]

    specs = []
    for precision, shape in zip(PRECISIONS, ([12], [1], [12])):
        specs.append(make_spec(tmp_path, linear_chain(operands("before", shape), operands("after", shape), 12, 3), 70, precision))
        chain = linear_chain([*operands("before", shape), "mish"], ["silu", *operands("after", shape)], 12, 3, affine=False)
        specs.append(make_spec(tmp_path, chain, 5, precision))
    for precision, shape in zip(PRECISIONS, ([12, 1, 1], [1], [1, 12, 1, 1])):
        pools = [{"max_pool2d": {"kernel_size": 2}}, *operands("between", shape), {"max_pool2d": {"kernel_size": 2, "stride": 1}}]
        chain = conv_chain(operands("before", shape), [*operands("after", shape), *pools, {"mul": {"name": "last", "shape": shape}}], 12, 3)
        specs.append(make_spec(tmp_path, chain, 4, precision, (7, 6)))
        specs.append(make_spec(tmp_path, conv_chain(operands("before", shape), operands("after", shape), 12, 3, affine=False), 3, precision, (5, 3)))
    specs.append(make_spec(tmp_path, linear_chain([], [], 12, 3), 3))
    specs.append(make_spec(tmp_path, linear_chain([], ["relu"], 12, 12 // 2, affine=False), 3))
    specs.append(make_spec(tmp_path, conv_chain([], [{"max_pool2d": {"kernel_size": 2}}], 4, 1, affine=False), 3, "bf16", (4, 4)))
    for backward in build(tmp_path, specs):
        check(backward, backward.chain.source())


@pytest.mark.parametrize("name", POOLS)
def test_pooling(tmp_path, name: str) -> None:
    """Every kind of window. Equal values in a window are common in half precision, and where a bound cuts the largest off."""
    arguments, size = POOLS[name]
    bounded = [{"hardtanh": {"min_val": -0.25, "max_val": 0.25}}, {"max_pool2d": arguments}, {"mul": {"value": 1.5}}]
    specs = [make_spec(tmp_path, conv_chain([], [{"max_pool2d": arguments}], 6, 3), 2, precision, size) for precision in PRECISIONS]
    specs.append(make_spec(tmp_path, conv_chain([], bounded, 6, 3), 2, "fp32", size))
    for backward in build(tmp_path, specs):
        check(backward, backward.chain.source())


def test_equal_values_give_their_gradient_to_the_first(tmp_path) -> None:
    spec = make_spec(tmp_path, conv_chain([], ["relu", {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}], 4, 2, affine=False), 2, "fp32", (7, 7))
    (backward,) = build(tmp_path, [spec])
    source = backward.chain.source().round()  # few distinct values: most windows have several largest ones
    grad_y = torch.randn(spec.output_shape)
    eager, got = backward.pytorch(source, grad_y, torch.float32), backward.kernel(source, grad_y)
    torch.testing.assert_close(got["t0"], eager["t0"], rtol=1e-5, atol=1e-6)


def test_nan_and_infinity_stay_in_their_group(tmp_path) -> None:
    spec = make_spec(tmp_path, conv_chain(["mish"], [{"max_pool2d": {"kernel_size": 2}}], 6, 3), 3, "fp32", (4, 4))
    (backward,) = build(tmp_path, [spec])
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
    for backward in build(tmp_path, specs):
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
    (backward,) = build(tmp_path, [make_spec(tmp_path, chain, 2, "fp32", (4, 4))])
    for parameter in backward.chain.module.parameters():
        parameter.data.abs_().add_(0.5)
    check(backward, backward.chain.source())
