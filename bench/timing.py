"""Times: interleaved trials with a cold L2, the cost of a launch, and the machine's own ceilings."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]
FLUSH_BYTES = 256 << 20  # more than any card's L2
LEAST_FLUSHES, MOST_FLUSHES = 2, 40  # before a trial


@dataclass(frozen=True)
class Time:
    """Milliseconds over `trials`: median, and the quartiles around it."""

    ms: float
    low: float
    high: float
    trials: int

    @property
    def spread(self) -> float:
        """Distance between the quartiles as a share of the median."""
        return (self.high - self.low) / self.ms if self.ms else 0.0


def summary(samples: list[float]) -> Time:
    ordered = sorted(samples)
    pick = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731
    return Time(pick(0.5), pick(0.25), pick(0.75), len(ordered))


def interleaved(
    calls: dict[str, Call], device: torch.device, budget_s: float = 3.0, trials: int = 60, least: int = 5, align: Call = lambda: None
) -> dict[str, Time]:  # fmt: skip
    """The summary of `rounds` by call."""
    return {name: summary(values) for name, values in rounds(calls, device, budget_s, trials, least, align=align).items()}


def rounds(
    calls: dict[str, Call], device: torch.device, budget_s: float = 3.0, trials: int = 60, least: int = 5, report: Callable[[int], None] = lambda done: None,
    align: Call = lambda: None,
) -> dict[str, list[float]]:  # fmt: skip
    """Time all calls in turn, in an order drawn anew each round, so that heat and clocks meet them alike. Milliseconds by call, one a round.

    On a GPU: CUDA events around each call, the L2 overwritten before it as often as it takes the device longer than the host takes to
    issue the call, so the host's time is not in the figure unless a call waits for the device. Stops after `trials` rounds, or when the
    budget is used up and `least` rounds are done; `report` is told how many are. `align` runs in front of each trial, untimed: several ranks wait for one
    another there, and do the same rounds where the budget is infinite.
    """
    for call in calls.values():
        for _ in range(3 if device.type == "cuda" else 1):
            call()
    once = _cuda_trial(device, calls, align) if device.type == "cuda" else lambda name: _cpu_trial(calls[name], align)
    order, draw = list(calls), random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(trials):
        if done >= least and time.perf_counter() - start > budget_s:
            break
        draw.shuffle(order)
        for name in order:
            samples[name].append(once(name))
        report(done + 1)
    return samples


def _cuda_trial(device: torch.device, calls: dict[str, Call], align: Call):
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def between(work: Callable[[], object], before: int = 0) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(before):
            flush.zero_()
        align()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    flush.zero_()
    flush_ms = between(lambda: [flush.zero_() for _ in range(10)]) / 10
    counts = {name: flushes_for(max(_issue_ms(call, device) for _ in range(5)), flush_ms) for name, call in calls.items()}
    return lambda name: between(calls[name], counts[name])


def flushes_for(issue_ms: float, flush_ms: float) -> int:
    """How often the L2 is overwritten before a call that takes the host so long to issue: twice that long, and a little for what the host does around it."""
    return min(max(math.ceil((2 * issue_ms + 0.1) / flush_ms), LEAST_FLUSHES), MOST_FLUSHES)


def _issue_ms(call: Call, device: torch.device) -> float:
    """The host's time to issue one call to an idle device."""
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _cpu_trial(call: Call, align: Call) -> float:
    align()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True)
class Overhead:
    """What a call costs beside its kernels, in microseconds.

    `host`: the host's time to issue one call without waiting; `call`: one call after another, waiting only at the end (the larger of host
    and device); `replay`: one call inside a CUDA graph of many, the shortest achievable; None where it cannot be captured.
    """

    host: float
    call: float
    replay: float | None


def overhead(call: Call, device: torch.device, calls: int = 200) -> Overhead:
    """Measure it on a GPU, with a warm L2. A call on a CPU launches nothing."""
    for _ in range(3):
        call()
    hosts, totals = [], []
    for _ in range(3):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        hosts.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize(device)
        totals.append((time.perf_counter() - start) / calls * 1e6)
    return Overhead(min(hosts), min(totals), _replay(call, device))


def _replay(call: Call, device: torch.device, copies: int = 20) -> float | None:
    try:
        graph = capture(call, device, copies)
    except RuntimeError:
        return None
    times = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / copies * 1e3)
    return min(times)


def capture(call: Call, device: torch.device, copies: int = 1) -> torch.cuda.CUDAGraph:
    """`copies` calls as one CUDA graph."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            call()
    return graph


@dataclass(frozen=True)
class Ceilings:
    """The machine's own rates, measured in this process: GB/s of a copy (bytes read and written), TFLOP/s of torch's GEMM by precision."""

    copy: float
    fp32: float
    tf32: float
    fp16: float
    bf16: float

    def rate(self, precision: str) -> float:
        """TFLOP/s that a chain of this precision can reach: tensor cores throughout, three fp16 products for fp32."""
        tensor = max(self.fp16, self.bf16)
        return {"fp32": max(self.fp32, tensor / 3), "tf32": max(self.tf32, tensor)}.get(precision, max(tensor, self.fp32))

    def floor_ms(self, precision: str, flop: float, moved: float) -> tuple[float, float]:
        """Milliseconds for the arithmetic and for moving every tensor once."""
        return flop / (self.rate(precision) * 1e9), moved / (self.copy * 1e6)


def measure_ceilings(device: torch.device, budget_s: float = 1.0) -> Ceilings:
    """Copy bandwidth and GEMM rates, on random data (zeros draw less power and run faster)."""
    gpu = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(0)
    elements = (1 << 28) if gpu else (1 << 25)
    source = torch.empty(elements, device=device).uniform_(generator=generator)
    copied = torch.empty_like(source)
    copy = interleaved({"copy": lambda: copied.copy_(source)}, device, budget_s / 4, 20)["copy"].ms
    del copied, source
    rates = {}
    sizes = {"fp32": 4096, "tf32": 8192, "fp16": 8192, "bf16": 8192} if gpu else {"fp32": 1536}
    allowed = torch.backends.cuda.matmul.allow_tf32
    for name, n in sizes.items():
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)
        a, b = (torch.randn(n, n, generator=generator, device=device).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        rates[name] = 2 * n**3 / interleaved({name: lambda: a @ b}, device, budget_s / 4, 20)[name].ms / 1e9  # noqa: B023
    torch.backends.cuda.matmul.allow_tf32 = allowed
    fill = rates["fp32"] if not gpu else 0.0
    return Ceilings(2 * elements * 4 / copy / 1e6, rates["fp32"], *(rates.get(name, fill) for name in ("tf32", "fp16", "bf16")))
