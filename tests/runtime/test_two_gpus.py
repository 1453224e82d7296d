"""What only two GPUs of one machine can show: work on the one that is not current, on both at once, and training in two processes.

All of it in one call, most of whose time is the compiling of two small packages and the starting of two processes:

    python -m pytest -m two_gpus
"""

import copy
import threading

import pytest
import torch

from .generated_packages import CHAINS, generate
from .tiny_package import run_python

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The folder of both chains' packages, a cache for all of this module's tests, and the packages by chain."""
    folder = tmp_path_factory.mktemp("two_gpus")
    made = {name: generate(folder, chain, name=f"two_gpus_{name}", targets=("sm_80",)) for name, chain in CHAINS.items()}
    return folder, folder / "cache", made


@pytest.fixture(autouse=True)
def setting(packages, monkeypatch):
    monkeypatch.setenv("TARGETS", "sm_80")
    monkeypatch.setenv("CODEGEN_CACHE", str(packages[1]))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the reference's
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


@pytest.fixture(params=CHAINS)
def trained(request, packages):
    """(model, reference with the same parameters, x), on the CPU."""
    module = packages[2][request.param]
    torch.manual_seed(0)
    model, reference = module.ModelNew(), module.Model()
    reference.load_state_dict(model.state_dict())
    return model, reference, module.get_inputs()[0]


def gradients(model, x):
    """y, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    y = model(x)
    return y, torch.autograd.grad(y.square().mean(), [x, *model.parameters()])


def assert_right(model, reference, x):
    """Without and with gradients, where the model is; everything stays there."""
    with torch.no_grad():
        y = model(x)
    assert y.device == x.device
    torch.testing.assert_close(y, reference(x).detach(), **TOLERANCE)
    (again, got), (_, want) = gradients(model, x), gradients(reference, x)
    assert torch.equal(again, y)
    for ours, theirs in zip(got, want):
        assert ours.device == x.device
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_the_gpu_that_is_not_current(trained):
    model, reference, x = trained
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        assert_right(model.to(device), reference.to(device), x.to(device))


def test_memory_is_taken_on_the_inputs_gpu_alone(trained):
    model, _, x = trained
    model, x = model.to("cuda:1"), x.to("cuda:1")
    with torch.no_grad():
        model(x)
        before = torch.cuda.memory_stats(0)["allocation.all.allocated"]
        model(x)
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == before


def test_a_parameter_on_the_other_gpu_is_refused(trained):
    model, _, x = trained
    with pytest.raises(ValueError, match=r"expected .* on cuda:0, where x is, got .* on cuda:1; move the model with model.to\('cuda:0'\)"):
        model.to("cuda:1")(x.to("cuda:0"))


def test_a_graph_on_the_gpu_that_is_not_current(trained):
    model, reference, x = trained
    model, reference, x = model.to("cuda:1"), reference.to("cuda:1"), x.to("cuda:1")
    with torch.no_grad(), torch.cuda.device(1):
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        x.mul_(-0.5)
        graph.replay()
        torch.testing.assert_close(y, reference(x), **TOLERANCE)


def test_a_side_stream_of_the_gpu_that_is_not_current(trained):
    model, reference, x = trained
    model, reference, x = model.to("cuda:1"), reference.to("cuda:1"), x.to("cuda:1")
    with torch.no_grad():
        want = reference(x)
        stream = torch.cuda.Stream(1)
        stream.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(stream):  # makes its device current, too
            torch.cuda._sleep(100_000_000)
            late = x * 1
            y = model(late)
        stream.synchronize()
    torch.testing.assert_close(y, want, **TOLERANCE)


def test_both_at_once_from_threads(trained):
    """Each thread starts on GPU 0, as threads do, and uses the model of one of the two."""
    model, reference, x = trained
    failures = []

    def work(index):
        try:
            device = torch.device("cuda", index)
            mine, other, given = copy.deepcopy(model).to(device), copy.deepcopy(reference).to(device), x.to(device)
            for _ in range(5):
                assert_right(mine, other, given)
            torch.cuda.synchronize(device)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


WORKER = """
import sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CLOSE = {"rtol": 1e-4, "atol": 1e-5}

def run(rank, meeting, folder, names):
    torch.cuda.set_device(rank)
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    sys.path.insert(0, folder)
    for name in names:
        train(rank, __import__(name))
    dist.destroy_process_group()

def pair(rank, package):
    torch.manual_seed(0)
    model, reference = package.ModelNew().cuda(), package.Model().cuda()
    reference.load_state_dict(model.state_dict())
    inputs = [torch.randn_like(package.get_inputs()[0]).cuda() for _ in range(2)]
    sum(reference(x).square().mean() for x in inputs).div(2).backward()
    return model, reference, inputs

def train(rank, package):
    model, reference, inputs = pair(rank, package)
    parallel = DistributedDataParallel(model, device_ids=[rank])
    parallel(inputs[rank]).square().mean().backward()
    for (key, parameter), want in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(parameter.grad, want.grad, msg=lambda text: f"DDP, {key}: {text}", **CLOSE)

    model, reference, inputs = pair(rank, package)
    fully_shard(model, mesh=init_device_mesh("cuda", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = model(inputs[rank])
    torch.testing.assert_close(first, reference(inputs[rank]), **CLOSE)
    first.square().mean().backward()
    for (key, parameter), want in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(parameter.grad.full_tensor(), want.grad, msg=lambda text: f"FSDP2, {key}: {text}", **CLOSE)
    optimizer.step()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs[rank]), reference(inputs[rank]), **CLOSE)

if __name__ == "__main__":
    mp.spawn(run, @ARGS@, nprocs=2)
"""


@pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_nccl_available()), reason="this torch has no NCCL")
def test_two_processes_train_with_ddp_and_fsdp2(tmp_path, packages):
    folder, _, made = packages
    script = tmp_path / "worker.py"
    script.write_text(WORKER.replace("@ARGS@", repr((str(tmp_path / "meeting"), str(folder), [module.__name__ for module in made.values()]))))
    done = run_python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert done.returncode == 0, done.stderr[-4000:]
