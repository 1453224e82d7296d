"""An emitted package through the runtime, for the tests that compare it with its reference on a device."""

import importlib
import os
import sys
from pathlib import Path
from unittest import mock

import torch

from codegen.folder import write_if_different
from codegen.manifest import Package
from codegen.render import render


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
            if not key.startswith(f"{spec.producer.name}."):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device))
        eager.load_state_dict(ours.state_dict())
    return ours, eager


def forget(package: str) -> None:
    """Drop the package's modules: the next one of that name lies in another folder."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
