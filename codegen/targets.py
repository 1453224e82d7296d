"""What the generator can emit for, as data: targets (an instruction set and its limits) and device classes (a card's rates)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """An instruction set with its limits. `smem_bytes` is what one block may plan for; `arch` is what the loader compiles for.

    `rival` is a target that runs on the same cards: this one serves a chain only where the other is not estimated faster.
    """

    name: str
    suffix: str
    language: str  # "cuda" or "cpp"
    arch: str  # "native", "sm_90a" or "host"
    min_capability: tuple[int, int]
    smem_bytes: int
    max_registers: int
    default_device: str
    flags: tuple[str, ...]
    summary: str
    rival: str | None = None

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs the target's code: later ones too where it is compiled for the device's own architecture."""
        if self.language != "cuda":
            return False
        return capability >= self.min_capability if self.arch == "native" else capability == self.min_capability


CUDA_FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-Xptxas=-warn-spills,-warn-lmem-usage")

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target(
            "cpu", "cpu", "cpp", "host", (0, 0), 0, 0, "host",
            ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra"),
            "one C++ pass behind torch's own GEMM or convolution",
        ),
        Target(
            "sm_80", "sm80", "cuda", "native", (8, 0), 99 * 1024, 255, "h100", CUDA_FLAGS,
            "cp.async and mma.sync, at most 99 KB of shared memory: every capability from 8.0",
        ),
        Target("sm_90a", "sm90a", "cuda", "sm_90a", (9, 0), 227 * 1024, 255, "h100", CUDA_FLAGS, "TMA, wgmma and clusters: H100 and H200", "sm_80"),
    )
}  # fmt: skip

DEFAULT_TARGETS = tuple(TARGETS)  # of a spec that names none: those of them that can serve it


def preference(targets: Iterable[Target] = TARGETS.values()) -> tuple[str, ...]:
    """The names of `targets` in the loader's order, the best first: code for exactly one architecture, for a range of them, for the host."""
    ranked = sorted(targets, key=lambda t: (t.language == "cuda", t.arch != "native", t.min_capability), reverse=True)
    return tuple(target.name for target in ranked)


def cuda_targets() -> dict[str, Target]:
    """The rows of the targets that run on GPUs, by name."""
    return {name: target for name, target in TARGETS.items() if target.language == "cuda"}


@dataclass(frozen=True)
class DeviceClass:
    """A card's figures for the cost model: rates in TFLOP/s (dense), bandwidth in GB/s, cache in MB.

    `clock` is that of an SM under load, in GHz: measured on H100 and H200, taken to be alike elsewhere until it is measured. `mma_share` is the share of the tensor rate that mma.sync reaches (arXiv 2501.12084 for Hopper), `library_share` what the vendor's
    GEMM reaches on large shapes.
    """

    name: str
    targets: tuple[str, ...]
    sms: int
    fp32: float
    tf32: float
    fp16: float
    hbm: float
    l2: float
    mma_share: float
    library_share: float
    smem_per_sm: int
    launch_us: float
    clock: float
    summary: str


DEVICES: dict[str, DeviceClass] = {
    d.name: d
    for d in (
        DeviceClass("host", ("cpu",), 1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0, 0.0, 1.4, "the machine's own processor"),
        DeviceClass("a100", ("sm_80",), 108, 19.5, 156.0, 312.0, 1555.0, 40.0, 0.90, 0.85, 164 * 1024, 3.0, 1.4, "A100 40/80 GB"),
        DeviceClass("rtx3090", ("sm_80",), 82, 35.6, 35.6, 71.2, 936.0, 6.0, 0.90, 0.85, 100 * 1024, 3.0, 1.4, "RTX 3090, A6000 class (8.6)"),
        DeviceClass("rtx4090", ("sm_80",), 128, 82.6, 82.6, 165.2, 1008.0, 72.0, 0.90, 0.85, 100 * 1024, 3.0, 1.4, "RTX 4090, L40 class (8.9)"),
        DeviceClass("h100", ("sm_90a", "sm_80"), 132, 66.9, 494.7, 989.4, 3350.0, 50.0, 0.63, 0.78, 227 * 1024, 3.0, 1.4, "H100 SXM"),
        DeviceClass("h200", ("sm_90a", "sm_80"), 132, 66.9, 494.7, 989.4, 4800.0, 50.0, 0.63, 0.78, 227 * 1024, 3.0, 1.4, "H200"),
    )
}  # fmt: skip
