"""What production does to a cache: full disks, clocks that go back, foreign and poisoned files, clearing while others build."""

import errno
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from runtime import BuildError, CallError, toolchain
from runtime import build as build_module
from runtime import cache as cache_module
from runtime.build import ensure_built, plan_build
from runtime.cache import LIBRARY, RECORD, CacheWarning, default_cache
from tests.fsk import fsk as invoke

from .tiny_package import ROOT, write_tiny_package


# ---- a full disk ----------------------------------------------------------------------------------------------------


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "owner, name",
    [
        (tempfile, "mkdtemp"),
        (Path, "write_bytes"),
        (Path, "write_text"),
        (Path, "mkdir"),
        (Path, "rename"),
        (os, "fsync"),
    ],
)
def test_a_disk_that_is_full_at_any_step_is_a_sentence_and_leaves_nothing(tiny, monkeypatch, private_cache, owner, name):
    cache, build = default_cache(), tiny.plan()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full_disk)
        with pytest.raises(BuildError, match="No space left on device.*free some space, or set CODEGEN_CACHE"):
            ensure_built(build, cache)
    assert not (private_cache / "building").exists() or not list((private_cache / "building").iterdir())
    assert cache.keys() == []
    assert ensure_built(build, cache).exists()


def test_a_disk_that_fills_up_under_the_compiler_gives_a_hint(tiny, counting_gxx, private_cache):
    script = counting_gxx.path.read_text()
    full = "case \" $* \" in *' -c '*) echo \"cc1plus: fatal error: error writing to x.s: No space left on device\" >&2; exit 1;; esac\n"
    counting_gxx.path.write_text(script.replace("exec", full + "exec"))
    with pytest.raises(BuildError, match="Hint: the disk is full: free some space"):
        ensure_built(tiny.plan())
    assert default_cache().keys() == []
    counting_gxx.path.write_text(script)
    assert ensure_built(tiny.plan()).exists()


# ---- the clock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["1970-01-02", "2099-01-01"])
def test_a_clock_that_jumps_in_mid_build(tiny, counting_gxx, then):
    """What a compiler writes looks older than its source, or comes from the future."""
    script = counting_gxx.path.read_text()
    touched = script.replace("exec ", "") + f'status=$?\ntouch -c -d {then} -- *.o *.so\nexit $status\n'
    counting_gxx.path.write_text(touched)
    library = ensure_built(tiny.plan())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ensure_built(tiny.plan()) == library
    assert len(counting_gxx.compiled) == 1


def test_no_part_of_the_cache_asks_for_the_time(tiny, counting_gxx, monkeypatch):
    library = ensure_built(tiny.plan())
    monkeypatch.setattr(time, "time", lambda: -1e9)
    monkeypatch.setattr(time, "time_ns", lambda: -10**18)
    assert ensure_built(tiny.plan()) == library
    assert len(counting_gxx.compiled) == 1


# ---- what is part of a build, and what is not ------------------------------------------------------------------------


def test_another_nvcc_is_another_key(tiny, tmp_path, monkeypatch):
    before, cpu = tiny.plan("sm_80").key, tiny.plan().key
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    real = toolchain.find_nvcc().path
    other = re.sub(r"release \S+, V\S+", "release 99.1, V99.1.7", subprocess.run([real, "--version"], capture_output=True, text=True).stdout)
    nvcc.write_text(f"#!/bin/sh\nif [ \"$1\" = --version ]; then cat <<'X'\n{other}\nX\nexit; fi\nexec {real} \"$@\"\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert tiny.plan("sm_80").tools.nvcc.version == (99, 1, 7)
    assert tiny.plan("sm_80").key != before
    assert tiny.plan().key == cpu


def test_how_the_toolkit_is_spelled_changes_nothing(tiny, tmp_path, monkeypatch):
    before = tiny.plan("sm_80").key
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "nvcc"
    script.write_text(f'#!/bin/sh\nexec {toolchain.find_nvcc().path} "$@"\n')
    script.chmod(0o755)
    for home in (str(tmp_path), f"{tmp_path}/", f"{tmp_path}/bin/..", f" {tmp_path} "):
        monkeypatch.setenv("CUDA_HOME", home)
        assert tiny.plan("sm_80").key == before
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert tiny.plan("sm_80").key == before


def test_torch_is_no_part_of_a_build(tiny, monkeypatch):
    """Its version is not in a key because nothing of it reaches a compiler or a linker."""
    before = tiny.plan().key
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert tiny.plan().key == before
    library = ensure_built(tiny.plan()).read_bytes()
    assert b"libtorch" not in library and b"libc10" not in library
    sources = [path for path in (ROOT / "generated" / "exemplars").glob("*/*") if path.suffix in (".cu", ".cpp")]
    assert len(sources) > 20
    for source in sources:
        assert not re.search(r'#\s*include\s*[<"](torch|ATen|c10)', source.read_text()), source


def test_a_fixed_architecture_reaches_the_built_file(tiny):
    def fixed(data):
        data["targets"]["sm_90a"] = {**data["targets"]["sm_80"], "arch": "sm_90a", "min_capability": [9, 0]}

    package = tiny.edit(fixed)
    built = ensure_built(plan_build(package, package.target("sm_90a"), (9, 0))).read_bytes()
    assert b"sm_90a" in built and b"sm_80" not in built


# ---- several at once ------------------------------------------------------------------------------------------------


def test_two_keys_build_at_once_in_folders_of_their_own(tmp_path, counting_gxx, private_cache):
    packages = [write_tiny_package(tmp_path / name) for name in ("one", "two")]
    packages[1].change_source("cpu.cpp", "return -1", "return -3")
    counting_gxx.set_delay(3)
    threads = [threading.Thread(target=ensure_built, args=(package.plan(),)) for package in packages]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while len(counting_gxx.compiled) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    folders = {path.parent for path in (private_cache / "building").glob("*/build.ninja")}
    for thread in threads:
        thread.join()
    assert {folder.name.partition("-")[0] for folder in folders} == {package.plan().key for package in packages}
    assert default_cache().keys() == sorted(package.plan().key for package in packages)


def test_an_entry_that_is_cleared_before_it_is_opened_is_built_again(tiny, counting_gxx, monkeypatch):
    real, cleared = build_module.ensure_built, []

    def ensure_and_lose(build):
        path = real(build)
        if not cleared:
            cleared.append(default_cache().clear())
        return path

    monkeypatch.setattr(build_module, "ensure_built", ensure_and_lose)
    assert tiny.plan().open().scale_launch
    assert cleared == [1] and len(counting_gxx.compiled) == 2


def test_a_cache_that_never_keeps_anything_is_a_sentence(tiny, monkeypatch, private_cache):
    monkeypatch.setattr(build_module, "ensure_built", lambda build: private_cache / "gone.so")
    with pytest.raises(BuildError, match="removed from the cache each time"):
        tiny.plan().open()


def test_clearing_while_others_build_and_load(tiny):
    build, stop, failures = tiny.plan(), threading.Event(), []

    def load_often():
        try:
            for _ in range(8):
                assert build.open().scale_launch
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    def clear_often():
        while not stop.wait(0.05):
            default_cache().clear()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clearing = threading.Thread(target=clear_often)
        loading = [threading.Thread(target=load_often) for _ in range(4)]
        for thread in [clearing, *loading]:
            thread.start()
        for thread in loading:
            thread.join()
        stop.set()
        clearing.join()
    assert failures == []
    assert [warning for warning in caught if issubclass(warning.category, CacheWarning)] == []
    assert default_cache().problem_of(build.key) in (None, "is damaged: the library or its record is missing or unreadable")


def test_clearing_takes_an_entry_out_whole(tiny, monkeypatch):
    """Who reads beside it finds all of an entry or nothing, however long the removing takes."""
    build = tiny.plan()
    ensure_built(build)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    assert default_cache().clear() == 1
    assert default_cache().keys() == []


def test_an_entry_that_vanishes_while_it_is_looked_at_is_no_damage(tiny, monkeypatch):
    build = tiny.plan()
    ensure_built(build)
    real = cache_module.sha256_of

    def remove_and_look(path):
        default_cache().clear()
        return real(path)

    monkeypatch.setattr(cache_module, "sha256_of", remove_and_look)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default_cache().find(build.key) is None


def test_a_cache_folder_that_is_removed_comes_back(tiny, private_cache):
    cache = default_cache()
    ensure_built(tiny.plan(), cache)
    shutil.rmtree(private_cache.parent)
    assert ensure_built(tiny.plan(), cache).exists()
    assert private_cache.stat().st_mode & 0o777 == 0o700


# ---- foreign and poisoned files --------------------------------------------------------------------------------------


def test_foreign_files_are_left_alone(tiny, private_cache):
    cache = default_cache()
    library = ensure_built(tiny.plan())
    foreign = [private_cache / folder / name for folder in ("entries", "locks", "building") for name in (".DS_Store", "note.txt", "x" * 255)]
    for path in foreign:
        path.write_text("not ours")
    (private_cache / "entries" / "folder").mkdir()
    tiny.change_source("cpu.cpp", "return -1", "return -3")
    ensure_built(tiny.plan())
    assert len(cache.keys()) == 2 and "folder" not in cache.keys()
    assert invoke("cache", "verify").output.endswith("2 sound, 0 damaged\n")
    assert cache.clear() == 2
    assert not library.exists() and all(path.read_text() == "not ours" for path in foreign)


@pytest.mark.parametrize("poison", ["one byte", "another library", "another key's entry", "another owner"])
def test_verify_detects_a_poisoned_entry(tiny, x, monkeypatch, private_cache, counting_gxx, poison):
    build = tiny.plan()
    library = ensure_built(build)
    content, before = library.read_bytes(), library.stat()
    if poison != "another owner":
        library.unlink()  # this process has mapped the old file
    if poison == "one byte":
        library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(library, ns=(before.st_atime_ns, before.st_mtime_ns))  # neither size nor time gives it away
    else:
        tiny.change_source("cpu.cpp", "* by[column]", "+ by[column]")
        other = ensure_built(tiny.plan())
        tiny.change_source("cpu.cpp", "+ by[column]", "* by[column]")
        if poison == "another library":
            shutil.copy(other, library)
        elif poison == "another key's entry":
            shutil.copy(other, library)
            shutil.copy(other.parent / RECORD, library.parent / RECORD)
    if poison == "another owner":
        real = Path.lstat

        def lstat(path):
            status = list(real(path))
            if path == library:
                status[4] += 1
            return os.stat_result(status)

        monkeypatch.setattr(Path, "lstat", lstat)
    result = invoke("cache", "verify")
    assert result.exit_code == 1
    assert f"{library.parent} " in result.output and "1 damaged" in result.output
    compiled = len(counting_gxx.compiled)
    if poison != "another owner":
        with pytest.warns(CacheWarning, match="built again"):
            model = tiny.model()
        with torch.no_grad():
            assert torch.equal(model(x), x * model.scale)
        assert len(counting_gxx.compiled) == compiled + 1
        assert invoke("cache", "verify").exit_code == 0


def test_a_record_names_its_key_and_digest(tiny):
    build = tiny.plan()
    record = json.loads((ensure_built(build).parent / RECORD).read_text())
    assert record["key"] == build.key and record["sha256"] == cache_module.sha256_of(ensure_built(build).parent / LIBRARY)


# ---- after construction ----------------------------------------------------------------------------------------------


def test_forward_compiles_nothing(tiny, x, monkeypatch, private_cache, tmp_path):
    model = tiny.model()
    shutil.rmtree(private_cache.parent)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("forward started a program"))
    with torch.no_grad():
        assert torch.equal(model(x), x * model.scale)
        with pytest.raises(CallError, match="set batch: 9"):
            model(torch.zeros(9, 8))
    assert not private_cache.exists()
