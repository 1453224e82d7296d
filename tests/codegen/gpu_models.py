"""An emitted package through the runtime, for the tests that compare it with its reference on a device."""

import copy
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from codegen.folder import write_if_different
from codegen.manifest import Package
from codegen.plan.model import Plan
from codegen.render import render
from codegen.ir.fused_form import FusedSpec
from tests.codegen.gemm_promise import round_to_tf32
from tests.fused import load_fused


def built_models(package: Package, folder: Path, device: str = "cuda") -> tuple[torch.nn.Module, torch.nn.Module]:
    """(ModelNew, Model) of the package, which has one target, on `device` and with equal parameters.

    The producer's are the initial ones, all others normal random numbers.
    """
    spec, (plan,) = package.spec, package.plans
    write_if_different(folder / spec.package, render(package))
    with mock.patch.dict(os.environ, TARGETS=plan.target.name), mock.patch.object(sys, "path", [str(folder), *sys.path]):
        forget(spec.package)
        try:
            module = importlib.import_module(spec.package)
            torch.manual_seed(0)
            ours = module.ModelNew(*module.get_init_inputs()).to(device)
            eager = module.Model(*module.get_init_inputs()).to(device)
        finally:
            forget(spec.package)
    generator = torch.Generator(device).manual_seed(1)
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            if not key.startswith(f"{spec.chain[0].name}."):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device))
        eager.load_state_dict(ours.state_dict())
    return ours, eager


def built_convolution(folder: Path, name: str, chain: dict[str, Any], precision: str, planned: Callable[[FusedSpec], Plan]) -> tuple[FusedSpec, torch.nn.Module, torch.nn.Module]:
    """(spec, ModelNew, Model) of a chain by the plan of `planned`, on the GPU with the same random parameters, gamma 0 and negative ones among them."""
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(chain | {"name": f"conv_{name}"}, sort_keys=False))
    spec = load_fused(path, precision)
    ours, eager = built_models(Package(spec, (planned(spec),)), folder)
    with torch.no_grad():
        for model in (ours, eager):
            model.norm.weight[0] = 0.0
    return spec, ours, eager


@torch.no_grad()
def exact(eager: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The model's result in float64."""
    return copy.deepcopy(eager).double()(x.double())


@torch.no_grad()
def tf32_result(eager: torch.nn.Module, x: torch.Tensor, producer: str) -> torch.Tensor:
    """The model's result with operands rounded to TF32, everything else in float64."""
    coarse = copy.deepcopy(eager)
    weight = coarse.get_submodule(producer).weight
    weight.copy_(round_to_tf32(weight))
    return exact(coarse, round_to_tf32(x))


def forget(package: str) -> None:
    """Drop the package's modules: the next one of that name lies in another folder."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
