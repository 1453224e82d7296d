"""The name `fixed_shapes` in torch.compile's list of backends, for a checkout that is not installed as for a distribution.

An installed distribution names its backend as an entry point. A checkout has none, so importing it adds a distribution of that entry point to what
importlib.metadata finds. No torch is imported here; where Dynamo has read its list already, the backend is registered there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, EntryPoint, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

GROUP, NAME, TARGET = "torch_dynamo_backends", "fixed_shapes", "fixed_shape_kernels.models.compiled:fixed_shapes"
PROJECT = "fixed-shape-kernels"


class _Checkout(Distribution):
    """The checkout as a distribution: its name and its entry point."""

    def read_text(self, filename: str) -> str | None:
        return {"METADATA": f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: 0\n", "entry_points.txt": f"[{GROUP}]\n{NAME} = {TARGET}\n"}.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parents[1] / path


class _Finder(DistributionFinder):
    """What importlib.metadata asks for distributions; it finds no modules."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context = DistributionFinder.Context()) -> Iterable[Distribution]:
        return [_Checkout()] if context.name in (None, PROJECT) else []


def announce() -> None:
    """Make `torch.compile(model, backend="fixed_shapes")` find the backend, whether torch is imported before or behind this package."""
    try:
        found = any(entry.group == GROUP and entry.name == NAME for entry in distribution(PROJECT).entry_points)
    except PackageNotFoundError:
        found = False
    if not found:
        sys.meta_path.append(_Finder())
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        registry._BACKENDS.setdefault(NAME, EntryPoint(NAME, TARGET, GROUP))
