"""A session of ranks under torchrun: their process group, their devices, and a sentence for what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .collectives import ParallelError

TIMEOUT = timedelta(seconds=50)  # for a rank that does not answer; one that has ended is noticed at once where its connection breaks


@contextmanager
def ranks(device: str | None = None, timeout: timedelta = TIMEOUT) -> Iterator[DeviceMesh]:
    """A mesh of all ranks that torchrun started, for the length of a block; of one rank without torchrun.

    `device` is "cuda" (NCCL, a GPU a rank) or "cpu" (gloo), by default "cuda" where this machine has a GPU for each of its ranks. A collective that waits for longer
    than `timeout` fails. Raises ParallelError where there are fewer GPUs than ranks.
    """
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    here, own = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = device or ("cuda" if torch.cuda.device_count() >= here else "cpu")
    if device == "cuda" and torch.cuda.device_count() < here:
        raise ParallelError(f"{here} ranks on this machine, and {torch.cuda.device_count()} GPUs; start as many ranks as there are GPUs, or run on the CPU")
    if device == "cuda":
        torch.cuda.set_device(own)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums by the switch have no fixed order, and nothing here sums on the way
    distributed.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timeout, device_id=torch.device("cuda", own) if device == "cuda" else None)
    try:
        yield init_device_mesh(device, (distributed.get_world_size(),), mesh_dim_names=("tp",))
    finally:
        distributed.destroy_process_group()
