"""Specs: their types, and how they are read, written and documented."""

from codegen.spec.reader import benchmark, load_spec, named, resolve, shipped
from codegen.spec.types import ELSEWHERE, MAX_ELEMENTS, MAX_SIZES, PREPACKED, Input, Spec, SpecError, Step, result_shape

__all__ = ["Input", "ELSEWHERE", "MAX_ELEMENTS", "MAX_SIZES", "PREPACKED", "Spec", "SpecError", "Step", "benchmark", "load_spec", "named", "resolve", "result_shape", "shipped"]
