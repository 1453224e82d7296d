"""What each rank of a test does: `python -m tests.parallel.worker <task.json>` under the variables that torchrun sets. Results go to <task>.<rank>.json."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import fixed_shape_kernels as fsk
from bench.metrics import compare
from bench.timing import capture
from fixed_shape_kernels.api import read
from fixed_shape_kernels.parallel import ChainParallel, ParallelError, ShardError, ranks


def reference(path: str, device: str, folder: Path) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The whole layer in PyTorch and its inputs, the same on all ranks; running statistics and scales are drawn, so that none hides a mistake."""
    package = fsk.load(path, targets="cpu", out=folder)
    torch.manual_seed(1)
    model = package.Model(*package.get_init_inputs()).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 1:
                tensor.add_(torch.rand_like(tensor) - 0.25)
    return model.to(device), tuple(given.to(device) for given in package.get_inputs())


def equal(mesh, task: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Each case beside float64: the error, PyTorch's own, whether a second call and all ranks have the same bits, and what ranks exchanged."""
    found = []
    for case in task["cases"]:
        own = folder / (case["name"] if distributed.get_rank() == 0 else f"{case['name']}_{distributed.get_rank()}")
        model, inputs = reference(case["path"], mesh.device_type, own)
        spec = read(case["path"])
        divided = copy.deepcopy(model)
        exact = copy.deepcopy(model).double()(*(given.double() for given in inputs))
        split = case.get("split")
        layouts = {} if split is None else {"input_layouts": Shard(split)}
        parallelize_module(divided, mesh, ChainParallel(case["path"], output_layouts=Replicate(), folder=folder / "parts", **layouts))
        x = inputs[0] if split is None else inputs[0].chunk(mesh.size(), split)[mesh.get_local_rank()].contiguous()
        y = divided(x, *inputs[1:])
        again = divided(x, *inputs[1:])
        heard: list[Any] = [None] * mesh.size()
        distributed.all_gather_object(heard, y.cpu())
        tolerance = spec.precision.tolerance
        row = {"name": case["name"], "precision": spec.precision.name, "error": compare(y, exact, tolerance, None).relative}
        row |= {"parity": compare(y, exact, tolerance, None, model(*inputs)).parity, "eager": compare(model(*inputs), exact, tolerance, None).relative}
        row["repeatable"] = all(torch.equal(y.cpu().nan_to_num(), other.nan_to_num()) for other in (again.cpu(), *heard))
        row["collectives"] = [one.kind for one in divided._divided.sharding.collectives]
        row["parts"] = {key: list(value.to_local().shape) for key, value in divided.state_dict().items() if isinstance(value, DTensor)}
        if case.get("compiled"):
            row["compiled"] = bool(torch.equal(torch.compile(divided, backend="aot_eager", fullgraph=True)(x, *inputs[1:]), y))
        if case.get("graph"):
            held: dict[str, torch.Tensor] = {}
            graph = capture(lambda: held.update(y=divided(x, *inputs[1:])), torch.device("cuda", torch.cuda.current_device()))  # noqa: B023
            graph.replay()
            torch.cuda.synchronize()
            row["graph"] = bool(torch.equal(held["y"], y))
        found.append(row)
    return found


def saved(mesh, task: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Write a checkpoint of a divided layer; or read one into a generated module that never held more than its part, and compute with it."""
    path, own = task["path"], folder / f"own_{distributed.get_rank()}_of_{mesh.size()}"
    model, inputs = reference(path, mesh.device_type, own)
    wanted = model(*inputs)
    if task["write"]:
        parallelize_module(model, mesh, ChainParallel(path, output_layouts=Replicate(), folder=folder / "parts"))
        state = get_model_state_dict(model)
        checkpoint.save(state, checkpoint_id=task["checkpoint"])
    else:
        package = fsk.load(path, targets="cpu", out=own)
        with torch.device("meta"):
            model = package.ModelNew(*package.get_init_inputs()).eval()
        parallelize_module(model, mesh, ChainParallel(output_layouts=Replicate(), folder=folder / "parts"))
        model.to_empty(device=mesh.device_type)
        state = get_model_state_dict(model)
        checkpoint.load(state, checkpoint_id=task["checkpoint"])
        set_model_state_dict(model, state)
    return [{"keys": list(state), "difference": float((model(*inputs) - wanted).abs().max())}]


def nested(mesh, task: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Two by two ranks: the layer is divided along one dimension of the mesh, and each pair has samples of its own."""
    both = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    model, (x, *_) = reference(task["path"], mesh.device_type, folder / f"own_{distributed.get_rank()}")
    x = x + both.get_local_rank("dp")
    wanted, said = model(x), ""
    try:
        parallelize_module(copy.deepcopy(model), both, ChainParallel(task["path"]))
    except ParallelError as error:
        said = str(error)
    parallelize_module(model, both["tp"], ChainParallel(task["path"], output_layouts=Replicate(), folder=folder / "parts"))
    return [{"difference": float((model(x) - wanted).abs().max()), "said": said, "of": repr(model)}]


def dies(mesh, task: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Rank 1 ends in the middle; the others go on calling."""
    model, inputs = reference(task["path"], mesh.device_type, folder / f"own_{distributed.get_rank()}")
    parallelize_module(model, mesh, ChainParallel(task["path"], output_layouts=Replicate(), folder=folder / "parts"))
    model(*inputs)
    if distributed.get_rank() == 1:
        os._exit(3)
    while True:
        model(*inputs)


def refused(mesh, task: dict[str, Any], folder: Path) -> dict[str, str]:
    """What is said where a division cannot be made, or a divided module is used wrongly, by the name of the fault."""
    path, said = task["path"], {}
    model, (x,) = reference(path, mesh.device_type, folder / f"own_{distributed.get_rank()}")
    make = lambda: copy.deepcopy(model)  # noqa: E731

    def told(name: str, work) -> None:
        try:
            work()
        except (ParallelError, ShardError) as error:
            said[name] = str(error)

    def styled(**options):
        return lambda: parallelize_module(make(), mesh, ChainParallel(**({"spec": path} | options), folder=folder / "parts"))

    told("plan", styled(plan={"gemm": "colwise", "norm": "rowwise"}))
    told("path", styled(plan={"gemm": "colwise", "nrm": "colwise"}))
    told("no spec", styled(spec=None))
    told("output", styled(output_layouts=Shard(0)))
    told("another module", lambda: parallelize_module(torch.nn.Linear(3, 3), mesh, ChainParallel(path)))
    divided = styled()()
    told("library", styled(spec=task["straddling"]))
    told("twice", lambda: parallelize_module(divided, mesh, ChainParallel(path)))
    told("shape", lambda: divided(x[:2]))
    told("inputs", lambda: divided(x, x))
    with torch.enable_grad():
        told("gradients", lambda: divided(x))
    handle = divided.gemm.register_forward_hook(lambda *given: None)
    told("hook", lambda: divided(x))
    handle.remove()
    divided.norm.eps = 1.0
    told("changed", lambda: divided(x))
    divided.norm.eps = 1e-5
    divided(x)
    with torch.no_grad():
        divided.gemm.weight.mul_(2.0)  # a write into the DTensor reaches the kernels
        twin = make()
        twin.gemm.weight.mul_(2.0)
        same = [torch.allclose(divided.gathered(divided(x)), twin(x), atol=1e-5)]
        divided.load_state_dict({key: distribute_tensor(value, mesh, divided.state_dict()[key].placements) for key, value in model.state_dict().items()}, assign=True)
        same.append(torch.allclose(divided.gathered(divided(x)), model(x), atol=1e-5))
    said["writes"] = str(same)
    divided.gemm.weight = torch.nn.Parameter(torch.zeros(4, 4))
    told("plain parameter", lambda: divided(x))
    rows = parallelize_module(make(), mesh, ChainParallel(path, plan={"gemm": "rowwise"}, output_layouts=Replicate(), use_local_output=False, folder=folder / "parts"))
    result = rows(distribute_tensor(x, mesh, [Replicate()]))  # redistributed to what the chain wants
    said["rows from a DTensor"] = f"{type(result).__name__} {float((result.to_local() - model(x)).abs().max()) < 1e-5}"
    return said


TASKS = {"equal": equal, "saved": saved, "dies": dies, "refused": refused, "nested": nested}


def main() -> None:
    path = Path(sys.argv[1])
    task = json.loads(path.read_text())
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the reference's
    with ranks(task["device"]) as mesh, torch.no_grad():
        result = {name: TASKS[name](mesh, own, path.parent) for name, own in task["tasks"].items()}
        path.with_suffix(f".{distributed.get_rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
