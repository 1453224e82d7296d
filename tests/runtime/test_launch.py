"""Steps become calls: library steps, temporaries, status codes."""

import ctypes

import pytest
import torch
import torch.nn.functional as functional

from runtime import LaunchError
from runtime.launch import DRIVER_ERROR, describe_status, make_program
from runtime.package import Buffer, LaunchStep, LibraryStep, Manifest, TargetManifest, TensorSpec

CPU = torch.device("cpu")


def manifest(x, parameters, y) -> Manifest:
    specs = tuple(TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in parameters.items())
    shapes = TensorSpec("x", tuple(x.shape), "float32"), TensorSpec("y", y, "float32")
    return Manifest("tiny", "tiny.yaml", "make generate", x.shape[0], "fp32", (), *shapes, specs, {}, {})


def target(steps, buffers=()) -> TargetManifest:
    return TargetManifest("cpu", (), (), "", None, None, tuple(buffers), tuple(steps))


def test_linear():
    x, parameters = torch.randn(4, 8), {"w": torch.randn(3, 8), "b": torch.randn(3)}
    steps = [LibraryStep("linear", ("x", "w", "b"), "y")]
    program = make_program(manifest(x, parameters, (4, 3)), target(steps), {}, CPU)
    assert torch.equal(program(x, list(parameters.values())), functional.linear(x, *parameters.values()))


def test_conv2d_without_bias():
    x, w = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3)
    options = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2, "allow_tf32": False}
    want = functional.conv2d(x, w, None, (2, 1), (1, 0), (1, 2), 2)
    steps = [LibraryStep("conv2d", ("x", "w", None), "y", options)]
    program = make_program(manifest(x, {"w": w}, tuple(want.shape)), target(steps), {}, CPU)
    assert torch.equal(program(x, [w]), want)


def test_autocast_does_not_reach_the_library(monkeypatch):
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    program = make_program(manifest(x, {"w": w}, (4, 3)), target([LibraryStep("linear", ("x", "w", None), "y")]), {}, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = program(x, [w])
    assert y.dtype is torch.float32 and torch.equal(y, functional.linear(x, w))


def test_launchers_get_pointers_threads_and_no_stream():
    calls = []

    def first(*args):
        calls.append(args)
        return 0

    def second(x, t, raw, y, threads, stream):
        source, destination = (ctypes.c_float * 32).from_address(t), (ctypes.c_float * 32).from_address(y)
        destination[:] = source[:]
        assert raw % 16 == 0 and (threads, stream) == (torch.get_num_threads(), None)
        return 0

    x = torch.randn(4, 8)
    steps = [
        LaunchStep("first", ("x", None, "raw")),
        LibraryStep("linear", ("x", "w", None), "t"),
        LaunchStep("second", ("x", "t", "raw", "y")),
    ]
    buffers = [Buffer("t", shape=(4, 8), dtype="float32"), Buffer("raw", nbytes=64)]
    program = make_program(manifest(x, {"w": torch.eye(8)}, (4, 8)), target(steps, buffers), {"first": first, "second": second}, CPU)
    assert torch.equal(program(x, [torch.eye(8)]), x)
    assert calls[0][:2] == (x.data_ptr(), None)


@pytest.mark.parametrize("status, text", [(-3, "refused its arguments"), (98, "CUDA error 98"), (DRIVER_ERROR + 1, "CUDA driver error 1 ")])
def test_a_status_is_explained(status, text):
    x = torch.randn(4, 8)
    program = make_program(manifest(x, {}, (4, 8)), target([LaunchStep("f", ("x", "y"))]), {"f": lambda *_: status}, CPU)
    with pytest.raises(LaunchError, match=f"f failed on cpu: .*{text}"):
        program(x, [])
    assert text in describe_status(status)
