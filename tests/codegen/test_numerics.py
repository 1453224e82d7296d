"""Literals and roundings are those of IEEE arithmetic, by torch's and numpy's conversions as the oracle."""

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codegen.numerics import PRECISIONS, float_literal, round_to, to_float32

finite = st.floats(-3.4e38, 3.4e38)


@given(finite)
def test_a_literal_reads_back_as_the_same_float32(value):
    text = float_literal(value)
    assert text.endswith("f") and "." in text
    assert numpy.float32(text[:-1]) == numpy.float32(value)


@given(st.floats(-65504.0, 65504.0))
def test_fp16_rounding_is_torchs(value):
    assert round_to(PRECISIONS["fp16"], value) == torch.tensor(value, dtype=torch.float64).to(torch.float16).item()


@given(st.floats(-3.3e38, 3.3e38))
def test_bf16_rounding_is_torchs(value):
    assert round_to(PRECISIONS["bf16"], value) == torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).item()


def test_examples():
    assert [float_literal(v) for v in (0.0, -2.0, 0.1, 1e-5, 1e10, 1 / 3)] == ["0.0f", "-2.0f", "0.1f", "1.0e-5f", "1.0e10f", "0.33333334f"]
    assert math.copysign(1, to_float32(-0.0)) == -1
    for precision, value in (("fp16", 65510.0), ("bf16", 3.3961e38), ("fp32", 1e39)):
        with pytest.raises(OverflowError):
            round_to(PRECISIONS[precision], value)
