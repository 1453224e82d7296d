"""Chains with results taken once more, reductions, averages and broadcasts on a GPU, through the runtime: against float64, beside eager PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from codegen.package import make_package
from codegen.plan import Refusal
from codegen.spec import Spec, load_spec
from tests.codegen import norm_harness as harness
from tests.codegen.cpu_chains import make_spec, relative_error
from tests.codegen.gpu_models import built_models
from tests.codegen.problems import PROBLEMS
from tests.codegen.test_chains import POOL, SHARED_ROWS, TAPS, conv, linear
from tests.codegen.test_cpu import FP32_ERROR, HALF_SHARE
from tests.codegen.test_stages import AVERAGES, BROADCASTS, REDUCTIONS, STEEPER, TAIL, conv_chain, linear_chain, reduced

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or harness.find_nvcc() is None, reason="needs a CUDA GPU and nvcc")]

DEPTH = 1024  # input features of a linear: enough for every arithmetic and for sm_90a's ring
Chain = tuple[list, int, tuple[int, int] | None]


def deep(chain: list, batch: int) -> Chain:
    (word, arguments), = chain[0].items()
    return [{word: {**arguments, "in_features": DEPTH}}, *chain[1:]], batch, None


def wide(chain: list, batch: int, size: tuple[int, int]) -> Chain:
    (word, arguments), = chain[0].items()
    return [{word: {**arguments, "in_channels": 3}}, *chain[1:]], batch, size


CHAINS: dict[str, Chain] = {}
for name in TAPS:
    CHAINS[f"{name}_linear"] = deep(linear(name, 512, 8), 300)
    CHAINS[f"{name}_conv"] = wide(conv(name), 5, (19, 70))
CHAINS["product_wide_groups"] = deep(linear("product", 3 * 8192, 1), 160)
CHAINS["product_pool"] = wide(conv("product", (POOL,)), 5, (19, 70))
CHAINS["twice_pool"] = wide(conv("twice", (SHARED_ROWS, "tanh", {"add": {"from": "pool"}})), 5, (20, 70))
CHAINS["product_split"] = wide(conv("product", (), 4, 2), 1, (200, 333))
for name in REDUCTIONS:
    CHAINS[f"{name}_linear"] = deep(linear_chain(["tanh"], reduced(name, True, TAIL), 512, 8), 300)
    CHAINS[f"{name}_long"] = deep(linear_chain([], reduced(name, False, []), 8192, 16), 257)
    CHAINS[f"{name}_conv"] = wide(conv_chain([], reduced(name, True, ["relu", {"add": {"from": "folded"}}]), 64, 8), 5, (37, 36))
    CHAINS[f"{name}_few"] = wide(conv_chain([], reduced(name, False, []), 33, 3), 2, (15, 17))
for name, (arguments, size) in AVERAGES.items():
    CHAINS[f"average_{name}"] = wide(conv_chain([], ["silu", {"avg_pool2d": arguments}, {"mul": {"name": "scale", "shape": [12, 1, 1]}}], 12, 3), 40, size)
for name, (keepdim, shapes, _) in BROADCASTS.items():
    adds = [{("mul" if i else "add"): {"name": f"p{i}", "shape": shape}} for i, shape in enumerate(shapes)]
    CHAINS[f"broadcast_{name}"] = deep(linear_chain([], [{"min": {"keepdim": keepdim}}, "tanh", *adds, "silu"], 256, 8), 301)
STAGES = [SHARED_ROWS, "silu", {"max_pool2d": {"kernel_size": 3, "stride": 1, "padding": 1}}, {"avg_pool2d": {"kernel_size": 2}}, {"max": {"keepdim": True}}]
CHAINS["stages"] = wide(conv_chain([], [*STAGES, {"add": {"name": "spread", "shape": [5, 1, 1]}}, "tanh"], 16, 4), 6, (40, 42))
TWO_POOLS = [{"max_pool2d": {"kernel_size": 2}}, "tanh", {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}]
CHAINS["two_pools"] = wide(conv_chain([], TWO_POOLS, 32, 4), 6, (41, 43))
CHAINS["two_pools_sides"] = wide(conv_chain(["relu"], ["silu", *TWO_POOLS, {"mul": {"name": "scale", "shape": [32, 1, 1]}}], 32, 4), 6, (41, 43))
for head in ("silu", "mish"):  # many minima are the function's own least value
    CHAINS[f"min_{head}"] = deep(linear_chain([], [head, *reduced("min", True, TAIL)], 512, 8), 300)
CHAINS["min_wide_batch"] = deep(linear_chain([], ["silu", *reduced("min", True, TAIL)], 8192, 32), 1024)  # sm_90a: groups of a tile, float32 y
CHAINS["mean_two_tiles"] = deep(linear_chain(["relu"], ["mish", *reduced("mean", True, TAIL)], 8192, 16), 1024)  # groups of two: the norm kernel
PLAIN = {"linear": {"name": "gemm", "in_features": DEPTH, "out_features": 512}}
GAIN = {"mul": {"name": "gain", "shape": [512]}}
CHAINS["plain"] = [PLAIN, "silu", {"add": {"from": "gemm"}}, GAIN], 4100, None
CHAINS["plain_few"] = [PLAIN, "mish", GAIN], 37, None
CHAINS["plain_long"] = [{"linear": {"name": "gemm", "in_features": 32768, "out_features": 256}}, "gelu"], 128, None  # K in slices
CHAINS["plain_twice"] = [PLAIN, "gelu", {"linear": {"name": "back", "in_features": 512, "out_features": DEPTH}}, {"softmax": {"dim": 1}}], 4096, None


def models(spec: Spec, target: str, folder):
    if target == "sm_90a" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs capability 9.0")
    try:
        package = make_package(spec, (target,))
    except Refusal as error:
        pytest.skip(f"{target} does not serve this chain: {error}")
    return built_models(package, folder)


def compare(ours, eager, x: torch.Tensor, steeper: float) -> None:
    """Error within the promise, NaN where PyTorch has it, the same bits twice."""
    with torch.no_grad():
        y, again = ours(x), ours(x)
        peer = eager(x)
        exact = eager.double()(x.double())
    eager.to(x.dtype)
    assert y.shape == exact.shape and torch.equal(y.isnan(), exact.isnan())
    assert torch.equal(y.nan_to_num(), again.nan_to_num()), "two runs differ"
    error, theirs = relative_error(y, exact), relative_error(peer, exact)
    if x.dtype is torch.float32:
        assert error <= max(1.1 * theirs, steeper * FP32_ERROR), (error, theirs)
    else:
        assert error <= 1.3 * HALF_SHARE * theirs, (error, theirs)


@pytest.fixture(autouse=True)
def full_precision():
    """Eager PyTorch in fp32, not in TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str, precision: str, target: str, tmp_path) -> None:
    chain, batch, size = CHAINS[name]
    spec = replace(make_spec(tmp_path, chain, batch, precision, size), name=f"chain_{name}")  # a name of its own: a process knows a package by it
    ours, eager = models(spec, target, tmp_path)
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(spec.input_shape, generator=generator, device="cuda").to(getattr(torch, {"fp32": "float32"}.get(precision, "bfloat16")))
    steeper = max(4.0, STEEPER.get(name.split("_")[0], 1.0))  # the error of a producer and of a norm, magnified by what follows
    compare(ours, eager, x, steeper)
    x[0].view(-1)[0] = torch.nan
    compare(ours, eager, x, steeper)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_problems(name: str, precision: str, target: str, tmp_path) -> None:
    """The shipped problems at their first version's shapes, against the modules that they are named after."""
    spec = load_spec(f"specs/{name}_small.yaml", precision)
    ours, reference = models(spec, target, tmp_path)
    eager = PROBLEMS[name](*spec.init_values).to("cuda", next(reference.parameters()).dtype)
    eager.load_state_dict(reference.state_dict())
    generator = torch.Generator("cuda").manual_seed(3)
    compare(ours, eager, torch.randn(spec.input_shape, generator=generator, device="cuda").to(next(eager.parameters()).dtype), 4.0)


BACK = ["min_linear", "max_conv", "sum_linear", "mean_conv", "logsumexp_linear", "average_padded", "broadcast_problem_75", "product_linear", "two_pools", "stages"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", BACK)
def test_gradients(name: str, precision: str, tmp_path) -> None:
    """The generated ones, and eager's own where they are asked for, while y stays the kernels'."""
    chain, batch, size = CHAINS[name]
    spec = replace(make_spec(tmp_path, chain, batch, precision, size), name=f"gradients_{name}")
    ours, eager = models(spec, "sm_80", tmp_path)
    generator = torch.Generator("cuda").manual_seed(4)
    x = torch.randn(spec.input_shape, generator=generator, device="cuda").to(next(eager.parameters()).dtype)
    with torch.no_grad():
        plain = ours(x)
    grad_y = torch.randn(plain.shape, generator=generator, device="cuda").to(plain.dtype)

    def gradients(model, x, grad_y):
        named = dict(model.named_parameters())
        y = model(x)
        return y, dict(zip(named, torch.autograd.grad(y, list(named.values()), grad_y), strict=True))

    theirs = gradients(eager, x, grad_y)[1]
    exact = gradients(eager.double(), x.double(), grad_y.double())[1]
    eager.to(x.dtype)
    for by_reference in (False, True):
        y, mine = gradients(ours.differentiate_by_reference(by_reference), x, grad_y)
        assert torch.equal(y, plain)
        for key, grad in mine.items():
            # In 16 bits values tie where a least or largest one is chosen, and each side passes the gradient to another: both are that far off.
            allowed = 1e-3 if precision == "fp32" else max(2 * relative_error(theirs[key], exact[key]), 2e-2)
            assert relative_error(grad, exact[key]) <= allowed, (key, relative_error(theirs[key], exact[key]))
