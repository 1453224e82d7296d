"""What templates see of an operator: constants folded as PyTorch uses them, one expression each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.ir.apply import applies, invertible, unique_constants
from codegen.numerics import to_float32
from tests.fused import load_fused

CHAIN = """\
name: layer
batch: 4
chain:
  - linear: {name: gemm, in_features: 8, out_features: 6}
  - elu: {alpha: 1.37}
  - mul: {value: 1.003}
  - group_norm: {name: norm, num_groups: 3}
  - hardtanh: {min_val: -0.3, max_val: 0.3}
  - hardtanh
  - add: {name: shift, shape: [6]}
  - mul: {name: gain, shape: [1]}
"""


@pytest.fixture
def spec(tmp_path):
    def load(precision):
        (tmp_path / "layer.yaml").write_text(CHAIN)
        return load_fused(tmp_path / "layer.yaml", precision)

    return load


def test_bounds_are_rounded_to_the_storage_type_and_other_scalars_are_not(spec):
    texts = {c.name: c.text for c in unique_constants(applies(spec("bf16"), spec("bf16").chain))}
    assert texts["kEluAlpha"] == "1.37f" and texts["kMul1Value"] == "1.003f"
    assert (texts["kHardtanh1MinVal"], texts["kHardtanh1MaxVal"]) == ("-0.30078125f", "0.30078125f")


def test_expressions_and_parameters(spec):
    layer = spec("fp32")
    before, after = applies(layer, layer.before_norm), applies(layer, layer.after_norm)
    assert [a.apply("v") for a in before] == ["elu(v, kEluAlpha)", "v * kMul1Value"]
    assert [a.apply("v", "p") for a in after][-2:] == ["v + p", "v * p"]
    assert [a.operand and (a.operand.key, a.operand.per_channel) for a in after] == [None, None, ("shift", True), ("gain", False)]


@pytest.mark.parametrize(("value", "inverted"), [("3.0", True), ("-0.7", True), ("2.0e-38", True), ("1.0e+38", False)])
def test_a_division_by_a_number_multiplies_where_its_inverse_is_normal(tmp_path, value, inverted):
    (tmp_path / "layer.yaml").write_text(f"name: divided\nbatch: 4\nchain:\n  - linear: {{name: a, in_features: 8, out_features: 8}}\n  - div: {{value: {value}}}\n")
    (divided,) = applies(layer := load_fused(tmp_path / "layer.yaml", "fp32"), layer.chain)
    assert divided.apply("v") == ("v * (1.0f / kDivValue)" if inverted else "v / kDivValue")


@given(st.floats(-(2.0**126), 2.0**126, width=32), st.floats(-(2.0**100), 2.0**100, width=32))
def test_an_inverse_errs_by_no_more_than_one_rounding_more(value, v):
    if not invertible(value):
        return
    exact, found = v / value, to_float32(v * to_float32(1.0 / to_float32(value))) if abs(v / value) < 2.0**127 else None
    assert found is None or abs(found - exact) <= 2.0**-23 * abs(exact) + 2.0**-149
