"""Emitted CUDA compiles with nvcc: no warnings, spills, local memory or double arithmetic, inside its plan.

One kernel of each template in `make test`; in `make test-all` the sources of every shipped spec, the stages behind fused kernels, and chains that once were
at fault. A text that was compiled before is not compiled again (runtime/kernel_report.py).
"""

from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from codegen.numerics import PRECISIONS
from codegen.package import make_package
from codegen.plan import plan as plan_of
from codegen.plan.model import Kernel, Plan
from codegen.spec import load_spec, shipped
from tests.codegen import test_stages as stages
from tests.codegen.representatives import REPRESENTATIVES, TEMPLATES, representative
from tests.compile_matrix import faults

# name -> (target, precision, batch, input, chain): once a source of each did not compile, spilled or held a function that nothing called.
ONCE_AT_FAULT = {
    "halves behind fp32": ("sm_90a", "fp16", 1950, {}, [
        {"linear": {"name": "gemm", "in_features": 2048, "out_features": 8992}}, {"sub": {"name": "shift", "shape": [8992]}},
        {"layer_norm": {"name": "norm", "normalized_shape": 8992, "elementwise_affine": False}}, {"logsumexp": {"dim": 1, "keepdim": False}},
    ]),
    "no parameter in the epilogue": ("sm_90a", "tf32", 18, {}, [
        {"linear": {"name": "gemm", "in_features": 3072, "out_features": 33230, "bias": False}}, "celu", {"group_norm": {"name": "norm", "num_groups": 3323}},
    ]),
    "no channel in the epilogue": ("sm_90a", "fp16", 8416, {}, [
        {"linear": {"name": "gemm", "in_features": 2752, "out_features": 80, "bias": False}}, {"layer_norm": {"name": "norm", "normalized_shape": 80}},
    ]),
    "planes smaller than moments": ("sm_90a", "tf32", 2, {"height": 2, "width": 2}, [
        {"conv2d": {"name": "conv", "in_channels": 1, "out_channels": 8, "kernel_size": 1}}, {"group_norm": {"name": "norm", "num_groups": 1}},
    ]),
    "nine octets through registers": ("sm_90a", "fp16", 203, {"height": 54, "width": 54}, [
        {"conv2d": {"name": "conv", "in_channels": 72, "out_channels": 6, "kernel_size": 1}}, {"group_norm": {"name": "norm", "num_groups": 1, "affine": False}},
    ]),
    "no parameter before the norm": ("sm_80", "bf16", 7, {"height": 128, "width": 192}, [
        {"conv2d": {"name": "conv", "in_channels": 96, "out_channels": 36, "kernel_size": 2, "bias": False}}, "hardswish", {"group_norm": {"name": "norm", "num_groups": 4}},
    ]),
    "a plane of one value": ("sm_80", "fp16", 1, {"height": 4, "width": 4}, [
        {"conv2d": {"name": "conv", "in_channels": 2, "out_channels": 24, "kernel_size": 7, "stride": 3, "padding": 2}}, "relu",
        {"group_norm": {"name": "norm", "num_groups": 3}}, {"max_pool2d": {"kernel_size": 1}},
    ]),
    "a logarithm before narrow groups": ("sm_90a", "fp16", 2048, {}, [
        {"linear": {"name": "gemm", "in_features": 1024, "out_features": 4096}}, "logsigmoid", {"group_norm": {"name": "norm", "num_groups": 512}}, "sigmoid",
    ]),
    "a pooled group that blocks share": ("sm_80", "bf16", 2, {"height": 152, "width": 152}, [
        {"conv2d": {"name": "conv", "in_channels": 16, "out_channels": 48, "kernel_size": 2, "dilation": 3}}, "mish", {"group_norm": {"name": "norm", "num_groups": 1}},
        {"max_pool2d": {"kernel_size": 2}}, "gelu",
    ]),
    "many weights and pixels on their way": ("sm_80", "tf32", 128, {"height": 34, "width": 34}, [
        {"conv2d": {"name": "conv", "in_channels": 12, "out_channels": 4, "kernel_size": 5, "stride": 3, "bias": False}}, {"instance_norm": {"name": "norm", "num_features": 4}},
    ]),
    "many weights of two tiles": ("sm_80", "tf32", 4, {"height": 40, "width": 202}, [
        {"conv2d": {"name": "conv", "in_channels": 54, "out_channels": 32, "kernel_size": 2, "bias": False}}, {"layer_norm": {"name": "norm", "elementwise_affine": False}},
        {"clamp": {"min": -1.0}}, {"mul": {"value": 0.5}},
    ]),
    "a channel for each of 16 values": ("sm_80", "bf16", 1, {"height": 64, "width": 64}, [
        {"conv2d": {"name": "conv", "in_channels": 492, "out_channels": 71, "kernel_size": [2, 4], "padding": [3, 0], "bias": False}},
        {"div": {"name": "divisor", "shape": [71, 1, 1]}}, {"group_norm": {"name": "norm", "num_groups": 1}},
    ]),
    "a row that is folded without parameters": ("sm_80", "bf16", 4096, {}, [
        {"linear": {"name": "gemm", "in_features": 256, "out_features": 96}}, {"layer_norm": {"name": "norm", "normalized_shape": 96, "elementwise_affine": False}},
        "silu", {"max": {"dim": 1}},
    ]),
    "a row of logarithms that a block folds": ("sm_80", "fp16", 5, {}, [
        {"linear": {"name": "gemm", "in_features": 72, "out_features": 24576}}, "mish", {"layer_norm": {"name": "norm", "normalized_shape": 24576}}, "gelu",
        {"logsumexp": {"dim": 1}}, {"mul": {"name": "gain", "shape": [1]}},
    ]),
    "a pitch without parameters": ("sm_90a", "bf16", 4066, {}, [
        {"linear": {"name": "gemm", "in_features": 1024, "out_features": 5438, "bias": False}}, "sigmoid", {"group_norm": {"name": "norm", "num_groups": 1, "affine": False}}, "silu",
    ]),
    "seven warps": ("sm_80", "fp32", 48, {}, [
        {"linear": {"name": "gemm", "in_features": 192, "out_features": 3584}}, {"div": {"value": 0.0858}}, {"layer_norm": {"name": "norm", "normalized_shape": 3584}},
    ]),
}  # fmt: skip
PACKAGES = [(path, precision) for path in shipped() for precision in (("fp32",) if path.endswith("_small.yaml") else PRECISIONS)]


def assert_without_faults(kernels: Iterable[tuple[Plan, Kernel]], folder: Path) -> None:
    """Compile every kernel; fail with all that is wrong with them."""
    found = [fault for plan, kernel in kernels for fault in faults(plan, kernel, folder)]
    assert not found, "\n".join(found)


@pytest.mark.representative
@pytest.mark.parametrize("key", REPRESENTATIVES, ids=lambda key: " ".join(filter(None, key)))
def test_a_kernel_of_each_template_compiles_within_its_plan(key, tmp_path):
    assert_without_faults([representative(key, tmp_path)], tmp_path)


def test_every_template_has_a_representative():
    assert {template for template, _ in REPRESENTATIVES} == {str(path.relative_to(TEMPLATES)) for path in TEMPLATES.rglob("*.cu.j2")}


@pytest.mark.nvcc
@pytest.mark.parametrize(("path", "precision"), PACKAGES, ids=[f"{Path(path).stem}-{precision}" for path, precision in PACKAGES])
def test_shipped_specs_compile_within_their_plans(path, precision, tmp_path):
    plans = [plan for plan in make_package(load_spec(path, precision)).plans if plan.target.language == "cuda"]
    assert_without_faults([(plan, kernel) for plan in plans for kernel in plan.kernels], tmp_path)


@pytest.mark.nvcc
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("number", range(len(stages.CHAINS)))
def test_stages_compile_within_their_plans(number, precision, tmp_path):
    plan = stages.planned(tmp_path, number, precision, "sm_80")
    kernels = [kernel for kernel in plan.kernels if kernel.template.startswith("stages/") or getattr(kernel, "fold", None)]
    assert kernels
    assert_without_faults([(plan, kernel) for kernel in kernels], tmp_path)


@pytest.mark.nvcc
@pytest.mark.parametrize("name", ONCE_AT_FAULT)
def test_chains_that_were_at_fault_compile_within_their_plans(name, tmp_path):
    target, precision, batch, size, chain = ONCE_AT_FAULT[name]
    path = tmp_path / "chain.yaml"
    path.write_text(yaml.safe_dump({"name": "chain", "batch": batch, "input": size, "chain": chain, **({"gemm": "generated"} if target == "sm_90a" or "weights" in name else {})}))
    plan = plan_of(load_spec(path, precision), target, "h100")
    assert_without_faults([(plan, kernel) for kernel in plan.kernels], tmp_path)
