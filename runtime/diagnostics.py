"""Turns a failed build's output into what its reader needs: the message and the source lines around it."""

import re
from dataclasses import dataclass

from .process import Finished

CONTEXT = 5  # source lines shown on either side
MESSAGES = 10  # further compiler errors listed after the first

# nvcc and its front end: "gemm.cu(12): error: ..."; g++: "cpu.cpp:12:5: error: ..."
_NVCC_ERROR = re.compile(r"^(?P<file>[^\s():]+)\((?P<line>\d+)\): (?:catastrophic |fatal )?error(?: #\S+)?: (?P<text>.*)$")
_GXX_ERROR = re.compile(r"^(?P<file>[^\s():]+):(?P<line>\d+):(?P<column>\d+): (?:fatal )?error: (?P<text>.*)$")
_OTHER_ERROR = re.compile(r"\b(error|undefined reference|fatal)\b", re.IGNORECASE)

NO_ROOM = r"No space left on device"

HINTS = {
    r"unsupported GNU version": "this nvcc does not accept this g++: set CXX to an older g++, or install a newer CUDA toolkit",
    r"Killed|signal 9|terminated by signal": "a compiler was killed, probably for lack of memory: set MAX_JOBS=1",
    NO_ROOM: "the disk is full: free some space, or set CODEGEN_CACHE (and TMPDIR) to another disk",
    r"Disk quota exceeded": "this user's disk quota is used up: remove some of this user's files, or set CODEGEN_CACHE (and TMPDIR) to another disk",
    r"Unsupported gpu architecture": "this nvcc does not know this device: install a newer CUDA toolkit",
    r"cannot find -lgomp|libgomp.spec": "g++ lacks its OpenMP library: install libgomp",
}


def ran_out_of_room(finished: Finished) -> bool:
    """Whether a compiler says that it could not write, for lack of room on the disk or of quota."""
    return re.search(rf"{NO_ROOM}|Disk quota exceeded", finished.output) is not None


@dataclass(frozen=True)
class Located:
    """One compiler error. ``column`` counts from 1; None where the compiler did not say."""

    file: str
    line: int
    column: int | None
    message: str

    def __str__(self):
        return f"{self.file}, line {self.line}: {self.message}"


def explain_failure(finished: Finished, sources: dict[str, bytes]) -> str:
    """What went wrong, with the lines around the first error and a hint where the cause is a known one."""
    lines = finished.output.splitlines()
    located = find_errors(lines)
    if located:
        text = str(located[0]) + _excerpt(located[0], sources)
        text += "".join(f"\n  {other}" for other in located[1 : 1 + MESSAGES])
    else:
        said = [line for line in lines if _OTHER_ERROR.search(line)] or lines[-2 * MESSAGES :]
        text = "\n".join(said[: 2 * MESSAGES]) or f"the build ended with status {finished.status} and said nothing"
    hints = [hint for pattern, hint in HINTS.items() if re.search(pattern, finished.output)]
    return text + "".join(f"\nHint: {hint}." for hint in hints)


def find_errors(lines: list[str]) -> list[Located]:
    """Every error that names a file and a line, in the order they were printed."""
    found = []
    for index, line in enumerate(lines):
        if match := _NVCC_ERROR.match(line):
            column = _column_of_caret(lines[index + 1 : index + 3])
            found.append(Located(match["file"], int(match["line"]), column, match["text"]))
        elif match := _GXX_ERROR.match(line):
            found.append(Located(match["file"], int(match["line"]), int(match["column"]), match["text"]))
    return found


def _column_of_caret(following: list[str]) -> int | None:
    """nvcc gives no column, but repeats the source line two blanks further in, with a caret below it."""
    if len(following) == 2 and following[1].strip() == "^":
        return following[1].index("^") - 1
    return None


def _excerpt(error: Located, sources: dict[str, bytes]) -> str:
    if error.file not in sources:
        return ""
    lines = sources[error.file].decode("utf-8", "replace").splitlines()
    first, last = max(1, error.line - CONTEXT), min(len(lines), error.line + CONTEXT)
    width = len(str(last))
    text = ""
    for number in range(first, last + 1):
        line = lines[number - 1]
        text += f"\n{'>' if number == error.line else ' '} {number:{width}} | {line}"
        if number == error.line and error.column is not None:
            before = line[: error.column - 1].ljust(error.column - 1)
            text += f"\n  {'':{width}} | {''.join(c if c == chr(9) else ' ' for c in before)}^"
    return text
