"""Collectives between kernels: torch's functional ones, so that CUDA graphs and torch.compile take them too.

Two are enough, both of which only move data: what is added or compared is merged on each rank in the order of the ranks, so that all get the same bits each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh


class ParallelError(RuntimeError):
    """What went wrong among ranks; the message is a sentence that names the rank and what to do."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that a chain is divided among: how many, which of them this process is, and the name of their process group."""

    size: int
    rank: int
    group: str

    @staticmethod
    def of(mesh: DeviceMesh) -> Ranks:
        """Those of a mesh of one dimension. Raises ParallelError for another."""
        if mesh.ndim != 1:
            raise ParallelError(f"a chain is divided along one dimension of a mesh, and this one has {mesh.ndim}; pass one of them, as in mesh['tp']")
        return Ranks(mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name)

    def gathered(self, value: torch.Tensor, what: str) -> torch.Tensor:
        """The values of all ranks as one tensor (ranks, ...). `what` names the place in messages."""
        parts = self._done(lambda: torch.ops._c10d_functional.all_gather_into_tensor(value.reshape(1, *value.shape).contiguous(), self.size, self.group), what)
        return parts.reshape(self.size, *value.shape)

    def exchanged(self, parts: torch.Tensor, what: str) -> torch.Tensor:
        """Part r of every rank's `parts` (ranks, ...), on rank r: (ranks, ...) by the rank that it comes from."""
        ones = [1] * self.size
        return self._done(lambda: torch.ops._c10d_functional.all_to_all_single(parts.contiguous(), ones, ones, self.group), what)

    def _done(self, begin, what: str) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.ops._c10d_functional.wait_tensor(begin())
        try:
            return torch.ops._c10d_functional.wait_tensor(begin())
        except (RuntimeError, distributed.DistBackendError) as error:
            raise ParallelError(
                f"rank {self.rank} of {self.size}: the exchange at {what} failed: another rank has ended, or does not answer "
                f"({next(iter(str(error).strip().splitlines()), type(error).__name__)}); look at what the other ranks said, and start all of them again."
            ) from error
