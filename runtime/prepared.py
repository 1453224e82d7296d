"""Prepared weights: what a target computes from parameters alone, kept by a model on each device and renewed when they change.

Buffers are used only while the parameters are told to be as they were: the same Parameter objects in the same memory, with no write
counted by PyTorch and no optimizer's step since. Where that cannot be told, a call prepares for itself alone. A renewal writes to the
same memory, as a captured CUDA graph goes on reading it.
"""

import sys
import threading
import weakref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from .errors import PreparationError
from .launch import Preparation

Key = list  # for each parameter that is read: identity, version, address, identity of the storage


class _Held:
    """The buffers on one device, and the state in which they are. ``key`` is None while they are not to be used."""

    def __init__(self, buffers: list[torch.Tensor], home: int | None):
        self.buffers = buffers
        self.key: Key | None = None
        self.parameters: list[nn.Parameter] = []  # an identity means something only as long as the object lives
        self.storages: list[StorageWeakRef] = []  # the same for a storage, without holding its memory
        self.ready: dict[int | None, torch.cuda.Stream | None] = {}  # streams, by handle, whose work comes after the preparation
        self.known = {home}  # streams that the allocator knows to use the buffers
        self.event: torch.cuda.Event | None = None

    def expire(self) -> None:
        self.key, self.parameters, self.storages = None, [], []


class PreparedWeights:
    """The buffers of one model, by device and layout. A copy of the model, or a pickled one, starts without any."""

    def __init__(self):
        self._held: dict[tuple[torch.device, str], _Held] = {}
        self._lock = threading.RLock()
        self.count = 0  # of preparations so far
        _everyone.add(self)

    def __deepcopy__(self, memo):
        return PreparedWeights()

    def __reduce__(self):
        return PreparedWeights, ()

    @property
    def nbytes(self) -> int:
        """Bytes held now, on all devices."""
        return sum(buffer.nbytes for held in list(self._held.values()) for buffer in held.buffers)

    def use(self, model: nn.Module, preparation: Preparation, parameters: list, tensors: list) -> list[torch.Tensor] | None:
        """The buffers for these parameters, ready on the current stream; None where a call has to prepare for itself.

        ``tensors`` are the parameters as kernels read them. Raises PreparationError where there is something to prepare while
        the current stream is being captured.
        """
        key = key_of(preparation.reads, parameters, tensors)
        if key is None:
            return None
        held = self._held.get(preparation.home)
        if held is None or held.key != key:
            if is_written_unseen(model):
                return None
            held = self.renew(preparation, parameters, tensors, key)
        elif preparation.stream_of()[1] not in held.ready:
            self._join(held, preparation)
        return held.buffers

    def renew(self, preparation: Preparation, parameters: list, tensors: list, key: Key, asked: bool = False) -> _Held:
        """Prepares on the current stream, unless another thread has just done so; ``asked``: in any case, and waits for the end."""
        device = preparation.device
        with self._lock:
            held = self._held.get(preparation.home)
            if held is not None and held.key == key and not asked:
                self._join(held, preparation)
                return held
            _refuse_capture(device)
            _watch_optimizers()
            stream = preparation.stream_of()[1]
            if held is None:
                held = _Held(preparation.allocate(), stream)
            held.expire()
            current = torch.cuda.current_stream(device) if device.type == "cuda" else None
            for handle, reader in held.ready.items():
                if handle != stream:
                    current.wait_stream(reader)
            preparation.fill(tensors, held.buffers)
            self.count += 1
            if current is not None:
                held.event = held.event or torch.cuda.Event()
                held.event.record(current)
                _announce(held, stream, current)
            held.ready = {stream: current}
            held.parameters = [parameters[index] for index in preparation.reads]
            held.storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in held.parameters]
            held.key = key  # last, as other threads look at it without the lock
            self._held[preparation.home] = held
            if asked and held.event is not None:
                held.event.synchronize()
            return held

    def expire(self, devices: set[torch.device]) -> None:
        """Something may have happened to the parameters: nothing is current any more. Only the memory on ``devices`` is kept."""
        with self._lock:
            for home, held in list(self._held.items()):
                held.expire()
                if home[0] not in devices:
                    del self._held[home]

    def expire_written(self, written: set[int]) -> None:
        """What was made from a parameter whose identity is among ``written`` is not current any more."""
        with self._lock:
            for held in self._held.values():
                if any(id(parameter) in written for parameter in held.parameters):
                    held.expire()

    def _join(self, held: _Held, preparation: Preparation) -> None:
        """Makes the current stream's work come after the preparation, once for each stream."""
        if preparation.device.type != "cuda" or _is_capturing(preparation.device):
            return  # a captured graph cannot wait for what came before it
        with self._lock:
            stream = torch.cuda.current_stream(preparation.device)
            stream.wait_event(held.event)
            handle = preparation.stream_of()[1]
            _announce(held, handle, stream)
            held.ready[handle] = stream


def key_of(reads: tuple[int, ...], parameters: list, tensors: list) -> Key | None:
    """What tells that the parameters at the positions ``reads`` are as they were; None where PyTorch does not tell."""
    key = []
    for index in reads:
        parameter = parameters[index]
        if type(parameter) is not nn.Parameter or tensors[index] is not parameter or parameter.is_inference():
            return None
        key += (id(parameter), parameter._version, parameter.data_ptr(), parameter.untyped_storage()._cdata)
    return key


def is_written_unseen(model: nn.Module) -> bool:
    """Does FSDP2 put the parameters together for each call? It tells PyTorch not to count that."""
    distributed = sys.modules.get("torch.distributed.fsdp")
    return distributed is not None and isinstance(model, getattr(distributed, "FSDPModule", ()))


def _announce(held: _Held, handle: int, stream: torch.cuda.Stream) -> None:
    """Memory that is given back is not given to others before ``stream`` has finished what it does now."""
    if handle not in held.known:
        held.known.add(handle)
        for buffer in held.buffers:
            buffer.record_stream(stream)


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _refuse_capture(device: torch.device) -> None:
    if _is_capturing(device):
        raise PreparationError(
            "the weights are not prepared, or have changed since, and a CUDA graph is being captured, which would prepare them at every "
            "replay; call model.prepare() before the capture."
        )


# ---- optimizers ----------------------------------------------------------------------------------------------------------
# A fused optimizer writes without counting (seen up to torch 2.13), so every step of one is taken as a write.

_everyone: "weakref.WeakSet[PreparedWeights]" = weakref.WeakSet()
_watching = threading.Lock()
_hook = None


def _watch_optimizers() -> None:
    global _hook
    with _watching:
        if _hook is None:
            _hook = register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_) -> None:
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for weights in list(_everyone):
        weights.expire_written(written)
