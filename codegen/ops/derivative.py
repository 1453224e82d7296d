"""Derivatives of arithmetic: how the gradient of v + p, of v * p and their like goes back to both.

Functions have theirs in functions.py, named `<name>_grad`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Derivative:
    """What becomes of `g`, the gradient of an operator's result, in C expressions of g, of the value {v} and of the other operand {p}.

    `shares` are (whose, expression) in the order in which they are formed: "p" is the gradient of the other operand, "v" replaces g by that of the value, so
    that what follows takes the new g. Without a "v", g is the value's too. `doubled` is the gradient of a value that meets itself, as in v + v; empty where
    no kernel takes such a step.
    """

    shares: tuple[tuple[str, str], ...]
    doubled: str = ""

    def taken(self, other: bool) -> tuple[tuple[str, str], ...]:
        """The shares that are formed: all of them where the `other` operand has a gradient, else the value's alone."""
        return tuple(share for share in self.shares if other or share[0] == "v")


ADD = Derivative((("p", "g"),), "g + g")
SUB = Derivative((("p", "-g"),))
MUL = Derivative((("p", "g * {v}"), ("v", "g * {p}")), "g * (2.0f * {v})")
DIV = Derivative((("v", "g / {p}"), ("p", "-(g * ({v} / {p}))")))
RSUB = Derivative((("p", "g"), ("v", "-g")))
RDIV = Derivative((("p", "g / {v}"), ("v", "-(g * ({p} / ({v} * {v})))")))
