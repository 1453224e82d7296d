"""Keys, entries and the place of the cache."""

import errno
import os
import shutil
import stat
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from runtime import cache as cache_module
from runtime.build import ensure_built
from runtime.cache import LIBRARY, RECORD, Cache, CacheWarning, default_cache


def key(tiny, target="cpu", capability=None) -> str:
    return tiny.plan(target, capability).key


def test_the_source_changes_the_key(tiny):
    before = key(tiny)
    tiny.change_source("cpu.cpp", "return -1", "return -3")
    assert key(tiny) != before


def test_an_included_file_changes_the_key(tiny):
    (tiny.path / "inner.h").write_text("constexpr int kOne = 1;")
    (tiny.path / "outer.h").write_text('#include "inner.h"\n')
    tiny.change_source("cpu.cpp", "#include <cstdint>", '#include <cstdint>\n#include "outer.h"')
    before = key(tiny)
    (tiny.path / "inner.h").write_text("constexpr int kOne = 2;")
    assert key(tiny) != before
    ensure_built(tiny.plan())


def test_flags_change_the_key(tiny):
    before = key(tiny)
    tiny.edit(lambda data: data["targets"]["cpu"]["flags"].append("-g"))
    assert key(tiny) != before


def test_the_arch_changes_the_key(tiny):
    assert len({key(tiny, "sm_80", capability) for capability in (None, (8, 0), (8, 6), (9, 0))}) == 4


def test_flags_that_nvcc_reads_from_the_environment_change_the_key(tiny, monkeypatch):
    before = key(tiny, "sm_80")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    assert key(tiny, "sm_80") != before


def test_the_compiler_changes_the_key(tiny, tmp_path, monkeypatch):
    before, before_cuda = key(tiny), key(tiny, "sm_80")
    other = tmp_path / "g++-other"
    other.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && echo 'g++ (Other) 13.1.0' && exit\nexec {shutil.which('g++')} \"$@\"\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert key(tiny) != before
    assert key(tiny, "sm_80") != before_cuda


def test_the_processor_matters_only_for_march_native(tiny, monkeypatch):
    plain = key(tiny)
    tiny.edit(lambda data: data["targets"]["cpu"]["flags"].append("-march=native"))
    native = key(tiny)
    monkeypatch.setattr(cache_module, "instruction_set", lambda: "another processor")
    assert key(tiny) != native
    tiny.edit(lambda data: data["targets"]["cpu"]["flags"].remove("-march=native"))
    assert key(tiny) == plain


def test_neither_times_nor_places_change_what_is_built(tiny, counting_gxx, tmp_path, monkeypatch):
    first = ensure_built(tiny.plan())
    for year in (0, 4_000_000_000):
        for path in [*tiny.path.iterdir(), first, first.parent]:
            os.utime(path, (year, year))
    tiny.path = tiny.path.rename(tmp_path / "moved")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert ensure_built(tiny.plan()) == first
    assert len(counting_gxx.compiled) == 1


@pytest.mark.parametrize("damage", ["truncate", "alter", "no record", "empty record", "symlink", "a file in its place"])
def test_a_damaged_entry_gives_one_warning_and_is_built_again(tiny, counting_gxx, damage, tmp_path):
    build = tiny.plan()
    library = ensure_built(build)
    good = library.read_bytes()
    if damage in ("truncate", "alter"):
        library.unlink()  # this process has mapped the old file
    if damage == "truncate":
        library.write_bytes(good[: len(good) // 2])
    elif damage == "alter":
        library.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "no record":
        (library.parent / RECORD).unlink()
    elif damage == "empty record":
        (library.parent / RECORD).write_text("")
    elif damage == "symlink":
        library.parent.rename(tmp_path / "elsewhere")
        library.parent.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.rmtree(library.parent)
        library.parent.write_text("not a folder")
    with pytest.warns(CacheWarning, match="built again") as caught:
        assert ensure_built(build) == library
    assert len(caught) == 1
    assert len(counting_gxx.compiled) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ensure_built(build) == library
    assert len(counting_gxx.compiled) == 2


def test_files_of_another_user_are_not_loaded(tiny, monkeypatch):
    build = tiny.plan()
    ensure_built(build)
    cache = default_cache()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert cache.problem_of(build.key) == "belongs to another user"


def test_a_cache_of_another_user_is_not_used(monkeypatch, private_cache, tmp_path):
    default_cache()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    uid = os.geteuid()
    own = os.stat
    monkeypatch.setattr(Path, "lstat", lambda self: _owned_by(own(self, follow_symlinks=False), uid + (self == private_cache)))
    private_cache.chmod(0o755)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert default_cache().root != private_cache


def _owned_by(status, uid):
    values = list(status)
    values[stat.ST_UID] = uid
    return os.stat_result(values)


def test_the_cache_is_private(tiny, private_cache):
    ensure_built(tiny.plan())
    for folder in (private_cache, *(path for path in private_cache.rglob("*") if path.is_dir())):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_users_own_folder_keeps_its_permissions(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    monkeypatch.setenv("CODEGEN_CACHE", str(shared))
    default_cache()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755


def test_default_place_follows_xdg_then_home(monkeypatch, tmp_path):
    monkeypatch.delenv("CODEGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache().root == tmp_path / "xdg" / "codegen" / "v1"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache().root == tmp_path / "home" / ".cache" / "codegen" / "v1"


def test_an_unwritable_home_falls_back_with_a_warning(tiny, x, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "temporary").mkdir()
    monkeypatch.delenv("CODEGEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with pytest.warns(CacheWarning, match="set CODEGEN_CACHE"):
        model = tiny.model()
    assert model(x).shape == x.shape
    assert stat.S_IMODE(next((tmp_path / "temporary").iterdir()).stat().st_mode) == 0o700


def test_a_user_without_a_home_gets_no_folder_called_tilde(monkeypatch, tmp_path):
    monkeypatch.delenv("CODEGEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.warns(CacheWarning, match="no home folder"):
        default_cache()
    assert not (tmp_path / "~").exists()


def test_a_squatted_fallback_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / f"codegen-cache-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"codegen-cache-{os.geteuid()}").chmod(0o777)
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(CacheWarning):
        root = default_cache().root
    assert root.parent.name != f"codegen-cache-{os.geteuid()}"


def test_clear_removes_entries_and_spares_a_running_build(tiny):
    build = tiny.plan()
    library = ensure_built(build)
    cache = default_cache()
    with cache.locked("running"):
        folder = cache.private_folder("running")
        assert cache.clear() == 1
        assert folder.exists()
    assert not library.exists()
    cache.clear()
    assert not folder.exists()


def test_what_a_dead_build_left_is_swept_by_the_next(tiny):
    cache = default_cache()
    with cache.locked("dead"):
        left = cache.private_folder("dead")
    ensure_built(tiny.plan())
    assert not left.exists()


@pytest.mark.parametrize("own_key", [True, False])
def test_a_dead_build_is_swept_while_its_compilers_still_write(tmp_path, own_key):
    """They outlive the lock of a process that was killed, and make files in its folder until they are ended."""
    cache = Cache(tmp_path / "cache")
    keep_writing = "i=0; while :; do i=$((i + 1)); : > $$.$((i % 200)) || exit; done"
    for attempt in range(20):
        left = cache.private_folder(f"dead{attempt}")
        compilers = [subprocess.Popen(["/bin/sh", "-c", keep_writing], cwd=left, stderr=subprocess.DEVNULL) for _ in range(2)]
        try:
            while len(os.listdir(left)) < 300:
                time.sleep(0.01)
            cache.private_folder(f"dead{attempt}" if own_key else "next")
            assert not left.exists()
        finally:
            for compiler in compilers:
                compiler.kill()
                compiler.wait()


def test_what_cannot_be_removed_is_left_at_once(tmp_path, monkeypatch):
    def refused(folder, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)

    cache = Cache(tmp_path / "cache")
    left = cache.private_folder("dead")
    monkeypatch.setattr(shutil, "rmtree", refused)
    started = time.monotonic()
    assert cache.private_folder("dead") != left
    assert time.monotonic() - started < 1


def test_publishing_twice_leaves_one_sound_entry(tiny):
    build = tiny.plan()
    library = ensure_built(build)
    cache = default_cache()
    again = cache.private_folder(build.key)
    shutil.copy(library, again / LIBRARY)
    cache.publish(build.key, again, cache.record(build.key))
    assert cache.problem_of(build.key) is None
    assert cache.keys() == [build.key]


def test_a_cache_object_does_nothing_by_itself(tmp_path):
    Cache(tmp_path / "none")
    assert not (tmp_path / "none").exists()
