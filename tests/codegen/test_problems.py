"""Shipped specs are the layers that they are named after: arguments, names, random draws and results."""

from __future__ import annotations

import inspect
import itertools
import shutil

import pytest
import torch

from codegen.spec import load_spec
from codegen.torch_text import module_lines
from tests import tiers
from tests.codegen.cpu_chains import relative_error
from tests.codegen.problems import PROBLEMS


@pytest.mark.parametrize("small", ["", "_small"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_arguments_and_parameters_are_the_modules(name: str, small: str) -> None:
    spec, module = load_spec(f"specs/{name}{small}.yaml"), PROBLEMS[name]
    signature = inspect.signature(module)
    assert [(key, p.default) for key, p in signature.parameters.items()] == [
        (key, value if key in spec.defaults else inspect.Parameter.empty) for key, value in spec.args
    ]
    with torch.device("meta"):
        model = module(*spec.init_values)
        shape = model(torch.empty(spec.input_shape)).shape
    assert tuple(shape) == spec.output_shape
    assert [(key, tuple(value.shape)) for key, value in model.state_dict().items()] == list(spec.parameters)
    assert len(module_lines(spec)) == len({key.split(".")[0] for key in model.state_dict()})


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("name", "precision"), tiers.quick(
    itertools.product(PROBLEMS, ("fp32", "bf16")), *((name, "fp32") for name in PROBLEMS), (next(iter(PROBLEMS)), "bf16"),
))  # fmt: skip
def test_draws_and_results_are_the_modules(on_cpu, name: str, precision: str) -> None:
    """The package's models start with the module's own weights under a seed, and compute what it does."""
    package, emitted = on_cpu(load_spec(f"specs/{name}_small.yaml", precision))
    models = []
    for module in (PROBLEMS[name], emitted.Model, emitted.ModelNew):
        torch.manual_seed(42)
        models.append(module(*emitted.get_init_inputs()))
    original, reference, model = models
    (x,) = emitted.get_inputs()
    for other in (reference, model):
        assert list(other.state_dict()) == list(original.state_dict())
        for key, value in original.state_dict().items():
            assert torch.equal(other.state_dict()[key], value.to(x.dtype)), key
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(torch.rand(parameter.shape), alpha=0.5)
        for other in (reference, model):
            other.load_state_dict(original.state_dict())
        original.to(x.dtype)
        got, eager = model(x), original(x)
        exact = original.double()(x.double())
        assert relative_error(reference.double()(x.double()), exact) < 1e-12
    ours, theirs = relative_error(got, exact), relative_error(eager, exact)
    assert got.shape == exact.shape and ours <= (max(1.1 * theirs, 3e-7) if precision == "fp32" else 1.05 * theirs)
    if precision == "fp32" and package.backward_plans:
        check_gradients(model, original, x)


def check_gradients(model: torch.nn.Module, exact: torch.nn.Module, x: torch.Tensor) -> None:
    """Against autograd in float64; a gradient that is 0 in truth is small beside the largest of the others."""
    mine, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    y, reference = model(mine), exact(theirs)
    incoming = torch.randn(y.shape)
    y.backward(incoming)
    reference.backward(incoming.double())
    pairs = [(mine.grad, theirs.grad), *((p.grad, q.grad) for p, q in zip(model.parameters(), exact.parameters(), strict=True))]
    scale = max(float(wanted.norm()) for _, wanted in pairs)
    for got, wanted in pairs:
        assert (got - wanted).norm() <= 1e-5 * wanted.norm() + 1e-6 * scale
