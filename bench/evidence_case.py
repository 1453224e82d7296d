"""One package of `make evidence`: the two jobs that a child process does for it.

`examine` builds the model, verifies it and compiles the peers into Inductor's cache; several children do that at once. `take_times` comes later, alone on
the card.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.children import Result, take_jobs
from bench.jobs import compile_peers, guarded
from bench.machine import choose_device, describe
from bench.measure import measure
from bench.subject import Emitted, Subject, construct, emit
from bench.timing import Ceilings
from bench.verify import verdict, verify


def _model(job: Mapping[str, Any], setting: Mapping[str, Any]) -> tuple[Emitted, nn.Module, torch.device]:
    device = choose_device(setting["device"])
    emitted = emit(job["path"], job["precision"], setting["target"], Path(setting["out"]), setting["prepack"]).at(job["batch"])
    return emitted, construct(emitted, device, setting["target"]), device


def examine(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """`bench.verify.verdict` on the package; `job["verdict"]` where it has one already."""
    subject = Subject(*_model(job, setting))
    result = job["verdict"] or verdict(verify(subject))
    compile_peers(subject, setting["peers"])
    return result


def take_times(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """The package's record, with `job["verdict"]`."""
    (emitted, ours, device), ceilings = _model(job, setting), Ceilings(**setting["ceilings"])
    record = measure(emitted, ours, device, describe(device), ceilings, tuple(setting["peers"]), setting["seconds"])
    return record | job["verdict"] | {"asked": setting["peers"], "autotuned": setting["autotuned"]}


WORK = {"examine": examine, "times": take_times}

if __name__ == "__main__":
    take_jobs(Path(sys.argv[1]), lambda job, setting: guarded(job, setting, WORK[setting["work"]]))
