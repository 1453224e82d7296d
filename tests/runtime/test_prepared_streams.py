"""Which stream waits for what around prepared weights, with stand-ins for CUDA's streams and events. On a real GPU: test_prepared_gpu.py."""

import contextlib

import pytest
import torch
from torch import nn

from runtime import PreparationError
from runtime.launch import Preparation
from runtime.prepared import PreparedWeights

DEVICE = torch.device("cuda", 0)


class Event:
    def __init__(self, log):
        self.log = log

    def record(self, stream):
        self.log.append(f"recorded on {stream.name}")

    def synchronize(self):
        self.log.append("host waits")


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for the event")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Buffer:
    nbytes = 4

    def __init__(self, log):
        self.log = log

    def record_stream(self, stream):
        self.log.append(f"used on {stream.name}")


class Bench:
    """A model's prepared weights over stand-ins; ``log`` is what CUDA was asked for, in order."""

    def __init__(self, patch):
        self.log: list[str] = []
        self.streams = {name: Stream(name, self.log) for name in "ABC"}
        self.on, self.capturing = "A", False
        patch.setattr(torch.cuda, "Event", lambda: Event(self.log))
        patch.setattr(torch.cuda, "current_stream", lambda device: self.streams[self.on])
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        fill = lambda tensors, buffers: self.log.append(f"filled on {self.on}")
        self.preparation = Preparation(DEVICE, (0,), lambda: [Buffer(self.log)], fill, None, lambda: (0, self.on))
        self.weights, self.parameter = PreparedWeights(), nn.Parameter(torch.ones(8))

    def call(self, stream):
        """What one forward on ``stream`` asks for."""
        self.on = stream
        begin = len(self.log)
        assert self.weights.use(nn.Module(), self.preparation, [self.parameter], [self.parameter]) is not None
        return self.log[begin:]

    def change(self):
        self.parameter.detach().add_(1)


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


def test_other_streams_wait_once(bench):
    assert bench.call("A") == ["filled on A", "recorded on A"]
    assert bench.call("A") == []
    assert bench.call("B") == ["B waits for the event", "used on B"]
    assert bench.call("B") == [] and bench.call("A") == []


def test_a_renewal_waits_for_those_who_read(bench):
    for stream in "ABC":
        bench.call(stream)
    bench.change()
    assert bench.call("B") == ["B waits for A", "B waits for C", "filled on B", "recorded on B"]
    assert bench.call("A") == ["A waits for the event"], "the memory came from A's pool"
    assert bench.call("C") == ["C waits for the event"], "and is known to be used on C"
    assert bench.call("B") == []


def test_prepare_waits_for_the_end(bench):
    key = [0]
    bench.weights.renew(bench.preparation, [bench.parameter], [bench.parameter], key, asked=True)
    assert bench.log == ["filled on A", "recorded on A", "host waits"]


def test_a_capture_uses_what_is_current_and_waits_for_nothing(bench):
    bench.call("A")
    bench.capturing = True
    assert bench.call("B") == []
    bench.capturing = False
    assert bench.call("B") == ["B waits for the event", "used on B"], "the capture has not counted as waiting"


def test_a_capture_prepares_nothing(bench):
    bench.capturing = True
    with pytest.raises(PreparationError, match="CUDA graph is being captured"):
        bench.call("A")
    bench.capturing = False
    bench.call("A")
    bench.change()
    bench.capturing = True
    with pytest.raises(PreparationError):
        bench.call("A")
    assert bench.log == ["filled on A", "recorded on A"]


def test_moved_away_the_memory_is_given_back(bench):
    bench.call("A")
    bench.weights.expire({DEVICE})
    assert bench.weights.nbytes == 4 and bench.call("A") == ["filled on A", "recorded on A"]
    bench.weights.expire({torch.device("cpu")})
    assert bench.weights.nbytes == 0
