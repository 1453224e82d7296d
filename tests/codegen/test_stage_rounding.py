"""What stages give in fp16 and bf16 is rounded once: each result is the number of the type that is nearest to the exact one, so eager's is no nearer."""

from __future__ import annotations

import shutil

import pytest
import torch

from codegen.plan import plan
from codegen.report import explanation
from tests.codegen.chains_emulated import build_emulated
from tests.codegen.cpu_chains import Chain, build, conv_chain, linear_chain, make_spec, relative_error
from tests.codegen.test_cpu import FP32_ERROR, HALF_SHARE
from tests.codegen.test_stages import REDUCTIONS, reduced, without_bias

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HALVES = ("fp16", "bf16")
POOLING = {"max_pool2d": {"kernel_size": 2}}
MEAN = {"avg_pool2d": {"kernel_size": 3, "stride": 1}}
FACTOR = {"mul": {"name": "factor", "shape": [1]}}

# Behind silu and mish many minima are the function's own least value: roundings of equal values do not average out.
LINEAR = {
    **{f"{name}_{head}": ([head], reduced(name, True, [FACTOR]), 96, 4) for name in REDUCTIONS for head in ("silu", "mish")},
    "min_tail": (["silu"], reduced("min", False, ["tanh", {"add": {"name": "shift", "shape": [1]}}]), 96, 4),
    "min_spread": (["silu"], [{"min": {"keepdim": True}}, {"add": {"name": "spread", "shape": [1, 96, 1, 1]}}], 96, 4),
    "max_wide": (["silu"], reduced("max", True, [FACTOR]), 2 * 8192, 2),
    "min_none": ([], reduced("min", True, [FACTOR]), 15, 5),
}
CONV = {
    **{f"{name}_silu": (["silu"], reduced(name, True, [FACTOR]), (11, 12)) for name in REDUCTIONS},
    "average": (["silu"], [MEAN, FACTOR], (11, 12)),
    "average_pools": (["silu"], [POOLING, "mish", MEAN, {"min": {}}], (12, 14)),
    "two_pools": (["silu"], [POOLING, "silu", POOLING, FACTOR], (12, 14)),
    "averages": ([], [MEAN, "silu", {"avg_pool2d": {"kernel_size": 2}}, FACTOR], (12, 14)),
    "one_read_pool": ([], [POOLING, "tanh", {"min": {"keepdim": True}}, FACTOR], (12, 14)),
}


def check_once_rounded(chain: Chain) -> None:
    """No element is further from the exact result than its nearest neighbour of the type, by more than fp32's own error."""
    source = chain.source(2.0)
    exact, eager, got = chain.pytorch(source, torch.float64), chain.pytorch(source), chain.kernel(source)
    nearest = (exact.to(chain.dtype).double() - exact).abs()
    slack = 8 * FP32_ERROR * (1.0 + exact.abs().max())
    beyond = (got.double() - exact).abs() - nearest - slack
    assert beyond.max() <= 0, f"{chain.spec.precision.name}: {int((beyond > 0).sum())} of {exact.numel()} are rounded more than once"
    assert relative_error(got, exact) <= HALF_SHARE * relative_error(eager, exact)


def specs_of(tmp_path, bare) -> list:
    specs = []
    for precision in HALVES:
        for head, tail, channels, groups in LINEAR.values():
            specs.append(make_spec(tmp_path, bare(linear_chain([], [*head, *tail], channels, groups)), 37, precision))
        for head, tail, size in CONV.values():
            specs.append(make_spec(tmp_path, bare(conv_chain([], [*head, *tail], 12, 3)), 3, precision, size))
    return specs


@needs_gxx
def test_cpu_rounds_once(tmp_path) -> None:
    for chain in build(tmp_path, [spec for spec in specs_of(tmp_path, list) if not _fused_on_cpu(spec)]):
        check_once_rounded(chain)


def _fused_on_cpu(spec) -> bool:
    """Two max_pools need no stage there."""
    return len(plan(spec, "cpu").kernels) == 1


@pytest.mark.emulated
@needs_gxx
def test_emulated_cuda_rounds_once(tmp_path) -> None:
    for chain in build_emulated(tmp_path, specs_of(tmp_path, without_bias)):
        check_once_rounded(chain)


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
@pytest.mark.parametrize("precision", HALVES)
def test_plans_say_what_float32_costs(tmp_path, precision: str, target: str) -> None:
    chain = linear_chain([], ["silu", {"min": {"keepdim": True}}], 8192, 16)
    chain[0]["linear"]["in_features"] = 1024
    found = plan(make_spec(tmp_path, chain, 1024, precision), target)
    (between,) = (buffer for buffer in found.buffers if buffer.name == "stage:0")
    assert between.dtype == "float32" and between.size == 4 * 1024 * 8192
    assert any("stays float32" in reason and "33.6 MB" in reason for reason in explanation(found)["why"])
