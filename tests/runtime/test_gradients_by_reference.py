"""Chains with stages and with results taken once more, on the cpu target: their generated backward; PyTorch's own gradients where those are asked for."""

import itertools
import json

import pytest
import torch

from runtime import GradientError
from tests import tiers

from .generated_packages import CONV, LINEAR, generate
from .test_gradients import error, gradients, pair, saved_shapes

pytestmark = pytest.mark.usefixtures("kept_builds")

NORM = {"group_norm": {"name": "norm", "num_groups": 4}}
POOL = {"max_pool2d": {"kernel_size": 2}}
FACTOR = {"mul": {"name": "factor", "shape": [1]}}
AVERAGES = {
    "plain": {"kernel_size": 2}, "padded": {"kernel_size": 3, "stride": 2, "padding": 1}, "inside": {"kernel_size": 3, "padding": 1, "count_include_pad": False},
    "ceil": {"kernel_size": 2, "ceil_mode": True}, "divisor": {"kernel_size": 3, "divisor_override": 5},
}  # fmt: skip
REDUCTIONS = ("min", "max", "sum", "mean", "logsumexp")
CHAINS = {
    **{f"{name}_linear": [LINEAR, NORM, "tanh", {name: {"keepdim": True}}, FACTOR] for name in REDUCTIONS},
    **{f"{name}_conv": [CONV, "relu", NORM, {name: {}}, "tanh"] for name in REDUCTIONS},
    **{f"average_{name}": [CONV, NORM, "silu", {"avg_pool2d": arguments}, FACTOR] for name, arguments in AVERAGES.items()},
    "broadcast": [LINEAR, NORM, {"min": {"keepdim": True}}, {"add": {"name": "spread", "shape": [1, 24, 1, 1]}}],
    "pools": [CONV, NORM, POOL, "silu", {"avg_pool2d": {"kernel_size": 2}}, {"max": {"keepdim": True}}],
    "residual": [LINEAR, NORM, "tanh", {"add": {"from": "gemm"}}],
    "residual_conv": [CONV, NORM, "tanh", {"add": {"from": "conv"}}, "hardswish", POOL],
    "small_75": [LINEAR, NORM, {"min": {"keepdim": True}}, {"add": {"name": "bias", "shape": [1, 24, 1, 1]}}, "silu"],
    "kept_by_a_stage": [CONV, NORM, {"mean": {"name": "folded", "keepdim": True}}, "relu", {"add": {"from": "folded"}}],
}
GENERATED = {
    "doubled": [LINEAR, NORM, {"leaky_relu": {"name": "act"}}, {"add": {"from": "act"}}],
    "two_pools": [CONV, NORM, POOL, "tanh", POOL],
}


# What make test runs: a kind of stage each, behind both producers, in every precision. The stages' own arithmetic has tests in tests/codegen.
QUICK = (
    ("min_linear", "fp32"), ("logsumexp_conv", "fp16"), ("average_inside", "bf16"), ("broadcast", "fp16"), ("pools", "fp32"), ("residual", "bf16"),
    ("residual_conv", "fp32"), ("kept_by_a_stage", "fp16"),
)  # fmt: skip


def emitted_backwards(module) -> dict:
    """The manifest's backward of each target."""
    return json.loads((module.ModelNew.__init__.__globals__["PACKAGE"].path / "manifest.json").read_text())["backward"]


@pytest.mark.parametrize(("name", "precision"), tiers.quick(itertools.product(CHAINS, ("fp32", "fp16", "bf16")), *QUICK))
def test_by_reference(tmp_path, name: str, precision: str) -> None:
    """Generated; asked for by reference, no further from float64 than eager's; nothing is saved without gradients; second derivatives are refused."""
    module = generate(tmp_path / "packages", CHAINS[name], precision)
    assert set(emitted_backwards(module)) == {"cpu"}
    model, reference = pair(module)
    (x,) = module.get_inputs()
    with torch.no_grad():
        plain = model(x)
    grad_y = torch.randn(plain.shape).to(x.dtype)
    _, eager = gradients(reference, x, grad_y)
    _, exact = gradients(reference, x, grad_y, torch.float64)
    y, got = gradients(model, x, grad_y)
    assert torch.equal(y, plain)
    for key in got:
        assert got[key].dtype is x.dtype
        assert error(got[key], exact[key]) <= 1.25 * error(eager[key], exact[key]) + max(4e-6, torch.finfo(x.dtype).eps / 4), key
    model.differentiate_by_reference()
    y, got = gradients(model, x, grad_y)
    assert torch.equal(y, plain)
    for key in got:
        assert got[key].dtype is x.dtype
        assert error(got[key], exact[key]) <= 1.01 * error(eager[key], exact[key]) + 1e-7, key

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y, shapes = saved_shapes(lambda: model(x))
        assert shapes == [] and y.grad_fn is None
    x.requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, grad_y, create_graph=True)
    with pytest.raises(GradientError, match="second derivatives are not generated"):
        torch.autograd.grad(first.float().square().sum(), list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("name", GENERATED)
def test_generated(tmp_path, name: str) -> None:
    """A value that meets itself, and one max_pool2d behind another: the cpu target's own backward."""
    module = generate(tmp_path / "packages", GENERATED[name])
    assert set(emitted_backwards(module)) == {"cpu"}
    model, reference = pair(module)
    (x,) = module.get_inputs()
    with torch.no_grad():
        grad_y = torch.randn_like(model(x))
    _, got = gradients(model, x, grad_y)
    _, exact = gradients(reference, x, grad_y, torch.float64)
    for key in got:
        assert error(got[key], exact[key]) <= 2e-6, key


@pytest.mark.parametrize("name", tiers.quick(["small_75", "residual_conv", "pools"], "small_75"))
def test_generated_under_a_compiler(tmp_path, name: str) -> None:
    """The operators' checks, and the same gradients from a compiled model."""
    module = generate(tmp_path / "packages", CHAINS[name])
    model, _ = pair(module)
    (x,) = module.get_inputs()
    with torch.no_grad():
        grad_y = torch.randn_like(model(x))
    _, want = gradients(model, x, grad_y)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    named = {"x": x.requires_grad_(), **dict(model.named_parameters())}
    for key, got in zip(named, torch.autograd.grad(compiled(x), list(named.values()), grad_y)):
        torch.testing.assert_close(got, want[key], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    operators = model._operators
    inputs = (x, *model._collect(x.device)[0])
    torch.library.opcheck(operators.forward_saving, inputs)
    saved = operators.forward_saving(*inputs)[1]
    behind = [dict(model.named_parameters())[spec.name].detach() for spec in operators.chain_parameters]
    torch.library.opcheck(operators.backward, (grad_y, saved, *behind))
