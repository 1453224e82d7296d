"""Where standalone.py has torch build its kernels: a folder for each text, and a lock left by a killed build is told of. No GPU is needed."""

import ctypes
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec
from codegen.standalone import render_standalone

SPEC = """\
name: twin
batch: {batch}
chain:
  - linear: {{name: gemm, in_features: 24, out_features: 32}}
  - group_norm: {{name: norm, num_groups: 4}}
  - hardtanh: {{min_val: -0.5, max_val: {largest}}}
"""

# In the place of torch's load_inline, whose CUDA build needs a torch with CUDA: it keeps to the same folder, lock and result.
BUILDER = """
import os, subprocess, time
from torch.utils.file_baton import FileBaton

def load_inline(name, cpp_sources, cuda_sources, extra_cuda_cflags, build_directory, no_implicit_headers, is_python_module):
    baton = FileBaton(os.path.join(build_directory, "lock"))
    if baton.try_acquire():
        if os.environ.get("STOP"):
            print("building", flush=True)
            time.sleep(120)
        with open(os.path.join(build_directory, "main.c"), "w") as file:
            file.write("int answer() { return %d; }" % (hash(cuda_sources) % 1000))
        subprocess.run(["g++", "-shared", "-fPIC", "-xc", "main.c", "-o", name + ".so"], cwd=build_directory, check=True)
        baton.release()
    else:
        baton.wait()
    return os.path.join(build_directory, name + ".so")
"""
CHILD = """
import sys, torch
torch.cuda.get_device_capability = lambda device=None: (8, 0)
scope, builder = {}, {}
exec(open(sys.argv[1]).read(), scope)
exec(open(sys.argv[2]).read(), builder)
scope["load_inline"] = builder["load_inline"]
scope["_library"]()
print("built", flush=True)
"""


def write_standalone(folder: Path, largest: float, batch: object = 8) -> Path:
    folder.mkdir(parents=True)
    (folder / "twin.yaml").write_text(SPEC.format(largest=largest, batch=batch))
    package = make_package(load_spec(folder / "twin.yaml"))
    (folder / "standalone.py").write_text(render_standalone(package, render(package)))
    return folder / "standalone.py"


@pytest.fixture
def extensions(tmp_path, monkeypatch) -> Path:
    """Torch's folder of extensions, for this test alone."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    (tmp_path / "builder.py").write_text(BUILDER)
    return tmp_path / "extensions"


def loaded(path: Path, builder: Path) -> dict:
    """The file's names, with a load_inline that needs no CUDA."""
    scope, names = {}, {}
    exec(path.read_text(), scope)
    exec(builder.read_text(), names)
    scope["load_inline"] = names["load_inline"]
    return scope


def child(path: Path, builder: Path, **environment) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(builder)], env={**os.environ, **environment},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


def test_two_files_of_one_name_build_in_folders_of_their_own(tmp_path, extensions):
    paths = [write_standalone(tmp_path / name, largest) for name, largest in (("a", 0.5), ("b", 0.75), ("c", 0.5))]
    answers = [loaded(path, tmp_path / "builder.py")["_library"]().answer() for path in paths]
    assert answers[0] != answers[1] and answers[0] == answers[2]
    folders = sorted(path.name for path in extensions.iterdir())
    assert len(folders) == 2 and all(re.fullmatch(r"twin_80_[0-9a-f]{16}", name) for name in folders)


def test_a_change_by_hand_is_another_extension(tmp_path, extensions):
    """The name is made of the text that is compiled, not of the text that was emitted."""
    path = write_standalone(tmp_path / "a", 0.5)
    for _ in range(2):
        loaded(path, tmp_path / "builder.py")["_library"]()
        path.write_text(path.read_text().replace('_CUDA_SM80 = r"""', '_CUDA_SM80 = r"""\n// changed'))
    assert len(list(extensions.iterdir())) == 2


def test_a_lock_of_a_killed_build_is_told_of_within_seconds(tmp_path, extensions):
    path = write_standalone(tmp_path / "a", 0.5)
    killed = child(path, tmp_path / "builder.py", STOP="1")
    assert killed.stdout.readline() == "building\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (lock,) = extensions.glob("*/lock")
    waiting = child(path, tmp_path / "builder.py")
    told, begun = [], time.monotonic()
    reader = threading.Thread(target=lambda: told.append(waiting.stderr.readline()))
    reader.start()
    reader.join(60)
    assert told and f"delete {lock}" in told[0], told
    assert waiting.poll() is None and time.monotonic() - begun < 60
    lock.unlink()
    assert waiting.wait(timeout=60) == 0 and waiting.stdout.read() == "built\n"
    assert waiting.stderr.read() == ""  # it is told once


def test_a_build_that_is_killed_while_others_wait_is_told_of_too(tmp_path, extensions):
    """A process that began to wait while the build was alive must not wait in torch, which says nothing."""
    path = write_standalone(tmp_path / "a", 0.5)
    killed = child(path, tmp_path / "builder.py", STOP="1")
    assert killed.stdout.readline() == "building\n"
    waiting = child(path, tmp_path / "builder.py")
    line = []
    reader = threading.Thread(target=lambda: line.append(waiting.stderr.readline()))
    reader.start()
    reader.join(60)
    killed.kill()
    killed.wait()
    (lock,) = extensions.glob("*/lock")
    assert line and f"delete {lock}" in line[0]
    lock.unlink()
    assert waiting.wait(timeout=60) == 0


def test_a_file_system_without_locks_leaves_torchs_own(tmp_path, extensions, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    assert isinstance(loaded(write_standalone(tmp_path / "a", 0.5), tmp_path / "builder.py")["_library"](), ctypes.CDLL)


@pytest.mark.parametrize("batch", ["[2, 8]", "[2, 8]\npad_batch: true"])
def test_a_range_of_batches_keeps_to_the_static_checker(tmp_path, batch):
    """No checked-in package is one, so the rules of test_standalone_rules do not meet it."""
    seen = "\n".join(re.split(r"#|//", line, maxsplit=1)[0] for line in write_standalone(tmp_path / "a", 0.5, batch).read_text().splitlines())
    assert not re.search(r"\b(try\s*:|except\b|pass\b|threading\b|multiprocessing\b)", seen)
