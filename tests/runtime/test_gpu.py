"""What only a GPU can show: streams, devices, graphs, threads, errors."""

import copy
import threading

import pytest
import torch

from runtime import CallError, GradientError, LaunchError, UnsupportedDeviceError, allocation, launch

pytestmark = pytest.mark.gpu


@pytest.fixture
def model(tiny, monkeypatch):
    monkeypatch.setenv("TARGETS", "")
    return tiny.model()


def expected(model, x):
    return (x * model.scale).detach()


def test_constructed_on_the_cpu_and_moved(model, x):
    model.cuda()
    assert torch.equal(model(x.cuda()), expected(model, x.cuda()))
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(x.cuda()), expected(model, x.cuda()))


def test_views(model, x):
    model, x = model.cuda(), x.cuda()
    for view in (x.t().contiguous().t(), x[:1].expand(4, 8), torch.cat([x.new_zeros(1), x.flatten()])[1:].view(4, 8)):
        assert torch.equal(model(view), expected(model, view))


def test_the_cpu_was_not_built_for(model, x):
    with pytest.raises(UnsupportedDeviceError, match="x is on cpu.*built here: sm_80.*TARGETS=cpu"):
        model(x)


def test_parameters_left_behind(model, x):
    with pytest.raises(CallError, match=r"scale: expected .* on cuda:0, where x is.*model.to\('cuda:0'\)"):
        model(x.cuda())


def test_current_stream_is_used(model, x):
    model, x = model.cuda(), x.cuda()
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = x * 1
        y = model(late)
    stream.synchronize()
    assert torch.equal(y, expected(model, x))


def test_graph_capture(model, x):
    model, x = model.cuda(), x.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            y = model(x)
        x.add_(1)
        graph.replay()
    assert torch.equal(y, expected(model, x))


def test_threads_on_one_module(model, x):
    model, x = model.cuda(), x.cuda()
    results = [None] * 8

    def call(index):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = model(x)
            torch.cuda.current_stream().synchronize()
            results[index] = torch.equal(y, expected(model, x))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_new_memory_is_what_torch_empty_gives():
    """The short way past the dispatcher, on this build of torch."""
    make = allocation.allocator((3, 5), torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    made, want = make(), torch.empty(3, 5, dtype=torch.bfloat16, device="cuda")
    assert (made.shape, made.stride(), made.dtype, made.device) == (want.shape, want.stride(), want.dtype, want.device)
    assert made.data_ptr() % launch.ALLOCATION == 0 and not made.requires_grad
    with torch.inference_mode():
        assert make().is_inference()


@pytest.mark.two_gpus
def test_another_device_than_the_current_one(model, x):
    model, x = model.to("cuda:1"), x.to("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(model(x), expected(model, x))
    with torch.no_grad():
        assert torch.equal(model(x), expected(model, x))
    assert torch.cuda.current_device() == 0


def test_backward_is_refused(model, x):
    with pytest.raises(GradientError):
        model.cuda()(x.cuda()).sum().backward()


def test_a_failing_launch_says_what_cuda_said(tiny, x, monkeypatch):
    tiny.change_source("scale_sm80.cu", "<<<4, 8, 0,", "<<<4, 2048, 0,")
    monkeypatch.setenv("TARGETS", "sm_80")
    model = tiny.model().cuda()
    with pytest.raises(LaunchError, match="scale_launch failed on cuda:0: CUDA error (1|9) .*invalid (configuration )?argument"):
        model(x.cuda())
