"""Where the cache can be: the folder that the environment names, and what a folder must be good for.

A folder is tried out before anything is compiled: owned by this user alone, writable, with room, with file locks, and with
leave to load libraries from it. What it lacks is told by its cause.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError
from .files import can_be_executed, cause_of, remedy_for

LAYOUT = "v1"
ENVIRONMENT = "CODEGEN_CACHE"
XDG = "XDG_CACHE_HOME"
ROOM = 16_000_000  # bytes that nvcc may need for one source and what lies between its passes

NOEXEC = "libraries cannot be loaded from it: it is mounted noexec, or a security policy forbids it"


@dataclass(frozen=True)
class Wanted:
    """The folder that the environment asks for; ``root`` is None where it names none.

    ``problem`` says why, and ``notice`` what was passed over on the way.
    """

    root: Path | None
    problem: str = ""
    notice: str = ""


@dataclass(frozen=True)
class Place:
    """The folder in use. ``notice`` is the sentence for its user where it is not the wanted one, else empty."""

    root: Path
    notice: str = ""


def wanted_root() -> Wanted:
    """Below CODEGEN_CACHE, else XDG_CACHE_HOME, else ~/.cache.

    A relative XDG_CACHE_HOME is passed over, as the XDG Base Directory Specification demands.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        expanded = os.path.expanduser(named)
        if expanded.startswith("~"):
            return Wanted(None, f"{ENVIRONMENT} is {named!r}, and that home folder is not known")
        return Wanted(Path(os.path.abspath(expanded)) / LAYOUT)
    base, notice = os.environ.get(XDG), ""
    if base and not os.path.isabs(base):
        notice = f"{XDG} is {base!r}, which is no absolute path and is passed over"
        base = None
    if base:
        return Wanted(Path(base) / "codegen" / LAYOUT)
    home = os.path.expanduser("~")
    if home.startswith("~"):
        return Wanted(None, "this user has no home folder", notice)
    if not os.path.isabs(home):
        return Wanted(None, f"HOME is {home!r}, which is no absolute path", notice)
    return Wanted(Path(home) / ".cache" / "codegen" / LAYOUT, notice=notice)


def readable_root() -> Path | None:
    """The wanted folder where it is there, this user's, and closed to other writers; nothing is made or changed."""
    root = wanted_root().root
    try:
        status = None if root is None else root.lstat()
    except OSError:
        return None
    if status is None or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return None
    return root


def usable_place() -> Place:
    """The wanted folder, else a folder of this user in the system's temporary folder.

    Raises BuildError, with the cause for each, where none of them can hold built libraries.
    """
    wanted = wanted_root()
    problem = wanted.problem or problem_with(wanted.root)
    if not problem:
        passed_over = f"{wanted.notice}; the build cache is {wanted.root}." if wanted.notice else ""
        return Place(wanted.root, passed_over)
    asked = f"{wanted.root} " if wanted.root else ""
    try:
        temporary = Path(tempfile.gettempdir())
        fallback = temporary / f"codegen-cache-{os.geteuid()}" / LAYOUT
        beside = problem_with(fallback)
        if beside or not _is_private(fallback.parent):
            fallback = Path(tempfile.mkdtemp(prefix="codegen-cache-")) / LAYOUT
            beside = problem_with(fallback)
            if beside:
                shutil.rmtree(fallback.parent, ignore_errors=True)
    except OSError as error:
        temporary, beside = "the temporary folder", cause_of(error)
    if beside:
        raise BuildError(
            f"there is no folder for built libraries: the build cache {asked}cannot be used ({problem}), nor can {temporary} ({beside}); "
            f"set {ENVIRONMENT} to a folder on a local disk that you can write and load libraries from."
        )
    before = f"{wanted.notice}; " if wanted.notice else ""
    return Place(
        fallback,
        f"{before}the build cache {asked}cannot be used ({problem}), so {fallback} is used instead; "
        f"set {ENVIRONMENT} to a folder that you can write.",
    )


def problem_with(root: Path) -> str:
    """Makes ``root`` a folder that only this user can use, and tries it out; says why where that fails, else nothing."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        root.mkdir(exist_ok=True, mode=0o700)
        if not _is_private(root):
            if root.lstat().st_uid != os.geteuid():
                return "it belongs to another user"
            root.chmod(0o700)
            if not _is_private(root):
                return "its file system keeps no permissions, so others can write to it"
        return _trial(root)
    except OSError as error:
        return cause_of(error)


def _trial(root: Path) -> str:
    """Writes, locks and maps a file in ``root``."""
    with tempfile.TemporaryFile(dir=root, buffering=0) as file:
        file.write(bytes(4096))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"its file system gives no locks ({error.strerror})"
        if not can_be_executed(file):
            return NOEXEC
    room = os.statvfs(root)
    if room.f_blocks and room.f_bavail * room.f_frsize < ROOM:
        return cause_of(OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, less than {ROOM // 10**6} MB are free"))
    return ""


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def cannot_write(error: OSError) -> BuildError:
    """The sentence for a cache that stopped being writable, as on a disk that became full."""
    remedy = remedy_for(error)
    other = f"set {ENVIRONMENT} to a folder on another disk" if remedy else f"set {ENVIRONMENT} to a folder that you can write"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return BuildError(f"the build cache cannot be used: {cause_of(error)}; {remedy}.")
    return BuildError(f"the build cache cannot be written: {cause_of(error)}; {f'{remedy}, or ' if remedy else ''}{other}.")
