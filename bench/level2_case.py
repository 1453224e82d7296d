"""One problem of level 2: the three jobs that a child process does for it, and what is recorded of them.

`build` emits the package and compiles its kernels; many children do that at once. `examine` verifies it and compiles the peers into Inductor's cache,
several at once on a card. `times` comes last, alone on the card. Modes are the benchmark's: what trains otherwise than it evaluates is timed in training.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.children import Result, take_jobs
from bench.jobs import compile_peers, guarded
from bench.machine import choose_device, precision_flags
from bench.measure import INPUT_SEED
from bench.packages import load_package
from bench.peers import Peer
from bench.peers import build as build_peers
from bench.records import picked, present_manifest
from bench.subject import Emitted, Subject, construct, emit, target_for
from bench.timing import interleaved
from bench.verify import Finding, rounded, verify
from codegen.algebra import passes_of
from codegen.plan import Refusal
from codegen.spec import SpecError, load_spec
from codegen.targets import DEVICES
from runtime import Package
from runtime.build import ensure_built, plan_build

PEERS = ("eager", "graph", "compile")  # of PyTorch, as bench.peers calls them
FIELDS = {"eager": "eager", "eager in a CUDA graph": "graph", "compile": "compile"}  # the names of their times in a record


def build(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """Emit and compile. Returns what is known of the package: folder, target, key, library_steps, flop, bytes, passes of algebra."""
    capability = setting["capability"] and tuple(setting["capability"])
    emitted = emit(job["path"], job["precision"], setting["target"], Path(setting["out"]), algebra=job["algebra"])
    target = target_for(emitted, capability, setting["target"])
    package = Package(emitted.folder)
    ensure_built(plan_build(package, package.target(target), capability))
    entry, floor = emitted.manifest["targets"][target], emitted.floor(target)
    return {
        "package": emitted.spec.package, "path": emitted.spec.named, "folder": str(emitted.folder), "target": target, "key": evidence_key(entry),
        "library_steps": [step["library"] for step in entry["steps"] if "library" in step], "kernels": sum("launch" in step for step in entry["steps"]),
        "flop": floor["flop"], "bytes": floor["bytes"], "passes": emitted.manifest["plan"][target].get("algebra", []),
    }  # fmt: skip


def evidence_key(entry: Mapping[str, Any]) -> str:
    """The digest of what a target runs, library steps too: what a measurement is evidence for."""
    runs = [entry["source_key"], entry["steps"], entry.get("training")]
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()


def rewritable(path: str, precision: str) -> bool:
    """Does any pass of algebra rewrite the chain of a spec today? False of one that cannot be read, or is gone."""
    try:
        return bool(passes_of(load_spec(path, precision)))
    except SpecError:
        return False


def todays_key(path: str, precision: str, target: str, card: str = "", algebra: bool = True) -> str | None:
    """The evidence key of what is emitted now for a spec; None where there is no such spec or target any more, or where a `card` (a device class) now runs
    another target of it. Without `algebra` it is that of the chain as written."""
    try:
        targets = present_manifest(path, precision, algebra=algebra).get("targets", {})
    except (OSError, SpecError, Refusal):
        return None
    best = picked(targets, card) if card in DEVICES and target != "cpu" else target
    return evidence_key(targets[target]) if target in targets and target == best else None


def _model(job: Mapping[str, Any], setting: Mapping[str, Any]) -> tuple[Emitted, nn.Module, torch.device]:
    device, folder = choose_device(setting["device"]), Path(job["folder"])
    emitted = Emitted(load_spec(job["path"], job["precision"], algebra=job["algebra"]), folder, load_package(folder))
    return emitted, construct(emitted, device, job["target"]), device


def examine(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """Verify, and compile the peers. Returns `verdict`."""
    subject = Subject(*_model(job, setting))
    result = verdict(verify(subject, repeats=1))
    if setting["timing"]:
        compile_peers(subject, PEERS, training=True)
    return result


def verdict(findings: list[Finding]) -> Result:
    """Is every family right? With the errors, against float64, of the one that comes nearest to breaking its promise, and what is wrong with any.

    `reference_outside` counts the elements of eager's result on the benchmark's data outside the harness's tolerance of the exact one: where there are any, only
    a result with eager's own rounding agrees with eager.
    """
    worst = max(findings, key=lambda found: (not found.ok, found.ours.relative / (found.allowed or 1.0)))
    return {
        "verified": all(found.ok for found in findings), "families": len(findings), "worst": worst.name, "error": rounded(worst.ours.relative),
        "eager_error": rounded(worst.by.eager.relative), "reference_outside": max((f.by.eager.outside for f in findings if f.name.startswith("benchmark")), default=None),
        "problems": {found.name: list(found.problems) for found in findings if not found.ok},
    }  # fmt: skip


def take_times(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """Milliseconds of ours and of the peers at the same precision, interleaved, the L2 flushed, on the benchmark's inputs and initial weights."""
    emitted, ours, device = _model(job, setting)
    torch.manual_seed(INPUT_SEED)
    eager = emitted.module.Model(*emitted.module.get_init_inputs()).to(device)
    eager.load_state_dict(ours.state_dict())
    inputs = tuple(given.to(device) for given in emitted.module.get_inputs())
    with torch.no_grad(), precision_flags(emitted.spec.precision.name):
        built, failed = build_peers(PEERS, emitted, eager, inputs)
        times = interleaved({peer.name: peer.call for peer in [Peer("ours", lambda: ours(*inputs)), *built]}, device, setting["seconds"])
    peers = {FIELDS[peer.name]: rounded(times[peer.name].ms) for peer in built}
    best = min(peers, key=peers.get, default=None)
    return {
        "ours_ms": rounded(times["ours"].ms), "spread": round(times["ours"].spread, 3), "peers": peers, "failed": failed, "best_torch": best,
        "speedup_torch": round(peers[best] / times["ours"].ms, 3) if best else None,
    }  # fmt: skip


WORK = {"build": build, "examine": examine, "times": take_times}

if __name__ == "__main__":
    take_jobs(Path(sys.argv[1]), lambda job, setting: guarded(job, setting, WORK[setting["work"]]))
