"""One package measured: our time and error beside the peers' in one process, as a record."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from torch import nn

from bench import peers as peers_module
from bench import store
from bench.machine import Machine, precision_flags
from bench.metrics import Errors, compare
from bench.peers import Peer
from bench.records import NOT_PREPARED, PREPARED, conclude, system
from bench.store import FORMAT, MACHINE, Record
from bench.subject import Emitted, Subject, built_target
from bench.timing import Ceilings, Time, interleaved, overhead
from bench.verify import rounded

INPUT_SEED = 0


def ceilings_record(ceilings: Ceilings) -> dict:
    """The measured rates as plain data: GB/s and TFLOP/s."""
    names = {"copy_gbs": "copy", "fp32_tflops": "fp32", "tf32_tflops": "tf32", "fp16_tflops": "fp16", "bf16_tflops": "bf16"}
    return {key: rounded(getattr(ceilings, name)) for key, name in names.items()}


def measure(
    emitted: Emitted, ours: nn.Module, device: torch.device, machine: Machine, ceilings: Ceilings, peer_names: tuple[str, ...],
    budget_s: float = 3.0, report=None, launches: bool = True,
) -> Record:  # fmt: skip
    """Time `ours` and the peers, interleaved, on the spec's own inputs with its initial weights, in evaluation mode. Errors are against float64.

    `launches` says whether to time the cost of launching too, where the device is a GPU. Prepared weights are current before the timing begins, and reported apart.
    """
    spec, target = emitted.spec, built_target(ours, emitted.spec.batch)
    subject = Subject(emitted, ours, device)
    torch.manual_seed(INPUT_SEED)
    inputs = tuple(given.to(device) for given in emitted.module.get_inputs())
    subject.load({}, training=False)
    exact = subject.run_exact(inputs)
    errors = lambda y: compare(y, exact, spec.precision.tolerance, None)  # noqa: E731
    del subject._exact
    prepare = preparing(ours) if emitted.prepares(target) else None
    with torch.no_grad(), precision_flags(spec.precision.name) as flags:
        built, failed = peers_module.build(peer_names, emitted, subject.eager, inputs, report)
        us = Peer("ours", lambda: ours(*inputs))
        measured = {peer.name: errors(peer.call()) if peer.chain else None for peer in [us, *built]}
        del exact
        if report:
            report("timing")
        times = interleaved({peer.name: peer.call for peer in [us, *built]}, device, budget_s)
        timed = [peer for peer in [us, *built] if launches and device.type == "cuda" and peer.name in ("ours", "eager", "compile")]
        host = {peer.name: overhead(peer.call, device, 100) for peer in timed}
    floor = emitted.floor(target)
    compute, memory = ceilings.floor_ms(spec.precision.name, floor["flop"], floor["bytes"])
    record: Record = {
        "format": FORMAT, "spec": system(spec.name, emitted.batch), "path": spec.path,
        "package": emitted.label, "precision": spec.precision.name, "target": target,
        **({} if emitted.batch is None else {"batch": emitted.batch}),
        "key": emitted.key(target), **machine.facts, "weights": PREPARED if prepare else NOT_PREPARED, "flags": flags, "verified": None,
        "flop": floor["flop"], "bytes": floor["bytes"], "floor_ms": rounded(max(compute, memory)),
        "floor": {"compute_ms": rounded(compute), "memory_ms": rounded(memory)}, "ceilings": ceilings_record(ceilings),
        "ours": {
            **_row(times["ours"], measured["ours"], floor), "outside": measured["ours"].outside, "elements": measured["ours"].elements,
            "roofline_share": rounded(max(compute, memory) / times["ours"].ms),
        },
        "peers": {
            peer.name: {**_row(times[peer.name], measured[peer.name], floor), "ours_ms": rounded(times["ours"].ms), "setup_s": round(peer.setup_s, 1)}
            | ({"note": peer.note} if peer.note else {})
            for peer in built
        },
        "overhead_us": {
            name: {"host": rounded(o.host), "call": rounded(o.call), "replay": None if o.replay is None else rounded(o.replay)} for name, o in host.items()
        },
        "failed": failed,
        **({"prepare": prepare} if prepare else {}),
    }  # fmt: skip
    return conclude(record)


def preparing(ours: nn.Module, trials: int = 9) -> dict:
    """What prepared weights cost: the median time of `prepare()` in milliseconds, from the call until they are ready, and the bytes they occupy."""
    ours.prepare()  # allocates
    samples = []
    for _ in range(trials):
        start = time.perf_counter()
        ours.prepare()
        samples.append((time.perf_counter() - start) * 1e3)
    return {"ms": rounded(statistics.median(samples)), "bytes": ours.prepared_bytes}


def _row(measured: Time, errors: Errors | None, floor: dict) -> dict:
    return {
        "ms": rounded(measured.ms), "spread": round(measured.spread, 3), "trials": measured.trials,
        "rel_error": None if errors is None else rounded(errors.relative), "max_error": None if errors is None else rounded(errors.largest),
        "tflops": rounded(floor["flop"] / measured.ms / 1e9), "gbs": rounded(floor["bytes"] / measured.ms / 1e6),
    }  # fmt: skip


def save_machine(results: Path, machine: Machine, ceilings: Ceilings, measured_by: str = "evidence") -> None:
    """Record the card and its measured rates; `measured_by` names the command, whose last rates alone are kept."""
    record = {"format": FORMAT, "measured_by": measured_by, **machine.facts, "ceilings": ceilings_record(ceilings)}
    store.put(MACHINE, results, machine.slug, [record])
