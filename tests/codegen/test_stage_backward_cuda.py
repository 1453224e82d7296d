"""The CUDA backward through stages and around operators, without a GPU: nvcc's opinion, and its arithmetic in an emulation against float64 autograd."""

from __future__ import annotations

import shutil

import pytest

from codegen.plan.backward.cuda import plan_backward_cuda
from codegen.plan.backward.stages import StageBackwardKernel
from codegen.plan.model import Launch, Library
from codegen.render import render_kernel
from codegen.targets import DEVICES, TARGETS
from tests import tiers
from tests.codegen import stage_backward_chains as chains
from tests.codegen.backward_cuda import build_emulated, planned
from tests.codegen.cpu_chains import conv_chain, linear_chain, make_spec
from tests.compile_matrix import faults

FACTOR = 2.0  # of eager's error: sums over a group are in fp32, as they are in eager
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
TAIL = [{"min": {"name": "least", "keepdim": True}}, "tanh", {"mul": {"from": "least"}}, {"add": {"name": "bias", "shape": [1, 64, 1, 1]}}, "silu"]
CHAINS = {
    "rows": (linear_chain([], ["silu", *TAIL], 64, 8), None, "fp32"),
    "wide_rows": (linear_chain([], [{"logsumexp": {}}, {"mul": {"name": "scale", "shape": [1]}}, "mish"], 8192, 16), None, "bf16"),
    "sums": (linear_chain([], [{"sum": {"keepdim": True}}, {"add": {"name": "bias", "shape": [96]}}], 96, 8), None, "fp16"),
    "columns": (conv_chain([], ["tanh", {"add": {"from": "conv"}}, {"logsumexp": {"keepdim": True}}], 16, 8), (30, 30), "fp32"),
    "means": (conv_chain([], [{"mean": {}}, "gelu", {"mul": {"name": "scale", "shape": [1]}}], 24, 8), (9, 7), "fp16"),
    "pools": (
        conv_chain([], [{"max_pool2d": {"kernel_size": 2}}, "relu", {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}, "elu", {"max": {}}], 8, 2),
        (33, 31), "fp32",
    ),
    "averages": (
        conv_chain(["relu"], ["silu", {"avg_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}}, "tanh", {"mul": {"name": "m", "shape": [8, 1, 1]}}], 8, 2),
        (33, 31), "bf16",
    ),
}  # fmt: skip


@pytest.mark.nvcc
@pytest.mark.parametrize(("target", "device"), [("sm_80", "a100"), ("sm_90a", "h100")])
@pytest.mark.parametrize("name", CHAINS)
def test_sources_compile_without_spills(tmp_path, name: str, target: str, device: str) -> None:
    chain, size, precision = CHAINS[name]
    plan = plan_backward_cuda(make_spec(tmp_path, chain, 128, precision, size), TARGETS[target], DEVICES[device])
    found = [text for kernel in plan.kernels for text in faults(plan, kernel, tmp_path)]
    assert not found, "\n".join(found)
    for kernel in plan.kernels:
        text = render_kernel(plan, kernel)
        assert "atomic" not in text and "double" not in text


def test_a_plan_with_stages(tmp_path) -> None:
    """The producer by torch's library, the head and the stages forward as far as they are needed, the stages back, the head back."""
    chain, _, _ = CHAINS["rows"]
    spec = make_spec(tmp_path, chain, 128)
    plan = planned(spec)
    assert isinstance(plan.steps[0], Library) and all(isinstance(step, Launch) for step in plan.steps[1:])
    kernels = plan.kernels
    assert [type(kernel) is StageBackwardKernel for kernel in kernels] == [False, False, True, True, False]
    assert [kernel.name for kernel in kernels[1:]] == ["channel_min", "broadcast_backward", "channel_min_backward", "backward"]
    known = {"t0", "grad:y", "grad:t0", *(buffer.name for buffer in plan.buffers)}
    known |= {key for key, _ in spec.parameters} | {f"grad:{key}" for key, _ in spec.parameters}
    for step in plan.steps[1:]:
        assert set(step.arguments) <= known
    assert len({kernel.file(plan.target) for kernel in kernels}) == len(kernels)


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(chains.REDUCTIONS))
def test_reductions(tmp_path, name: str) -> None:
    chains.check_all(build_emulated, tmp_path, chains.reduction_specs(tmp_path, name), FACTOR, 2.0 * chains.STEEPER.get(name, 1.0))


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(chains.BROADCASTS))
def test_parameters_that_change_the_shape(tmp_path, name: str) -> None:
    chains.check_all(build_emulated, tmp_path, chains.broadcast_specs(tmp_path, name), FACTOR)


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(chains.AVERAGES))
def test_average_pooling(tmp_path, name: str) -> None:
    chains.check_all(build_emulated, tmp_path, chains.average_specs(tmp_path, name), FACTOR)


@pytest.mark.representative
@needs_gxx
def test_stages_behind_each_other(tmp_path) -> None:
    chains.check_all(build_emulated, tmp_path, chains.mixed_specs(tmp_path), FACTOR)


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(chains.TAPS))
def test_results_taken_once_more(tmp_path, name: str) -> None:
    chains.check_all(build_emulated, tmp_path, chains.residual_specs(tmp_path, name), FACTOR, chains.STEEPER.get(name, 1.0))


@pytest.mark.emulated
@needs_gxx
def test_equal_extremes(tmp_path) -> None:
    chains.check_ties(build_emulated, tmp_path)


@needs_gxx
@pytest.mark.parametrize("name", tiers.emulated(chains.REDUCTIONS))
def test_nan_and_infinity(tmp_path, name: str) -> None:
    chains.check_nan_and_infinity(build_emulated, tmp_path, name)


@pytest.mark.emulated
@needs_gxx
def test_names_that_could_collide(tmp_path) -> None:
    chains.check_names(build_emulated, tmp_path)
