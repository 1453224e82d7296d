"""A model carries its own package, whatever is imported under the same name, or generated into the same folder, later."""

import copy
import importlib.util
import pickle
import sys

import pytest
import torch

from runtime import PackageError

from .generated_packages import generate, import_from

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 sums over 24 products and groups of 8 values


def chain(low: float, high: float) -> list:
    return [
        {"linear": {"name": "gemm", "in_features": 24, "out_features": 32}}, {"group_norm": {"name": "group_norm", "num_groups": 4}},
        {"hardtanh": {"min_val": low, "max_val": high}},
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


@pytest.fixture
def x():
    return torch.randn(8, 24)


def steps(model, x) -> list[torch.Tensor]:
    """y and a gradient, eager, copied, compiled and exported."""
    copied = copy.deepcopy(model)
    found = []
    with torch.no_grad():
        found += [model(x), copied(x), torch.compile(copied, fullgraph=True, backend="aot_eager")(x), torch.export.export(copied, (x,)).module()(x)]
    for m in (model, copied, torch.compile(copied, backend="aot_eager")):
        x = x.detach().requires_grad_()
        y = m(x)
        found += [y.detach(), *torch.autograd.grad(y.sum(), x)]
    torch._dynamo.reset()
    return found


def wanted(module, model, x) -> list[torch.Tensor]:
    reference = module.Model(*module.get_init_inputs())
    reference.load_state_dict(model.state_dict())
    x = x.detach().requires_grad_()
    y = reference(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    y = y.detach()
    return [y, y, y, y, y, grad, y, grad, y, grad]


def check(module, model, x):
    for found, want in zip(steps(model, x), wanted(module, model, x), strict=True):
        torch.testing.assert_close(found, want, **TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"pad_batch": True}])
def test_two_packages_of_one_name(tmp_path, x, options):
    batch = [4, 8] if options else 8
    a = generate(tmp_path / "a", chain(-2.0, 2.0), batch=batch, name="twin", **options)
    model = a.ModelNew(*a.get_init_inputs())
    b = generate(tmp_path / "b", chain(-0.25, 0.5), batch=batch, name="twin", **options)
    other = b.ModelNew(*b.get_init_inputs())
    check(a, model, x)
    check(b, other, x)
    check(a, a.ModelNew(*a.get_init_inputs()), x)


@pytest.mark.parametrize("reload", [False, True])
def test_generated_again_into_the_same_folder(tmp_path, x, reload):
    """As in a notebook: also what is built only after that, the backward, is of the sources that the model was imported with."""
    first = generate(tmp_path / "p", chain(-2.0, 2.0), batch=8, name=f"again_{reload}")
    origin = first.Model
    unbuilt = first.ModelNew
    model = unbuilt(*first.get_init_inputs())
    init = first.get_init_inputs()
    second = generate(tmp_path / "p", chain(-0.25, 0.5), batch=8, name=f"again_{reload}")
    if reload:
        module = sys.modules[first.ModelNew.__module__]
        spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)  # what importlib.reload does to the old module's own globals

    class Old:
        Model, get_init_inputs = origin, staticmethod(lambda: init)

    check(Old, model, x)
    check(Old, unbuilt(*init), x)
    check(second, second.ModelNew(*second.get_init_inputs()), x)


def test_a_pickle_of_another_spec_is_refused(tmp_path, x):
    a = generate(tmp_path / "a", chain(-2.0, 2.0), batch=8, name="pickled")
    data = pickle.dumps(a.ModelNew(*a.get_init_inputs()))
    assert pickle.loads(data)(x).shape == (8, 32)
    generate(tmp_path / "b", chain(-0.25, 0.5), batch=8, name="pickled")
    with pytest.raises(PackageError, match="of another pickled than .*another spec"):
        pickle.loads(data)
    again = import_from(tmp_path / "a" / "pickled", "pickled")
    assert type(pickle.loads(data)) is again.ModelNew
