"""What is wrong with a problem file, with the line where it shows."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Fault:
    """One thing wrong, at a 1-based line of the problem file (0: of the file as a whole)."""

    line: int
    message: str


class Refused(Exception):
    """The file cannot become a spec; `faults` holds every reason found."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = sorted(set(faults))
        super().__init__("; ".join(f"line {fault.line}: {fault.message}" for fault in self.faults))


class Unfit(Exception):
    """An operator's call has no place in a chain; the message is a sentence for the file's author."""


def line_here(path: str) -> int:
    """The line of the file at `path` that is being executed; 0 where no frame is of that file."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == path:
            return frame.f_lineno
        frame = frame.f_back
    return 0


def line_of(error: BaseException, path: str) -> int:
    """The innermost line of the file at `path` that `error` came through; 0 where there is none."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def first_line(error: BaseException) -> str:
    """`TypeError: what it says`, the first line of the message alone."""
    said = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
