"""Kernels whose arguments are listed as C pointers."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.plan.model import Kernel


@dataclass(frozen=True)
class Pointer:
    """A launcher's argument: C type, C name, and whether the kernel writes it."""

    c_type: str
    name: str
    written: bool = False

    def declaration(self, restrict: bool = False) -> str:
        const = "" if self.written else "const "
        return f"{const}{self.c_type}* {'__restrict__ ' if restrict else ''}{self.name}"


@dataclass(frozen=True)
class PointerKernel(Kernel):
    """A kernel whose arguments are listed as C pointers."""

    pointers: tuple[Pointer, ...] = ()

    def restricted(self, pointers: tuple[Pointer, ...]) -> list[str]:
        """Parameter declarations of a CUDA function."""
        return [p.declaration(restrict=True) for p in pointers]

    @property
    def declarations(self) -> list[str]:
        return [p.declaration() for p in self.pointers]

    @property
    def names(self) -> list[str]:
        return [p.name for p in self.pointers]
