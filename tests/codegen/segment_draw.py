"""Random chains over the grammar of segments, and data that is hard for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch

from codegen.spec import Spec, SpecError
from tests.codegen.segment_chains import segment_spec

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 33, 64)
MOST_VALUES = 6000
FUNCTIONS = (
    "relu",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "mish",
    "hardswish",
    "softsign",
    "elu",
    {"leaky_relu": {"negative_slope": 0.2}},
    {"clamp": {"min": -1.5, "max": 2.0}},
)
FOLDS = ("min", "max", "amin", "amax", "sum", "mean", "logsumexp")


def random_spec(folder: Path, seed: int, precision: str = "fp32") -> Spec:
    """A valid chain of two to seven operators, drawn anew until there is one."""
    random = Random(seed)
    while True:
        shape = [random.choice(SIZES) for _ in range(random.randint(2, 5))]
        if 4 <= math.prod(shape) <= MOST_VALUES:
            made = _chain(folder, random, shape, precision)
            if made is not None:
                return made


def _chain(folder: Path, random: Random, shape: list[int], precision: str) -> Spec | None:
    inputs: dict[str, list[int]] = {}
    steps: list[Any] = []
    spec = None
    for number in range(random.randint(2, 7)):
        for _ in range(5):
            before = (spec.output_shape if spec else tuple(shape), list(spec.chain) if spec else [])
            step = _step(random, *before, number, inputs)
            try:
                spec = segment_spec(folder, shape, [*steps, step], precision, {k: v for k, v in inputs.items() if any(k in str(s) for s in (*steps, step))})
            except SpecError:
                continue
            steps.append(step)
            break
    return spec if spec is not None and math.prod(spec.output_shape) <= 4 * MOST_VALUES else None


def _step(random: Random, shape: tuple[int, ...], chain: list, number: int, inputs: dict[str, list[int]]) -> Any:
    rank = len(shape)
    name = f"step{number}"
    kind = random.choice(
        ("function", "function", "number", "parameter", "parameter", "tap", "input", "norm", "norm", "softmax", "fold", "pool", "pool", "shape")
    )
    arithmetic = random.choice(("add", "sub", "mul"))
    if kind == "function":
        function = random.choice(FUNCTIONS)
        return {function: {"name": name}} if isinstance(function, str) else function
    if kind == "number":
        return {arithmetic: {"name": name, "value": random.choice((0.5, -1.25, 2.0))}}
    if kind == "parameter":
        own = [size if random.random() < 0.6 else 1 for size in shape][random.randint(0, max(0, rank - 1)) :]
        return {arithmetic: {"name": name, "shape": own or [1]}}
    if kind == "tap":
        named = [step.name for step in chain if step.name and step.operator.kind.value != "shape"]
        return {arithmetic: {"from": random.choice(named)}} if named else "relu"
    if kind == "input":
        inputs[f"other{number}"] = [size if random.random() < 0.7 else 1 for size in shape][random.randint(0, max(0, rank - 1)) :] or [1]
        return {arithmetic: {"from": f"other{number}"}}
    if kind == "norm":
        return _norm(random, shape, name)
    if kind == "softmax":
        return {random.choice(("softmax", "log_softmax")): {"name": name, "dim": random.randrange(-rank, rank) if rank else 0}}
    if kind == "fold":
        fold = random.choice(FOLDS)
        axes = sorted(random.sample(range(rank), random.randint(1, max(1, min(3, rank - 1))))) if rank else [0]
        return {fold: {"name": name, "dim": axes[0] if fold in ("min", "max") else axes, "keepdim": random.random() < 0.5}}
    if kind == "pool" and 3 <= rank <= 5:
        return _pool(random, shape, name)
    return random.choice(({"flatten": {"start_dim": random.randrange(max(1, rank - 1))}}, {"unsqueeze": {"dim": random.randrange(rank + 1)}}, "silu"))


def _norm(random: Random, shape: tuple[int, ...], name: str) -> Any:
    norm = random.choice(("group_norm", "layer_norm", "instance_norm", "batch_norm", "rms_norm"))
    if norm == "group_norm":
        divisors = [n for n in range(1, shape[1] + 1) if shape[1] % n == 0] if len(shape) > 1 else [1]
        return {norm: {"name": name, "num_groups": random.choice(divisors), "affine": random.random() < 0.7}}
    if norm in ("layer_norm", "rms_norm"):
        return {norm: {"name": name, "normalized_shape": list(shape[random.randint(1, max(1, len(shape) - 1)) :]) or [1], "eps": 1e-3}}
    if norm == "instance_norm":
        return {norm: {"name": name, "affine": random.random() < 0.5}}
    return {norm: {"name": name, "momentum": random.choice((0.1, 0.3, None)), "track_running_stats": random.random() < 0.7, "affine": random.random() < 0.7}}


def _pool(random: Random, shape: tuple[int, ...], name: str) -> Any:
    rank = len(shape) - 2
    if random.random() < 0.2:
        return {f"adaptive_avg_pool{rank}d": {"name": name, "output_size": [random.choice((1, 2, 3, size)) for size in shape[2:]]}}
    size = [random.randint(1, min(4, extent)) for extent in shape[2:]]
    values = {
        "name": name, "kernel_size": size, "stride": [random.randint(1, 3) for _ in size], "padding": [random.randint(0, extent // 2) for extent in size],
        "ceil_mode": random.random() < 0.4,
    }  # fmt: skip
    if random.random() < 0.5:
        return {f"max_pool{rank}d": values | {"dilation": [random.randint(1, 2) for _ in size]}}
    return {f"avg_pool{rank}d": values | {"count_include_pad": random.random() < 0.5} | ({"divisor_override": 3} if rank > 1 and random.random() < 0.2 else {})}


def hard_data(x: torch.Tensor, seed: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor like `x`): what kernels of norms, softmax and folds go wrong with."""
    generator = torch.Generator(x.device).manual_seed(seed)

    def put(*values: float) -> torch.Tensor:
        made = x.clone()
        for value in values:
            made.view(-1)[torch.randint(made.numel(), (2,), generator=generator, device=x.device)] = value
        return made

    yield "plain", x
    yield "nan", put(math.nan)
    yield "infinity", put(math.inf)
    yield "both infinities", put(math.inf, -math.inf)
    yield "all infinite", torch.full_like(x, -math.inf)
    yield "ties", (x * 2).round()
