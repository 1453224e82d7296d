"""Specs of the fused form for the tests of what serves those alone."""

from pathlib import Path

from codegen.ir.fused_form import FusedSpec
from codegen.spec import load_spec


def load_fused(path: str | Path, precision: str | None = None, prepack: bool = False) -> FusedSpec:
    """A spec that has the form. Raises ValueError for another, SpecError for a faulty one."""
    return FusedSpec.of(load_spec(path, precision, prepack))
