"""The package as a value, and manifest.json: all that the runtime needs to build and run it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from codegen.ir.chain import chain_of
from codegen.ir.fused_form import departure, fused
from codegen.ir.value import input_name
from codegen.plan import Refusal
from codegen.plan.backward.cpu import gradient_keys, plan_backward
from codegen.plan.backward.cuda import plan_backward_cuda
from codegen.plan.model import Buffer, Launch, Library, Plan
from codegen.plan.parts import library_step
from codegen.report import explanation, regenerate
from codegen.spec import Spec
from codegen.targets import TARGETS

FORMAT = 1
RANGE_FORMAT = 2  # of a package for several batches: what depends on the batch stands in `sizes`, one entry for each
_ORDER = (
    "format", "name", "spec", "regenerate", "batch", "pad_batch", "precision", "prepack", "init_args", "input", "inputs", "output", "parameters", "state", "reference", "targets", "plan",
    "skipped", "backward", "sizes",
)  # fmt: skip
_COMMENT_OR_STRING = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True)
class Package:
    """What one `make generate` emits for one spec and precision: the spec and a plan for each target. `regenerate` is the command.

    `skipped` holds (target, reason) for each default target that cannot serve the spec. Of a range of batches `sizes` are the packages of the single
    ones, whose plans this one has together.
    """

    spec: Spec
    plans: tuple[Plan, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    sizes: tuple[Package, ...] = ()

    @property
    def regenerate(self) -> str:
        return regenerate(self.spec, next((plan.device for plan in self.plans if plan.device.name != plan.target.default_device), None))

    @property
    def backward_plans(self) -> tuple[Plan, ...]:
        """The backwards, in sources of their own: one for the CPU, and one for CUDA, made for the least of the CUDA targets and good for all of them. None where
        the chain has something that gradients are not generated for."""
        if self.sizes:
            return tuple(plan for size in self.sizes for plan in size.backward_plans)
        form = fused(self.spec)
        if form is None:
            return ()
        made = [plan_backward(form, plan.target, plan.device) for plan in self.plans if plan.target.language == "cpp"]
        cuda = [plan for plan in self.plans if plan.target.language == "cuda"]
        if cuda:
            least = min(cuda, key=lambda plan: plan.target.min_capability)
            try:
                made.append(plan_backward_cuda(form, least.target, least.device))
            except Refusal:  # the head has no norm kernel that runs it again
                pass
        return tuple(map(_apart, made)) if any(plan.algebra for plan in self.plans) else tuple(made)

    def plan_for(self, target: str) -> Plan | None:
        return next((plan for plan in self.plans if plan.target.name == target), None)


def _apart(backward: Plan) -> Plan:
    """A backward beside a rewritten forward: of the chain as written it computes again what it needs, by kernels with names of their own."""
    return replace(backward, steps=tuple(step.apart("written") if isinstance(step, Launch) else step for step in backward.steps))


def source_key(sources: dict[str, str], flags: tuple[str, ...], target: str) -> str:
    """SHA-256 over the sources without comments and white space, the flags and the target: what a measurement is evidence for."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        bare = "".join(_COMMENT_OR_STRING.sub(lambda m: m.group() if m.group().startswith('"') else " ", sources[name]).split())
        digest.update(f"{name}\0{bare}\0".encode())
    digest.update("\0".join([*flags, target]).encode())
    return digest.hexdigest()


def manifest_text(package: Package, files: dict[str, str]) -> str:
    """manifest.json for the package's rendered `files`."""
    spec = package.spec
    dtype = spec.precision.dtype
    data: dict[str, Any] = {
        "format": RANGE_FORMAT if package.sizes else FORMAT,
        "name": spec.package,
        "spec": spec.path,
        "regenerate": package.regenerate,
        "precision": spec.precision.name,
        **({"prepack": True} if spec.prepack else {}),
        "init_args": [[name, list(value) if isinstance(value, tuple) else value] for name, value in spec.args],
        "parameters": [{"key": key, "shape": list(shape), "dtype": dtype} for key, shape in spec.parameters],
        **({"state": [_state(spec, entry) for entry in spec.buffers]} if spec.buffers else {}),
        **({"pad_batch": spec.pad_batch, "sizes": [_size(size, files) for size in package.sizes]} if package.sizes else _size(package, files)),
    }
    return json.dumps({key: data[key] for key in _ORDER if key in data}, indent=1, ensure_ascii=True) + "\n"


def _size(package: Package, files: dict[str, str]) -> dict[str, Any]:
    """What depends on the batch."""
    spec, dtype = package.spec, package.spec.precision.dtype
    return {
        "batch": spec.batch,
        **_inputs(spec),
        "output": {"shape": list(spec.output_shape), "dtype": dtype},
        "targets": {plan.target.name: _target(plan, files) for plan in package.plans},
        "plan": {plan.target.name: explanation(plan) for plan in package.plans},
        "skipped": dict(package.skipped),
        **({"reference": _reference(spec)} if departure(spec.chain) else {}),
        "backward": {plan.target.name: _backward(plan, files) for plan in package.backward_plans},
    }


def _inputs(spec: Spec) -> dict[str, Any]:
    """`input` where x is the only one, else `inputs`, the first of which the steps call x."""
    entries = [
        {
            "name": input_name(spec, given.name), "shape": list(given.shape), "dtype": spec.precision.dtype,
            **({} if given.batched else {"batched": False}),
        }
        for given in spec.inputs
    ]  # fmt: skip
    if [given.name for given in spec.inputs] == ["x"]:
        return {"input": entries[0]}
    return {"inputs": [{"argument": given.name, **entry} for given, entry in zip(spec.inputs, entries, strict=True)]}


def _state(spec: Spec, entry: tuple[str, tuple[int, ...], str]) -> dict[str, Any]:
    key, shape, fill = entry
    return {"key": key, "shape": list(shape), "dtype": "int64" if fill == "count" else spec.precision.dtype}


def _reference(spec: Spec) -> dict[str, Any]:
    """The whole chain by torch's operators, whose gradients stand where none are generated."""
    steps = {mode: [_library(library_step(spec, step, mode == "training")) for step in spec.chain] for mode in ("steps", "training")}
    return steps if spec.has_modes else {"steps": steps["steps"]}


def _target(plan: Plan, files: dict[str, str]) -> dict[str, Any]:
    target = plan.target
    arch = {"arch": target.arch} if target.language == "cuda" else {}
    sources = list(dict.fromkeys(kernel.file(target) for kernel in plan.kernels))
    return {
        "sources": sources,
        "flags": list(target.flags),
        "source_key": source_key({name: files[name] for name in sources}, target.flags, target.name),
        "min_capability": list(target.min_capability),
        **arch,
        "device_class": plan.device.name,
        "buffers": {buffer.name: _buffer(buffer) for buffer in plan.buffers},
        **({"prepare": _prepare(plan, files)} if plan.preparing else {}),
        "steps": [_step(step, plan) for step in plan.steps if step not in plan.preparing],
        **({"training": [_step(step, plan) for step in plan.training if step not in plan.preparing]} if plan.training else {}),
    }


def _prepare(plan: Plan, files: dict[str, str]) -> dict[str, Any]:
    """What may be done ahead of calls, once for given parameters: the buffers to keep and the steps that fill them, which a call without them does first.

    Two sizes of a range with the same `layout` fill the same buffers with the same values, so that one copy serves both: their steps read the same, and
    so do their sources but for the batch in the names.
    """
    prepare = {"buffers": list(plan.prepared), "steps": [_step(step, plan) for step in plan.preparing]}
    whole = TARGETS[plan.target.name]
    if plan.target == whole:
        return prepare
    sources = {(file := step.kernel.file(plan.target)): files[file] for step in plan.preparing}
    plain = {name.replace(plan.target.suffix, whole.suffix): text.replace(plan.target.suffix, whole.suffix) for name, text in sources.items()}
    kept = [[buffer.name, _buffer(buffer)] for buffer in plan.buffers if buffer.name in plan.prepared]
    filled = [[step.kernel.function(whole), *step.arguments] for step in plan.preparing]
    layout = source_key(plain, (json.dumps([kept, filled]),), plan.target.name)
    return {**prepare, "layout": layout[:16]}


def _backward(plan: Plan, files: dict[str, str]) -> dict[str, Any]:
    """The backward of a target, apart from the forward: its sources have a key of their own, so that a change of one leaves the other's alone.

    `saved` lists what the chain's segments save, which its steps call t0, t1 and so on; where a step of torch's library gives that again, `recompute` is that
    step, and a forward saves nothing.
    """
    spec = plan.spec
    entry = {key: value for key, value in _target(plan, files).items() if key in ("sources", "flags", "source_key", "buffers", "steps")}
    saved = [{"name": f"t{number}", "shape": list(value.shape), "dtype": value.storage.dtype} for number, value in enumerate(chain_of(spec).saves)]
    recompute = {"recompute": step for step in entry["steps"] if "library" in step}
    launches = [step for step in entry["steps"] if "launch" in step]
    return {**entry, "steps": launches, **recompute, "saved": saved, "gradients": list(gradient_keys(spec)), "why": list(plan.why)}


def _buffer(buffer: Buffer) -> dict[str, Any]:
    return {"bytes": buffer.bytes} if buffer.bytes else {"shape": list(buffer.shape), "dtype": buffer.dtype}


def _step(step: Launch | Library, plan: Plan) -> dict[str, Any]:
    if isinstance(step, Launch):
        return {"launch": step.kernel.function(plan.target), "args": list(step.arguments)}
    return _library(step)


def _library(step: Library) -> dict[str, Any]:
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in step.options.items()}
    also = {"also": list(step.also)} if step.also else {}
    return {"library": step.operation, "args": list(step.arguments), "out": step.out, **also, **options}
