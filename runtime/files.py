"""Reading JSON that may be damaged, and saying why a file operation failed.

One errno stands for one cause, and each cause has a remedy of its own.
"""

import errno
import json
import mmap
from pathlib import Path
from typing import BinaryIO

# What an error number says about the place where a file was to be written, and what its user can do.
_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("this user's disk quota is used up", "remove some of this user's files"),
    errno.EFBIG: ("a file became larger than this user may write", "raise the limit (ulimit -f)"),
    errno.EROFS: ("it is on a read-only file system", ""),
    errno.EACCES: ("this user may not write there", ""),
    errno.EPERM: ("this user may not write there", ""),
    errno.ENOTDIR: ("a file stands where a folder is needed", ""),
    errno.EEXIST: ("a file stands where a folder is needed", ""),
    errno.ENAMETOOLONG: ("its path is too long", ""),
    errno.ELOOP: ("its symbolic links lead in a circle", ""),
    errno.EIO: ("its disk or network drive fails", "repair the drive"),
    errno.ESTALE: ("its network drive was changed by its server", "mount the drive again"),
    errno.ENOLCK: ("its file system gives no locks", ""),
    errno.EOPNOTSUPP: ("its file system lacks something that is needed, such as locks", ""),
    errno.ENOSYS: ("its file system lacks something that is needed, such as locks", ""),
    errno.EMFILE: ("this process has too many files open", "close some or raise the limit (ulimit -n)"),
    errno.ENFILE: ("this machine has too many files open", "close some"),
}
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def cause_of(error: OSError) -> str:
    """Why ``error`` happened, with the system's own words and the file in brackets."""
    said = error.strerror or str(error)
    said = f"{said}: {error.filename}" if error.filename else said
    known = _CAUSES.get(error.errno)
    return f"{known[0]} ({said})" if known else said


def remedy_for(error: OSError) -> str:
    """The remedy for the cause itself, without another folder; empty where there is none."""
    return _CAUSES.get(error.errno, ("", ""))[1]


def read_json(path: Path) -> object:
    """The contents of a JSON file. Raises OSError where it cannot be read and ValueError where it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:  # the parser's answer to thousands of open brackets
        raise ValueError("it is nested too deeply") from error


def can_be_executed(file: BinaryIO) -> bool:
    """Whether the system maps an open file that is not empty as code, which it refuses on a file system mounted noexec."""
    try:
        mmap.mmap(file.fileno(), 1, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except (OSError, ValueError):
        return False
    return True


def can_be_loaded(path: Path) -> bool:
    """The same of a file by its path."""
    try:
        with open(path, "rb") as file:
            return can_be_executed(file)
    except OSError:
        return False
