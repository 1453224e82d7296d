"""The constructor's arguments, which are folded into the kernels: a model takes those that its package was generated for."""

from typing import Any, Sequence

from .errors import ArgumentError
from .manifest import Manifest


def check_init_args(manifest: Manifest, given: dict[str, Any]) -> None:
    folded = dict(manifest.init_args)
    for name in given:
        if name not in folded:
            raise ArgumentError(f"{name}: {manifest.name} takes no such argument; it takes {', '.join(folded) or 'none'}.")
    for name, value in folded.items():
        if name not in given:
            raise ArgumentError(f"{name}: expected {value!r}, got nothing; pass every argument of the original module.")
        if not _same(given[name], value):
            raise ArgumentError(
                f"{name}: expected {value!r}, got {given[name]!r}; {manifest.name} was generated for {name} = {value!r} "
                f"from {manifest.spec}; set {name} there and run {manifest.regenerate}."
            )


def _same(given: Any, folded: Any) -> bool:
    if isinstance(folded, tuple):
        return (
            isinstance(given, Sequence)
            and not isinstance(given, str)
            and len(given) == len(folded)
            and all(map(_same, given, folded))
        )
    if isinstance(given, bool) != isinstance(folded, bool):
        return False
    try:
        return bool(given == folded)
    except (RuntimeError, ValueError, TypeError):
        return False
