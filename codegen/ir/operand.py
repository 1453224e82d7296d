"""Operands: the parameters that kernels read beside their values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """A parameter's tensor: its key in state_dict, its C identifier, and whether it has a value for each channel or one for all."""

    key: str
    pointer: str
    per_channel: bool = True


def c_identifier(key: str) -> str:
    """`group_norm.weight` -> `group_norm_weight`."""
    return key.replace(".", "_")


def operand_of(key: str, per_channel: bool = True) -> Operand:
    """The operand of a key under its own name."""
    return Operand(key, c_identifier(key), per_channel)
