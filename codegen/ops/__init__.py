"""The operator table: rows, rules of shapes and texts, C functions with their derivatives."""

from codegen.ops.rules import Parameter, Shape, ShapeError, Values, broadcast
from codegen.ops.table import ALIASES, FILLS, OPERATORS, PARAMETER, REQUIRED, Argument, Kind, Operator

__all__ = ["ALIASES", "FILLS", "OPERATORS", "PARAMETER", "REQUIRED", "Argument", "Kind", "Operator", "Parameter", "Shape", "ShapeError", "Values", "broadcast"]
