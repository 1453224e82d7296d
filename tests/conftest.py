"""Shared by all tests: tiers, hypothesis profiles, the compiler that keeps what it made. GPU tests run only where as many GPUs are visible as they need."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import compiler, tiers

TOP = Path(__file__).parents[1]
NEEDED = {"gpu": (1, "needs a CUDA GPU"), "two_gpus": (2, "needs two CUDA GPUs")}  # by marker

# A property test sets no number of examples of its own: `make test` takes few, `make test-all` runs the same tests again with many.
# CI draws the same examples each time (.ci/run sets DERANDOMIZE), so that its verdict is the commit's; everybody else draws new ones.
fixed = bool(os.environ.get("DERANDOMIZE"))
settings.register_profile("few", max_examples=25, deadline=None, derandomize=fixed)
settings.register_profile("many", max_examples=200, deadline=None, derandomize=fixed)
settings.load_profile("few")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # workers have the environment of this process
        compiler.set_up(TOP / "build" / "tests")
        # A thread of OpenMP that waits would otherwise spin for milliseconds, on a core where another worker has work: most of the time of small tensors.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_collection_modifyitems(items):
    found = [text for item in items for text in tiers.complaints(item)]
    if found:
        raise pytest.UsageError("\n".join(found))
    if not any(marker in item.keywords for marker in NEEDED for item in items):
        return
    import torch

    for marker, (count, reason) in NEEDED.items():
        if torch.cuda.device_count() < count:
            for item in items:
                if marker in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def one_thread():
    """PyTorch computes in one thread: with small tensors on many workers, waiting threads would only get in each other's way."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    tiers.running(item)
    try:
        return (yield)
    finally:
        tiers.running(None)
