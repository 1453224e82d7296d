"""A generated model under DistributedDataParallel and FSDP2: two processes with gloo on the cpu target."""

import textwrap

import pytest
import torch

from .generated_packages import CHAINS, generate
from .tiny_package import run_python

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
    pytest.mark.slow,
]

WORKER = """
import os, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp

def run(rank, meeting, folder, name):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    package = __import__(name)
    torch.manual_seed(0)
    model, reference = package.ModelNew(), package.Model()
    reference.load_state_dict(model.state_dict())
    inputs = [torch.randn_like(package.get_inputs()[0]) for _ in range(2)]
    sum(reference(x).square().mean() for x in inputs).div(2).backward()
    want = {key: parameter.grad for key, parameter in reference.named_parameters()}
@BODY@
    dist.barrier()
    dist.destroy_process_group()
    # Gloo's threads may still hold work with Python tensors: one that frees them while the interpreter is being torn
    # down aborts the process (pytorch/pytorch#179291), long after everything that this test asks was answered.
    os._exit(0)

if __name__ == "__main__":
    mp.spawn(run, @ARGS@, nprocs=2)
"""

DDP = """
    from torch.nn.parallel import DistributedDataParallel
    parallel = DistributedDataParallel(model)
    parallel(inputs[rank]).square().mean().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want[key], rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad)
    parallel(inputs[rank]).square().mean().backward()
"""

FSDP = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = model(inputs[rank])
    torch.testing.assert_close(first, reference(inputs[rank]), rtol=1e-4, atol=1e-5)
    first.square().mean().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), want[key], rtol=1e-4, atol=1e-6)
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs[rank]), reference(inputs[rank]), rtol=1e-4, atol=1e-5)
"""

FSDP_OF_A_PART = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    part = model.gemm if hasattr(model, "gemm") else model.conv
    fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    for call in (lambda: model(inputs[0]), lambda: torch.no_grad()(model)(inputs[0])):
        try:
            call()
        except Exception as error:
            assert "fully_shard(model)" in str(error), error
        else:
            raise AssertionError("a sharded parameter was taken")
"""


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("body", [DDP, FSDP, FSDP_OF_A_PART], ids=["ddp", "fsdp2", "fsdp2 of a part"])
def test_two_processes(tmp_path, body, chain):
    module = generate(tmp_path / "packages", CHAINS[chain])
    arguments = (str(tmp_path / "meeting"), str(tmp_path / "packages"), module.__name__)
    text = WORKER.replace("@BODY@", textwrap.indent(textwrap.dedent(body), "    ")).replace("@ARGS@", repr(arguments))
    script = tmp_path / "worker.py"
    script.write_text(text)
    done = run_python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr[-4000:]
