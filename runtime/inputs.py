"""Inputs of a layer beside x: which argument is which, and whether each is what its kernels were made for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from .checks import argument_name, not_dense, wrong_other
from .errors import CallError
from .launch import dtype_named
from .manifest import Manifest, TensorSpec
from .operators import Operators, operators_for
from .package import Package


@dataclass(frozen=True)
class Size:
    """A batch that a package was made for: the shape of x, the other inputs, and the operators that compute it."""

    batch: int
    shape: torch.Size
    others: tuple[tuple[TensorSpec, torch.Size, torch.dtype], ...]
    operators: Operators

    def check_others(self, others: tuple, device: torch.device) -> None:
        """Raises CallError for an input that is not what the kernels read, or not on the device of x."""
        for (spec, shape, dtype), tensor in zip(self.others, others):
            try:
                fits = isinstance(tensor, torch.Tensor) and tensor.shape == shape and tensor.dtype is dtype and tensor.device == device
            except RuntimeError:  # a nested tensor has no shape
                fits = False
            fault = not_dense(argument_name(self.operators.package.manifest, spec), tensor, True) if isinstance(tensor, torch.Tensor) else None
            if fault is not None or not fits:
                raise fault or wrong_other(self.operators.package.manifest, spec, tensor, device)

    def padded(self, x: torch.Tensor, others: tuple) -> tuple:
        """All inputs, those that have a row for each sample of x with rows of zeros behind them."""
        rows = x.shape[:1]
        batched = (given.shape[:1] == rows and spec.batched for (spec, *_), given in zip(self.others, others))
        return self._more_rows(x), *(self._more_rows(given) if more else given for given, more in zip(others, batched))

    def _more_rows(self, given: torch.Tensor) -> torch.Tensor:
        return functional.pad(given, [0, 0] * (given.dim() - 1) + [0, self.batch - given.shape[0]])


def sizes_of(package: Package) -> tuple[Size, ...]:
    """The batches of a package, in ascending order."""
    return tuple(_size(size) for size in package.sizes)


def _size(package: Package) -> Size:
    manifest = package.manifest
    others = tuple((spec, torch.Size(spec.shape), dtype_named(spec.dtype)) for spec in manifest.others)
    return Size(manifest.batch, torch.Size(manifest.input.shape), others, operators_for(package))


def bound(manifest: Manifest, others: tuple, named: Mapping[str, Any]) -> tuple:
    """The inputs behind the first, by place or by name. Raises CallError for other inputs than the layer has."""
    names = manifest.arguments[1:]
    if len(others) + len(named) != len(names) or any(name not in names[len(others) :] for name in named):
        got = ", ".join([f"{1 + len(others)} by place", *(f"{name}=" for name in named)])
        raise CallError(f"{manifest.name} takes the inputs {', '.join(manifest.arguments)}; got {got}.")
    return (*others, *(named[name] for name in names[len(others) :]))
