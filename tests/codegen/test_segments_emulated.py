"""Segments' CUDA kernels for sm_80 on a CPU: the emitted sources, compiled by g++ against tests/codegen/emulation, against PyTorch in float64."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.codegen.segment_chains import SegmentChain, build_segments, planned_chains
from tests.codegen.segment_draw import random_spec
from tests.codegen.test_segment_kernels import CASES, check, check_constant_groups, norms, specs_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
KINDS = {"map", "rows", "columns", "partial", "merge", "windows"}
ONE_OF_EACH = ("layer_norm", "channels", "batch_norm", "max_pool3d")  # one small kernel of every kind, or more


def kinds(chains: list[SegmentChain]) -> set[str]:
    """The templates of all kernels of `chains`."""
    return {kernel.template.split("/")[1].split(".")[0] for chain in chains for kernel in chain.plan.kernels}


@pytest.mark.representative
def test_one_of_each_kind_against_float64(tmp_path) -> None:
    chains = build_segments(tmp_path, specs_of(tmp_path, "fp32", ONE_OF_EACH), "sm_80")
    assert kinds(chains) == KINDS
    for chain in chains:
        check(chain, "fp32")


@pytest.mark.emulated
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_kind_against_float64(tmp_path, precision: str) -> None:
    for chain in build_segments(tmp_path, specs_of(tmp_path, precision), "sm_80"):
        check(chain, precision)


def test_every_kind_of_kernel_is_among_the_cases(tmp_path) -> None:
    chains = planned_chains(specs_of(tmp_path, "fp32"), "sm_80")
    kernels = [kernel for chain in chains for kernel in chain.plan.kernels]
    assert kinds(chains) == KINDS and len(CASES) <= len(kernels)
    assert {kernel.held for kernel in kernels if kernel.template.endswith("rows.cu.j2")} == {True, False}
    assert {kernel.partial for kernel in kernels} == {"", "strided", "columns"}


@pytest.mark.emulated
def test_random_chains_against_float64(tmp_path) -> None:
    for chain in build_segments(tmp_path, [random_spec(tmp_path, 500 + number) for number in range(25)], "sm_80"):
        check(chain, "fp32", chance=2.0)


@pytest.mark.emulated
def test_constant_groups_give_beta(tmp_path) -> None:
    check_constant_groups(build_segments(tmp_path, norms(tmp_path), "sm_80"))


@pytest.mark.emulated
def test_the_order_of_threads_does_not_change_bits(tmp_path) -> None:
    chains = build_segments(
        tmp_path, [spec for name, spec in zip(CASES, specs_of(tmp_path, "fp32"), strict=True) if name not in ("wide_rows", "few_rows")], "sm_80"
    )
    for chain in chains:
        sources, made = chain.sources(), []
        for seed in (0, 1, 77):
            chain.library.emulate_in_order(seed)
            made.append(chain.kernels(sources, training=True))
        assert all(torch.equal(made[0][key], other[key]) for other in made[1:] for key in other), chain.spec.input_shape
