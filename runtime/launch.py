"""Turns the steps of a target into one Python callable for one device.

Nothing is kept on the device between calls and nothing waits for the device: the output and the temporaries come from
torch's allocator on the current stream, and each launcher gets that stream.
"""

import ctypes
import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Callable

import torch

from .allocation import allocator
from .errors import LaunchError
from .library import PRODUCERS, call_of
from .manifest import Backward, Buffer, LaunchStep, LibraryStep, Manifest, Step, TargetManifest, gradient_of

# What launchers refuse before they start anything; the texts are the conditions in the emitted sources.
REFUSALS = {
    -1: "a tensor is not aligned to 16 bytes, or the number of threads is below 1",
    -2: "there is no memory for its scratch, or the device cannot hold one of its clusters",
}

DRIVER_ERROR = 1_000_000  # launchers return this plus a CUresult where the driver, not the runtime, failed

ALLOCATION = 512  # bytes; the alignment of torch's CUDA allocations

Slots = list  # one tensor per name that the steps use; the last one is the output
Program = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]


def make_program(
    manifest: Manifest, target: TargetManifest, functions: dict[str, Callable], device: torch.device, saved: tuple[str, ...] = ()
) -> Program:
    """``program(x, operands) -> y`` for ``device``; ``program(x, operands, saving=True) -> (y, *saved)`` for a backward.

    ``x`` and ``operands`` (the manifest's, in order) must have been checked, be contiguous and lie on the device. A caller that
    knows their addresses gives them as ``addresses`` [x, *operands], a list that is the program's from then on.
    ``functions`` are the resolved launchers, ``saved`` names what the target's backward needs of a forward. The program raises
    LaunchError with CUDA's message where a launch fails.
    """
    slot_of, allocations = _slots(manifest, target, target.steps, _known(manifest))
    run = _runner(manifest, (*target.prepare, *target.steps), functions, device, slot_of, allocations, ("y", *saved))
    kept = [slot_of[name] for name in saved]

    def program(x, parameters, addresses=None, saving=False):
        slots = run([x, *parameters], addresses)
        if saving:
            return (slots[-1], *(slots[place] for place in kept))
        return slots[-1]

    return program


def make_training_program(manifest: Manifest, target: TargetManifest, functions: dict[str, Callable], device: torch.device) -> Program:
    """``program(x, operands) -> (y, further results...)``: the steps of training, with the results that the manifest's reference names."""
    slot_of, allocations = _slots(manifest, target, target.training, _known(manifest))
    results = manifest.reference.results
    run = _runner(manifest, (*target.prepare, *target.training), functions, device, slot_of, allocations, ("y", *results))
    places = [slot_of[name] for name in results]

    def program(x, operands):
        slots = run([x, *operands])
        return (slots[-1], *(slots[place] for place in places))

    return program


def _known(manifest: Manifest) -> list[str]:
    """The tensors that a program is given, in order."""
    return [manifest.input.name, *(entry.name for entry in manifest.operands)]


@dataclass(frozen=True)
class Preparation:
    """A target's program in two parts, for one device: what depends on parameters alone, and the rest.

    ``reads`` are the positions of the parameters that the first part reads. ``allocate()`` gives new buffers,
    ``fill(parameters, buffers)`` prepares them on the current stream, ``run(x, operands, buffers) -> y`` does the rest; its
    tensors are those of a program. ``stream_of()`` are the last two arguments of a launcher.
    """

    device: torch.device
    reads: tuple[int, ...]
    allocate: Callable[[], list[torch.Tensor]]
    fill: Callable[[list, list], object]
    run: Callable[[torch.Tensor, list, list], torch.Tensor]
    stream_of: Callable[[], tuple[int, int | None]]
    layout: str = ""

    @property
    def home(self) -> tuple[torch.device, str]:
        """Where the buffers are kept: programs with the same one share them."""
        return self.device, self.layout


def make_preparation(manifest: Manifest, target: TargetManifest, functions: dict[str, Callable], device: torch.device) -> Preparation | None:
    """The target's program in two parts; None where nothing can be prepared."""
    if not target.prepare:
        return None
    parameters = [entry.name for entry in manifest.parameters]
    read = {name for step in target.prepare for name in step.args}
    shapes = {buffer.name: _allocation(buffer) for buffer in target.buffers}
    filling = _runner(manifest, target.prepare, functions, device, {name: index for index, name in enumerate((*parameters, *target.prepared))}, [])
    rest = _runner(manifest, target.steps, functions, device, *_slots(manifest, target, target.steps, [*_known(manifest), *target.prepared]), ("y",))
    return Preparation(
        device,
        tuple(index for index, name in enumerate(parameters) if name in read),
        lambda: [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in map(shapes.get, target.prepared)],
        lambda tensors, buffers: filling([*tensors, *buffers]),
        lambda x, operands, buffers: rest([x, *operands, *buffers])[-1],
        _stream_getter(device),
        target.layout,
    )


def make_backward(manifest: Manifest, backward: Backward, functions: dict[str, Callable], device: torch.device):
    """``run(grad_y, saved, parameters) -> gradients`` of what ``backward.gradients`` names, in that order.

    ``parameters`` are those behind the producer, in the order of ``backward.gradients``. The tensors must have been checked, be
    contiguous and lie on the device.
    """
    known = [gradient_of("y"), *(entry.name for entry in backward.saved), *(entry.name for entry in backward.gradients[1:])]
    made = [(gradient_of(entry.name), entry.shape, entry.dtype) for entry in backward.gradients]
    names = [*known, *(buffer.name for buffer in backward.target.buffers), *(name for name, _, _ in made)]
    allocations = [_allocation(buffer) for buffer in backward.target.buffers]
    allocations += [(shape, dtype_named(dtype)) for _, shape, dtype in made]
    slot_of = {name: index for index, name in enumerate(names)}
    run = _runner(manifest, backward.target.steps, functions, device, slot_of, allocations, tuple(name for name, _, _ in made))

    def program(grad_y, saved, parameters):
        return tuple(run([grad_y, *saved, *parameters])[-len(made) :])

    return program


def _allocation(buffer: Buffer) -> tuple[tuple[int, ...], torch.dtype]:
    if buffer.nbytes is not None:
        return (buffer.nbytes,), torch.uint8
    return buffer.shape, dtype_named(buffer.dtype)


def _slots(manifest: Manifest, target: TargetManifest, steps: tuple[Step, ...], known: list[str]) -> tuple[dict[str, int], list]:
    """The place of every tensor of a forward, the ``known`` ones first and y last, and what to allocate for each behind those."""
    names, allocations = list(known), []
    produced = {name for step in steps if isinstance(step, LibraryStep) for name in (step.out, *step.also)}
    for buffer in target.buffers:
        if buffer.name not in known:
            names.append(buffer.name)
            allocations.append(None if buffer.name in produced else _allocation(buffer))
    for name in sorted(produced.difference(names, ("y",))):
        names.append(name)
        allocations.append(None)
    names.append("y")
    allocations.append(None if "y" in produced else (manifest.output.shape, dtype_named(manifest.output.dtype)))
    return {name: index for index, name in enumerate(names)}, allocations


def _runner(
    manifest: Manifest, steps: tuple[Step, ...], functions, device: torch.device, slot_of: dict[str, int], allocations: list, wanted: tuple[str, ...] = ()
):  # fmt: skip
    """``run(first tensors, their addresses or None) -> slots``: allocates what follows them and performs ``steps``.

    Launchers take addresses, torch's libraries tensors; both are kept, slot by slot. Temporaries that launchers alone use, and that
    are not ``wanted`` afterwards, share one allocation and have no tensors of their own. Behind the addresses is the null pointer. What is wanted
    is never in the memory of what was given, as torch asks of an operator's results; of torch's library some are views.
    """
    as_tensors = {slot_of[name] for step in steps if isinstance(step, LibraryStep) for name in step.args if name} | {slot_of[name] for name in wanted}
    first = len(slot_of) - len(allocations)
    size, places = 0, []  # for each slot that follows: what makes its tensor, its offset in the shared memory; neither: a step gives it
    for slot, allocation in enumerate(allocations, first):
        shared = allocation is not None and slot not in as_tensors
        places.append((allocator(*allocation, device) if allocation and not shared else None, size if shared else None))
        size += _padded(*allocation) if shared else 0
    scratch = allocator((size,), torch.uint8, device) if size else None
    spent = _spent(steps, slot_of, first, wanted)
    perhaps_views = {name for step in steps if isinstance(step, LibraryStep) and step.call not in PRODUCERS for name in (step.out, *step.also)}
    borrowed = [slot_of[name] for name in wanted if name in perhaps_views]
    steps = [
        _launch(step, functions[step.function], slot_of, device)
        if isinstance(step, LaunchStep)
        else _library(step, slot_of, manifest, device)
        for step in steps
    ]
    stream_of = _stream_getter(device)

    def run(slots: Slots, addresses: list[int] | None = None) -> Slots:
        if addresses is None:
            addresses = [tensor.data_ptr() for tensor in slots]
        if scratch:
            memory = scratch()  # held until everything is launched; on a GPU what follows on the stream may have it then
            base = memory.data_ptr()
        for make, offset in places:
            if make:
                tensor = make()
                slots.append(tensor)
                addresses.append(tensor.data_ptr())
            else:
                slots.append(None)
                addresses.append(None if offset is None else base + offset)
        addresses.append(None)
        number, stream = stream_of()
        for step, places_spent in zip(steps, spent):
            step(slots, addresses, number, stream)
            for place in places_spent:
                slots[place] = None
        if borrowed:
            given = {tensor.untyped_storage().data_ptr() for tensor in slots[:first]}
            for place in borrowed:
                if slots[place].untyped_storage().data_ptr() in given:
                    slots[place] = slots[place].clone()
        return slots

    return run


def _spent(steps: tuple[Step, ...], slot_of: dict[str, int], first: int, wanted: tuple[str, ...]) -> list[list[int]]:
    """For each step the slots of library results that no later step reads: their memory is free from then on."""
    made = {slot_of[name] for step in steps if isinstance(step, LibraryStep) for name in (step.out, *step.also)}
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        own = (step.out, *step.also) if isinstance(step, LibraryStep) else ()
        last.update((slot_of[name], number) for name in (*step.args, *own) if name is not None)
    kept = {slot_of[name] for name in ("y", *wanted) if name in slot_of}
    return [[slot for slot, number in last.items() if number == at and slot in made - kept and slot >= first] for at in range(len(steps))]


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a temporary in shared memory: whole multiples of what torch's allocator aligns to."""
    return -(-math.prod(shape) * dtype.itemsize // ALLOCATION) * ALLOCATION


def dtype_named(name: str) -> torch.dtype:
    """``float32`` -> ``torch.float32``."""
    return getattr(torch, name)


def _launch(step: LaunchStep, function: Callable, slot_of: dict[str, int], device: torch.device):
    places = [-1 if name is None else slot_of[name] for name in step.args]
    pick = itemgetter(*places) if len(places) > 1 else lambda addresses: [addresses[place] for place in places]

    def launch(slots, addresses, number, stream):
        status = function(*pick(addresses), number, stream)
        if status:
            raise LaunchError(f"{step.function} failed on {device}: {describe_status(status)}.")

    return launch


def _stream_getter(device: torch.device) -> Callable[[], tuple[int, int | None]]:
    """The last two arguments of every launcher: device index and stream; for the CPU, threads and nothing."""
    if device.type == "cpu":
        return lambda: (torch.get_num_threads(), None)
    index = device.index
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # the handle without a Stream object around it
    if raw is None:
        return lambda: (index, torch.cuda.current_stream(device).cuda_stream)
    return lambda: (index, raw(index))


def _library(step: LibraryStep, slot_of: dict[str, int], manifest: Manifest, device: torch.device):
    """A step that torch's own library performs, in exactly the arithmetic the package promises."""
    indices = [None if name is None else slot_of[name] for name in step.args]
    results = [slot_of[name] for name in (step.out, *step.also)]
    call = call_of(step.call, step.options, manifest.precision)
    kind = device.type

    def library(slots, addresses, number, stream):
        operands = [None if i is None else slots[i] for i in indices]
        if torch.is_autocast_enabled(kind):  # it would change the type of the result under the next kernel's feet
            with torch.autocast(kind, enabled=False):
                made = call(*operands)
        else:
            made = call(*operands)
        for place, tensor in zip(results, made if isinstance(made, tuple) else (made,)):
            slots[place] = tensor = tensor.contiguous()
            addresses[place] = tensor.data_ptr()

    return library


def describe_status(status: int) -> str:
    """What a launcher's non-zero return value means."""
    if status < 0:
        meaning = REFUSALS.get(status, "the sources and the manifest do not belong together")
        return f"it refused its arguments (code {status}): {meaning}"
    if status >= DRIVER_ERROR:
        return f"CUDA driver error {status - DRIVER_ERROR} ({_driver_message(status - DRIVER_ERROR)})"
    return f"CUDA error {status} ({_runtime_message(status)})"


def _runtime_message(status: int) -> str:
    try:
        cudart = torch.cuda.cudart()
        return str(cudart.cudaGetErrorString(cudart.cudaError(status)))
    except Exception:  # noqa: BLE001 - torch without CUDA, or a code this torch does not know: the number must do
        return "see cudaError_t in the CUDA documentation"


def _driver_message(result: int) -> str:
    try:
        text = ctypes.c_char_p()
        ctypes.CDLL("libcuda.so.1").cuGetErrorString(result, ctypes.byref(text))
        return (text.value or b"unknown").decode()
    except OSError:
        return "see CUresult in the CUDA documentation"
