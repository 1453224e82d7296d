"""Gradients of whole generated models on the cpu target, against float64 autograd of the reference; what is saved, and what is refused."""

import copy
import itertools
import json
import pickle
import shutil
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from runtime import GradientError
from tests import tiers

from .generated_packages import BIASLESS, CHAINS, generate, import_from

KINDS = {**CHAINS, **{f"{name} without bias": chain for name, chain in BIASLESS.items()}}


def pair(module, seed=0):
    """(generated model, reference with the same parameters)."""
    torch.manual_seed(seed)
    model, reference = module.ModelNew(), module.Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    reference.load_state_dict(model.state_dict())
    return model, reference


def gradients(model, x, grad_y, dtype=None):
    """y and the gradients of x and of every parameter, by name."""
    model, x = (model, x) if dtype is None else (copy.deepcopy(model).to(dtype), x.to(dtype))
    x = x.detach().requires_grad_()
    y = model(x)
    named = {"x": x, **dict(model.named_parameters())}
    return y, dict(zip(named, torch.autograd.grad(y, list(named.values()), grad_y.to(y.dtype))))


def error(got, exact):
    return float((got.double() - exact).norm() / exact.norm())


pytestmark = [pytest.mark.usefixtures("kept_builds"), pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]  # torch's own modules


@pytest.fixture(params=CHAINS)
def module(request, shared):
    return shared(CHAINS[request.param])


@pytest.fixture
def trained(module):
    """(model, reference, x, gradient of y)."""
    model, reference = pair(module)
    (x,) = module.get_inputs()
    return model, reference, x, torch.randn(model._package.manifest.output.shape, dtype=x.dtype)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def assert_each_alone(model, x, grad_y, together):
    """Asking for one gradient gets the bits that it has among all of `together`."""
    for name, parameter in [("x", None), *model.named_parameters()]:
        model.requires_grad_(False)
        leaf = x.detach().requires_grad_() if parameter is None else parameter.requires_grad_()
        (alone,) = torch.autograd.grad(model(leaf if parameter is None else x), leaf, grad_y)
        assert torch.equal(alone, together[name]), name


def assert_same_gradients(got, want):
    assert got.keys() == want.keys()
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023


# ---- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "precision"), tiers.quick(
    itertools.product(KINDS, ("fp32", "tf32", "fp16", "bf16")), *((name, "fp32") for name in KINDS), ("linear", "bf16"), ("conv", "fp16"),
))  # fmt: skip
def test_against_float64(shared, name, precision):
    """Per tensor, the error is no more than eager's at that precision, but for what chance does to few values and one rounding."""
    module = shared(KINDS[name], precision)
    model, reference = pair(module)
    (x,) = module.get_inputs()
    grad_y = torch.randn(model._package.manifest.output.shape).to(x.dtype)
    _, got = gradients(model, x, grad_y)
    _, eager = gradients(reference, x, grad_y)
    _, exact = gradients(reference, x, grad_y, torch.float64)
    assert got.keys() == exact.keys()
    for name in got:
        assert got[name].dtype is x.dtype
        allowed = 1.25 * error(eager[name], exact[name]) + max(1e-6, torch.finfo(x.dtype).eps / 4)
        assert error(got[name], exact[name]) <= allowed, name


def test_each_gradient_alone(trained):
    model, _, x, grad_y = trained
    _, everything = gradients(model, x, grad_y)
    assert_each_alone(model, x, grad_y, everything)


def test_repeatable(trained):
    model, _, x, grad_y = trained
    y, first = gradients(model, x, grad_y)
    for _ in range(3):
        again_y, again = gradients(model, x, grad_y)
        assert torch.equal(again_y, y) and all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("view", [lambda g: g.sum() - g.sum() + torch.ones(()).expand_as(g), lambda g: torch.stack([g, g], -1)[..., 1], torch._neg_view])
def test_any_view_of_the_incoming_gradient(trained, view):
    model, reference, x, grad_y = trained
    assert_same_gradients(gradients(model, x, view(grad_y))[1], gradients(reference, x, view(grad_y))[1])


def test_strided_input(trained):
    model, reference, x, grad_y = trained
    strided = torch.stack([x, x], dim=-1)[..., 0]
    assert_same_gradients(gradients(model, strided, grad_y)[1], gradients(reference, x, grad_y)[1])


def test_accumulation_and_two_uses(trained):
    model, reference, x, grad_y = trained
    for m in (model, reference):
        ((m(x) + m(x * 0.5)) * grad_y).sum().backward()
        (m(x - 1) * grad_y).sum().backward()
    assert_same_gradients({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in reference.named_parameters()})


def test_retained_graph_and_checkpointing(trained):
    model, _, x, grad_y = trained
    y = model(x)
    parameters = list(model.parameters())
    first = torch.autograd.grad(y, parameters, grad_y, retain_graph=True)
    again = torch.autograd.grad(y, parameters, grad_y)
    recomputed = torch.autograd.grad(checkpoint(model, x, use_reentrant=False), parameters, grad_y)
    for a, b, c in zip(first, again, recomputed):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_training_steps_follow_the_reference(trained):
    model, reference, x, grad_y = trained
    losses = []
    for m in (model, reference):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            loss = (m(x) - grad_y).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0]


# ---- what is saved --------------------------------------------------------------------------------------------------


def saved_shapes(call):
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        y = call()
    return y, sorted(shapes)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_saved_without_gradients(trained, mode):
    model, _, x, _ = trained
    with mode():
        y, shapes = saved_shapes(lambda: model(x))
    assert shapes == [] and y.grad_fn is None and not y.requires_grad
    model.requires_grad_(False)
    y, shapes = saved_shapes(lambda: model(x))
    assert shapes == [] and not y.requires_grad


def test_only_what_is_needed_is_saved(trained):
    """The producer's result and the parameters behind it; x for the weight's gradient, the weight for that of x."""
    model, _, x, _ = trained
    producer = model.gemm if hasattr(model, "gemm") else model.conv
    behind = [tuple(p.shape) for n, p in model.named_parameters() if not n.startswith(("gemm", "conv"))]
    result = tuple(producer(x).shape)
    model.requires_grad_(False)
    model.norm.weight.requires_grad_()
    assert saved_shapes(lambda: model(x))[1] == sorted([result, *behind])
    producer.weight.requires_grad_()
    assert saved_shapes(lambda: model(x))[1] == sorted([result, *behind, tuple(x.shape)])
    producer.weight.requires_grad_(False)
    assert saved_shapes(lambda: model(x.requires_grad_()))[1] == sorted([result, *behind, tuple(producer.weight.shape)])


def test_a_parameter_changed_before_backward_is_noticed(trained):
    model, _, x, grad_y = trained
    y = model(x)
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad_y)


@pytest.mark.parametrize("chain", CHAINS)
def test_the_backward_is_built_when_it_is_first_needed(tmp_path, chain, counting_gxx):
    module = generate(tmp_path / "packages", CHAINS[chain])
    model = module.ModelNew()
    (x,) = module.get_inputs()
    with torch.no_grad():
        model(x)
    assert len(counting_gxx.compiled) == 1
    model(x).sum().backward()
    model(x).sum().backward()
    assert len(counting_gxx.compiled) == 2


# ---- refused --------------------------------------------------------------------------------------------------------


def test_second_derivatives_are_refused(trained):
    model, _, x, grad_y = trained
    x.requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, grad_y, create_graph=True)
    with pytest.raises(GradientError, match="second derivatives are not generated for generated_.*create_graph, or use the reference"):
        first.sum().backward()


@pytest.mark.parametrize("frozen", ["none", "parameters", "x"])
def test_a_penalty_on_gradients_is_refused_whatever_asks_for_them(trained, frozen):
    """Also where nothing that the kernels read asks for gradients: a term of the loss without derivatives would be left out silently."""
    model, _, x, _ = trained
    model.requires_grad_(frozen != "parameters")
    x.requires_grad_(frozen != "x")
    asking = [tensor for tensor in (x, *model.parameters()) if tensor.requires_grad]
    first = torch.autograd.grad(model(x).sum(), asking, create_graph=True)
    for grad in first:
        assert grad.requires_grad
        with pytest.raises(GradientError, match="second derivatives are not generated"):
            (grad.pow(2).sum() + sum(tensor.sum() for tensor in asking)).backward()


def without_backward(module, folder):
    """A copy of the package under `folder`, as it is for a target that has no generated backward."""
    manifest = shutil.copytree(module.ModelNew.__init__.__globals__["PACKAGE"].path, folder / "without_backward") / "manifest.json"
    data = json.loads(manifest.read_text())
    data["backward"] = {}
    manifest.write_text(json.dumps(data))
    return import_from(manifest.parent, f"{module.__name__}_without_backward")


def test_a_target_without_a_backward_refuses(module, tmp_path):
    model = without_backward(module, tmp_path).ModelNew()
    (x,) = module.get_inputs()
    y = model(x)
    with pytest.raises(GradientError, match=r"not generated yet for generated_.* on cpu; .*model.differentiate_by_reference\(\)"):
        y.sum().backward()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="gradients are not generated yet"):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), y)


def test_gradients_by_the_reference_when_asked_for(module, tmp_path):
    """y is the kernels', bit for bit; the gradients are the reference's; copies keep the choice; x alone, parameters alone."""
    module = without_backward(module, tmp_path)
    model, reference = pair(module)
    (x,) = module.get_inputs()
    plain = model(x)
    assert model.differentiate_by_reference() is model
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    grad_y = torch.randn_like(plain)
    y, got = gradients(model, x, grad_y)
    assert torch.equal(y, plain)
    _, want = gradients(reference, x, grad_y)
    assert_same_gradients(got, want)
    model.requires_grad_(False)
    (alone,) = torch.autograd.grad(model(x.requires_grad_()), x, grad_y)
    torch.testing.assert_close(alone, want["x"])
    (first,) = torch.autograd.grad(model(x), x, grad_y.requires_grad_(), create_graph=True)
    with pytest.raises(GradientError, match="second derivatives are not generated for generated_"):
        first.sum().backward()
    model.differentiate_by_reference(False)
    with pytest.raises(GradientError):
        model(x).sum().backward()


def test_the_reference_is_found_from_a_derived_class_and_without_sys_modules(module, tmp_path, monkeypatch):
    """A test that cleans up, a harness that executes the source: the class knows its module all the same. Another Model beside a derived class is none."""
    module = without_backward(module, tmp_path)

    class Model(torch.nn.Module):
        pass

    class Derived(module.ModelNew):
        def __init__(self, *args):
            super().__init__(*args)

    torch.manual_seed(0)
    model = Derived(*module.get_init_inputs())
    _, reference = pair(module)
    reference.load_state_dict(model.state_dict())
    (x,) = module.get_inputs()
    for name in [name for name in sys.modules if name.split(".")[0] == module.__name__]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(globals(), "Model", Model)
    grad_y = torch.randn_like(model(x).detach())
    assert_same_gradients(gradients(model.differentiate_by_reference(), x, grad_y)[1], gradients(reference, x, grad_y)[1])


# ---- compilers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training(trained, backend):
    model, _, x, grad_y = trained
    _, want = gradients(model, x, grad_y)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x.requires_grad_()
    named = {"x": x, **dict(model.named_parameters())}
    got = dict(zip(named, torch.autograd.grad(compiled(x), list(named.values()), grad_y)))
    assert_same_gradients(got, want)


def test_opcheck_with_gradients(trained):
    model, _, x, grad_y = trained
    operators = model._operators
    inputs = (x.requires_grad_(), *(p for p in model._collect(x.device)[0]))
    torch.library.opcheck(operators.forward, inputs)
    torch.library.opcheck(operators.forward_saving, inputs)
    saved = operators.forward_saving(*inputs)[1]
    behind = [dict(model.named_parameters())[spec.name].detach() for spec in operators.chain_parameters]
    torch.library.opcheck(operators.backward, (grad_y, saved, *behind))


# ---- what modules are put through -----------------------------------------------------------------------------------


def test_functional_call(trained):
    model, reference, x, grad_y = trained
    found = []
    for m in (model, reference):
        parameters = {name: (p * 1.5).detach().requires_grad_() for name, p in m.named_parameters()}
        y = torch.func.functional_call(m, parameters, (x,))
        found.append(dict(zip(parameters, torch.autograd.grad(y, list(parameters.values()), grad_y))))
    assert_same_gradients(*found)


def test_parametrize(trained):
    model, reference, x, grad_y = trained

    class Squared(nn.Module):
        def forward(self, weight):
            return weight.square()

    for m in (model, reference):
        parametrize.register_parametrization(m.norm, "weight", Squared())
        m(x).backward(grad_y)
    assert_same_gradients({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in reference.named_parameters()})


def test_weight_tying(trained):
    """One parameter in two places gets the sum of both gradients, and the tie survives a deepcopy."""
    model, reference, x, grad_y = trained
    for m in (model, reference):
        m.norm.weight = m.norm.bias
    model, reference = copy.deepcopy(model), copy.deepcopy(reference)
    assert model.norm.weight is model.norm.bias
    for m in (model, reference):
        m(x).backward(grad_y)
    assert_same_gradients({n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in reference.named_parameters()})


def test_copies_train(trained):
    model, reference, x, grad_y = trained
    _, want = gradients(reference, x, grad_y)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_gradients(gradients(other, x, grad_y)[1], want)
    model.load_state_dict({key: torch.zeros_like(value) for key, value in reference.state_dict().items()})
    model.load_state_dict(reference.state_dict(), strict=True, assign=True)
    assert_same_gradients(gradients(model.train(), x, grad_y)[1], want)


def test_autocast_changes_nothing(trained):
    model, _, x, grad_y = trained
    _, want = gradients(model, x, grad_y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, got = gradients(model, x, grad_y)
    assert y.dtype is torch.float32
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_frozen_and_hooked_parameters(trained):
    """A hook sees the gradient, a tensor hook changes it, and a frozen parameter has none."""
    model, _, x, grad_y = trained
    model.norm.bias.requires_grad_(False)
    seen = []
    model.norm.weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    model.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(module))
    model(x.requires_grad_()).backward(grad_y)
    assert model.norm.bias.grad is None and torch.equal(model.norm.weight.grad, seen[0] * 2) and seen[1] is model
