"""The backward as a library of its own, built late: at once from many threads, damaged, without compilers, ahead of time."""

import threading

import pytest
import torch

from runtime import ToolchainError
from runtime.build import plan_build
from runtime.cache import LIBRARY, CacheWarning

from .generated_packages import CHAINS, generate

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own modules


@pytest.fixture
def module(tmp_path):
    return generate(tmp_path / "packages", CHAINS["linear"])


def train(model, x) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).square().mean(), list(model.parameters())))


def test_threads_that_train_at_once_share_one_build(module, counting_gxx):
    model, (x,) = module.ModelNew(), module.get_inputs()
    counting_gxx.set_delay(0.5)
    barrier, results = threading.Barrier(8), []

    def work():
        barrier.wait()
        results.append(train(model, x))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and len(counting_gxx.compiled) == 2  # the forward's source and the backward's
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0]))


def test_a_damaged_backward_is_built_again(module, counting_gxx, private_cache):
    model, (x,) = module.ModelNew(), module.get_inputs()
    package = model._package
    build = plan_build(package, package.manifest.backward["cpu"].target)
    folder = private_cache / "entries" / build.key
    folder.mkdir(parents=True)
    (folder / LIBRARY).write_bytes(b"\x7fELF half a library")
    with pytest.warns(CacheWarning, match="is damaged.*built again"):
        train(model, x)
    assert len(counting_gxx.compiled) == 2


def test_without_compilers_the_first_forward_that_needs_it_says_so(module, monkeypatch, tmp_path):
    model, (x,) = module.ModelNew(), module.get_inputs()
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path))
        with pytest.raises(ToolchainError, match=r"g\+\+ was not found"):
            model(x)
        with torch.no_grad():
            assert model(x).shape == torch.Size(model._package.manifest.output.shape)
    assert all(bool(gradient.isfinite().all()) for gradient in train(model, x))


def test_built_ahead_it_needs_no_compiler_later(module, monkeypatch, tmp_path, counting_gxx):
    """For a server, and before a CUDA graph is captured."""
    model, (x,) = module.ModelNew(), module.get_inputs()
    model.build(backward=True)
    assert len(counting_gxx.compiled) == 2
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a forward started a program"))
    assert len(train(model, x)) == 5


def test_building_ahead_where_there_is_no_backward_is_nothing(tiny, x, counting_gxx):
    model = tiny.model()
    model.build(backward=True)
    assert len(counting_gxx.compiled) == 1
