"""Small packages out of the real generator, imported under a name of their own: what the tests of whole models run."""

import importlib
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from codegen.folder import write_if_different
from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec

from .tiny_package import run_python

_numbers = itertools.count()

LINEAR = {"linear": {"name": "gemm", "in_features": 12, "out_features": 24}}
CONV = {"conv2d": {"name": "conv", "in_channels": 3, "out_channels": 8, "kernel_size": 3}}
LINEAR_CHAIN = [LINEAR, {"add": {"name": "bias", "shape": [24]}}, "mish", {"group_norm": {"name": "norm", "num_groups": 4}}, "silu"]
CONV_CHAIN = [
    CONV, "tanh", {"group_norm": {"name": "norm", "num_groups": 2}}, {"mul": {"name": "scale", "shape": [8, 1, 1], "init": "rand"}},
    {"max_pool2d": {"kernel_size": 2}}, {"clamp": {"min": -0.5, "max": 1.5}},
]  # fmt: skip
CHAINS = {"linear": LINEAR_CHAIN, "conv": CONV_CHAIN}
BIASLESS = {
    "linear": [{"linear": {**LINEAR["linear"], "bias": False}}, {"group_norm": {"name": "norm", "num_groups": 3, "affine": False}}, "gelu"],
    "conv": [
        {"conv2d": {**CONV["conv2d"], "out_channels": 6, "stride": [2, 1], "padding": [1, 2], "dilation": [1, 2], "groups": 3, "bias": False}},
        {"group_norm": {"name": "norm", "num_groups": 3}}, "hardswish",
    ],
}  # fmt: skip


def generate(
    folder: Path, chain: list[Any], precision: str = "fp32", batch: int = 6, spatial: tuple[int, int] = (9, 11), name: str | None = None,
    targets: tuple[str, ...] = ("cpu",), **options: Any,
) -> ModuleType:  # fmt: skip
    """The package of ``chain`` and of a spec's other ``options``, for the cpu target or others, written under ``folder`` and imported under a name
    that no other test has."""
    name = name or f"generated_{next(_numbers)}"
    data: dict[str, Any] = {"name": name, "batch": batch, "precision": precision, "chain": chain, **options}
    if "inputs" in options:
        pass
    elif isinstance(chain[0], dict) and "conv2d" in chain[0]:
        data["input"] = {"height": spatial[0], "width": spatial[1], "values": "randn"}
    else:
        data["input"] = {"values": "randn"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.yaml").write_text(json.dumps(data))  # JSON is YAML
    package = make_package(load_spec(folder / "spec.yaml"), targets)
    path = folder / package.spec.package
    write_if_different(path, render(package))
    return import_from(path, package.spec.package)


def import_from(path: Path, name: str) -> ModuleType:
    """The package in the folder ``path``, imported (again) as ``name``."""
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[str(path)])
    module = importlib.util.module_from_spec(spec)
    sys.modules.pop(f"{name}.model", None)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def assert_an_exported_program_runs(model: torch.nn.Module, package: ModuleType, x: torch.Tensor, folder: Path) -> None:
    """In a process that imports the package and constructs no model, the exported program gives the model's result; ``folder`` is for files."""
    with torch.no_grad():
        torch.export.save(torch.export.export(model, (x,)), folder / "program.pt2")
        torch.save([x, model(x)], folder / "values.pt")
    done = run_python(
        f"""
        import sys, torch
        sys.path.insert(0, {str(Path(package.__file__).parents[1])!r})
        import {package.__name__}
        x, y = torch.load({str(folder / "values.pt")!r})
        assert torch.equal(torch.export.load({str(folder / "program.pt2")!r}).module()(x), y)
        """
    )
    assert done.returncode == 0, done.stderr
