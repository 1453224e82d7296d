"""Specs: their types, and how they are read, written and documented."""

from codegen.spec.types import ELSEWHERE, MAX_ELEMENTS, MAX_SIZES, PREPACKED, Spec, SpecError, Step, load_spec, named, resolve, result_shape, shipped

__all__ = ["ELSEWHERE", "MAX_ELEMENTS", "MAX_SIZES", "PREPACKED", "Spec", "SpecError", "Step", "load_spec", "named", "resolve", "result_shape", "shipped"]
