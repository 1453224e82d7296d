"""Fixtures of the runtime's tests: a cache of its own for every test, the tiny package, a compiler that counts."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from runtime import load
from runtime.wheel import make_wheel
from tests.compiler import gxx

from .generated_packages import generate
from .tiny_package import BATCH, FEATURES, CountingCompiler, TinyPackage, unpack, write_tiny_package


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch) -> Path:
    """An empty build cache for this test alone, and TARGETS=cpu; no other variable steers the runtime."""
    for name in ("CUDA_HOME", "NVCC", "CUDAHOSTCXX", "NVCC_CCBIN", "CXX", "MAX_JOBS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(load, "_functions", {})  # what another test loaded
    monkeypatch.setenv("TARGETS", "cpu")
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "v1"


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Callable[..., ModuleType]:
    """`generate` without a folder, once for the same arguments: for tests that leave the package as it is."""
    made: dict[str, ModuleType] = {}

    def get(*arguments, **options) -> ModuleType:
        key = json.dumps([arguments, options])
        if key not in made:
            made[key] = generate(tmp_path_factory.mktemp("packages"), *arguments, **options)
        return made[key]

    return get


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory) -> Path:
    """A build cache for all tests of this process that ask for kept_builds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def kept_builds(private_cache, shared_cache, monkeypatch) -> None:
    """The compiler that keeps objects and a cache that keeps libraries, for tests that look at what models compute and not at how they are built."""
    monkeypatch.setenv("CXX", shlex.quote(gxx()))
    monkeypatch.setenv("CODEGEN_CACHE", str(shared_cache))


@pytest.fixture
def tiny(tmp_path) -> TinyPackage:
    """The package, in a folder of this test."""
    return write_tiny_package(tmp_path / "tiny")


@pytest.fixture
def counting_gxx(tmp_path, private_cache, monkeypatch) -> CountingCompiler:
    """The real g++, counted; CXX names it. The cache is this test's, also beside kept_builds."""
    monkeypatch.setenv("CODEGEN_CACHE", str(private_cache.parent))
    folder = tmp_path / "compilers"
    folder.mkdir()
    script = folder / "counting-g++"
    script.write_text(
        "#!/bin/sh\n"
        f"folder='{folder}'\n"
        'case " $* " in *" -c "*)\n'
        '  echo "$*" >> "$folder/log"\n'
        '  if [ -f "$folder/delay" ]; then sleep "$(cat "$folder/delay")"; fi;;\n'
        "esac\n"
        f'exec {shutil.which("g++")} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return CountingCompiler(script)


@pytest.fixture
def x() -> torch.Tensor:
    """An input of the right kind."""
    return torch.arange(float(BATCH * FEATURES)).reshape(BATCH, FEATURES)


@pytest.fixture
def tiny_wheel(tiny, tmp_path) -> Path:
    """The tiny package's wheel for the CPU, unpacked: the folder that Python would import."""
    tiny.edit(lambda data: data["targets"].pop("sm_80"))
    return unpack(make_wheel(tiny.package, tmp_path / "dist"), tmp_path)
