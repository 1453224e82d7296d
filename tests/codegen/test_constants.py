"""Every number of a spec is checked as the kernels hold it: what is accepted keeps its meaning there, and what PyTorch refuses is refused."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from codegen.ir.apply import folded
from codegen.numerics import PRECISIONS, to_float32
from codegen.ops import OPERATORS, Kind
from codegen.spec import Spec, SpecError, load_spec
from codegen.torch_text import module_lines

ARGUMENTS = [(name, a.name) for name, operator in OPERATORS.items() for a in operator.arguments if a.type in ("number", "bound")]
CONV = {"instance_norm"}
EXTREMES = [s * v for s in (1, -1) for v in (0.0, 1e-50, 1e-46, 1e-45, 1e-42, 1.17549e-38, 1.1754944e-38, 1e-9, 6e-8, 2.9e-8, 1e-5, 1.0, 20.0, 65504.0, 65520.0, 3.4028e38, 3.4028236e38, 1e39, 1e300)]
numbers = st.one_of(st.sampled_from(EXTREMES), st.floats(allow_nan=False, allow_infinity=False), st.floats(width=32, allow_nan=False, allow_infinity=False), st.floats(-70000, 70000))


def data_of(operator: str, values: dict) -> dict:
    conv = operator in CONV
    head = {"conv2d": {"name": "first", "in_channels": 2, "out_channels": 4, "kernel_size": 1}} if conv else {"linear": {"name": "first", "in_features": 4, "out_features": 4}}
    norm = OPERATORS[operator].kind is Kind.NORM
    own = {operator: values | ({"name": "norm"} if norm else {}) | ({"num_groups": 2} if operator == "group_norm" else {})}
    chain = [head, own] if norm else [head, {"group_norm": {"name": "norm", "num_groups": 2}}, own]
    return {"name": "layer", "batch": 2, **({"input": {"height": 3, "width": 3}} if conv else {}), "chain": chain}


def read(folder, data: dict, precision: str = "fp32") -> Spec:
    path = folder / "layer.yaml"
    path.write_text(yaml.safe_dump(data))
    return load_spec(path, precision)


def eager(spec: Spec, operator: str, dtype: torch.dtype) -> torch.Tensor:
    """The operator by PyTorch in `dtype`, on values of many sizes and zero that the spec's precision holds."""
    step = next(step for step in spec.chain if step.operator.name == operator)
    if step.operator.kind is Kind.NORM:
        line = next(line for line in module_lines(spec) if line.startswith("self.norm"))
        return eval(line.removeprefix("self.norm = "), {"nn": nn}).to(dtype)(torch.zeros(step.input_shape, dtype=dtype))
    v = torch.tensor([[0.0, 1.0, -1.0, 1e-3], [-1e-3, 6e4, -6e4, 1e-7]]).to(getattr(torch, spec.precision.dtype)).to(dtype)
    v = v[v != 0] if operator == "rdiv" else v  # 0 / 0 is NaN
    return eval(step.operator.call(step.values).format(v="v"), {"torch": torch, "F": F, "v": v, "self": SimpleNamespace(training=True)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("constants")


@settings(max_examples=800, deadline=None)
@given(slot=st.sampled_from(ARGUMENTS), value=numbers, precision=st.sampled_from(list(PRECISIONS)))
@example(slot=("celu", "alpha"), value=1e-50, precision="fp32")
@example(slot=("softplus", "beta"), value=1e-45, precision="bf16")
@example(slot=("group_norm", "eps"), value=1e-50, precision="fp32")
@example(slot=("div", "value"), value=-1e-46, precision="fp16")
@example(slot=("hardtanh", "max_val"), value=-1.0000001, precision="fp16")
def test_what_is_accepted_means_the_same_in_the_kernels_and_pytorch_takes_it_too(slot, value, precision, folder):
    operator, argument = slot
    try:
        spec = read(folder, data_of(operator, {argument: value}), precision)
    except SpecError as error:
        assert len(error.problems) == 1 and argument in str(error)
        held_in_16_bits = OPERATORS[operator].bounds  # bounds and thresholds are compared as the precision has them
        assert value <= 0 or not 1e-37 < value < 60000 or held_in_16_bits or (operator == "dropout" and value > 1), "refused without need"
        return
    step = next(step for step in spec.chain if step.operator.name == operator)
    held = folded(step, argument, spec.precision)
    assert math.isfinite(held) and (held == 0) == (value == 0) and math.copysign(1, held) == math.copysign(1, value)
    if not step.operator.bounds:
        assert abs(held - value) <= 2.0**-24 * abs(value) and held == to_float32(value)
    eager(spec, operator, getattr(torch, spec.precision.dtype))  # raises for what PyTorch refuses
    # Its value is taken in float64: in 16 bits PyTorch's own intermediates overflow, 1 / sqrt(eps) of a constant row, say, and 0 times them is NaN.
    assert not eager(spec, operator, torch.float64).isnan().any()


@pytest.mark.parametrize(
    ("operator", "values", "precision", "said"),
    [
        ("celu", {"alpha": 1e-50}, "fp32", "alpha: 1.0e-50 is too small for float32"),
        ("celu", {"alpha": 1e-42}, "fp32", "alpha: 1.0e-42 is too small for float32"),
        ("group_norm", {"eps": 1e-50}, "fp32", "eps: 1.0e-50 is too small for float32"),
        ("layer_norm", {"eps": 1e-50}, "bf16", "eps: 1.0e-50 is too small for float32"),
        ("instance_norm", {"eps": -1e-5}, "fp32", "eps: -1.0e-05 must be positive"),
        ("softplus", {"beta": 1e-50}, "fp32", "beta: 1.0e-50 is too small for float32"),
        ("div", {"value": 1e-50}, "fp32", "value: 1.0e-50 is too small for float32"),
        ("div", {"value": 0.0}, "fp32", "value: 0.0 must not be 0"),
        ("mul", {"value": 1e39}, "fp32", "value: 1.0e+39 is beyond the range of float32"),
        ("hardtanh", {"max_val": 1e39}, "fp32", "max_val: 1.0e+39 is beyond the range of float32"),
        ("clamp", {"min": 1e-9}, "fp16", "min: 1.0e-09 is too small for float16"),
        ("clamp", {"min": 1.0, "max": 1.0001}, "fp16", "min: 1.0 must be less than max: 1.0, as float16 has them"),
        ("hardtanh", {"min_val": 1.0, "max_val": 1.0 + 1e-9}, "fp32", "as float32 has them"),
        ("softshrink", {"lambd": -0.5}, "fp32", "lambd: -0.5 must not be negative"),
    ],
)
def test_what_would_become_another_number_is_refused(operator, values, precision, said, tmp_path):
    with pytest.raises(SpecError) as caught:
        read(tmp_path, data_of(operator, values), precision)
    assert said in str(caught.value)


def test_an_argument_of_the_constructor_is_checked_where_it_is_used(tmp_path):
    data = {**data_of("group_norm", {"eps": "small"}), "args": {"small": 1e-50}}
    with pytest.raises(SpecError, match=r"eps: small = 1e-50 is too small for float32"):
        read(tmp_path, data)
