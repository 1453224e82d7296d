"""Packages for several batches on a GPU: each size, padding, CUDA graphs, and on an H100 or H200 sizes of two targets beside each other."""

import pytest
import torch

from .generated_packages import CHAINS, generate

pytestmark = pytest.mark.gpu

BATCHES = (1, 3, 8)
WIDE = [{"linear": {"name": "gemm", "in_features": 1024, "out_features": 4096}}, {"group_norm": {"name": "norm", "num_groups": 16}}, "tanh"]  # smooth: no value beside a kink
MIXED = (1, 1024, 2048)  # of WIDE: sm_90a has no plan for the first
hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200")


def pair(package):
    """The generated model and the reference in float64, on the GPU with the same weights."""
    models = []
    for made in (package.ModelNew, package.Model):
        torch.manual_seed(0)
        models.append(made().cuda())
    return models[0], models[1].double()


def x_of(package, batch):
    torch.manual_seed(batch)
    return package.get_inputs(batch)[0].cuda()


def gradients(model, x, grad_y):
    x = x.clone().requires_grad_()
    model.zero_grad()
    model(x).backward(grad_y)
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_same(got, want):
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


@pytest.fixture(params=CHAINS)
def padding(request, tmp_path, monkeypatch):
    monkeypatch.setenv("TARGETS", "sm_80")
    return generate(tmp_path, CHAINS[request.param], batch=list(BATCHES), pad_batch=True, targets=("sm_80",))


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8])
def test_values_and_gradients(padding, batch):
    model, reference = pair(padding)
    x = x_of(padding, batch)
    with torch.no_grad():
        y, want = model(x), reference(x.double())
    assert_same([y], [want])
    grad_y = torch.randn_like(y)
    assert_same(gradients(model, x, grad_y), gradients(reference, x.double(), grad_y.double()))


def test_nan_stays_in_its_row(padding):
    model, _ = pair(padding)
    x = x_of(padding, 5)
    with torch.no_grad():
        clean = model(x)
        x[2] = float("nan")
        y = model(x)
    assert torch.isnan(y[2]).any() and torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_a_graph_of_a_padded_call_replays(padding):
    model, _ = pair(padding)
    x = x_of(padding, 5)
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.copy_(x + 1)
        graph.replay()
        assert torch.equal(y, model(x))


@hopper
def test_sizes_of_two_targets_side_by_side(tmp_path, monkeypatch):
    monkeypatch.delenv("TARGETS")
    package = generate(tmp_path, WIDE, batch=list(MIXED), pad_batch=True, targets=("sm_80", "sm_90a"))
    model, reference = pair(package)
    device = next(model.parameters()).device
    assert [model._loaded.targets[batch, device] for batch in MIXED] == ["sm_80", "sm_90a", "sm_90a"]
    for batch in (*MIXED, 700):
        x = x_of(package, batch)
        with torch.no_grad():
            y, want = model(x), reference(x.double())
        assert_same([y], [want])
        grad_y = torch.randn_like(y)
        assert_same(gradients(model, x, grad_y), gradients(reference, x.double(), grad_y.double()))


@hopper
def test_sizes_share_prepared_weights(tmp_path, monkeypatch):
    monkeypatch.delenv("TARGETS")
    package = generate(tmp_path, WIDE, batch=list(MIXED), prepack=True, targets=("sm_80", "sm_90a"))
    model, reference = pair(package)
    with torch.no_grad():
        for _ in range(2):
            for batch in MIXED:
                x = x_of(package, batch)
                assert_same([model(x)], [reference(x.double())])
        assert model._prepared.count == 1
        for of in (model, reference):
            of.gemm.weight.mul_(-3)
        for batch in MIXED:
            x = x_of(package, batch)
            assert_same([model(x)], [reference(x.double())])
        assert model._prepared.count == 2
