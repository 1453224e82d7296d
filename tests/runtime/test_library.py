"""Every library step on a CPU in 16 bits: it runs, forward and backward, and gives what float32 does but for roundings."""

import pytest
import torch

from runtime.library import NAMES, PRODUCERS, SINGLE_ON_CPU, call_of

SHAPES = {1: (2, 4, 8), 2: (2, 4, 8, 6), 3: (2, 4, 8, 6, 4)}
NORMS = {
    "group_norm": {"num_groups": 2}, "layer_norm": {"normalized_shape": [6]}, "rms_norm": {"normalized_shape": [6]}, "instance_norm": {},
    "batch_norm": {"momentum": 0.1, "training": True},
}  # fmt: skip
NUMBERS = {
    "hardtanh": {"min_val": -0.5, "max_val": 0.5}, "clamp": {"min": -0.5, "max": 0.5}, "leaky_relu": {"negative_slope": 0.25}, "gelu": {"approximate": "none"},
    "softplus": {"beta": 1.0, "threshold": 20.0}, "elu": {"alpha": 1.0}, "celu": {"alpha": 1.0}, "softshrink": {"lambd": 0.5},
    **{name: {"value": 1.5} for name in ("add", "sub", "mul", "div", "rsub", "rdiv", "minimum", "maximum")},
    **{name: {"dim": 1} for name in ("softmax", "log_softmax")}, **{name: {"dim": 1, "keepdim": False} for name in ("min", "max")},
    **{name: {"dim": [1], "keepdim": False} for name in ("amin", "amax", "sum", "mean", "logsumexp")},
    "view": {"sizes": [2, -1]}, "dropout": {"p": 0.0, "training": True},
}  # fmt: skip


def rank_of(name: str) -> int:
    """The spatial axes that the operator's name tells, 2 where it tells none."""
    return int(name[-2]) if name.endswith("d") and name[-2].isdigit() else 2


def step(name: str) -> tuple[dict, list[tuple[int, ...]]]:
    """Options of the operator, and the shapes of what it takes: the value, its weight and bias."""
    rank, size = rank_of(name), SHAPES[rank_of(name)]
    if name == "linear":
        return {}, [(3, 8), (5, 8), (5,)]
    if name in PRODUCERS:
        geometry = {"stride": [2] * rank, "padding": [1] * rank, "dilation": [1] * rank, "groups": 2, "output_padding": [0] * rank}
        return geometry, [size, (4, 3 if "transpose" in name else 2, *[3] * rank), (6 if "transpose" in name else 4,)]
    if name in NORMS:
        channels = (6,) if "normalized_shape" in NORMS[name] else (4,)
        return NORMS[name] | {"eps": 1e-3}, [size, channels, channels]
    if "adaptive" in name:
        return {"output_size": [2] * rank}, [size]
    if "pool" in name:
        further = {"dilation": [1] * rank} if "max" in name else {"count_include_pad": False}
        return {"kernel_size": [3] * rank, "stride": [2] * rank, "padding": [1] * rank, "ceil_mode": True, **further}, [size]
    return NUMBERS.get(name, {}), [size]


def run(name: str, options: dict, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of everything the step takes."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    further = [torch.zeros(4, dtype=leaves[0].dtype), torch.ones(4, dtype=leaves[0].dtype), torch.zeros((), dtype=torch.int64)] if name == "batch_norm" else []
    made = call_of(name, options, "fp32")(*leaves, *further)
    y = made[0] if isinstance(made, tuple) else made
    grad = torch.linspace(-1, 2, y.numel()).to(leaves[0].dtype).reshape(y.shape)  # all types take the same values, but for their rounding
    return [y.detach(), *(found for found in torch.autograd.grad(y, leaves, grad, allow_unused=True) if found is not None)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_step_in_16_bits_is_right_on_a_cpu(name, dtype):
    options, shapes = step(name)
    generator = torch.Generator().manual_seed(3)
    away = lambda shape: (torch.rand(shape, generator=generator) + 0.5) * torch.randn(shape, generator=generator).sign()  # from 0, for quotients
    operands = [away(shape).to(dtype) for shape in shapes]
    found, wanted = run(name, options, operands), run(name, options, [operand.float() for operand in operands])
    assert len(found) == len(wanted)
    for place, (got, exact) in enumerate(zip(found, wanted, strict=True)):
        allowed = 3 if place == 0 else 16  # torch adds up gradients of parameters in their own type
        assert got.dtype is dtype and float((got.float() - exact).norm()) <= allowed * torch.finfo(dtype).eps * float(exact.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", sorted(SINGLE_ON_CPU))
def test_what_torch_lacks_is_rounded_once(name, dtype):
    options, (shape,) = step(name)
    v = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(call_of(name, options, "fp16")(v), call_of(name, options, "fp32")(v.float()).to(dtype))
