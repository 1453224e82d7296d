"""Shared by all tests: GPU tests run only where a GPU is visible."""

import pytest


def pytest_collection_modifyitems(items):
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        needs = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(needs)
    elif torch.cuda.device_count() < 2:
        for item in items:
            if "two_gpus" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))
