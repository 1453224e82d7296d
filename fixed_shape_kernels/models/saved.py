"""An optimised model on disk: the packages of its chains, the calls that they are for, and the report. Weights are not among them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from .installed import Optimized

FORMAT = 3
INDEX = "optimized.json"


def save_optimized(opt: Optimized, folder: str | Path) -> Path:
    """Write what is needed to put the same kernels into the same model without judging them again; returns the folder.

    Raises FileExistsError for a folder that holds something else, TypeError for a call with an argument that is neither a tensor nor plain, OSError where
    nothing can be written.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).is_file():
        raise FileExistsError(17, "the folder holds something else", str(folder))
    calls = [{"arguments": [_described(value) for value in call.arguments], "packages": {place: package.name for place, package in call.packages.items()}} for call in opt.calls]
    folder.mkdir(parents=True, exist_ok=True)
    for package in {package for call in opt.calls for package in call.packages.values()}:
        shutil.copytree(package, folder / package.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    index = {
        "format": FORMAT, "torch": torch.__version__, "model": type(opt._model).__name__, "training": opt._model.training, "trains": opt.trains, "precision": opt.precision,
        "apart": opt.apart, "calls": calls, "report": json.loads(opt.report.to_json()),
    }  # fmt: skip
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return folder


def read(folder: str | Path) -> dict[str, Any]:
    """The index of a folder that `save` wrote. Raises ValueError."""
    try:
        index = json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no optimised model: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{folder} holds an optimised model of another format; optimise again")
    return index


def _described(value: Any) -> Any:
    """An argument as plain data: of a tensor its shape and type."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (bool, int, float, str, type(None))):
        return {"value": value}
    raise TypeError(f"a call with a {type(value).__name__} cannot be saved; tensors, numbers, words and None can")


def argument(described: dict[str, Any], device: torch.device) -> Any:
    """The argument again: of a tensor one of zeros."""
    return torch.zeros(described["shape"], dtype=getattr(torch, described["dtype"]), device=device) if "shape" in described else described["value"]
