"""Prepared weights on a GPU: a small package whose forward reads only what was prepared, on any; the Hopper GEMM's, on an H100 or H200.

The results of a model with prepared weights are compared, bit by bit, with those of calls that prepare for themselves.
"""

import copy
import io
import threading

import pytest
import torch
from torch import nn

from runtime import PreparationError

from .generated_packages import generate
from .prepared_package import write_prepared_package

pytestmark = pytest.mark.gpu

CHAIN = [
    {"linear": {"name": "gemm", "in_features": 336, "out_features": 320}}, {"add": {"name": "bias", "shape": [320]}}, "mish",
    {"group_norm": {"name": "norm", "num_groups": 10}}, "silu",
]  # fmt: skip
WIDE = [{"linear": {"name": "gemm", "in_features": 1024, "out_features": 4096}}, {"group_norm": {"name": "norm", "num_groups": 16}}, "hardtanh"]
SLEEP = 200_000_000  # cycles: about 0.1 s, so that what does not wait comes too early


class Layer:
    """A model on the GPU, an input for it, and its weight."""

    def __init__(self, model, x, key):
        self.model, self.x, self.key = model.cuda(), x.cuda(), key

    @property
    def owner(self):
        return self.model.get_submodule(self.key.rpartition(".")[0])

    @property
    def name(self):
        return self.key.rpartition(".")[2]

    @property
    def weight(self):
        return getattr(self.owner, self.name)

    def __call__(self):
        with torch.no_grad():
            return self.model(self.x)

    def unprepared(self):
        """By a call that prepares for itself: its weight is a plain tensor."""
        count = self.model._prepared.count
        given = {key: value.detach() for key, value in self.model.named_parameters()}
        with torch.no_grad():
            y = torch.func.functional_call(self.model, given, (self.x,))
        assert self.model._prepared.count == count
        return y

    def is_right(self):
        return torch.equal(self(), self.unprepared())


@pytest.fixture(params=["small", "fp32", "tf32", "fp32 wide"])
def layer(request, tmp_path, tmp_path_factory, monkeypatch):
    kind, *wide = request.param.split()
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path_factory.getbasetemp() / "prepared"))  # each package is compiled once
    if kind == "small":
        monkeypatch.setenv("TARGETS", "sm_80")
        return Layer(write_prepared_package(tmp_path / "prepared").model(), torch.arange(32.0).reshape(4, 8), "scale")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an H100 or H200")
    monkeypatch.setenv("TARGETS", "sm_90a")
    torch.manual_seed(0)
    batch, chain = (1024, WIDE) if wide else (5000, CHAIN)
    module = generate(tmp_path, chain, kind, batch, name=request.param.replace(" ", "_") + "_layer", targets=("sm_90a",), prepack=True)
    return Layer(module.ModelNew(), torch.randn(batch, chain[0]["linear"]["in_features"]), "gemm.weight")


def test_prepared_once_and_equal_bits(layer):
    first = layer()
    assert torch.equal(layer(), first) and layer.is_right()
    assert layer.model._prepared.count == 1 and layer.model.prepared_bytes > 0
    layer.model.prepare()
    assert torch.equal(layer(), first) and layer.model._prepared.count == 2
    if layer.key == "gemm.weight":
        assert layer.model.prepared_bytes == layer.weight.numel() * (4 if layer.model._package.manifest.precision == "fp32" else 2) + 4 * len(layer.weight)


def in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(1.5)


def swapped(layer):
    setattr(layer.owner, layer.name, nn.Parameter(layer.weight.detach() * 1.5))


def other_data(layer):
    layer.weight.data = layer.weight.data * 1.5


def loaded(layer):
    layer.model.load_state_dict({key: value * 1.5 for key, value in layer.model.state_dict().items()})


def assigned(layer):
    layer.model.load_state_dict({key: value * 1.5 for key, value in layer.model.state_dict().items()}, assign=True)


def stepped(**options):
    def step(layer):
        optimizer = torch.optim.AdamW(layer.model.parameters(), lr=0.01, **options)
        for parameter in layer.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return step


def there_and_back(layer):
    layer.model.cpu()
    layer.weight.data.mul_(1.5)
    layer.model.cuda()


def to_half_and_back(layer):
    layer.model.half().float()


WRITES = {
    "in place": in_place, "swapped": swapped, "other data": other_data, "loaded": loaded, "assigned": assigned, "step": stepped(foreach=False),
    "foreach step": stepped(foreach=True), "fused step": stepped(fused=True), "there and back": there_and_back, "half and back": to_half_and_back,
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_noticed(layer, write):
    before = layer()
    write(layer)
    assert layer.is_right() and layer.model._prepared.count == 2
    if write is not to_half_and_back:
        assert not torch.equal(layer(), before)


def test_what_pytorch_does_not_count(layer):
    layer()
    layer.weight.data.mul_(1.5)
    layer.model.prepare()
    assert layer.is_right()


def test_grad_mode_and_inference_parameters_prepare_for_themselves(layer):
    layer.weight.data.mul_(1.5)
    y = layer.model(layer.x)
    assert layer.model._prepared.count == 0 and torch.equal(y, layer())
    with torch.inference_mode():
        layer.model.load_state_dict({key: value.clone() for key, value in layer.model.state_dict().items()}, assign=True)
        assert layer.weight.is_inference() and torch.equal(layer.model(layer.x), y)
    assert layer.model._prepared.count == 1


def test_compiled(layer):
    layer()
    with torch.no_grad():
        y = torch.compile(layer.model, fullgraph=True, backend="aot_eager")(layer.x)
    assert torch.equal(y, layer()) and layer.model._prepared.count == 1


def test_copies(layer):
    y = layer()
    copied = copy.deepcopy(layer.model)
    file = io.BytesIO()
    torch.save(layer.model.state_dict(), file)
    assert copied.prepared_bytes == 0 and file.tell() < sum(p.nbytes for p in layer.model.parameters()) + 16384
    with torch.no_grad():
        assert torch.equal(copied(layer.x), y) and copied.prepared_bytes == layer.model.prepared_bytes


def test_another_stream_waits(layer):
    """The preparation is held up, and a forward on another stream comes right after it."""
    layer()
    in_place(layer)
    expected = layer.unprepared()
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    torch.cuda._sleep(SLEEP)
    layer()
    with torch.cuda.stream(other):
        y = layer()
    other.synchronize()
    assert torch.equal(y, expected)


def test_a_renewal_waits_for_readers_on_another_stream(layer):
    before, old = layer(), layer.weight
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        layer()
        torch.cuda._sleep(SLEEP)
        late = layer()
    swapped(layer)
    after = layer()
    assert layer.weight is not old, "which stays as it is: only what was prepared from it is written over"
    torch.cuda.synchronize()
    assert torch.equal(late, before), "the renewal came too early"
    assert torch.equal(after, layer.unprepared())


def test_a_capture_needs_prepared_weights(layer):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(PreparationError, match=r"call model.prepare\(\) before the capture"), torch.cuda.graph(graph):
        layer()
    assert layer.is_right(), "the device is as it was"


def test_a_captured_graph(layer):
    """It reads the same memory after every renewal."""
    layer.model.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    graph.replay()
    assert torch.equal(y, layer.unprepared())
    for renew in (layer.model.prepare, layer):
        in_place(layer)
        renew()
        y.zero_()
        graph.replay()
        assert torch.equal(y, layer.unprepared())


def test_a_capture_after_ordinary_calls(layer):
    """As torch.cuda.graph waits for the device before it begins."""
    with torch.cuda.stream(torch.cuda.Stream()):
        layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    graph.replay()
    assert torch.equal(y, layer.unprepared()) and layer.model._prepared.count == 1


def test_threads_on_streams_of_their_own(layer):
    expected = layer.unprepared()
    in_place(layer)
    changed = layer.unprepared()
    torch.cuda.synchronize()
    found, start = [None] * 8, threading.Barrier(8)

    def call(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait()
            results = [layer() for _ in range(10)]
            torch.cuda.current_stream().synchronize()
            found[index] = all(torch.equal(y, changed) for y in results)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8 and layer.model._prepared.count == 1 and not torch.equal(changed, expected)


def test_moved_away_the_memory_is_given_back(layer):
    layer()
    layer.model.cpu()
    assert layer.model.prepared_bytes == 0
    layer.model.cuda()
    assert layer.is_right()


@pytest.mark.two_gpus
@pytest.mark.parametrize("layer", ["small", "fp32"], indirect=True)
def test_two_devices(layer):
    y = layer()
    layer.model.to("cuda:1")
    with torch.no_grad():
        assert torch.equal(layer.model(layer.x.to("cuda:1")).to("cuda:0"), y)
    layer.model.to("cuda:0")
    assert torch.equal(layer(), y) and layer.model._prepared.count == 3
