"""Segments' kernels on a GPU against PyTorch in float64."""

from __future__ import annotations

import pytest

from tests.codegen.segment_chains import build_on_gpu
from tests.codegen.segment_draw import random_spec
from tests.codegen.test_segment_kernels import check, check_constant_groups, norms, specs_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_every_kind_against_float64(tmp_path, precision: str) -> None:
    for chain in build_on_gpu(tmp_path, specs_of(tmp_path, precision)):
        check(chain, precision)


def test_random_chains_against_float64(tmp_path) -> None:
    for chain in build_on_gpu(tmp_path, [random_spec(tmp_path, 2000 + number) for number in range(40)]):
        check(chain, "fp32", chance=2.0)


def test_constant_groups_give_beta(tmp_path) -> None:
    check_constant_groups(build_on_gpu(tmp_path, norms(tmp_path)))
