"""Importing costs nothing and touches nothing."""

from .tiny_package import run_python

WATCHED = """
import os, sys
import torch
events = []
def watch(event, args):
    if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        events.append((event, args[0]))
    if event in ("os.mkdir", "os.rename", "subprocess.Popen", "os.exec", "os.fork", "ctypes.dlopen"):
        events.append((event, args))
sys.addaudithook(watch)
import runtime
from runtime import Package
Package("nowhere")
assert events == [], events
assert not torch.cuda.is_initialized()
assert not [name for name in sys.modules if name.split(".")[0] in ("codegen", "click", "rich")], "needless imports"
"""


def test_importing_writes_nothing_starts_nothing_and_leaves_cuda_alone():
    done = run_python(WATCHED)
    assert done.returncode == 0, done.stderr


def test_constructing_without_a_gpu_leaves_cuda_alone(tiny):
    done = run_python(
        f"""
        import pathlib, torch
        from tests.runtime.tiny_package import TinyPackage
        TinyPackage(pathlib.Path({str(tiny.path)!r})).model()
        assert not torch.cuda.is_initialized()
        """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
