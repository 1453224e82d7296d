"""Calls of layers with several inputs and with state: launched without the dispatcher, checked like the first input, never in an argument's memory."""

import copy

import pytest
import torch
from torch import nn

from runtime import CallError

from .generated_packages import generate

ROWS, WIDE = 6, 24
INPUTS = {"x": {"shape": [12]}, "residual": {"shape": [WIDE]}, "offset": {"shape": [WIDE], "batched": False}}
CHAIN = [
    {"linear": {"name": "gemm", "in_features": 12, "out_features": WIDE}}, {"batch_norm": {"name": "norm", "num_features": WIDE}},
    {"add": {"from": "residual"}}, {"mul": {"from": "offset"}}, "tanh",
]  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return generate(tmp_path_factory.mktemp("inputs"), CHAIN, inputs=INPUTS, batch=ROWS)


@pytest.fixture
def model(package):
    """In evaluation, with statistics of some training."""
    made = package.ModelNew()
    made.norm.running_mean.normal_()
    made.norm.running_var.uniform_(0.5, 2.0)
    return made.eval()


@pytest.fixture
def reference(package, model):
    made = package.Model().double().eval()
    made.load_state_dict(model.state_dict())
    return made


@pytest.fixture
def inputs():
    return torch.randn(ROWS, 12), torch.randn(ROWS, WIDE), torch.randn(WIDE)


def assert_right(y: torch.Tensor, reference: nn.Module, inputs: tuple) -> None:
    wanted = reference(*(given.double() for given in inputs))
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=4e-6)  # 40 roundings of values below 8


def test_a_call_without_gradients_is_launched_at_once(model, reference, inputs, monkeypatch):
    operator = model._operators.forward(*inputs, *model._gather(), *model._gather_state())
    (size,) = model._sizes
    monkeypatch.setattr(size.operators, "forward", None)  # nobody asks for it
    with torch.no_grad():
        by_place, by_name = model(*inputs), model(inputs[0], offset=inputs[2], residual=inputs[1])
    assert torch.equal(by_place, operator) and torch.equal(by_name, operator)
    assert_right(by_place, reference, inputs)


@pytest.mark.parametrize("place", range(3))
def test_inputs_that_kernels_cannot_read_as_they_lie(place, model, reference, inputs):
    """Strides, an address that is no multiple of 16 bytes, a negative bit."""
    given = inputs[place]
    strided = torch.stack([given, given], -1)[..., 0]
    shifted = torch.cat([torch.zeros(1), given.flatten()])[1:].reshape(given.shape)
    negative = torch._neg_view(-given)
    for made in (strided, shifted, negative):
        assert torch.equal(made, given)
        changed = (*inputs[:place], made, *inputs[place + 1 :])
        with torch.no_grad():
            assert_right(model(*changed), reference, inputs)


def test_state_that_kernels_cannot_read_as_it_lies(model, reference, inputs):
    model.norm.running_mean = torch.stack([model.norm.running_mean] * 2, -1)[:, 0]
    with torch.no_grad():
        assert_right(model(*inputs), reference, inputs)


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t[:, :-1], r"residual: expected \(6, 24\) float32 on cpu, where x is, got \(6, 23\)"),
    (lambda t: t.double(), r"residual: expected .*, got \(6, 24\) float64 on cpu; convert it"),
    (lambda t: t.to("meta"), r"residual: expected .*, got \(6, 24\) float32 on meta; move it there"),
    (lambda t: None, r"residual: expected .*, got NoneType; pass a torch.Tensor"),
    (lambda t: t.to_sparse(), r"residual: expected a dense tensor, got layout torch.sparse_coo; pass residual.to_dense\(\)"),
    (lambda t: torch.nested.nested_tensor(list(t)), r"residual: expected a dense tensor, got a nested tensor"),
])  # fmt: skip
def test_a_wrong_second_input_is_named(change, said, model, inputs):
    x, residual, offset = inputs
    for context in (torch.no_grad(), torch.enable_grad()):
        with context, pytest.raises(CallError, match=said):
            model(x, change(residual), offset)


@pytest.mark.parametrize("call", [lambda m, x, r, o: m(x), lambda m, x, r, o: m(x, r, o, o), lambda m, x, r, o: m(x, r, scale=o), lambda m, x, r, o: m(x, r, residual=o)])
def test_other_inputs_than_the_layer_has(call, model, inputs):
    with pytest.raises(CallError, match="takes the inputs x, residual, offset; got"):
        call(model, *inputs)


def test_wrong_state_is_named(model, inputs):
    model.norm.running_var = torch.ones(WIDE, dtype=torch.float64)
    with pytest.raises(CallError, match=r"norm.running_var: expected \(24,\) float32 on cpu.*got \(24,\) float64"):
        model(*inputs)
    model.norm.running_var = None
    with pytest.raises(CallError, match="norm.running_var: expected .*, got None"):
        model(*inputs)


def test_training_without_gradients_moves_the_statistics_and_evaluation_does_not(model, package, inputs):
    reference = copy.deepcopy(package.Model())
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        for mode in (True, False, True):
            y, wanted = model.train(mode)(*inputs), reference.train(mode)(*inputs)
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    for (key, mine), theirs in zip(model.named_buffers(), reference.buffers()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=key)
    assert model.norm.num_batches_tracked == 2


def test_two_modes_in_one_model_are_refused(model, inputs):
    model.norm.train()
    with pytest.raises(CallError, match="norm is in training mode while .* is in evaluation mode"):
        model(*inputs)


def test_gradients_reach_every_input(model, reference, inputs):
    asked = [given.clone().requires_grad_() for given in inputs]
    wanted = [given.double().requires_grad_() for given in inputs]
    model(*asked).sum().backward()
    reference(*wanted).sum().backward()
    for mine, theirs in zip(asked, wanted):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chain", [[{"dropout": {"p": 0.5}}], ["relu", {"dropout": {"p": 0.5}}]], ids=["the input", "a value"])
def test_a_result_is_never_the_memory_of_an_input(chain, tmp_path):
    """Evaluation's dropout gives back what it gets."""
    made = generate(tmp_path, chain, inputs={"x": {"shape": [8]}}).ModelNew().eval()
    x = torch.rand(6, 8)
    with torch.no_grad():
        y = made(x)
        assert torch.equal(y, x) and y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        y.zero_()
    assert x.any()
