"""The machine a measurement is made on: its device, its name under bench/results/, and PyTorch's precision switches."""

from __future__ import annotations

import os
import platform
import re
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_CARDS = re.compile(r"\b(H100|H200|GH200|A100|A10|A30|A40|A6000|L4|L40S?|B200|B100|T4|V100|RTX \d{4}(?: Ti| SUPER)?)\b", re.IGNORECASE)


def choose_device(name: str | None) -> torch.device:
    """The device called `name` ("cpu" or "cuda"); without a name, the GPU where one is visible."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError("no CUDA GPU is visible here; --device cpu (make: ON=cpu) runs it on the CPU")
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


@dataclass(frozen=True)
class Machine:
    """What a record says about where it was measured. `slug` names its folder under bench/results/."""

    gpu: str
    slug: str
    torch: str
    cuda: str | None
    driver: str | None

    @property
    def facts(self) -> dict[str, str | None]:
        return {"gpu": self.gpu, "torch": self.torch, "cuda": self.cuda, "driver": self.driver}


def describe(device: torch.device) -> Machine:
    """The machine behind `device`."""
    if device.type == "cpu":
        return Machine(f"CPU, {torch.get_num_threads()} threads, {platform.machine()}", "cpu", str(torch.__version__), None, None)
    name = torch.cuda.get_device_name(device)
    return Machine(name, slug_of(name), str(torch.__version__), torch.version.cuda, _driver())


def slug_of(card: str) -> str:
    """`NVIDIA H100 80GB HBM3` -> `h100`; an unknown card's whole name in letters, digits and hyphens."""
    found = _CARDS.search(card)
    text = found.group(1) if found else card
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _driver() -> str | None:
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", first)
    return found.group() if found else None


def set_precision(precision: str) -> dict[str, object]:
    """Allow TF32 in torch's GEMM and convolution for the tf32 rows, and only there; returns what torch now says.

    Only the older switches are used: torch refuses to read them once the newer `fp32_precision` ones were set, and torch.compile reads them.
    """
    allow = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allow
    torch.backends.cudnn.allow_tf32 = allow
    return flags()


def flags() -> dict[str, object]:
    """The switches that decide the precision of torch's own fp32 GEMM and convolution."""
    return {
        "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "cuda.matmul.allow_fp16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cuda.matmul.allow_bf16_reduced_precision_reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
    }


def cards(device: torch.device) -> tuple[str, ...]:
    """The GPUs of `device`'s kind, itself first, each as CUDA_VISIBLE_DEVICES names it to a child process that is to see no other; () for a CPU."""
    if device.type == "cpu":
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = lambda index: visible[index].strip() if index < len(visible) and visible[index].strip() else str(index)  # noqa: E731
    same = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_name(i) == torch.cuda.get_device_name(device)]
    return tuple(name(i) for i in sorted(same, key=lambda i: i != (device.index or 0)))


@contextmanager
def precision_flags(precision: str):
    """`set_precision` for the length of a block."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield set_precision(precision)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def environment(**values: str | None):
    """Environment variables for the length of a block; None unsets."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _apply(values)
        yield
    finally:
        _apply(before)


def _apply(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def synchronize(device: torch.device) -> None:
    """Wait for everything on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
