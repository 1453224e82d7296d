"""Norm kernels alone: chains to try, a build with nvcc, a launch through ctypes, and the chain by PyTorch's own operators.

The producer's result is drawn at random, so that a test sees the norm kernel's error and nothing else.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: F401  the operators' calls name it

from codegen.ops import Kind
from codegen.plan.floor import floor
from codegen.plan.model import Plan
from codegen.plan.norm.route import NormPlan, plan_norm
from codegen.plan.shared.moments import TileStatistics
from codegen.render import render_kernel
from codegen.ir.fused_form import FusedSpec
from codegen.targets import DEVICES, TARGETS
from tests.fused import load_fused

OUTLIER = {"float32": 1e6, "float16": 6e4, "bfloat16": 1e6}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A chain, given by its producer and the text of the operators around the norm; `tile` asks for statistics from the producer."""

    name: str
    batch: int
    channels: int
    groups: int
    size: tuple[int, int] | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    in_place: bool = False
    tile: int | None = None
    affine: bool = True

    def text(self) -> str:
        operators = [
            f"linear: {{name: gemm, in_features: 8, out_features: {self.channels}}}"
            if self.size is None
            else f"conv2d: {{name: conv, in_channels: 2, out_channels: {self.channels}, kernel_size: 1}}",
            *self.before,
            f"group_norm: {{name: norm, num_groups: {self.groups}, affine: {str(self.affine).lower()}}}",
            *self.after,
        ]
        head = f"name: {self.name}\nbatch: {self.batch}\nargs: {{}}\n"
        if self.size is not None:
            head += f"input: {{height: {self.size[0]}, width: {self.size[1]}}}\n"
        return head + "chain:\n" + textwrap.indent("\n".join(f"- {operator}" for operator in operators), "  ") + "\n"

    def spec(self, folder: Path, precision: str = "fp32") -> FusedSpec:
        path = folder / f"{self.name}.yaml"
        path.write_text(self.text())
        return load_fused(path, precision)

    def plan(self, folder: Path, precision: str = "fp32", device: str = "h100") -> Plan:
        spec, target = self.spec(folder, precision), TARGETS["sm_80"]
        norm = self.norm_plan(spec, device)
        return Plan(spec, target, DEVICES[device], norm.steps, norm.buffers, floor(spec, DEVICES[device]), norm.why)

    def norm_plan(self, spec: FusedSpec, device: str = "h100") -> NormPlan:
        bias = "conv.bias" if self.size is not None else None
        statistics = TileStatistics(self.tile, self.channels // self.tile, "tile_statistics") if self.tile else None
        return plan_norm(
            spec, TARGETS["sm_80"], DEVICES[device], source="y" if self.in_place else "t0", apply_before=not self.in_place,
            producer_bias=None if self.in_place else bias, statistics=statistics,
        )  # fmt: skip


LINEAR_CASES = (
    *(Case(f"width_{width}", 13, width * 3, 3) for width in (2, 3, 5, 17, 31, 32, 48, 100, 512, 1000)),
    Case("width_8192", 9, 16384, 2, after=("hardtanh: {min_val: -2.0, max_val: 2.0}",)),
    Case("width_65536", 150, 65536, 1),
    Case("width_65537", 2, 2 * 65537, 2, before=("add: {name: bias, shape: [131074]}",)),
    Case("mish_before", 33, 768, 24, before=("add: {name: bias, shape: [768]}", "hardtanh", "mish")),
    Case("one_factor", 33, 510, 10, before=("mul: {value: 0.5}",), after=("mul: {name: factor, shape: [1]}", "gelu")),
    Case("no_affine", 17, 640, 10, affine=False, after=("silu",)),
    Case("in_place", 33, 4096, 8, in_place=True, after=("hardtanh",)),
    Case("in_place_block", 9, 8192, 1, in_place=True),
    Case("in_place_stream", 140, 65536, 1, in_place=True),
    Case("tiles", 33, 4096, 8, in_place=True, tile=128, after=("hardtanh",)),
    Case("many_tiles", 9, 8192, 2, in_place=True, tile=64),
    Case("one_tile", 9, 120, 5, in_place=True, tile=24),
)
CONV_CASES = (
    Case("conv_odd", 5, 12, 4, (17, 19), before=("relu",), after=("mul: {name: scale, shape: [12, 1, 1]}", "relu")),
    Case("conv_even", 5, 12, 4, (16, 20), after=("add: {name: shift, shape: [12, 1, 1]}",)),
    Case("conv_long", 140, 4, 1, (128, 130)),
    Case("conv_split", 1, 4, 2, (200, 333)),
)
POOL_CASES = (
    Case("pool_scale_clamp", 5, 64, 16, (126, 126), after=("mul: {name: scale, shape: [64, 1, 1]}", "max_pool2d: {kernel_size: 4}", "clamp: {min: 0.0, max: 1.0}")),
    Case("pool_plain", 7, 16, 8, (30, 30), after=("max_pool2d: {kernel_size: 2}",)),
    Case("pool_odd", 5, 12, 4, (37, 39), after=("mul: {name: scale, shape: [12, 1, 1]}", "max_pool2d: {kernel_size: 3, stride: 2, padding: 1, ceil_mode: true}")),
    Case(
        "pool_falls", 5, 12, 4, (37, 39), before=("mish",),
        after=("mul: {value: -2.0}", "relu", "max_pool2d: {kernel_size: [3, 2], stride: [2, 3], padding: 1, dilation: [2, 1]}", "add: {name: shift, shape: [12, 1, 1]}"),
    ),
    Case("pool_mish", 5, 12, 4, (37, 39), after=("mish", "max_pool2d: {kernel_size: 3, stride: 2, padding: 1}", "mul: {name: scale, shape: [12, 1, 1]}")),
    Case("pool_overlapping", 3, 8, 2, (64, 66), after=("sigmoid", "max_pool2d: {kernel_size: 5, stride: 1}")),
    Case("pool_large", 140, 4, 1, (130, 130), after=("max_pool2d: {kernel_size: 2, stride: 1}", "tanh")),
    Case("pool_shared", 2, 8, 1, (130, 140), before=("mish",), after=("gelu", "max_pool2d: {kernel_size: 3, stride: 2, padding: 1}", "mul: {name: scale, shape: [8, 1, 1]}")),
    Case("pool_shared_rises", 1, 12, 2, (150, 151), after=("max_pool2d: {kernel_size: 2}", "tanh")),
    Case("pool_block", 3, 16, 1, (40, 48), after=("max_pool2d: {kernel_size: 2, stride: 2}",)),
    Case("pool_global", 3, 8, 2, (9, 9), after=("max_pool2d: {kernel_size: 9}",)),
    Case("pool_no_affine", 3, 8, 2, (9, 11), affine=False, after=("mul: {value: -1.5}", "max_pool2d: {kernel_size: 2}")),
    Case("pool_no_affine_twice", 3, 8, 2, (9, 11), affine=False, after=("mish", "mul: {value: -1.5}", "max_pool2d: {kernel_size: 2}")),
)  # fmt: skip
ALL_CASES = LINEAR_CASES + CONV_CASES + POOL_CASES


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or next((str(p) for p in (Path("/usr/local/cuda/bin/nvcc"),) if p.exists()), None)


def build(plan: Plan, folder: Path, arch: str) -> ctypes.CDLL:
    """Compile the plan's kernels into one library and load it."""
    sources = []
    for kernel in plan.kernels:
        source = folder / kernel.file(plan.target)
        source.write_text(render_kernel(plan, kernel))
        sources.append(str(source))
    library = folder / "kernels.so"
    command = [find_nvcc(), "-std=c++17", "-O3", f"-arch={arch}", "-shared", "-Xcompiler=-fPIC", "-o", str(library), *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return ctypes.CDLL(str(library))


def parameters(spec: FusedSpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random parameters in the storage type, on the GPU; each holds a zero and values of both signs."""
    made = {}
    for key, shape in spec.parameters:
        if not key.endswith(("gemm.weight", "conv.weight")):
            value = torch.randn(shape, generator=generator, device="cuda")
            if value.numel() > 1:
                value.view(-1)[1] = 0.0
            made[key] = value.to(DTYPES[spec.precision.dtype])
    return made


def draw(spec: FusedSpec, kind: str, generator: torch.Generator) -> torch.Tensor:
    """The producer's result: "normal", "offset" (a mean far above the spread), "outlier_first" and "outlier" (one value of each group a million
    times the others), "constant" (each group alike), "beyond" (squares, or the one of a value, exceed fp32's range) or "special" (NaN, inf)."""
    shape = spec.producer.output_shape
    value = torch.randn(shape, generator=generator, device="cuda")
    if kind == "offset":
        value = value * 0.01 + 100.0
    elif kind.startswith("outlier"):
        value.view(shape[0], spec.num_groups, -1)[:, :, 0 if kind == "outlier_first" else spec.group_size // 3] = OUTLIER[spec.precision.dtype]
    elif kind == "constant":
        value = value.view(shape[0], spec.num_groups, -1)[:, :, :1].expand(-1, -1, spec.group_size).reshape(shape).contiguous()
    elif kind == "beyond":
        value[::3] *= 1e36
        value[1::3].view(len(value[1::3]), -1)[:, 0] = 1e38
    elif kind == "special":
        flat = value.view(-1)
        flat[0], flat[flat.numel() // 2], flat[-1] = float("nan"), float("inf"), -float("inf")
    return value.to(DTYPES[spec.precision.dtype])


def reference(spec: FusedSpec, result: torch.Tensor, values: dict[str, torch.Tensor], from_bias: bool, from_before: bool, dtype: torch.dtype) -> torch.Tensor:
    """The chain behind the producer in `dtype`, by PyTorch's operators."""
    v = result.to(dtype)
    at = lambda key: values[key].to(dtype)  # noqa: E731
    if from_bias:
        v = v + at("conv.bias").view(1, -1, 1, 1)
    made = {spec.producer.index: v}
    for step in spec.chain[1 if from_before else spec.norm_index :]:
        if step.operator.kind is Kind.NORM:
            weights = [at(step.key(parameter)) for parameter in step.parameters] or [None, None]
            v = torch.nn.functional.group_norm(v, spec.num_groups, *weights, step.values["eps"])
        else:
            p = at(step.key(step.parameters[0])) if step.parameters else made.get(step.tap)
            v = eval(step.operator.call(step.values).format(v="v", p="p"), {"F": torch.nn.functional, "torch": torch, "v": v, "p": p})
        made[step.index] = v
    return v


def tile_statistics(result: torch.Tensor, tile: int) -> torch.Tensor:
    """(count, mean, mean_rest, M2) of each row's tiles, as a GEMM leaves them; an M2 beyond fp32's range is that of values times 2^-80, and negative."""
    tiles = result.double().view(result.shape[0], -1, tile)
    mean = tiles.mean(-1, keepdim=True)
    high = mean.float().double()
    m2 = ((tiles - mean) ** 2).sum(-1, keepdim=True)
    m2 = torch.where(m2 > torch.finfo(torch.float32).max, -m2 * 2.0**-160, m2)
    return torch.cat((torch.full_like(mean, tile), high, mean - high, m2), -1).float().contiguous()


def launch(plan: Plan, library: ctypes.CDLL, tensors: dict[str, torch.Tensor], stream: int) -> None:
    """Run the plan's launches on the tensors by name; raises RuntimeError with a launcher's error code."""
    for kernel in plan.kernels:
        pointers = [ctypes.c_void_p(tensors[name].data_ptr()) for name in kernel.arguments]
        code = getattr(library, kernel.function(plan.target))(*pointers, ctypes.c_int(torch.cuda.current_device()), ctypes.c_void_p(stream))
        if code:
            raise RuntimeError(f"{kernel.name}: error {code}")


def compute(case: Case, plan: Plan, library: ctypes.CDLL, result: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """y of a case for a producer's result, which is left as it was."""
    spec = plan.spec
    dtype = DTYPES[spec.precision.dtype]
    y = result.clone() if case.in_place else torch.full(spec.output_shape, float("nan"), dtype=dtype, device="cuda")
    tensors = {"t0": result, "y": y, **values}
    if case.tile:
        tensors["tile_statistics"] = tile_statistics(result, case.tile)
    for buffer in plan.buffers:
        tensors[buffer.name] = torch.empty(buffer.bytes, dtype=torch.uint8, device="cuda")
    launch(plan, library, tensors, torch.cuda.current_stream().cuda_stream)
    return y


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the exact result."""
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))
