"""Chains that start with a linear, at sizes that no tile or vector divides, for the GEMM's tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from codegen.ir.fused_form import FusedSpec
from tests.fused import load_fused

ARITHMETICS = (("fp16", "fp16"), ("bf16", "bf16"), ("tf32", "tf32"), ("fp32", "fp16x3"), ("fp32", "tf32x3"), ("fp32", "bf16x3"), ("fp32", "ffma"))


@dataclass(frozen=True)
class Case:
    """batch x in_features -> out_features in `groups` groups, with operators before and after the norm as YAML data; 0 groups: no norm."""

    name: str
    batch: int
    in_features: int
    out_features: int
    groups: int
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()
    linear: dict[str, Any] = field(default_factory=dict)
    norm: dict[str, Any] = field(default_factory=dict)

    def spec(self, folder: Path, precision: str, math: str | None) -> FusedSpec:
        linear = {"name": "gemm", "in_features": self.in_features, "out_features": self.out_features, **self.linear}
        data = {
            "name": self.name, "batch": self.batch, "precision": precision, "gemm": "generated", **({"math": math} if math else {}),
            "chain": [{"linear": linear}, *self.before, *([{"group_norm": {"name": "norm", "num_groups": self.groups, **self.norm}}] if self.groups else []), *self.after],
        }  # fmt: skip
        path = folder / f"{self.name}_{math or precision}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        return load_fused(path)


def bias(n: int) -> dict:
    return {"add": {"name": "bias", "shape": [n]}}


CASES = (
    Case("one_row", 1, 8, 8, 2),
    Case("odd_pitch", 35, 77, 51, 3, before=("relu",), after=("silu",)),
    Case("group_17", 130, 130, 510, 30, before=(bias(1), "silu"), after=({"mul": {"value": 0.5}},), linear={"bias": False}),
    Case("group_100", 37, 100, 100, 1, after=("sigmoid", {"mul": {"name": "gain", "shape": [100]}})),
    Case("group_48", 65, 1000, 384, 8, after=("gelu",), norm={"affine": False}),
    Case("group_250", 200, 333, 1000, 4, linear={"bias": False}, norm={"affine": False}),
    Case("group_3", 40, 64, 33, 11),
    Case("small_30", 128, 1024, 512, 8, after=({"hardtanh": {"min_val": -2.0, "max_val": 2.0}},)),
    Case("small_94", 128, 512, 1024, 32, before=(bias(1024), "hardtanh", "mish")),
    Case("wide_group", 300, 72, 2048, 1, before=(bias(2048), "hardtanh")),
    Case("wider_than_norm_holds", 40, 96, 16384, 1),
    Case("ragged_wide", 70, 40, 20000, 1),
    Case("long_k", 33, 8200, 72, 9),
    Case("very_long_k", 4, 70000, 64, 4),
    Case("large", 1024, 2048, 1536, 48, after=(bias(1536),)),
)
