"""Steps become calls: library steps, temporaries, status codes."""

import ctypes

import pytest
import torch
import torch.nn.functional as functional

from runtime import LaunchError, allocation, launch
from runtime.launch import DRIVER_ERROR, describe_status, make_backward, make_program
from runtime.manifest import Backward, Buffer, LaunchStep, LibraryStep, Manifest, TargetManifest, TensorSpec

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


def test_a_saving_forward_gives_all_that_it_is_asked_to_save_and_a_backward_takes_it_in_order():
    x, parameters = torch.randn(4, 8), {"w": torch.randn(3, 8), "v": torch.randn(5, 3)}
    steps = [LibraryStep("linear", ("x", "w", None), "t0"), LibraryStep("linear", ("t0", "v", None), "t1"), LibraryStep("linear", ("t1", "v2", None), "y")]
    described = manifest(x, parameters | {"v2": torch.randn(2, 5)}, (4, 2))
    given = [*parameters.values(), torch.randn(2, 5)]
    forward = target(steps, [Buffer("t0", (4, 3), "float32"), Buffer("t1", (4, 5), "float32")])
    t0 = functional.linear(x, given[0])
    t1 = functional.linear(t0, given[1])
    assert torch.equal(make_program(described, forward, {}, CPU)(x, given), functional.linear(t1, given[2]))
    y, *saved = make_program(described, forward, {}, CPU, ("t1", "t0"))(x, given, saving=True)
    assert torch.equal(y, functional.linear(t1, given[2])) and torch.equal(saved[0], t1) and torch.equal(saved[1], t0)
    assert len(make_program(described, forward, {}, CPU)(x, given, saving=True)) == 1, "nothing is saved where nothing is asked for"

    def add(dy, first, second, scale, made, threads, stream):
        taken = [(ctypes.c_float * 4).from_address(address) for address in (dy, first, second, scale)]
        (ctypes.c_float * 4).from_address(made)[:] = [a + 10 * b + 100 * c + 1000 * d for a, b, c, d in zip(*taken)]
        return 0

    launches = target([LaunchStep("add", ("grad:y", "t1", "t0", "scale", "grad:t1"))])
    names = [TensorSpec(name, (4,), "float32") for name in ("t1", "t0", "scale")]
    tensors = [torch.full((4,), value) for value in (1.0, 2.0, 3.0, 4.0)]
    backward = Backward(launches, tuple(names[:2]), (names[0], names[2]), steps[0], False)
    made = make_backward(described, backward, {"add": add}, CPU)(tensors[0], tensors[1:3], tensors[3:])
    assert torch.equal(made[0], torch.full((4,), 4321.0))


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


def test_temporaries_of_launchers_share_one_allocation(monkeypatch):
    """No two overlap, each is aligned as an allocation of its own would be, and what is returned or read by a library is not among them."""
    made, calls = [], []
    real = launch.allocator

    def allocator(shape, dtype, device):
        made.append((shape, dtype))
        return real(shape, dtype, device)

    monkeypatch.setattr(launch, "allocator", allocator)
    x = torch.randn(4, 8)
    buffers = [Buffer("a", nbytes=100), Buffer("b", shape=(4, 9), dtype="float16"), Buffer("c", nbytes=513), Buffer("t", shape=(4, 8), dtype="float32")]
    steps = [LaunchStep("f", ("x", "a", "b", "c", "t")), LibraryStep("linear", ("t", "w", None), "u"), LaunchStep("f", ("u", None, "b", "c", "y"))]

    def write(x, *rest):
        calls.append(rest)
        (ctypes.c_float * 32).from_address(rest[3])[:] = (ctypes.c_float * 32).from_address(x)[:]
        return 0

    program = make_program(manifest(x, {"w": torch.eye(8)}, (4, 8)), target(steps, buffers), {"f": write}, CPU)
    assert made == [((4, 8), torch.float32), ((4, 8), torch.float32), ((512 + 512 + 1024,), torch.uint8)]
    assert torch.equal(program(x, [torch.eye(8)]), x)
    (a, b, c, *_), again = calls
    assert (b - a, c - b) == (512, 512) and again[:3] == (None, b, c)


def test_addresses_that_are_known_are_taken():
    x, w = torch.randn(4, 8), torch.randn(8)
    seen = []
    program = make_program(manifest(x, {"w": w}, (4, 8)), target([LaunchStep("f", ("w", "x", None, "y"))]), {"f": lambda *args: seen.append(args) or 0}, CPU)
    y = program(x, [w], [1600, 3200])
    assert seen == [(3200, 1600, None, y.data_ptr(), torch.get_num_threads(), None)]


@pytest.mark.parametrize("shape, dtype", [((3, 5, 7), torch.float32), ((4,), torch.bfloat16), ((2, 0, 3), torch.float16), ((), torch.float32), ((1000,), torch.uint8)])
def test_the_short_way_to_new_memory_gives_what_torch_empty_does(shape, dtype, monkeypatch):
    assert allocation._short_ways(), "this torch lacks it; see runtime/allocation.py"
    for ways in (allocation._short_ways(), {}):
        monkeypatch.setattr(allocation, "_short_ways", lambda: ways)  # noqa: B023
        make = allocation.allocator(shape, dtype, CPU)
        made, want = make(), torch.empty(shape, dtype=dtype)
        assert (made.shape, made.stride(), made.dtype, made.device) == (want.shape, want.stride(), want.dtype, want.device)
        assert type(made) is torch.Tensor and not made.requires_grad and made.data_ptr() % 16 == 0 and (make() is not made)
        with torch.inference_mode():
            assert make().is_inference()


def test_the_short_way_serves_the_current_gpu_alone(monkeypatch):
    short, general, current = [], [], [0]
    monkeypatch.setattr(allocation, "_short_ways", lambda: {"cuda": lambda *args: short.append(args)})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: general.append((args, options)))
    device = torch.device("cuda", 1)
    make = allocation.allocator((2, 3), torch.float32, device)
    make()
    assert (short, general) == ([], [(((2, 3),), {"dtype": torch.float32, "device": device})])
    current[0] = 1
    make()
    assert short == [((2, 3), (3, 1), torch.float32)] and len(general) == 1


@pytest.mark.parametrize("status, text", [(-3, "refused its arguments"), (98, "CUDA error 98"), (DRIVER_ERROR + 1, "CUDA driver error 1 ")])
def test_a_status_is_explained(status, text):
    x = torch.randn(4, 8)
    program = make_program(manifest(x, {}, (4, 8)), target([LaunchStep("f", ("x", "y"))]), {"f": lambda *_: status}, CPU)
    with pytest.raises(LaunchError, match=f"f failed on cpu: .*{text}"):
        program(x, [])
    assert text in describe_status(status)
