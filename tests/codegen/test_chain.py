"""What templates see of an operator: constants folded as PyTorch uses them, one expression each."""

import pytest

from codegen.ir.apply import applies, unique_constants
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
