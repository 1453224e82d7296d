"""Numbers of the cost models that were fitted to measurements: each with its unit, its card, its date and the record of the measurements."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.targets import DEVICES, DeviceClass


@dataclass(frozen=True)
class Source:
    """Where fitted numbers come from: the card's class, the month, and what was measured."""

    card: str
    date: str
    record: str


@dataclass(frozen=True)
class Fitted:
    """A fitted number. Units: "us" (microseconds of an SM's work), "ms", "cycles", "share" of a rate, "ratio" of two times, "GB/s", "bytes", "instructions"."""

    value: float
    unit: str
    source: Source

    def on(self, device: DeviceClass) -> float:
        """The number for a card of another class: times that an SM works scale with its clock, all else is taken to be alike."""
        return self.value * (DEVICES[self.source.card].clock / device.clock) if self.unit in ("us", "ms") else self.value


SWEEP = Source("h200", "2026-11", "bench.sweep: 28 random convolutions and the shipped ones on H100 and H200; half of the estimates within 20 %")
GEMM_SHAPES = Source("h200", "2026-11", "bench.tune: the shipped linear chains, and 1024 x 8192 x 8192 with every tile")
LIBRARY_SHAPES = Source("h200", "2026-11", "27 shapes of the vendor's half-precision GEMM (cuBLAS 13)")
HOPPER_SHAPES = Source("h100", "2026-11", "bench.run: K = 8192 at every precision; (tf32, registers) on an H200")
MACHINE = Source("h200", "2026-11", "bench.machine: torch's GEMM at 51.4 TFLOP/s in fp32 and 383 in tf32")
CONV_PRODUCTS = Source("h200", "2026-11", "convolutions and transposed convolutions of 17 problems of level 2: ours, and cuDNN beside it")
DIRECT = Source("h200", "2026-11", "bench.level2: the convolutions of three channels of level 2")
LEVEL2_PEERS = Source("h200", "2026-11", "the first convolution of 20 problems of level 2 by cuDNN in TF32")
TRUNCATION = Source("h200", "2026-11", "products alone at each interval, K from 512 to 8192, beside float64; in no record")
NORM_SHAPES = Source("h200", "2026-11", "bench.tune: norm kernels of few and of many groups")
