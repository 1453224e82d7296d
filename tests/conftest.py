"""Shared by all tests: GPU tests run only where as many GPUs are visible as they need."""

import pytest

NEEDED = {"gpu": (1, "needs a CUDA GPU"), "two_gpus": (2, "needs two CUDA GPUs")}  # by marker


def pytest_collection_modifyitems(items):
    if not any(marker in item.keywords for marker in NEEDED for item in items):
        return
    import torch

    for marker, (count, reason) in NEEDED.items():
        if torch.cuda.device_count() < count:
            for item in items:
                if marker in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=reason))
