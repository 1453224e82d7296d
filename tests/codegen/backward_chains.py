"""A chain's backward for tests: the emitted kernel through ctypes, autograd beside it, and what the difference may be."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from codegen.plan.backward.cpu import gradient_keys, plan_backward
from codegen.plan.model import Launch, Plan
from codegen.render import render_kernel
from codegen.spec import Spec
from codegen.targets import DEVICES, TARGETS
from codegen.torch_text import reference_lines
from tests.codegen.cpu_chains import Chain, compiled, conv_chain, linear_chain, make_spec, relative_error
from tests.codegen.test_cpu import ELEMENTWISE, POOLS, PRECISIONS

# A gradient is computed in fp32 and rounded once to the storage type, whose rounding error is at most this.
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# What fp32 loses on the way: the derivatives' own errors (at most 8 units of 2^-24), and the differences that the norm's derivative takes.
FP32_ERROR = 16 * 2.0**-24


class Backward:
    """A chain's gradients by the emitted kernel and by PyTorch."""

    def __init__(self, chain: Chain, plan: Plan, device: str = "cpu"):
        self.chain, self.plan, self.library, self.device = chain, plan, None, device

    def kernel(self, source: torch.Tensor, grad_y: torch.Tensor, threads: int = 1) -> dict[str, torch.Tensor]:
        """Gradients by name, `t0` first, on the CPU. `threads` counts where the kernel runs there."""
        launches = [step for step in self.plan.steps if isinstance(step, Launch)]
        tensors = {"t0": source, "grad:y": grad_y, **{key: p.detach() for key, p in self.chain.module.named_parameters()}}
        made = [f"grad:{name}" for name in ("t0", *gradient_keys(self.chain.spec))]
        for name in made:
            tensors[name] = torch.full(tensors[name.removeprefix("grad:")].shape, torch.nan, dtype=self.chain.dtype)
        for buffer in self.plan.buffers:
            dtype = getattr(torch, buffer.dtype) if buffer.dtype else torch.uint8
            tensors[buffer.name] = torch.full(buffer.shape or (buffer.bytes,), torch.nan if buffer.dtype else 255, dtype=dtype)
        tensors = {name: tensor.contiguous().to(self.device) for name, tensor in tensors.items()}
        place = (threads, None) if self.device == "cpu" else (torch.cuda.current_device(), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        for launch in launches:
            pointers = [ctypes.c_void_p(tensors[name].data_ptr()) for name in launch.arguments]
            assert getattr(self.library, launch.kernel.function(self.plan.target))(*pointers, *place) == 0
        return {name.removeprefix("grad:"): tensors[name].cpu() for name in made}

    def pytorch(self, source: torch.Tensor, grad_y: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Autograd's gradients at `dtype`."""
        module = self.chain.module.to(dtype)
        module.zero_grad()
        leaf = source.to(dtype).detach().requires_grad_()
        names = {"torch": torch, "F": torch.nn.functional, "self": module, "v": leaf}
        exec("\n".join(reference_lines(self.chain.spec)[1:]), names)  # noqa: S102
        names["v"].backward(grad_y.to(dtype))
        found = {"t0": leaf.grad, **{key: p.grad for key, p in module.named_parameters() if p.grad is not None}}
        module.zero_grad()
        module.to(self.chain.dtype)
        return found


def build_backwards(folder: Path, specs: Sequence[Spec]) -> list[Backward]:
    """The cpu target's backwards of `specs`, their kernels compiled together."""
    made, texts = [], []
    for i, spec in enumerate(specs):
        plan = plan_backward(spec, TARGETS["cpu"], DEVICES["host"])
        steps = [replace(step, kernel=replace(step.kernel, name=f"backward{i}_{step.kernel.name}")) for step in plan.steps if isinstance(step, Launch)]
        plan = replace(plan, steps=tuple(steps))
        made.append(Backward(Chain(spec, seed=i), plan))
        texts += [render_kernel(plan, kernel) for kernel in plan.kernels]
    library = compiled(folder, "backward", texts)
    for backward in made:
        backward.library = library
    return made


def check(backward: Backward, source: torch.Tensor, factor: float = 1.1, steeper: float = 1.0) -> None:
    """Compare with float64 autograd; `factor`: what an error may be in fp32, of eager's; `steeper`: how much the chain magnifies what fp32 loses."""
    chain = backward.chain
    generator = torch.Generator().manual_seed(0)
    grad_y = torch.randn(chain.spec.output_shape, generator=generator).to(chain.dtype)
    exact = backward.pytorch(source, grad_y, torch.float64)
    eager = backward.pytorch(source, grad_y, chain.dtype)
    got = backward.kernel(source, grad_y)
    assert got.keys() == exact.keys()
    for name, gradient in got.items():
        ours, theirs = relative_error(gradient, exact[name]), relative_error(eager[name], exact[name])
        # In half precision eager's error is large against fp32's: where terms cancel, a twentieth of it is still no half-precision result.
        lost = steeper * FP32_ERROR * (8.0 if gradient.numel() == 1 else 1.0)  # one sum may cancel, and has no others beside it
        allowed = ROUNDING[chain.dtype] + max(lost, (factor if chain.dtype is torch.float32 else 0.05) * theirs)
        assert ours <= allowed, f"{chain.spec.precision.name} {name}: error {ours:.3g}, eager's {theirs:.3g}, allowed {allowed:.3g}"


def elementwise_specs(folder: Path, name: str) -> list[Spec]:
    """An operator on both sides of the norm, and behind a pooling, at every precision."""
    op = ELEMENTWISE[name]
    specs = [make_spec(folder, linear_chain([op], [op], 7 * width, 7), 5, precision) for precision, width in zip(PRECISIONS, (17, 5, 48))]
    pooled = [op, {"max_pool2d": {"kernel_size": 2}}, op]
    return [*specs, make_spec(folder, conv_chain([op], pooled, 6, 3), 3, "fp32", (6, 7))]


def operand_specs(folder: Path, operands: Callable[[str, list[int]], list], pools: Callable[[list[int]], list]) -> list[Spec]:
    """Arithmetic with a tensor: a value per channel or one for all; before the norm, behind it, and behind a pooling; values needed or not.

    `operands(prefix, shape)` are the operators, `pools(shape)` what follows those behind a convolution's norm.
    """
    specs = []
    for precision, shape in zip(PRECISIONS, ([12], [1], [12])):
        specs.append(make_spec(folder, linear_chain(operands("before", shape), operands("after", shape), 12, 3), 70, precision))
        chain = linear_chain([*operands("before", shape), "mish"], ["silu", *operands("after", shape)], 12, 3, affine=False)
        specs.append(make_spec(folder, chain, 5, precision))
    for precision, shape in zip(PRECISIONS, ([12, 1, 1], [1], [1, 12, 1, 1])):
        chain = conv_chain(operands("before", shape), [*operands("after", shape), *pools(shape)], 12, 3)
        specs.append(make_spec(folder, chain, 4, precision, (7, 6)))
        specs.append(make_spec(folder, conv_chain(operands("before", shape), operands("after", shape), 12, 3, affine=False), 3, precision, (5, 3)))
    specs.append(make_spec(folder, linear_chain([], [], 12, 3), 3))
    specs.append(make_spec(folder, linear_chain([], ["relu"], 12, 12 // 2, affine=False), 3))
    return [*specs, make_spec(folder, conv_chain([], [{"max_pool2d": {"kernel_size": 2}}], 4, 1, affine=False), 3, "bf16", (4, 4))]


def pool_specs(folder: Path, name: str) -> list[Spec]:
    """A kind of window. Equal values in a window are common in half precision, and where a bound cuts the largest off."""
    arguments, size = POOLS[name]
    bounded = [{"hardtanh": {"min_val": -0.25, "max_val": 0.25}}, {"max_pool2d": arguments}, {"mul": {"value": 1.5}}]
    specs = [make_spec(folder, conv_chain([], [{"max_pool2d": arguments}], 6, 3), 2, precision, size) for precision in PRECISIONS]
    return [*specs, make_spec(folder, conv_chain([], bounded, 6, 3), 2, "fp32", size)]
