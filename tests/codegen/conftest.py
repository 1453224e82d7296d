"""Fixtures of the generator's tests: the package of a spec, imported to run on the CPU."""

import shlex
from collections.abc import Callable
from types import ModuleType

import pytest

from codegen.folder import write_if_different
from codegen.manifest import Package
from codegen.package import make_package
from codegen.render import render
from codegen.spec import Spec
from tests.compiler import gxx
from tests.runtime.generated_packages import import_from


@pytest.fixture
def on_cpu(tmp_path, monkeypatch) -> Callable[[Spec], tuple[Package, ModuleType]]:
    """A function from a spec to its package for the cpu target and that package imported, which is built in this test's own cache."""
    monkeypatch.setenv("TARGETS", "cpu")
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", shlex.quote(gxx()))

    def emitted(spec: Spec) -> tuple[Package, ModuleType]:
        package = make_package(spec, ("cpu",))
        folder = tmp_path / spec.package
        write_if_different(folder, render(package))
        return package, import_from(folder, f"{spec.package}_on_cpu")

    return emitted
