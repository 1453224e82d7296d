"""`make bench BACKWARD=1`: a forward and its backward beside PyTorch's, at the same precision, in one process; each gradient with its error."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import torch
from rich.table import Table
from torch import nn

from bench.machine import Machine, precision_flags
from bench.peers import failure_text
from bench.subject import CONV_CHUNK, Emitted, Subject
from bench.timing import Time, interleaved
from bench.verify import rounded
from runtime import RuntimeFailure

INPUT_SEED, GRADIENT_SEED = 0, 1
# Those of bench.peers that train, with torch.compile's mode.
MODES = {"eager": None, "compile": "default", "max-autotune-no-cudagraphs": "max-autotune-no-cudagraphs"}
TRAINERS = tuple(MODES)

Gradients = dict[str, torch.Tensor]
Step = Callable[[], Gradients]


def step_of(call: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, x: torch.Tensor, grad_y: torch.Tensor) -> Step:
    """One forward and backward: the gradients of x and of every parameter of `model`, by name, for the gradient of y.

    `call` is the model, or what it was compiled to.
    """
    named = {"x": x, **dict(model.named_parameters())}
    wanted = list(named.values())
    return lambda: dict(zip(named, torch.autograd.grad(call(x), wanted, grad_y), strict=True))


def exact_gradients(model: nn.Module, x: torch.Tensor, grad_y: torch.Tensor, chunked: bool) -> Gradients:
    """The same in float64; some samples at a time where they are independent of each other (`chunked`)."""
    model = copy.deepcopy(model).double()
    size = CONV_CHUNK if chunked and x.dim() > 2 else x.shape[0]
    parts, total = [], {}
    for part, grad in zip(x.double().split(size), grad_y.double().split(size if chunked else grad_y.shape[0]), strict=True):
        found = step_of(model, model, part.requires_grad_(), grad)()
        parts.append(found.pop("x"))
        total = {name: gradient + total[name] if total else gradient for name, gradient in found.items()}
    return {"x": torch.cat(parts), **total}


def relative_errors(found: Gradients, exact: Gradients) -> dict[str, float | None]:
    """Frobenius, by tensor."""
    errors = {}
    for name, want in exact.items():
        norm, off = float(want.norm()), float((found[name].double() - want).norm())
        errors[name] = rounded(off / norm if norm else off)
    return errors


def measure_backward(
    emitted: Emitted, ours: nn.Module, device: torch.device, machine: Machine, peer_names: tuple[str, ...] = TRAINERS[:2],
    budget_s: float = 3.0, report=None,
) -> dict:  # fmt: skip
    """Time forward and backward of `ours` and of the peers that train, interleaved, on the spec's own inputs, x's gradient included.

    Returns the `backward` of a record. Errors are against float64.
    """
    spec = emitted.spec
    subject = Subject(emitted, ours, device)
    subject.load({})
    torch.manual_seed(INPUT_SEED)
    x = emitted.module.get_inputs()[0].to(device)
    generator = torch.Generator().manual_seed(GRADIENT_SEED)
    grad_y = torch.randn(spec.output_shape, generator=generator).to(device, x.dtype)
    exact = exact_gradients(subject.eager, x, grad_y, spec.output_shape[0] == spec.batch)
    x.requires_grad_()
    with precision_flags(spec.precision.name):
        steps, failed, setup = {"ours": step_of(ours, ours, x, grad_y)}, {}, {}
        torch._dynamo.reset()
        for name in (name for name in peer_names if name in MODES):
            if report:
                report(name)
            start = time.perf_counter()
            try:
                steps[name] = _peer(name, subject.eager, x, grad_y)
                steps[name]()
            except Exception as error:  # noqa: BLE001 - as in bench.peers: a fact to report
                steps.pop(name, None)
                failed[name] = failure_text(error)
            setup[name] = time.perf_counter() - start
        errors = {name: relative_errors(step(), exact) for name, step in steps.items()}
        del exact
        peaks = {name: _peak(step, device) for name, step in steps.items()}
        if report:
            report("timing")
        times = interleaved(steps, device, budget_s)
    target, entry = _served(emitted, device)
    rows = {name: {**_row(times[name]), "rel_errors": errors[name], "peak_bytes": peaks[name]} for name in steps}
    best = min((name for name in rows if name != "ours"), key=lambda name: rows[name]["ms"], default=None)
    return {
        "target": target, "key": entry["source_key"] if entry else None, "torch": machine.torch, "ours": rows.pop("ours"),
        "peers": {name: {**row, "setup_s": round(setup[name], 1)} for name, row in rows.items()}, "failed": failed,
        "best_torch": best, "speedup_torch": round(times[best].ms / times["ours"].ms, 3) if best else None,
    }  # fmt: skip


def needs_backward(emitted: Emitted, device: torch.device) -> None:
    """Raise RuntimeFailure where no backward is generated for this chain and device: there is nothing of ours to time."""
    for size in emitted.sizes:
        if _served(size, device)[0] is None:
            raise RuntimeFailure(
                f"{size.label}: no backward is generated for this chain on {'a CPU' if device.type == 'cpu' else 'a GPU'}, so there is none to time; "
                "its forward is timed without --backward (make: BACKWARD=1)"
            )


def _peer(name: str, eager: nn.Module, x: torch.Tensor, grad_y: torch.Tensor) -> Step:
    mode = MODES[name]
    return step_of(torch.compile(eager, mode=mode, fullgraph=True, dynamic=False) if mode else eager, eager, x, grad_y)


def _row(measured: Time) -> dict:
    return {"ms": rounded(measured.ms), "spread": round(measured.spread, 3), "trials": measured.trials}


def _peak(step: Step, device: torch.device) -> int | None:
    """Bytes that one step needs at most beside what is there before it; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _served(emitted: Emitted, device: torch.device) -> tuple[str | None, dict | None]:
    """The name and the manifest's entry of the backward that serves the device."""
    found = [(name, entry) for name, entry in emitted.manifest["backward"].items() if (name == "cpu") == (device.type == "cpu")]
    return found[0] if found else (None, None)


def table_of(package: str, precision: str, gpu: str, made: dict) -> Table:
    """The `backward` of a record for a terminal."""
    tensors = list(made["ours"]["rel_errors"])
    table = Table(title=f"{package}, {precision}, forward and backward on {gpu}; errors of the gradients relative to float64", title_justify="left")
    table.add_column("")
    for column in ("ms", "spread", "ours is faster by", "peak MB", *tensors):
        table.add_column(column, justify="right")
    for name, row in [("ours", made["ours"]), *sorted(made["peers"].items(), key=lambda item: item[1]["ms"])]:
        errors = ["-" if row["rel_errors"][tensor] is None else f"{row['rel_errors'][tensor]:.1e}" for tensor in tensors]
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"
        ratio = "" if row is made["ours"] else f"{row['ms'] / made['ours']['ms']:.2f}x"
        table.add_row(name, f"{row['ms']:.4f}", f"{row['spread']:.1%}", ratio, peak, *errors, style="bold" if row is made["ours"] else None)
    return table
