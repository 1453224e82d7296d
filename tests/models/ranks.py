"""What each rank does in the tests of training in parallel: `python -m tests.models.ranks <task.json>`. Results go to <task>.<rank>.json.

Each task trains a model with kernels, and a twin that is wrapped in the same way and has none, and says how far they are apart.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fixed_shape_kernels as fsk
from fixed_shape_kernels.parallel import ranks

STEPS = 3


class Block(nn.Module):
    """A residual block with a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.scale = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), nn.Parameter(torch.rand(16) + 0.5)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.front(x)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.head(x))


def data(step: int) -> torch.Tensor:
    """A batch of this rank."""
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + distributed.get_rank()))


def optimized(folder: Path, **options: Any) -> tuple[fsk.models.Optimized, nn.Module]:
    """(a model with every chain that is right, its twin), the same on all ranks."""
    torch.manual_seed(0)
    model = Net().train()
    twin = copy.deepcopy(model)
    return fsk.optimize(model, data(0), training=True, min_gain=0.0, cache_dir=folder / f"packages_{distributed.get_rank()}", **options), twin


def trained(call: Callable[..., torch.Tensor], twin_call: Callable[..., torch.Tensor], model: nn.Module, twin: nn.Module) -> dict[str, float]:
    """The largest relative differences of results, of all gradients and of all parameters and buffers together, over a few steps."""
    found = dict.fromkeys(("result", "gradient", "state"), 0.0)
    steppers = [torch.optim.SGD(each.parameters(), 0.05) for each in (model, twin)]

    def noted(name: str, mine: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> None:
        one, other = (torch.cat([(value.full_tensor() if isinstance(value, DTensor) else value).detach().double().flatten() for value in values]) for values in (mine, theirs))
        found[name] = max(found[name], float((one - other).norm() / other.norm()))

    for step in range(STEPS):
        y, wanted = call(data(step)), twin_call(data(step))
        noted("result", [y], [wanted])
        for each in (y, wanted):
            each.square().sum().backward()
        noted("gradient", *([parameter.grad for parameter in each.parameters()] for each in (model, twin)))
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        noted("state", *([*each.parameters(), *each.buffers()] for each in (model, twin)))
    return found


def told(opt: fsk.models.Optimized, found: dict[str, float]) -> dict[str, Any]:
    return found | {"replaced": len(opt.report.replaced), "fallbacks": sorted({why for _, why in opt.fallbacks})}


def replicated(mesh: Any, folder: Path) -> dict[str, Any]:
    opt, twin = optimized(folder)
    return told(opt, trained(DistributedDataParallel(opt), DistributedDataParallel(twin), opt, twin))


def sharded(mesh: Any, folder: Path, parts: bool, checkpoints: bool = False, named: bool = True) -> dict[str, Any]:
    """FSDP2 over the whole model, and over its blocks too; `named` says whether `apart` told of them."""
    opt, twin = optimized(folder, apart=[Block] if parts and named else ())
    for each in (opt._model, twin):
        if checkpoints:
            apply_activation_checkpointing(each, check_fn=lambda part: isinstance(part, Block))
        for block in each.blocks if parts else ():
            fully_shard(block, mesh=mesh)
        fully_shard(each, mesh=mesh)
    return told(opt, trained(opt, twin, opt._model, twin))


def checkpointed(mesh: Any, folder: Path) -> dict[str, Any]:
    opt, twin = optimized(folder, apart=[Block])
    for each in (opt._model, twin):
        apply_activation_checkpointing(each, check_fn=lambda part: isinstance(part, Block))
    return told(opt, trained(opt, twin, opt._model, twin))


def compiled(mesh: Any, folder: Path, wrapped: str) -> dict[str, Any]:
    """The backend of torch.compile, within DDP, FSDP2 or checkpoints."""
    torch.manual_seed(0)
    model, reports = Net().train(), []
    twin = copy.deepcopy(model)
    options = {"min_gain": 0.0, "against": "eager", "cache_dir": str(folder / f"packages_{distributed.get_rank()}"), "on_report": reports.append}
    calls = []
    for each in (model, twin):
        if wrapped == "checkpoints":
            apply_activation_checkpointing(each, check_fn=lambda part: isinstance(part, Block))
        if wrapped == "sharded":
            for block in each.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(each, mesh=mesh)
        calls.append(DistributedDataParallel(each) if wrapped == "replicated" else each)
    found = trained(torch.compile(calls[0], backend="fixed_shapes", dynamic=False, options=options), calls[1], model, twin)
    return found | {"replaced": sum(len(report.replaced) for report in reports), "fallbacks": [], "left": sorted({row.why for report in reports for row in report.rows if row.status == "not traced"})}


def refused(mesh: Any, folder: Path) -> list[str]:
    """What `optimize` says to a model that is wrapped already."""
    torch.manual_seed(0)
    wrapped, divided, said = DistributedDataParallel(Net()), Net(), []
    fully_shard(divided, mesh=mesh)
    for model in (wrapped, divided):
        try:
            fsk.optimize(model, data(0), training=True, cache_dir=folder / "packages")
        except ValueError as error:
            said.append(str(error))
    return said


TASKS = {
    "refused": refused,
    "replicated": replicated,
    "sharded": lambda mesh, folder: sharded(mesh, folder, parts=False),
    "sharded parts": lambda mesh, folder: sharded(mesh, folder, parts=True),
    "sharded parts unnamed": lambda mesh, folder: sharded(mesh, folder, parts=True, named=False),
    "sharded checkpoints": lambda mesh, folder: sharded(mesh, folder, parts=True, checkpoints=True),
    "checkpoints": checkpointed,
    **{f"compiled {wrapped}": lambda mesh, folder, wrapped=wrapped: compiled(mesh, folder, wrapped) for wrapped in ("replicated", "sharded", "checkpoints")},
}


def main() -> None:
    path = Path(sys.argv[1])
    task = json.loads(path.read_text())
    torch.set_num_threads(1)
    with ranks(task["device"]) as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = {}
        for name in task["tasks"]:
            result[name] = TASKS[name](mesh, path.parent)
        path.with_suffix(f".{distributed.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
