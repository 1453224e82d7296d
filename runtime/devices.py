"""What GPUs and which driver this machine has."""

import ctypes
import functools
from typing import TYPE_CHECKING

import torch

from .errors import ToolchainError

if TYPE_CHECKING:
    from .tools import Tool  # a wheel carries no compilers

Capability = tuple[int, int]


def visible_capabilities() -> list[Capability]:
    """The compute capability of every GPU torch sees, by device index. Initialises CUDA where there is one."""
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


@functools.lru_cache(maxsize=None)
def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the installed driver supports, or None without a driver. Initialises nothing."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except OSError:
        return None
    return version.value // 1000, version.value % 1000 // 10


def check_driver(nvcc: "Tool") -> None:
    """A driver runs what any nvcc of its own major version made, and nothing of a later one."""
    driver = driver_version()
    if driver is not None and nvcc.version[0] > driver[0]:
        raise ToolchainError(
            f"nvcc {nvcc.version_text} (from {nvcc.origin}, {nvcc.path}) makes code for CUDA {nvcc.version[0]} drivers, and "
            f"the driver of this machine supports CUDA {driver[0]}.{driver[1]}: set CUDA_HOME to a toolkit of CUDA "
            f"{driver[0]}, or install a newer driver."
        )
