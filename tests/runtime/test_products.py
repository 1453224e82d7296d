"""The producer's part of a CUDA backward, on a CPU: cuDNN's calls are replaced by torch's own convolutions, all else is what a GPU runs."""

import json

import pytest
import torch
import torch.nn.functional as functional

from runtime import GradientError, products

from .generated_packages import CHAINS, generate, import_from
from .test_gradients import assert_each_alone, assert_same_gradients, gradients, pair, saved_shapes

pytestmark = [pytest.mark.usefixtures("kept_builds"), pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]  # torch's own modules


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The (shapes, allow_tf32) of every call that cuDNN would get."""
    seen = []

    def convolution(x, weight, padding, stride, dilation, groups, benchmark, deterministic, allow_tf32):
        assert (benchmark, deterministic) == (False, True)
        seen.append((tuple(x.shape), tuple(weight.shape), allow_tf32))
        return getattr(functional, f"conv{x.dim() - 2}d")(x, weight, None, stride, padding, dilation, groups)

    def transposed(x, weight, padding, output_padding, stride, dilation, groups, benchmark, deterministic, allow_tf32):
        assert (benchmark, deterministic) == (False, True)
        assert all(extra < step for extra, step in zip(output_padding, stride)), "cuDNN takes no output_padding of a stride or more"
        seen.append((tuple(x.shape), tuple(weight.shape), allow_tf32))
        return getattr(functional, f"conv_transpose{x.dim() - 2}d")(x, weight, None, stride, padding, output_padding, groups, dilation)

    monkeypatch.setattr(products, "_convolution", convolution)
    monkeypatch.setattr(products, "_transposed_convolution", transposed)
    monkeypatch.setattr(products, "on_cuda", lambda tensor: True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # what a forward asks for
    return seen


@pytest.fixture
def switch():
    """Sets the process-wide precision of float32 products, for one test."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield lambda precision: setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
    torch.backends.cuda.matmul.fp32_precision = before


# (input channels, output channels, kernel, what departs from torch's defaults); the kernel's length is the rank.
CONVOLUTIONS = {
    "plain": (3, 8, (3, 3), {}), "1x1": (4, 6, (1, 1), {}), "strided": (4, 6, (3, 2), {"stride": (2, 3), "padding": (1, 1)}),
    "dilated": (2, 4, (3, 3), {"dilation": (2, 3), "padding": (2, 0)}), "grouped": (6, 9, (3, 3), {"groups": 3, "stride": (2, 2)}),
    "depthwise": (5, 10, (2, 3), {"groups": 5, "padding": (0, 2)}), "line": (3, 4, (4,), {"stride": (3,), "padding": (2,)}),
    "volume": (2, 4, (3, 2, 3), {"stride": (2, 1, 3), "padding": (1, 0, 2), "groups": 2}), "volume dilated": (2, 3, (2, 2, 2), {"dilation": (3, 2, 1)}),
}  # fmt: skip
TRANSPOSED = {
    "plain": (3, 8, (3, 3), {}), "strided": (4, 6, (3, 2), {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2)}),
    "kernel is stride": (4, 6, (2, 2), {"stride": (2, 2)}), "grouped": (6, 9, (3, 3), {"groups": 3, "stride": (2, 2), "dilation": (2, 1)}),
    "line": (3, 4, (5,), {"stride": (2,), "padding": (2,), "output_padding": (1,)}),
    "extra of a stride": (4, 6, (2, 3), {"dilation": (2, 4), "stride": (1, 3), "output_padding": (1, 2)}),
    "line, extra of more": (3, 4, (2,), {"stride": (2,), "dilation": (6,), "output_padding": (5,), "padding": (1,)}),
    "volume": (4, 2, (3, 3, 3), {"stride": (2, 2, 2), "padding": (1, 1, 1), "output_padding": (1, 1, 1), "groups": 2}),
}  # fmt: skip
SIZES = (7, 8, 5)
CASES = [(transposed, name) for transposed, table in ((False, CONVOLUTIONS), (True, TRANSPOSED)) for name in table]


def convolution(transposed: bool, name: str, precision: str):
    """(the producer, torch's own call, input and weight shapes) of a case."""
    channels, filters, kernel, own = (TRANSPOSED if transposed else CONVOLUTIONS)[name]
    rank = len(kernel)
    options = {"stride": (1,) * rank, "padding": (0,) * rank, "dilation": (1,) * rank, "groups": 1, **({"output_padding": (0,) * rank} if transposed else {}), **own}
    word = f"conv{'_transpose' if transposed else ''}{rank}d"
    groups = options["groups"]
    weight = (channels, filters // groups, *kernel) if transposed else (filters, channels // groups, *kernel)
    return products.Producer(word, options, precision), lambda *leaves: getattr(functional, word)(*leaves, **options), (5, channels, *SIZES[:rank]), weight, filters


def drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def wanted_gradients(call, operands, grad_of):
    """(y, gradients) by torch's autograd."""
    leaves = [tensor.detach().requires_grad_() for tensor in operands]
    y = call(*leaves)
    return y.detach(), torch.autograd.grad(y, leaves, grad_of(y))


@pytest.mark.parametrize("columns", [40, 4000])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(("transposed", "name"), CASES)
def test_convolutions(transposed, name, precision, columns, calls, monkeypatch):
    """Product and derivatives of every rank, with pieces of rows and of several samples, under the TF32 of the precision."""
    monkeypatch.setattr(products, "COLUMNS", columns)
    producer, call, x_shape, weight_shape, filters = convolution(transposed, name, precision)
    x, weight, bias = (tensor.float() for tensor in drawn(x_shape, weight_shape, (filters,)))
    grad = torch.randn(call(x, weight, bias).shape, generator=torch.Generator().manual_seed(1))
    y, wanted = wanted_gradients(call, [tensor.double() for tensor in (x, weight, bias)], lambda y: grad.double())
    torch.testing.assert_close(producer.produce(x, weight, bias, deterministic=True).double(), y, rtol=1e-5, atol=1e-5)
    for got, want in zip(producer.derive(grad, x, weight, [True] * 3), wanted):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    assert producer.derive(grad, x, weight, [False, False, True])[:2] == (None, None)
    assert {allow_tf32 for _, _, allow_tf32 in calls} == {precision == "tf32"}


@pytest.mark.parametrize(("transposed", "name"), CASES)
def test_on_a_cpu_torch_itself_convolves(transposed, name, calls, monkeypatch):
    monkeypatch.setattr(products, "on_cuda", lambda tensor: False)
    producer, call, x_shape, weight_shape, filters = convolution(transposed, name, "fp32")
    x, weight, bias = drawn(x_shape, weight_shape, (filters,))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y = producer(*leaves)
    grad = torch.randn_like(y)
    want, wanted = wanted_gradients(call, (x, weight, bias), lambda _: grad)
    torch.testing.assert_close(y.detach(), want)
    for got, exact in zip(torch.autograd.grad(y, leaves, grad), wanted):
        torch.testing.assert_close(got, exact)
    assert calls == []


@pytest.mark.parametrize("allowed", [False, True])
def test_a_linear_keeps_its_precision_under_any_switch(calls, switch, allowed):
    """Where the process's TF32 for products of matrices is not that of the precision, they become convolutions, which are told."""
    switch("tf32" if allowed else "ieee")
    x, weight, bias, grad = (tensor.float() for tensor in drawn((7, 12), (9, 12), (9,), (7, 9)))
    y, wanted = wanted_gradients(functional.linear, (x, weight, bias), lambda y: grad)
    for precision in ("fp32", "tf32", "fp16"):
        calls.clear()
        producer = products.Producer("linear", {}, precision)
        torch.testing.assert_close(producer.produce(x, weight, bias), y)
        for got, want in zip(producer.derive(grad, x, weight, [True] * 3), wanted):
            torch.testing.assert_close(got, want)
        tf32 = precision == "tf32"
        shapes = [((7, 12, 1, 1), (9, 12, 1, 1), tf32), ((7, 9, 1, 1), (12, 9, 1, 1), tf32), ((9, 7, 1, 1), (12, 7, 1, 1), tf32)]
        assert calls == (shapes if precision != "fp16" and allowed != tf32 else [])


def test_a_linear_of_several_axes(calls):
    x, weight, bias, grad = drawn((2, 3, 4), (5, 4), (5,), (2, 3, 5))
    producer = products.Producer("linear", {}, "bf16")
    y, wanted = wanted_gradients(functional.linear, (x, weight, bias), lambda y: grad)
    torch.testing.assert_close(producer.produce(x, weight, bias), y)
    for got, want in zip(producer.derive(grad, x, weight, [True] * 3), wanted):
        torch.testing.assert_close(got, want)


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
    assert_each_alone(model, x, grad_y, got)


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
