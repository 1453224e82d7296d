"""The producer's part of a CUDA backward, on a CPU: cuDNN's calls are replaced by torch's own convolutions, all else is what a GPU runs."""

import json

import pytest
import torch
import torch.nn.functional as functional

from runtime import GradientError, products
from runtime.manifest import LibraryStep

from .generated_packages import CHAINS, generate, import_from
from .test_gradients import assert_same_gradients, gradients, pair, saved_shapes

pytestmark = [pytest.mark.usefixtures("kept_objects"), pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]  # torch's own modules


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The (shapes, allow_tf32) of every call that cuDNN would get."""
    seen = []

    def convolution(x, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32):
        assert (benchmark, deterministic) == (False, True)
        seen.append((tuple(x.shape), tuple(weight.shape), allow_tf32))
        return functional.conv2d(x, weight, None, stride, padding, dilation, groups)

    def transposed(x, weight, padding, output_padding, stride, dilation, groups, benchmark, deterministic, allow_tf32):
        assert (benchmark, deterministic) == (False, True)
        seen.append((tuple(x.shape), tuple(weight.shape), allow_tf32))
        return functional.conv_transpose2d(x, weight, None, stride, padding, output_padding, groups, dilation)

    monkeypatch.setattr(products, "_convolution", convolution)
    monkeypatch.setattr(products, "_transposed_convolution", transposed)
    return seen


@pytest.fixture
def switch():
    """Sets the process-wide precision of float32 products, for one test."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield lambda precision: setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
    torch.backends.cuda.matmul.fp32_precision = before


CONVOLUTIONS = {
    "plain": (3, 8, (3, 3), {}), "1x1": (4, 6, (1, 1), {}), "strided": (4, 6, (3, 2), {"stride": (2, 3), "padding": (1, 1)}),
    "dilated": (2, 4, (3, 3), {"dilation": (2, 3), "padding": (2, 0)}), "grouped": (6, 9, (3, 3), {"groups": 3, "stride": (2, 2)}),
    "depthwise": (5, 10, (2, 3), {"groups": 5, "padding": (0, 2)}),
}  # fmt: skip


def convolution_step(options) -> LibraryStep:
    given = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **options}
    return LibraryStep("conv2d", ("x", "w", "b"), "t0", given)


def wanted_gradients(step, x, weight, bias, grad):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    y = functional.linear(*leaves) if step.call == "linear" else functional.conv2d(*leaves, **step.options)
    return y.detach(), torch.autograd.grad(y, leaves, grad(y))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name, exact, calls, monkeypatch):
    channels, filters, kernel, options = CONVOLUTIONS[name]
    monkeypatch.setattr(products, "COLUMNS", 4000)  # several samples at a time, and a rest
    step = convolution_step(options)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    x, weight, bias = draw(5, channels, 11, 10), draw(filters, channels // step.options["groups"], *kernel), draw(filters)
    y, wanted = wanted_gradients(step, x, weight, bias, lambda y: draw(*y.shape))
    generator.manual_seed(0)
    [draw(*tensor.shape) for tensor in (x, weight, bias)]
    grad = draw(*y.shape)
    torch.testing.assert_close(products.produce(step, exact, x, weight, bias), y)
    for got, want in zip(products.derive(step, exact, grad, x, weight, [True] * 3), wanted):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert products.derive(step, exact, grad, x, weight, [False, False, True])[:2] == (None, None)
    assert {allow_tf32 for _, _, allow_tf32 in calls} == {not exact}


@pytest.mark.parametrize("allowed", [False, True])
def test_no_tf32_in_fp32(calls, switch, allowed):
    """Where the process allows TF32 in products of matrices, those of fp32 become convolutions, which are told not to use it."""
    switch("tf32" if allowed else "ieee")
    step = LibraryStep("linear", ("x", "w", "b"), "t0")
    x, weight, bias = torch.randn(7, 12), torch.randn(9, 12), torch.randn(9)
    grad = torch.randn(7, 9)
    y, wanted = wanted_gradients(step, x, weight, bias, lambda y: grad)
    for exact in (False, True):
        calls.clear()
        torch.testing.assert_close(products.produce(step, exact, x, weight, bias), y)
        for got, want in zip(products.derive(step, exact, grad, x, weight, [True] * 3), wanted):
            torch.testing.assert_close(got, want)
        shapes = [((7, 12, 1, 1), (9, 12, 1, 1), False), ((7, 9, 1, 1), (12, 9, 1, 1), False), ((9, 7, 1, 1), (12, 7, 1, 1), False)]
        assert calls == (shapes if exact and allowed else [])
    conv = convolution_step({"groups": 2})
    x, weight, bias = torch.randn(3, 4, 5, 5), torch.randn(6, 2, 3, 3), torch.randn(6)
    grad = torch.randn(3, 6, 3, 3)
    y, wanted = wanted_gradients(conv, x, weight, bias, lambda y: grad)
    for got, want in zip(products.derive(conv, True, grad, x, weight, [True] * 3), wanted):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# ---- a whole model whose backward computes the producer again -------------------------------------------------------


@pytest.fixture(params=CHAINS)
def module(request, tmp_path):
    """A package whose cpu backward is like that of CUDA: it saves nothing and starts with a library step of its own."""
    module = generate(tmp_path / "packages", CHAINS[request.param])
    path = module.ModelNew.__init__.__globals__["PACKAGE"].path
    data = json.loads((path / "manifest.json").read_text())
    data["backward"]["cpu"]["recompute"] = data["targets"]["cpu"]["steps"][0]
    (path / "manifest.json").write_text(json.dumps(data))
    return import_from(path, f"{module.__name__}_recomputing")


@pytest.fixture
def trained(module):
    model, reference = pair(module)
    (x,) = module.get_inputs()
    yield model, reference, x, torch.randn(model._package.manifest.output.shape)
    torch._dynamo.reset()


def test_gradients_without_a_saved_result(trained):
    """Right, the same bits twice, each alone as well as together."""
    model, reference, x, grad_y = trained
    y, got = gradients(model, x, grad_y)
    assert_same_gradients(got, gradients(reference, x, grad_y)[1])
    assert all(torch.equal(again, got[name]) for name, again in gradients(model, x, grad_y)[1].items())
    for name, parameter in [("x", None), *model.named_parameters()]:
        model.requires_grad_(False)
        leaf = x.detach().requires_grad_() if parameter is None else parameter.requires_grad_()
        (alone,) = torch.autograd.grad(model(leaf if parameter is None else x), leaf, grad_y)
        assert torch.equal(alone, got[name]), name


def test_only_x_and_parameters_are_saved(trained):
    model, _, x, _ = trained
    y, shapes = saved_shapes(lambda: model(x))
    assert shapes == sorted([(0,), tuple(x.shape), *(tuple(p.shape) for p in model.parameters())])
    with torch.no_grad():
        assert saved_shapes(lambda: model(x))[1] == []


def test_second_derivatives_are_refused(trained):
    model, _, x, grad_y = trained
    x.requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, grad_y, create_graph=True)
    with pytest.raises(GradientError, match="second derivatives are not generated"):
        first.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training(trained, backend):
    model, _, x, grad_y = trained
    _, want = gradients(model, x, grad_y)
    x.requires_grad_()
    named = {"x": x, **dict(model.named_parameters())}
    got = dict(zip(named, torch.autograd.grad(torch.compile(model, fullgraph=True, backend=backend)(x), list(named.values()), grad_y)))
    assert_same_gradients(got, want)


def test_opcheck(trained):
    model, _, x, _ = trained
    operators = model._operators
    parameters = dict(model.named_parameters())
    producer = "gemm" if hasattr(model, "gemm") else "conv"
    weight, bias = parameters[f"{producer}.weight"], parameters[f"{producer}.bias"]
    x, weight, bias = x.detach(), weight.detach(), bias.detach()
    saved = operators.produce(x, weight, bias)
    torch.library.opcheck(operators.produce, (x, weight, bias))
    for wanted in ([True] * 3, [False, True, False]):
        torch.library.opcheck(operators.derive, (torch.randn_like(saved), x, weight, wanted))
