"""Signs of progress on the terminal's error stream; nothing is written where that is no terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")


def steps(items: Collection[Item], what: str) -> Iterator[Item]:
    """Iterate over `items` with a bar that counts them; none for a single one."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=len(items) < 2 or not console.is_terminal) as bar:
        yield from bar.track(items, description=what)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show that `what` goes on, for the length of a block."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
