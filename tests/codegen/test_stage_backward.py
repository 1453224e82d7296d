"""The cpu target's backward through stages and around operators, against float64 autograd."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codegen.plan.backward.cpu import plan_backward
from codegen.plan.backward.stages import place
from codegen.plan.stages.kernel import element_offset
from codegen.targets import DEVICES, TARGETS
from tests import tiers
from tests.codegen import stage_backward_chains as chains
from tests.codegen.backward_chains import build_backwards
from tests.codegen.cpu_chains import conv_chain, linear_chain, make_spec

pytestmark = pytest.mark.usefixtures("one_thread")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
FACTOR = 1.25  # of eager's error in fp32


@needs_gxx
@tiers.shares
@pytest.mark.parametrize("name", chains.REDUCTIONS)
def test_reductions(tmp_path, name: str, share: str) -> None:
    specs = tiers.share_of(share, chains.REDUCTIONS, name, chains.reduction_specs(tmp_path, name))
    chains.check_all(build_backwards, tmp_path, specs, FACTOR, chains.STEEPER.get(name, 1.0))


@needs_gxx
@tiers.shares
@pytest.mark.parametrize("name", chains.BROADCASTS)
def test_parameters_that_change_the_shape(tmp_path, name: str, share: str) -> None:
    specs = tiers.share_of(share, chains.BROADCASTS, name, chains.broadcast_specs(tmp_path, name))
    chains.check_all(build_backwards, tmp_path, specs, FACTOR)


@needs_gxx
@tiers.shares
@pytest.mark.parametrize("name", chains.AVERAGES)
def test_average_pooling(tmp_path, name: str, share: str) -> None:
    specs = tiers.share_of(share, chains.AVERAGES, name, chains.average_specs(tmp_path, name))
    chains.check_all(build_backwards, tmp_path, specs, FACTOR)


@needs_gxx
def test_stages_behind_each_other(tmp_path) -> None:
    chains.check_all(build_backwards, tmp_path, chains.mixed_specs(tmp_path), FACTOR)


@needs_gxx
@tiers.shares
@pytest.mark.parametrize("name", chains.TAPS)
def test_results_taken_once_more(tmp_path, name: str, share: str) -> None:
    specs = tiers.share_of(share, chains.TAPS, name, chains.residual_specs(tmp_path, name))
    chains.check_all(build_backwards, tmp_path, specs, FACTOR, chains.STEEPER.get(name, 1.0))


@needs_gxx
def test_equal_extremes(tmp_path) -> None:
    chains.check_ties(build_backwards, tmp_path)


@needs_gxx
@pytest.mark.parametrize("name", chains.REDUCTIONS)
def test_nan_and_infinity(tmp_path, name: str) -> None:
    chains.check_nan_and_infinity(build_backwards, tmp_path, name)


@needs_gxx
def test_names_that_could_collide(tmp_path) -> None:
    chains.check_names(build_backwards, tmp_path)


@needs_gxx
def test_the_same_bits_for_any_number_of_threads(tmp_path) -> None:
    """Sums in parts: of one value, of a value per channel, of the input of a broadcast."""
    tail = [{"mean": {"keepdim": True}}, "silu", {"mul": {"name": "scale", "shape": [1]}}, {"mul": {"name": "spread", "shape": [2100, 1, 1]}}, "tanh"]
    pooled = [{"avg_pool2d": {"kernel_size": 2}}, {"mul": {"name": "scale", "shape": [6, 1, 1]}}, "gelu"]
    specs = [make_spec(tmp_path, conv_chain([], tail, 6, 2), 9, "fp32", (11, 12)), make_spec(tmp_path, conv_chain([], pooled, 6, 2), 30, "bf16", (40, 41))]
    for backward in build_backwards(tmp_path, specs):
        assert any(item.parts > 1 for kernel in backward.plan.kernels for item in getattr(kernel, "reduced", ()))
        source, grad_y = backward.chain.source(), torch.randn(backward.chain.spec.output_shape).to(backward.chain.dtype)
        chains.check(backward, source, FACTOR)
        first = backward.kernel(source, grad_y, 1)
        for threads in (1, 2, 5):
            again = backward.kernel(source, grad_y, threads)
            assert all(torch.equal(again[name], first[name]) for name in first)


def test_only_what_is_needed_runs_forward_again(tmp_path) -> None:
    def names(after: list) -> list[str]:
        spec = make_spec(tmp_path, linear_chain([], after, 60, 5), 8)
        return [kernel.name for kernel in plan_backward(spec, TARGETS["cpu"], DEVICES["host"]).kernels]

    add = {"add": {"name": "spread", "shape": [60, 1]}}
    assert names([{"sum": {}}, add]) == ["broadcast_backward", "channel_sum_backward", "chain_backward"]
    assert names([{"min": {}}, add]) == ["chain", "broadcast_backward", "channel_min_backward", "chain_backward"]
    assert names([{"sum": {}}, add, "silu"]) == ["chain", "channel_sum", "broadcast_backward", "channel_sum_backward", "chain_backward"]


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5), st.integers(0, 4))
def test_places_of_what_an_element_meets(dims: list[tuple[int, bool]], dropped: int) -> None:
    """Every result is met once, by the element that `element_offset` names."""
    whole = tuple(size for size, _ in dims)
    shape = tuple(size if kept else 1 for size, kept in dims)[min(dropped, len(dims) - 1) :]
    meets, offset = place(shape, whole).replace("/", "//"), element_offset(shape, whole).replace("/", "//")
    count, outputs = torch.Size(shape).numel(), torch.Size(whole).numel()
    met = [(eval(meets, {"element": element, "repeat": repeat}), element) for element in range(count) for repeat in range(outputs // count)]
    assert sorted(index for index, _ in met) == list(range(outputs))
    assert all(eval(offset, {"index": index}) == element for index, element in met)
