"""The hundred specs of KernelBench's second level: they load, they render the same bytes twice, and at small sizes the cpu target is their Model."""

import copy
import re

import pytest
import torch

from codegen.package import make_package
from codegen.render import render
from codegen.spec import benchmark, load_spec, shipped
from tests.codegen.level2_small import small

SPECS = benchmark()
NUMBERS = [int(re.search(r"/([0-9]+)_", path)[1]) for path in SPECS]
# One each of: a norm over the last spatial axis, windows behind softmax, several folds, batch statistics with a residual, a bare weight, a detached residual,
# two inputs, a norm of one statistic a sample, softmax over space, two producers, scalars, dropout, a parameter met twice, one under another shape.
QUICK = (3, 6, 8, 15, 14, 20, 26, 28, 38, 45, 50, 66, 79, 89)
TOLERANCE = 1e-4  # the promise of fp32


def test_there_is_one_spec_for_each_number_and_none_is_listed_as_shipped():
    assert NUMBERS == list(range(1, 101))
    specs = [load_spec(path) for path in SPECS]
    assert len({spec.name for spec in specs}) == 100
    assert not set(SPECS) & set(shipped())


@pytest.mark.parametrize("path", SPECS, ids=map(str, NUMBERS))
def test_specs_render_for_every_device_class_and_twice_the_same(path):
    package = make_package(load_spec(path), ("cpu", "sm_80"))
    files = render(package)
    assert {plan.target.name for plan in package.plans} == {"cpu", "sm_80"}
    assert files == render(make_package(load_spec(path), ("cpu", "sm_80")))


@pytest.mark.parametrize("path", [path for path, number in zip(SPECS, NUMBERS, strict=True) if number in QUICK], ids=map(str, sorted(QUICK)))
def test_the_cpu_target_is_the_model_in_values_gradients_and_state(path, tmp_path, on_cpu):
    check(path, tmp_path, on_cpu)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path, number in zip(SPECS, NUMBERS, strict=True) if number not in QUICK], ids=[str(n) for n in NUMBERS if n not in QUICK])
def test_the_cpu_target_is_the_model_in_the_other_specs_too(path, tmp_path, on_cpu):
    check(path, tmp_path, on_cpu)


def check(path, folder, on_cpu):
    """Values, gradients and state of the package at small sizes, in both modes, beside those of its Model from the same weights."""
    _, module = on_cpu(small(path, folder))
    torch.manual_seed(0)
    ours = module.ModelNew(*module.get_init_inputs())
    torch.manual_seed(0)
    theirs = module.Model(*module.get_init_inputs())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)
    ours.load_state_dict(theirs.state_dict())
    for mode in (True, True, False):
        before = copy.deepcopy(theirs)
        found, wanted = (_results(model.train(mode), module.get_inputs()) for model in (ours, theirs))
        largest = max(float(value.abs().max()) for key, value in wanted.items() if value is not None and key.startswith("gradient"))
        for key, value in wanted.items():
            assert (found[key] is None) == (value is None), key
            if value is not None:
                assert found[key].shape == value.shape
                noise = 1e-6 * largest * value.numel() ** 0.5 if key.startswith("gradient") else 1e-7  # a gradient that is 0 but for rounding
                error, allowed = float((found[key] - value).norm()), TOLERANCE * float(value.norm()) + noise
                assert error <= allowed or error <= allowed + 3 * eager_error(before, module, mode, key, value), (key, mode)


def eager_error(model, module, mode, key, value):
    """The distance of PyTorch's float32 value from its float64 one: large for groups of two channels that nearly agree."""
    exact = _results(model.double().train(mode), module.get_inputs(), torch.float64)[key]
    return float((value - exact).norm())


def _results(model, inputs, dtype=torch.float32):
    """The result, the gradients and the state of a model, by name, from inputs that are the same for every model."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(x.shape, generator=generator).to(dtype).requires_grad_() for x in inputs]
    torch.manual_seed(2)
    y = model(*inputs)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    gradients = {f"gradient of input {place}": x.grad for place, x in enumerate(inputs)} | {f"gradient of {key}": p.grad for key, p in model.named_parameters()}
    state = {key: buffer.double().clone() for key, buffer in model.named_buffers()}
    model.zero_grad()
    return {"y": y.detach(), **gradients, **state}
