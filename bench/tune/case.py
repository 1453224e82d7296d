"""In a child process: the candidates of one spec timed in turn."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.children import Result, take_jobs
from bench.jobs import guarded
from bench.machine import choose_device, precision_flags
from bench.measure import INPUT_SEED
from bench.packages import load_package
from bench.subject import Emitted, construct
from bench.timing import interleaved
from bench.verify import rounded
from codegen.spec import load_spec


def compare(job: Mapping[str, Any], setting: Mapping[str, Any]) -> Result:
    """Median milliseconds of every candidate (`folders` and `targets` by label), with the same weights and input, in an order drawn anew each round."""
    device = choose_device(setting["device"])
    spec = load_spec(job["spec"], job["precision"]).at(job["batch"])
    models, x = {}, None
    for label, folder in job["folders"].items():
        emitted = Emitted(spec, Path(folder), load_package(Path(folder)))
        models[label] = construct(emitted, device, job["targets"][label])
        if x is None:
            torch.manual_seed(INPUT_SEED)
            x = emitted.module.get_inputs()[0].to(device)
    with torch.no_grad(), precision_flags(spec.precision.name):
        times = interleaved({label: lambda model=model: model(x) for label, model in models.items()}, device, setting["seconds"])
    return {"ms": {label: rounded(time.ms) for label, time in times.items()}}


if __name__ == "__main__":
    take_jobs(Path(sys.argv[1]), lambda job, setting: guarded(job, setting, compare))
