"""The ``Model`` beside a package's ``ModelNew``: without memory of its own, for functional calls and for what its children are."""

import functools

import torch
from torch import nn

from .children import Child, children_of
from .errors import GradientError
from .package import Package


@functools.cache
def reference_of(model_class: type, package: Package) -> nn.Module | None:
    """The package's ``Model`` without memory of its own, for functional calls; None where the package has none."""
    reference = model_class._origin and model_class._origin[1]
    if reference is None:
        return None
    with torch.device("meta"):
        return reference(*(value for _, value in package.manifest.init_args))


@functools.cache
def children_of_model(model_class: type, package: Package) -> tuple[Child, ...]:
    reference = reference_of(model_class, package)
    return () if reference is None else children_of(reference)


def reference_for_gradients(model_class: type, package: Package) -> nn.Module:
    reference = reference_of(model_class, package)
    if reference is None:
        raise GradientError(f"{package.manifest.name} has no Model beside its ModelNew to differentiate; generate the package again.")
    return reference
