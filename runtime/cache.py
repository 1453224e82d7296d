"""The folder of built libraries: what an entry is, and how one is published and checked. Where it is: folders.py.

    <base>/v1/                     0700, made by this user
        entries/<key>/             library.so and record.json, published whole by one rename
        locks/<key>.lock           held (flock) while the key is built; the kernel releases it when the holder dies
        building/<key>-XXXX/       private to one build; removed by the next build of any key when its lock is free
        failed/<name>-<target>/    the last failed build of a target, kept to be looked at
    reports/<key>.json         what ptxas said about one source

A key says everything that determines the library's bytes, and never a time or a path.
"""

import errno
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from .files import can_be_loaded, read_json
from .folders import readable_root, usable_place
from .supervisor import LONGEST_ENDING_SECONDS

LIBRARY = "library.so"
RECORD = "record.json"

_KEY = re.compile(r"[0-9a-f]{64}")


class CacheWarning(UserWarning):
    """Something about the cache that costs time but not correctness."""


@dataclass(frozen=True)
class Record:
    """What is kept beside a library: its key and digest, and what it is for people who list the cache."""

    key: str
    sha256: str
    package: str
    target: str
    flags: tuple[str, ...]


def build_key(sources: dict[str, bytes], flags: tuple[str, ...], compiler: str) -> str:
    """SHA-256 of all that decides what comes out of a build.

    ``sources`` by file name, ``flags`` with the architecture's, ``compiler`` the toolchain's identity. The host's ABI
    belongs to it, and the processor's abilities where ``-march=native`` lets the compiler use them.
    """
    digest = hashlib.sha256()
    for name in sorted(sources):
        _feed(digest, name, sources[name])
    _feed(digest, *flags)
    _feed(digest, compiler, platform.machine(), *platform.libc_ver())
    if any(flag.endswith("=native") for flag in flags):
        _feed(digest, instruction_set())
    return digest.hexdigest()


def instruction_set() -> str:
    """The processor's model and abilities, as far as the kernel says them."""
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU implementer", "CPU part")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    lines = [line.partition(":") for line in first.splitlines()]
    return "\n".join(f"{key.strip()}:{value.strip()}" for key, _, value in lines if key.strip() in wanted)


def _feed(digest, *parts: str | bytes) -> None:
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)


class Cache:
    """The cache below ``root``, a folder that belongs to this user alone."""

    def __init__(self, root: Path):
        self.root = root
        self.entries, self.locks = root / "entries", root / "locks"
        self.building, self.failed = root / "building", root / "failed"
        self.reports = root / "reports"

    def find(self, key: str, warn: bool = True) -> Path | None:
        """The library published under ``key``, or None. A damaged or foreign entry gives a warning and None."""
        folder = self.entries / key
        if not os.path.exists(folder):  # Path.exists raises where the drive fails
            return None
        problem = self.problem_of(key)
        if problem is None:
            return folder / LIBRARY
        if warn and folder.exists():  # else somebody has just cleared the cache
            warnings.warn(f"{folder} {problem}; it is built again.", CacheWarning, stacklevel=2)
        return None

    def problem_of(self, key: str) -> str | None:
        """Why the entry must not be loaded, as the end of a sentence; None where it is sound."""
        folder = self.entries / key
        try:
            for path in (folder, folder / LIBRARY, folder / RECORD):
                status = path.lstat()
                if status.st_uid != os.geteuid():
                    return "belongs to another user"
                if stat.S_ISLNK(status.st_mode):
                    return "is reached through a symbolic link"
            record = self.record(key)
            if record.key != key:
                return "is damaged: it was published under another key"
            if sha256_of(folder / LIBRARY) != record.sha256:
                return "is damaged: the library is not the one that was published"
        except (OSError, ValueError, TypeError, KeyError):
            return "is damaged: the library or its record is missing or unreadable"
        return None

    def record(self, key: str) -> Record:
        """The record of an entry; OSError, ValueError, KeyError or TypeError where it has none that can be read."""
        data = read_json(self.entries / key / RECORD)
        return Record(data["key"], data["sha256"], data["package"], data["target"], tuple(data["flags"]))

    def keys(self) -> list[str]:
        """The keys of all entries, sound or not; files that are no entries are left out."""
        names = os.listdir(self.entries) if self.entries.exists() else []
        return sorted(name for name in names if _KEY.fullmatch(name))

    @contextmanager
    def locked(self, key: str):
        """Holds the key's lock; other processes and threads that want the same key wait here."""
        self._make(self.locks)
        with FileLock(self.locks / f"{key}.lock", mode=0o600, thread_local=False):
            yield

    def private_folder(self, key: str) -> Path:
        """A new empty folder for one build. What dead builds left behind is removed first. Call under the lock."""
        self._make(self.building)
        for left in self.building.iterdir():
            self._remove_if_dead(left, key)
        return Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self.building))

    def publish(self, key: str, built: Path, record: Record) -> Path:
        """Makes ``built`` (a folder with the library) the entry of ``key``; returns the library's path.

        The entry appears whole or not at all: what is in the folder is written through before the rename.
        """
        (built / RECORD).write_text(json.dumps(asdict(record), indent=1))
        for name in (LIBRARY, RECORD):
            _write_through(built / name)
        self._make(self.entries)
        target = self.entries / key
        try:
            built.rename(target)
        except OSError:
            if not target.exists():
                raise
            self._discard(key)  # a damaged entry
            built.rename(target)
        return target / LIBRARY

    def _discard(self, key: str) -> None:
        """Takes an entry out at once, as it was published. Processes that mapped it keep what they mapped."""
        self._make(self.building)
        aside = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=self.building))
        (self.entries / key).rename(aside / "removed")
        shutil.rmtree(aside, ignore_errors=True)

    def keep_failed(self, name: str, built: Path) -> Path | None:
        """Moves a failed build to where its user can look at it, in place of the one that was kept before.

        Returns None where it cannot be kept.
        """
        kept = self.failed / name
        try:
            self._make(self.failed)
            shutil.rmtree(kept, ignore_errors=True)
            return built.rename(kept)
        except OSError:  # another process has just kept the same failure, or nothing can be written
            if os.path.exists(kept):
                return kept
            with suppress(OSError):
                self.failed.rmdir()  # where it is empty
            return None

    def clear(self) -> int:
        """Removes everything that no build is using; returns how many entries were removed."""
        removed = 0
        for key in self.keys():
            with self._if_free(key) as free:
                if free and (self.entries / key).exists():
                    self._discard(key)
                    removed += 1
        if self.building.exists():
            for left in self.building.iterdir():
                self._remove_if_dead(left)
        shutil.rmtree(self.failed, ignore_errors=True)
        shutil.rmtree(self.reports, ignore_errors=True)
        return removed

    def _remove_if_dead(self, folder: Path, held: str = "") -> None:
        """A private folder is in use only while somebody holds its key's lock; ``held`` is the key we hold."""
        key, made_here, _ = folder.name.partition("-")
        if not made_here or not folder.is_dir():
            return
        if key == held:
            remove_private(folder)
            return
        with self._if_free(key) as free:
            if free:
                remove_private(folder)

    @contextmanager
    def _if_free(self, key: str):
        self._make(self.locks)
        lock = FileLock(self.locks / f"{key}.lock", mode=0o600, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _make(self, folder: Path) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed all of it
        folder.mkdir(mode=0o700, exist_ok=True)


def default_cache() -> Cache:
    """The cache that this process writes to: below CODEGEN_CACHE, else XDG_CACHE_HOME, else ~/.cache.

    Where that cannot be used, one warning and a folder of this user in the system's temporary folder. Raises BuildError
    where neither can.
    """
    place = usable_place()
    if place.notice:
        warnings.warn(place.notice, CacheWarning, stacklevel=2)
    return Cache(place.root)


def readable_cache() -> Cache | None:
    """The wanted cache where it can be read; it need not be writable."""
    root = readable_root()
    return None if root is None else Cache(root)


def caches_in_use() -> list[Cache]:
    """The caches that libraries are loaded from: the wanted one where it can be read, and the one that is written to."""
    caches = {cache.root: cache for cache in (readable_cache(), default_cache()) if cache is not None}
    return list(caches.values())


def find_built(key: str) -> Path | None:
    """The library under ``key`` in the wanted cache, also in one that is read-only, or None. Nothing is written.

    What is damaged or cannot be loaded from where it lies counts as absent: the build that follows tells of it.
    """
    cache = readable_cache()
    found = None if cache is None else cache.find(key, warn=False)
    return found if found is not None and can_be_loaded(found) else None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_private(folder: Path) -> None:
    """Removes the private folder of a build that is over. What its user may not remove stays.

    A killed process frees the lock before its compilers end: until the supervisor has ended them, they can make files behind the back of a
    removal, which then finds the folder not empty. So it is emptied again until it is gone; nothing can be made in it after that.
    """
    end = time.monotonic() + LONGEST_ENDING_SECONDS
    written = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)  # what a removal says that others make and remove files beside
    while os.path.lexists(folder):
        try:
            shutil.rmtree(folder)
            return
        except OSError as error:
            if error.errno not in written or time.monotonic() > end:
                shutil.rmtree(folder, ignore_errors=True)
                return


def _write_through(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
