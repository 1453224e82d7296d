"""How many compilers may run at once without taking the machine down."""

import os
from pathlib import Path

BYTES_PER_JOB = 1_500_000_000  # nvcc's passes on one heavily templated source stay below this
CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def parallel_jobs(wanted: int) -> int:
    """Jobs for ``wanted`` sources: at most the cores of this process, at most what free memory holds, at least one.

    MAX_JOBS in the environment replaces both limits.
    """
    named = os.environ.get("MAX_JOBS", "")
    if named.isdigit() and int(named) > 0:
        return min(wanted, int(named))
    return max(1, min(wanted, usable_cores(), free_memory() // BYTES_PER_JOB))


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that can be taken without swapping: the machine's, or what the container has left if that is less."""
    free = [_available_memory()]
    for limit_file, usage_file in CGROUP_FILES:
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            free.append(max(0, limit - usage))
    return min(free)


def _available_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return BYTES_PER_JOB  # nothing is known: one job


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # absent, or the word "max"
        return None
