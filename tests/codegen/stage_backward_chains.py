"""Chains whose backward goes through stages or around an operator, for both backwards' tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from codegen.spec import Spec
from tests.codegen.backward_chains import Backward, check
from tests.codegen.cpu_chains import conv_chain, linear_chain, make_spec
from tests.codegen.test_chains import POOL, SHARED_ROWS, TAPS, conv, linear
from tests.codegen.test_cpu import PRECISIONS
from tests.codegen.test_stages import AVERAGES, BROADCASTS, REDUCTIONS

# What fp32 loses is magnified by a sum of normalised values, which nearly cancels, and by products of values with themselves.
STEEPER = {"sum": 4.0, "mean": 4.0, "squared": 2.0, "several": 2.0}
Build = Callable[[Path, list[Spec]], list[Backward]]
FACTOR = {"mul": {"name": "factor", "shape": [1]}}


def reduction_specs(folder: Path, name: str) -> list[Spec]:
    """Rows and positions, with and without what needs the folded value, at every precision."""
    specs = []
    for precision, keepdim in zip(PRECISIONS, (True, False, True)):
        lead = {name: {"name": "folded", "keepdim": keepdim}}
        specs.append(make_spec(folder, linear_chain(["tanh"], [lead, FACTOR, {"leaky_relu": {"negative_slope": 0.25}}], 60, 5), 301, precision))
        specs.append(make_spec(folder, linear_chain([], ["silu", lead], 2048, 4), 5, precision))
        specs.append(make_spec(folder, conv_chain([], ["gelu", lead], 12, 3), 2, precision, (19, 17)))
        tail = [lead, "silu", {"add": {"from": "folded"}}, {"mul": {"from": "folded"}}, {"sub": {"name": "less", "shape": [1]}}]
        specs.append(make_spec(folder, conv_chain([], tail, 65, 5), 20, precision, (3, 5)))
    return specs


def broadcast_specs(folder: Path, name: str) -> list[Spec]:
    """Parameters that give a result another shape, behind a value that is needed or not; behind them a stage of its own."""
    keepdim, shapes, _ = BROADCASTS[name]
    specs = []
    for precision, words in zip((*PRECISIONS, "fp32"), (("add", "mul"), ("mul", "sub"), ("div", "mul"), ("div", "add"))):
        operands = [{words[i]: {"name": f"p{i}", "shape": shape}} for i, shape in enumerate(shapes)]
        chain = linear_chain([], [{"min": {"keepdim": keepdim}}, "tanh", *operands, *([] if words[0] == "add" else ["silu"])], 60, 5)
        specs.append(make_spec(folder, chain, 301, precision))
    return specs


def average_specs(folder: Path, name: str) -> list[Spec]:
    arguments, size = AVERAGES[name]
    average = {"avg_pool2d": {"name": "average", **arguments}}
    tails = (
        ["silu", average, {"mul": {"name": "scale", "shape": [6, 1, 1]}}], [average, "tanh", {"add": {"from": "average"}}],
        [average, "relu", {"max_pool2d": {"kernel_size": 1}}, {"add": {"name": "shift", "shape": [6, 1, 1]}}],
    )  # fmt: skip
    return [make_spec(folder, conv_chain([], tail, 6, 3), 2, precision, size) for precision, tail in zip((*PRECISIONS, "fp32", "fp32"), (*tails, *tails[:2]))]


def mixed_specs(folder: Path) -> list[Spec]:
    """Stages behind each other, of every kind."""
    pools = [{"max_pool2d": {"kernel_size": 3, "stride": 1}}, "silu", {"max_pool2d": {"kernel_size": 2, "padding": 1, "dilation": 2}}, {"avg_pool2d": {"kernel_size": 2}}]
    tail = [*pools, {"max_pool2d": {"kernel_size": 3, "stride": 1, "padding": 1}}, {"mul": {"name": "shift", "shape": [1]}}, {"logsumexp": {"keepdim": True}}]
    spread = [{"add": {"name": "spread", "shape": [5, 1, 1]}}, "tanh"]
    return [make_spec(folder, conv_chain(["relu"], [*tail, *spread], 8, 2), 3, precision, (12, 13)) for precision in PRECISIONS]


def residual_specs(folder: Path, name: str) -> list[Spec]:
    """Behind a linear, behind a convolution, in front of poolings and of a stage, and behind a pooling."""
    behind = (SHARED_ROWS, "tanh", {"add": {"from": "pool"}})
    specs = []
    for precision in PRECISIONS:
        specs.append(make_spec(folder, linear(name), 4, precision))
    for precision, tail in zip((*PRECISIONS, "fp32"), ((), (POOL,), behind, ({"logsumexp": {}},))):
        specs.append(make_spec(folder, conv(name, tail), 2, precision, (9, 14)))
    return specs


def check_all(build: Build, folder: Path, specs: list[Spec], factor: float, steeper: float = 1.0) -> None:
    """Against float64 autograd: every spec's gradients."""
    for backward in build(folder, specs):
        check(backward, backward.chain.source(), factor, steeper)


def check_ties(build: Build, folder: Path) -> None:
    """Of equal extremes over channels the first gets the gradient, as in PyTorch; of windows' too."""
    specs = [make_spec(folder, linear_chain([], ["relu", {name: {}}], 12, 3, affine=False), 40) for name in ("min", "max")]
    specs += [make_spec(folder, conv_chain([], ["hardtanh", {name: {"keepdim": True}}], 12, 3, affine=False), 3, "fp32", (5, 6)) for name in ("min", "max")]
    pools = ["relu", {"max_pool2d": {"kernel_size": 1}}, {"avg_pool2d": {"kernel_size": 1}}, {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}]
    specs.append(make_spec(folder, conv_chain([], pools, 4, 2, affine=False), 2, "fp32", (7, 7)))
    for backward in build(folder, specs):
        source = (backward.chain.source(2.0)).round()
        grad_y = torch.randn(backward.chain.spec.output_shape)
        exact, got = backward.pytorch(source, grad_y, torch.float64), backward.kernel(source, grad_y)
        torch.testing.assert_close(got["t0"].double(), exact["t0"], rtol=1e-4, atol=1e-5)


def check_nan_and_infinity(build: Build, folder: Path, name: str) -> None:
    """Channels that are NaN or infinite, one after the other: gradients are NaN where PyTorch's are, and equal elsewhere."""
    after = [{"add": {"name": "m", "shape": [4, 1, 1]}}, {name: {}}]
    (backward,) = build(folder, [make_spec(folder, conv_chain([], after, 4, 4, affine=False), 2, "fp32", (3, 3))])
    source = backward.chain.source()
    grad_y = torch.randn(backward.chain.spec.output_shape)
    for values in itertools.product((1.0, torch.nan, torch.inf, -torch.inf), repeat=2):
        backward.chain.module.m.data[:2] = torch.tensor(values)[:, None, None]
        exact, got = backward.pytorch(source, grad_y, torch.float64), backward.kernel(source, grad_y)
        for key in ("m", "t0"):
            torch.testing.assert_close(got[key].double(), exact[key], rtol=1e-4, atol=1e-5, equal_nan=True)


def check_names(build: Build, folder: Path) -> None:
    """Attributes named like functions and variables of the emitted sources stay apart from them."""
    names = ("input", "values", "follow", "sums", "winner", "g", "v", "index", "own", "through", "target", "element", "repeat", "place", "sum_input", "total", "least_kept")
    scales = [{"mul": {"name": name, "shape": [1]}} for name in names]
    reduced = [{"min": {"name": "least", "keepdim": True}}, *scales[:9], {"mul": {"from": "least"}}, {"add": {"name": "sum", "shape": [5, 1, 1]}}, *scales[9:], "mish"]
    pooled = ["silu", {"avg_pool2d": {"name": "least", "kernel_size": 2}}, *scales, {"add": {"from": "least"}}]
    for backward in build(folder, [make_spec(folder, conv_chain([], tail, 4, 2), 2, "fp32", (4, 4)) for tail in (reduced, pooled)]):
        for parameter in backward.chain.module.parameters():
            parameter.data.abs_().mul_(0.25).add_(0.75)
        check(backward, backward.chain.source(), 2.0, 2.0)


__all__ = [
    "AVERAGES", "BROADCASTS", "REDUCTIONS", "STEEPER", "TAPS", "average_specs", "broadcast_specs", "check_all", "check_nan_and_infinity", "check_names", "check_ties",
    "mixed_specs", "reduction_specs", "residual_specs",
]  # fmt: skip
