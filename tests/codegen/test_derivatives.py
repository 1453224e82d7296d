"""Derivatives of arithmetic in the operator table: those that autograd finds for the same expressions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codegen.ops import OPERATORS

ARITHMETIC = {name: row for name, row in OPERATORS.items() if row.expression is not None and row.function is None}
numbers = st.floats(0.25, 4.0).flatmap(lambda size: st.sampled_from((size, -size)))


def value(text: str, **names: torch.Tensor | float):
    """A C expression of +, -, *, / and float literals, evaluated in float64."""
    return eval(text.replace("2.0f", "2.0").format(v="v", p="p"), {}, names)


def test_arithmetic_has_its_derivative_in_its_row():
    assert set(ARITHMETIC) == {"add", "sub", "mul", "div", "rsub", "rdiv"}
    assert {name for name, row in OPERATORS.items() if row.derivative is not None} == set(ARITHMETIC)


@pytest.mark.parametrize("name", ARITHMETIC)
@given(v=numbers, p=numbers, g=numbers)
def test_shares_are_autograds(name: str, v: float, p: float, g: float):
    row = ARITHMETIC[name]
    inputs = [torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in (v, p)]
    wanted = torch.autograd.grad(value(row.expression, v=inputs[0], p=inputs[1]), inputs, torch.tensor(g, dtype=torch.float64))
    for other in (True, False):  # the other operand has a gradient, or is a number
        found, at = {}, g
        for whose, share in row.derivative.taken(other):
            found[whose] = value(share, v=v, p=p, g=at)
            at = found.get("v", g)
        assert ("p" in found) == other
        assert torch.allclose(torch.tensor(at, dtype=torch.float64), wanted[0], rtol=1e-12)
        assert not other or torch.allclose(torch.tensor(found["p"], dtype=torch.float64), wanted[1], rtol=1e-12)


@pytest.mark.parametrize("name", [name for name, row in ARITHMETIC.items() if row.derivative.doubled])
@given(v=numbers, g=numbers)
def test_a_value_that_meets_itself_gets_both_shares(name: str, v: float, g: float):
    row = ARITHMETIC[name]
    x = torch.tensor(v, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(value(row.expression, v=x, p=x), x, torch.tensor(g, dtype=torch.float64))
    assert torch.allclose(torch.tensor(value(row.derivative.doubled, v=v, g=g), dtype=torch.float64), wanted, rtol=1e-12)
