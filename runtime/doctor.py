"""Looks at what a build needs on this machine and says what is missing and what to install."""

import os
import platform
from dataclasses import dataclass
from typing import Callable

import torch

from .build import plan_build
from .cache import Cache, default_cache, find_built, readable_cache
from .devices import check_driver, driver_version, visible_capabilities
from .errors import BuildError, RuntimeFailure, ToolchainError
from .folders import usable_place
from .load import libraries_for, with_backwards
from .manifest import TARGETS, TargetManifest
from .package import Package
from .resources import free_memory, parallel_jobs, usable_cores
from .toolchain import find_cuobjdump, find_gxx, find_host_compiler, find_ninja, find_nvcc
from .tools import Tool


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``state`` is ``ok``, ``missing`` (nothing can be built for what is here) or ``optional``."""

    what: str
    state: str
    detail: str


def examine() -> list[Finding]:
    """Everything the doctor reports, in order."""
    capabilities = visible_capabilities()
    nvcc = _tool("nvcc", find_nvcc, needed=bool(capabilities))
    findings = [
        Finding("Python", "ok", platform.python_version()),
        Finding("torch", "ok", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"),
        _tool("g++", find_gxx, needed=True),
        _tool("ninja", find_ninja, needed=True),
        nvcc,
        *_host_compiler(),
        _tool("cuobjdump", find_cuobjdump, needed=False),
        _driver(capabilities),
        *_gpus(capabilities),
        _cache(),
        Finding("parallel jobs", "ok", f"{parallel_jobs(1000)} ({usable_cores()} cores, {free_memory() / 1e9:.1f} GB free)"),
    ]
    found = {finding.what: finding.state == "ok" for finding in findings}
    found["cache"] = all(finding.state != "missing" for finding in findings if finding.what == "cache")  # another folder will do
    return findings + [_target(name, *row, capabilities, found) for name, row in TARGETS.items()]


def _tool(name: str, find: Callable[[], Tool], needed: bool) -> Finding:
    try:
        tool = find()
    except ToolchainError as error:
        return Finding(name, "missing" if needed else "optional", str(error))
    with_flags = f", with {' '.join(tool.flags)}" if tool.flags else ""
    behind = f", behind {' '.join(tool.launcher)}" if tool.launcher else ""
    behind += f", without {' and '.join(tool.left_out)}, which is not installed" if tool.left_out else ""
    return Finding(name, "ok", f"{tool.version_text}, {tool.path} (from {tool.origin}){with_flags}{behind}")


def _host_compiler() -> list[Finding]:
    """The g++ that nvcc calls, where it is named apart."""
    finding = _tool("g++ for CUDA", find_host_compiler, needed=False)
    return [] if finding.detail == _tool("g++", find_gxx, needed=True).detail else [finding]


def _driver(capabilities) -> Finding:
    version = driver_version()
    if version is None:
        return Finding("driver", "optional", "no NVIDIA driver: CUDA targets can be compiled here, not run")
    try:
        check_driver(find_nvcc())
    except ToolchainError as error:
        return Finding("driver", "missing" if capabilities else "optional", str(error))
    return Finding("driver", "ok", f"supports CUDA {version[0]}.{version[1]}")


def _gpus(capabilities) -> list[Finding]:
    if not capabilities:
        return [Finding("GPU", "optional", "none visible")]
    return [
        Finding(f"GPU {index}", "ok", f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}")
        for index, (major, minor) in enumerate(capabilities)
    ]


def _cache() -> Finding:
    """The cache that is written to; where that is not the wanted one, why, and whether the wanted one is still read."""
    named = "CODEGEN_CACHE" if os.environ.get("CODEGEN_CACHE") else "default"
    readable = readable_cache()
    try:
        place = usable_place()
    except BuildError as error:
        entries = 0 if readable is None else len(readable.keys())
        return Finding("cache", "missing", f"{error} {entries} entries in {readable.root} can be used." if entries else str(error))
    if not place.notice:
        return Finding("cache", "ok", f"{place.root} ({named}), {len(Cache(place.root).keys())} entries")
    detail = f"{place.root}, {len(Cache(place.root).keys())} entries: {place.notice}"
    if readable is not None and readable.root != place.root and readable.keys():
        detail += f" {len(readable.keys())} entries in {readable.root} are used."
    return Finding("cache", "optional", detail)


def _target(name, arch, least, capabilities, found: dict[str, bool]) -> Finding:
    target = TargetManifest(name, (), (), "", arch, least, (), ())
    host = "g++ for CUDA" if "g++ for CUDA" in found else "g++"
    tools = ["g++", "ninja", "cache"] if arch is None else [host, "ninja", "nvcc", "cache"]
    absent = [tool for tool in tools if not found[tool]]
    builds = f"cannot be built ({', '.join(absent)})" if absent else "can be built"
    if arch is None:
        return Finding("target cpu", "missing" if absent else "ok", f"{builds}; runs here")
    able = [f"GPU {index}" for index, capability in enumerate(capabilities) if target.runs_on(capability)]
    runs = f"runs here on {', '.join(able)}" if able else "no visible GPU runs it"
    return Finding(f"target {name}", "ok" if able and not absent else "optional", f"{builds}; {runs}")


def examine_package(package: Package) -> list[Finding]:
    """The libraries of ``package`` that models on this machine load, the backward's included, and what has become of each.

    What is not built yet is no fault: constructing a model builds it, the first forward that asks for gradients the backward.
    """
    try:
        chosen = libraries_for(package, visible_capabilities(), os.environ.get("TARGETS", ""))
    except RuntimeFailure as error:
        return [Finding(package.manifest.name, "missing", str(error))]
    findings = []
    for target, capability in with_backwards(package, chosen):
        what = f"{package.manifest.name} {target.name}"
        compiled_for = "" if capability is None else f", for capability {capability[0]}.{capability[1]}"
        try:
            state, detail = _library(package, target, capability, (target, capability) in chosen)
        except RuntimeFailure as error:
            state, detail, compiled_for = "missing", str(error), ""
        findings.append(Finding(what, state, detail + compiled_for))
    return findings


def _library(package: Package, target: TargetManifest, capability, forward: bool) -> tuple[str, str]:
    if package.prebuilt is not None:
        package.prebuilt.library(target.name, capability)
        return "ok", "came with the package"
    build = plan_build(package, target, capability)
    if (find_built(build.key) or default_cache().find(build.key)) is not None:
        return "ok", f"built: {build.key[:12]} in the cache"
    return "optional", f"not built yet: {'constructing a model' if forward else 'the first forward that asks for gradients'} does it"
