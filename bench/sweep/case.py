"""One case of the sweep: what is recorded of it, and the two jobs that a child process does for it.

`examine` builds the model, judges it by bench.verify's promise and compiles the peers into Inductor's cache; many children do that at once.
`measure_times` comes later, alone on the card.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.children import Result, take_jobs
from bench.jobs import compile_peers, guarded
from bench.machine import choose_device, describe
from bench.measure import measure
from bench.packages import load_package
from bench.store import Record
from bench.subject import Emitted, Subject, construct
from bench.sweep.draw import producer_name
from bench.sweep.judge import judge
from bench.timing import Ceilings
from codegen.spec import load_spec

KEPT = ("ours", "peers", "floor_ms", "failed", "best_peer", "speedup", "best_torch", "speedup_torch")  # of a measured record
LAUNCH_MS = 0.004  # below this floor a call costs what its launches cost


def begin(emitted: Emitted, target: str, text: str) -> Record:
    """What is known of a case whose spec reads `text` once it is generated."""
    plan, spec = emitted.manifest["plan"][target], emitted.spec
    floor = plan["floor"]
    made = emitted.manifest["targets"][target]
    return {
        "spec": text, "package": spec.package, "precision": spec.precision.name, "producer": producer_name(spec), "target": target,
        "device_class": made["device_class"], "key": emitted.key(target), "flop": floor["flop"], "bytes": floor["bytes"],
        "route": " + ".join(f"torch's {step['library']}" if "library" in step else step["launch"].removesuffix("_launch") for step in made["steps"]),
        "limiter": limiter(floor), "why": plan["why"], "verified": None,
    }  # fmt: skip


def limiter(floor: Mapping[str, Any]) -> str:
    """What bounds the case on the planned device: "launches", "arithmetic" or "memory"; "unknown" where the device's rates are."""
    compute, memory = floor["compute_ms"] or 0.0, floor["memory_ms"] or 0.0
    if not floor["bytes"] or not (compute or memory):
        return "unknown"
    return "launches" if max(compute, memory) < LAUNCH_MS else "arithmetic" if compute > memory else "memory"


def verdict(rows: list[Result]) -> Result:
    """What `judge` found, with the error and the allowed error of the family that comes nearest to breaking its promise."""
    worst = max(rows, key=lambda row: (not row["ok"], (row["rel_error"] or 0.0) / (row["allowed"] or 1.0)))
    found = {"error": worst["rel_error"], "allowed": worst["allowed"], "worst": worst["family"]}
    return {"verified": all(row["ok"] for row in rows), **found, "verification": rows}


def _subject(job: Mapping[str, Any], device: torch.device) -> tuple[Emitted, torch.nn.Module]:
    folder = Path(job["folder"])
    spec = load_spec(job["spec"], job.get("precision"))
    emitted = Emitted(spec.at(job.get("batch", spec.batch)), folder, load_package(folder))
    return emitted, construct(emitted, device, job["target"])


def examine(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """Build, verify, compile the peers. Returns `verdict`, or {"failure": why}."""
    device = choose_device(setting["device"])
    emitted, ours = _subject(job, device)
    subject = Subject(emitted, ours, device)
    result = verdict(judge(subject, tuple(setting["families"])))
    compile_peers(subject, job["peers"])
    return result


def prepare(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """Build and compile the peers, for a case that was verified on an earlier machine or day. Returns {}, or {"failure": why}."""
    device = choose_device(setting["device"])
    emitted, ours = _subject(job, device)
    compile_peers(Subject(emitted, ours, device), job["peers"])
    return {}


def measure_times(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """Time ours beside the peers. Returns the KEPT fields of bench.measure's record, or {"failure": why}."""
    device = choose_device(setting["device"])
    emitted, ours = _subject(job, device)
    record = measure(emitted, ours, device, describe(device), Ceilings(**setting["ceilings"]), tuple(job["peers"]), setting["seconds"], launches=False)
    for row in (record["ours"], *record["peers"].values()):
        for name in ("spread", "trials", "max_error", "gbs", "ours_ms", "setup_s", "elements", "outside"):
            row.pop(name, None)
    return {key: record[key] for key in KEPT} | {"asked": job["peers"]}


WORK = {"examine": examine, "prepare": prepare, "times": measure_times}


if __name__ == "__main__":
    take_jobs(Path(sys.argv[1]), lambda job, setting: guarded(job, setting, WORK[setting["work"]]))
