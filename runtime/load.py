"""Chooses the targets that this machine needs, has them built, and resolves their functions.

A target's library is loaded once per process, whatever the number of modules and threads that ask for it.
"""

import ctypes
import os
import re
import threading
from typing import Callable

import torch

from .devices import Capability, check_driver, visible_capabilities
from .errors import UnsupportedDeviceError
from .launch import Preparation, Program, make_backward, make_preparation, make_program, make_training_program
from .manifest import TARGETS, Backward, Manifest, TargetManifest
from .package import Package

Place = tuple[int, torch.device]  # a batch and a device

_functions: dict[tuple, dict[str, Callable]] = {}  # by build key and signatures
_locks: dict[str, threading.Lock] = {}
_locks_lock = threading.Lock()


class Loaded:
    """The programs of one package, by batch and device, those of training beside them, and in two parts where weights can be prepared.

    ``built`` names the targets that were built for this machine, ``targets`` the one that each program runs. A copy of a module
    shares it. It cannot leave the process: a pickled one comes back empty, and the module that holds it loads again.
    """

    def __init__(self, built: tuple[str, ...] = ()):
        self.programs: dict[Place, Program] = {}
        self.training: dict[Place, Program] = {}
        self.built = built
        self.targets: dict[Place, str] = {}
        self.preparations: dict[Place, Preparation] = {}

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where there is a program for any batch."""
        return tuple(dict.fromkeys(device for _, device in self.programs))

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return Loaded, ()


def load(package: Package) -> Loaded:
    """Builds and loads what the visible devices need, or what TARGETS names.

    Raises ToolchainError, BuildError, PackageError, or UnsupportedDeviceError where no emitted target runs here.
    """
    capabilities = visible_capabilities()
    requested = os.environ.get("TARGETS", "")
    chosen = [(size, choose_targets(size, capabilities, requested)) for size in package.sizes]
    loaded = Loaded(tuple(dict.fromkeys(target.name for _, pairs in reversed(chosen) for target, _ in pairs)))
    devices = [(torch.device("cuda", index), capability) for index, capability in enumerate(capabilities)]
    for size, pairs in chosen:
        functions = [load_functions(size, target, capability) for target, capability in pairs]
        for device, capability in [(torch.device("cpu"), None), *devices]:
            for (target, compiled_for), resolved in zip(pairs, functions):
                place = (size.manifest.batch, device)
                if compiled_for == capability and target.runs_on(capability) and place not in loaded.programs:
                    _add_program(loaded, place, size.manifest, target, resolved)
    return loaded


def _add_program(loaded: Loaded, place: Place, manifest: Manifest, target: TargetManifest, functions: dict[str, Callable]) -> None:
    _, device = place
    backward = backward_for(manifest, device)
    saved = () if backward is None or backward.recomputes else tuple(entry.name for entry in backward.saved)
    loaded.programs[place] = make_program(manifest, target, functions, device, saved)
    if target.training:
        loaded.training[place] = make_training_program(manifest, target, functions, device)
    loaded.targets[place] = target.name
    preparation = make_preparation(manifest, target, functions, device)
    if preparation is not None:
        loaded.preparations[place] = preparation


def choose_targets(
    package: Package, capabilities: list[Capability], requested: str
) -> list[tuple[TargetManifest, Capability | None]]:
    """What to build: pairs of a target and the capability to compile for, best target first.

    Without a request: for each capability the best emitted target that runs on it, and ``cpu`` where no GPU is
    visible. A requested target that no visible GPU can run is compiled for the least device it runs on.
    """
    emitted = package.manifest.targets
    names = [name for name in re.split(r"[\s,]+", requested) if name]
    if names:
        named = [emitted[name] for name in names if name in emitted]
        missing = dict.fromkeys(name for name in names if name not in emitted)
        unknown = [name for name in missing if name not in TARGETS]
        if unknown or not named:
            raise UnsupportedDeviceError(
                f"TARGETS is {requested!r}, but {package.manifest.name} was generated for {', '.join(emitted)}{_at(package)}; "
                f"name one of these; {'; '.join(package.why_not(name) for name in unknown or missing)}."
            )
        return [pair for target in sorted(named, key=_rank, reverse=True) for pair in _pairs_of(target, capabilities)]
    if not capabilities or set(emitted) == {"cpu"}:
        return [(package.target("cpu"), None)]
    chosen = []
    for capability in dict.fromkeys(capabilities):
        target = best_target(package, capability)
        if target is not None:
            chosen.append((target, capability))
    if not chosen:
        raise UnsupportedDeviceError(
            f"no target of {package.manifest.name}{_at(package)} runs on the visible GPUs (compute capability "
            f"{', '.join(f'{major}.{minor}' for major, minor in dict.fromkeys(capabilities))}); "
            f"emitted: {describe_targets(package)}. Set TARGETS=cpu to run on the CPU."
        )
    return chosen


def libraries_for(package: Package, capabilities: list[Capability], requested: str) -> list[tuple[TargetManifest, Capability | None]]:
    """What ``choose_targets`` has the package build, each library once: sizes of a range may choose different targets, and those that choose the
    same one have it together."""
    found = {}
    for size in reversed(package.sizes):
        for target, capability in choose_targets(size, capabilities, requested):
            found.setdefault((target.name, capability), (size.built_as(target), capability))
    return list(found.values())


def with_backwards(package: Package, chosen: list[tuple[TargetManifest, Capability | None]]) -> list[tuple[TargetManifest, Capability | None]]:
    """``chosen`` as it is, and behind it the libraries that gradients on the same devices need, each once.

    One backward serves all CUDA targets, compiled for each device: for one that ``chosen`` leaves open, the only one that the target
    runs on, or where there are several, the least.
    """
    found = []
    for target, capability in chosen:
        backward = backward_for(package.manifest, torch.device("cpu" if target.arch is None else "cuda"))
        if backward is not None:
            alone = capability is None and target.is_for_one_capability
            found.append((backward.target, target.least_capability if alone else capability))
    return [*chosen, *dict.fromkeys(found)]


def best_target(package: Package, capability: Capability) -> TargetManifest | None:
    """The emitted target to prefer on a GPU: one made for exactly this architecture, else the latest that runs."""
    able = [target for target in package.manifest.targets.values() if target.runs_on(capability)]
    return max(able, key=_rank, default=None)


def _rank(target: TargetManifest) -> tuple:
    """Later is better: the CPU, then what was planned for a range of devices, then for one exactly."""
    return (False, (0, 0)) if target.arch is None else (target.arch != "native", target.least_capability)


def describe_targets(package: Package) -> str:
    """The targets of the package and what each runs on, for messages. A size of a range does without some where others serve it better."""
    texts = []
    for target in package.manifest.targets.values():
        if target.arch is None:
            texts.append("cpu")
            continue
        major, minor = target.least_capability
        later = "" if target.arch != "native" else " or later"
        texts.append(f"{target.name} (compute capability {major}.{minor}{later})")
    return ", ".join(texts) + (" (and the wheel holds no other)" if package.prebuilt is not None else "")


def _at(package: Package) -> str:
    """Which size of a range a message is about."""
    return f" at batch {package.manifest.batch}" if len(package.manifest.batches) > 1 else ""


def load_functions(package: Package, target: TargetManifest, capability: Capability | None) -> dict[str, Callable]:
    """The launchers of a target by name, with their C signatures; built first where the cache has none."""
    if not target.sources:  # library steps alone
        return {}
    library = _library_of(package, package.built_as(target), capability)
    memo = (library.key, *target.functions.items())
    with _lock_of(library.key):
        if memo not in _functions:
            _functions[memo] = _resolve(library.open(), target)
        return _functions[memo]


def _library_of(package: Package, target: TargetManifest, capability: Capability | None):
    """What to open: the library that came with the package, else one to be built on this machine."""
    if package.prebuilt is not None:
        return package.prebuilt.library(target.name, capability)
    from .build import plan_build  # a wheel carries no builder

    build = plan_build(package, target, capability)
    if capability is not None:
        check_driver(build.tools.nvcc)
    return build


def load_backward(package: Package, device: torch.device) -> Callable | None:
    """The backward's ``run(grad_y, saved, parameters)`` for ``device``, built first where the cache has none; None where none was emitted."""
    backward = backward_for(package.manifest, device)
    if backward is None:
        return None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return make_backward(package.manifest, backward, load_functions(package, backward.target, capability), device)


def backward_for(manifest: Manifest, device: torch.device) -> Backward | None:
    """The emitted backward that serves ``device``, None where there is none: that of the CPU, or the one of CUDA, which is made for the
    least capability that the package has a target for. The meta device takes the CPU's shapes."""
    wants_cuda = device.type == "cuda"
    if device.type not in ("cpu", "meta", "cuda"):
        return None
    return next((entry for entry in manifest.backward.values() if (entry.target.arch is not None) == wants_cuda), None)


def _pairs_of(target: TargetManifest, capabilities: list[Capability]):
    if target.arch is None:
        return [(target, None)]
    able = [capability for capability in dict.fromkeys(capabilities) if target.runs_on(capability)]
    return [(target, capability) for capability in able] or [(target, None)]


def _resolve(library: ctypes.CDLL, target: TargetManifest) -> dict[str, Callable]:
    functions = {}
    for name, pointers in target.functions.items():
        function = library[name]
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int, ctypes.c_void_p]
        function.restype = ctypes.c_int
        functions[name] = function
    return functions


def _lock_of(key: str) -> threading.Lock:
    with _locks_lock:
        return _locks.setdefault(key, threading.Lock())


def _forget_locks() -> None:
    """A fork copies a lock that another thread holds, and nobody in the child would ever release it."""
    global _locks_lock
    _locks_lock = threading.Lock()
    _locks.clear()


os.register_at_fork(after_in_child=_forget_locks)
