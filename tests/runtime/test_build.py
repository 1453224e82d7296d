"""Building with the real compilers: at once, interrupted, failing, in awkward places."""

import dataclasses
import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime import BuildError
from runtime.build import ensure_built
from runtime.cache import Cache
from runtime.process import run_program
from runtime.supervisor import ASKED, IGNORED_BY_PYTHON
from tests import tiers

from .tiny_package import child_environment, run_python, write_tiny_package

CONSTRUCT = """
import signal, sys, pathlib, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what nohup started inherits that of a hang-up
from tests.runtime.tiny_package import TinyPackage
model = TinyPackage(pathlib.Path(sys.argv[1])).model()
x = torch.randn(4, 8)
assert torch.equal(model(x), x * model.scale)
"""


def start_construct(tiny) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", CONSTRUCT, str(tiny.path)], env=child_environment(),
                            start_new_session=True)  # fmt: skip


def wait_for(condition, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_a_build_is_published_whole(tiny, private_cache, target):
    library = ensure_built(tiny.plan(target))
    assert sorted(path.name for path in library.parent.iterdir()) == ["library.so", "record.json"]
    assert list((private_cache / "building").iterdir()) == []


def test_a_killed_build_blocks_nothing(tiny, x, counting_gxx, private_cache):
    counting_gxx.set_delay(60)
    process = start_construct(tiny)
    try:
        assert wait_for(lambda: counting_gxx.compiled, 60)
        process.kill()  # SIGKILL, to the process alone
        process.wait()
        counting_gxx.set_delay(0)
        started = time.monotonic()
        assert tiny.model()(x).shape == x.shape
        assert time.monotonic() - started < 20
    finally:
        process.kill()
    assert list((private_cache / "building").iterdir()) == []


def test_an_interrupted_build_stops_its_compilers(tiny, counting_gxx, private_cache):
    counting_gxx.set_delay(60)
    process = start_construct(tiny)
    try:
        assert wait_for(lambda: counting_gxx.compiled, 60)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) != 0
        assert wait_for(lambda: not compilers_of(private_cache), 10), compilers_of(private_cache)
    finally:
        process.kill()
    assert list((private_cache / "building").iterdir()) == []


@pytest.mark.parametrize(("number", "stubborn"), tiers.quick(
    itertools.product((signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGABRT), (False, True)), (signal.SIGTERM, True), (signal.SIGKILL, False),
))  # fmt: skip
def test_a_process_that_ends_takes_its_compilers_along(tiny, counting_gxx, private_cache, number, stubborn):
    """Also compilers that ignore the signal, and whatever they have started."""
    counting_gxx.set_delay(60)
    if stubborn:
        text = counting_gxx.path.read_text()
        counting_gxx.path.write_text(text.replace("#!/bin/sh\n", "#!/bin/sh\ntrap '' TERM HUP INT\n"))
    process = start_construct(tiny)
    try:
        assert wait_for(lambda: counting_gxx.compiled, 60)
        assert len(compilers_of(private_cache)) >= 2  # ninja and the compiler
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
        assert wait_for(lambda: not compilers_of(private_cache), 20), compilers_of(private_cache)
    finally:
        process.kill()


def test_a_handler_of_the_users_own_still_ends_the_compilers(tiny, counting_gxx, private_cache):
    """As where a program answers SIGTERM with SystemExit, or a thread other than the main one builds."""
    counting_gxx.set_delay(60)
    code = "import signal, sys, threading\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n" + CONSTRUCT
    process = subprocess.Popen([sys.executable, "-c", code, str(tiny.path)], env=child_environment())
    try:
        assert wait_for(lambda: counting_gxx.compiled, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 3
        assert wait_for(lambda: not compilers_of(private_cache), 10), compilers_of(private_cache)
    finally:
        process.kill()
    assert list((private_cache / "building").iterdir()) == []


def test_a_program_that_cannot_be_started_is_not_taken_for_a_full_disk(tiny, tmp_path, monkeypatch):
    build = tiny.plan()
    gone = dataclasses.replace(build, tools=dataclasses.replace(build.tools, ninja=dataclasses.replace(build.tools.ninja, path=str(tmp_path / "gone"))))
    with pytest.raises(BuildError, match="gone could not be started .*No such file") as caught:
        ensure_built(gone)
    assert "CODEGEN_CACHE" not in str(caught.value)


@pytest.mark.parametrize(("command", "status"), [("exit 3", 3), ("kill -9 $$", -9), ("kill -SEGV $$", -11), ("true", 0)])
def test_the_supervisor_passes_on_how_a_program_ended(command, status):
    finished = run_program(["/bin/sh", "-c", f"echo said; {command}"])
    assert (finished.status, finished.output) == (status, "said\n")


def test_the_supervisor_hands_signals_on_as_they_were():
    """The supervisor blocks signals and Python ignores some; a compiler gets the defaults of all but the C library's own and those that were ignored before, as a
    shell ignores SIGQUIT for what it runs in the background."""
    reset = (*IGNORED_BY_PYTHON, *ASKED)
    inherited = sum(1 << number - 1 for number in range(1, 32) if number not in reset and signal.getsignal(number) is signal.SIG_IGN)
    finished = run_program(["/bin/sh", "-c", "grep -E 'Sig(Ign|Blk)' /proc/self/status"])
    masks = [int(line.split()[1], 16) & (1 << 31) - 1 for line in finished.output.splitlines()]
    assert masks == [0, inherited]


def compilers_of(cache: Path) -> list[str]:
    """The commands of all processes that work in one of the cache's building folders."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd").startswith(str(cache)):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # ended, or another user's
            continue
    return [command for command in found if command]


def test_threads_share_one_build(tiny, x, counting_gxx):
    counting_gxx.set_delay(0.5)
    ModelNew = tiny.model_class()
    barrier, results = threading.Barrier(16), []

    def construct():
        barrier.wait()
        results.append(ModelNew(8, (8,))(x).tolist())

    threads = [threading.Thread(target=construct) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(x * ModelNew(8, (8,)).scale).tolist()] * 16
    assert len(counting_gxx.compiled) == 1


@pytest.mark.slow
def test_processes_share_one_build(tiny, counting_gxx):
    """Ranks that start together on a cold cache."""
    counting_gxx.set_delay(2)
    processes = [start_construct(tiny) for _ in range(16)]
    assert [process.wait(timeout=240) for process in processes] == [0] * 16
    assert len(counting_gxx.compiled) == 1


def test_a_second_process_compiles_nothing(tiny, counting_gxx):
    tiny.model()
    assert start_construct(tiny).wait(timeout=60) == 0
    assert len(counting_gxx.compiled) == 1


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_awkward_paths(tmp_path, monkeypatch, target):
    folder = tmp_path / "a b, c's $HOME arch=sm_90 ünï"
    tiny = write_tiny_package(folder / "package")
    monkeypatch.setenv("CODEGEN_CACHE", str(folder / "cache dir"))
    monkeypatch.setenv("TMPDIR", str(folder))
    assert ensure_built(tiny.plan(target)).is_relative_to(folder)


def test_a_fork_during_a_build_can_build(tiny, x, counting_gxx):
    """The child must not wait for a thread that exists in its parent alone."""
    counting_gxx.set_delay(1)
    code = f"""
        import os, pathlib, threading, time, torch
        from tests.runtime.tiny_package import TinyPackage
        torch.set_num_threads(1)
        tiny = TinyPackage(pathlib.Path({str(tiny.path)!r}))
        log = pathlib.Path({str(counting_gxx.path.parent / "log")!r})
        thread = threading.Thread(target=tiny.model)
        thread.start()
        while not log.exists():
            time.sleep(0.1)
        time.sleep(0.1)  # starting a program and forking at once hangs Python itself
        child = os.fork()
        if child == 0:
            tiny.model()
            os._exit(0)
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
    """
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert len(counting_gxx.compiled) == 1


def test_nothing_is_written_to_the_package(tiny, x):
    before = {path: path.stat().st_mtime_ns for path in tiny.path.rglob("*")}
    tiny.path.chmod(0o555)
    code = f"import sys; sys.argv = ['', {str(tiny.path)!r}]\n{CONSTRUCT}"
    done = run_python(code)
    tiny.path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in tiny.path.rglob("*")} == before


@pytest.mark.slow
def test_no_gpu_builds_for_the_cpu_and_compiles_cuda(tiny):
    code = """
        import pathlib, torch
        from tests.runtime.tiny_package import TinyPackage
        tiny = TinyPackage(pathlib.Path(%r))
        print(tiny.model())
    """
    for targets, built in (("", "built=cpu"), ("sm_80", "built=sm_80"), ("cpu, sm_80", "built=sm_80, cpu")):
        done = run_python(code % str(tiny.path), CUDA_VISIBLE_DEVICES="", TARGETS=targets)
        assert done.returncode == 0 and built in done.stdout, done.stderr


def test_a_gxx_error_shows_the_lines_around_it(tiny, private_cache):
    good = (tiny.path / "cpu.cpp").read_text()
    tiny.change_source("cpu.cpp", "out[row * 8 + column] =", "out[row * 8 + colum] =")
    build = tiny.plan()
    with pytest.raises(BuildError) as caught:
        ensure_built(build)
    text = str(caught.value)
    number = 1 + (tiny.path / "cpu.cpp").read_text()[: (tiny.path / "cpu.cpp").read_text().index("colum]")].count("\n")
    assert f"tiny for cpu did not build: cpu.cpp, line {number}: " in text
    lines = text.splitlines()
    shown = next(index for index, line in enumerate(lines) if line.startswith(f"> {number} |"))
    assert lines[shown + 1].index("^") == lines[shown].index("colum]")
    assert f"  {number - 5:2} | " in lines[shown - 5] and str(number + 5) not in text.split("|")[0]
    assert (caught.value.kept / "cpu.cpp").exists() and (caught.value.kept / "build.log").exists()
    assert str(caught.value.kept) in text
    assert not (private_cache / "entries").exists()
    assert list((private_cache / "building").iterdir()) == []
    (tiny.path / "cpu.cpp").write_text(good)
    assert ensure_built(tiny.plan()).exists()


def test_an_nvcc_error_shows_the_lines_around_it(tiny):
    tiny.change_source("scale_sm80.cu", "x[i] * scale[threadIdx.x]", "x[i] * scal[threadIdx.x]")
    with pytest.raises(BuildError) as caught:
        ensure_built(tiny.plan("sm_80"))
    lines = str(caught.value).splitlines()
    assert 'identifier "scal" is undefined' in lines[0]
    shown = next(index for index, line in enumerate(lines) if line.startswith(">"))
    assert lines[shown + 1].index("^") == lines[shown].index("scal[")


def test_a_link_error_is_shown(tiny):
    tiny.change_source("cpu.cpp", "extern", "int missing_function();\nstatic int used = missing_function();\nextern")
    with pytest.raises(BuildError, match="undefined reference to `missing_function"):
        ensure_built(tiny.plan())


def test_a_library_that_lacks_a_function_is_not_published(tiny, private_cache):
    tiny.change_source("cpu.cpp", "scale_launch", "scale_other")
    with pytest.raises(BuildError, match="has no function scale_launch"):
        ensure_built(tiny.plan())
    assert not (private_cache / "entries").exists()


def test_a_library_that_cannot_be_loaded_is_not_published(tiny, private_cache):
    tiny.edit(lambda data: data["targets"]["cpu"]["flags"].append("-Dscale_launch=other"))
    with pytest.raises(BuildError, match="no function"):
        ensure_built(tiny.plan())
    assert not (private_cache / "entries").exists()


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tiny, monkeypatch, private_cache):
    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "library.so")

    with monkeypatch.context() as patched:
        patched.setattr(Cache, "publish", full)
        with pytest.raises(BuildError, match="No space left on device.*free some space"):
            ensure_built(tiny.plan())
    assert list((private_cache / "building").iterdir()) == []
    assert ensure_built(tiny.plan()).exists()


def test_a_killed_compiler_gives_a_hint(tiny, tmp_path, monkeypatch, counting_gxx):
    counting_gxx.path.write_text(counting_gxx.path.read_text().replace('echo "$*" >>', 'kill -9 $$; echo >>'))
    with pytest.raises(BuildError, match="Hint: a compiler was killed.*MAX_JOBS=1"):
        ensure_built(tiny.plan())
