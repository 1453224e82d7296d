"""The chains of the tests: the three systems at small sizes, and one for each thing that ranks may have to exchange."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.sweep.draw import SMALL, draw
from codegen.ir.chain import chain_of
from codegen.ir.layout import ShardError

LINEAR = {"linear": {"name": "gemm", "in_features": 24, "out_features": 48}}
CONV = {"conv2d": {"name": "conv", "in_channels": 8, "out_channels": 16, "kernel_size": 3}}
PLANE = {"input": {"height": 9, "width": 7, "values": "randn"}}


def norm(groups: int) -> dict[str, Any]:
    return {"group_norm": {"name": "norm", "num_groups": groups}}


# A spec without its name, `split` for x in parts of that dimension, `compiled` to run torch.compile too, and the merges that it needs.
EQUAL: dict[str, dict[str, Any]] = {
    "problem_30": {"chain": [LINEAR, norm(8), {"hardtanh": {"min_val": -2.0, "max_val": 2.0}}], "compiled": True, "merges": []},
    "problem_94": {"chain": [LINEAR, {"add": {"name": "bias", "shape": [48]}}, "hardtanh", "mish", norm(16)], "merges": []},
    "problem_85": {
        "chain": [CONV, norm(4), {"mul": {"name": "scale", "shape": [16, 1, 1], "init": "rand"}}, {"max_pool2d": {"kernel_size": 2}}, {"clamp": {"min": 0.0, "max": 1.0}}],
        **PLANE, "merges": [],
    },
    "straddling": {"chain": [LINEAR, "gelu", norm(3), "silu"], "compiled": True, "merges": ["moments"]},
    "one_group": {"chain": [CONV, norm(1), "relu"], **PLANE, "merges": ["moments"]},
    "rows": {"chain": [LINEAR, {"softmax": {"dim": 1}}], "merges": ["rows"]},
    "by_rows": {"chain": [LINEAR, {"add": {"name": "bias", "shape": [48]}}, norm(8), "tanh"], "split": 1, "compiled": True, "merges": ["product"]},
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "log_rows": {"chain": [CONV, {"log_softmax": {"dim": 1}}], **PLANE, "merges": ["rows"]},
    "logsumexp": {"chain": [LINEAR, {"logsumexp": {"dim": 1, "keepdim": True}}, "mish"], "merges": ["rows"]},
    "extremes": {"chain": [LINEAR, norm(4), {"min": {"dim": 1, "keepdim": True}}, {"add": {"name": "bias", "shape": [1, 48]}}], "merges": ["extremes"]},
    "mean_of_all": {"chain": [CONV, {"mean": {"dim": [1, 2, 3]}}], **PLANE, "merges": ["sum"]},
    "layer_norm": {"chain": [CONV, {"layer_norm": {"name": "norm"}}, "tanh"], **PLANE, "merges": ["moments"]},
    "rms_norm": {"chain": [LINEAR, {"rms_norm": {"name": "norm"}}], "merges": ["moments"]},
    "two_products": {
        "chain": [LINEAR, "gelu", {"linear": {"name": "second", "in_features": 48, "out_features": 24}}, {"add": {"from": "x"}}, {"layer_norm": {"name": "norm"}}],
        "merges": ["product", "moments"],
    },
    "transposed": {
        "chain": [
            {"conv_transpose2d": {"name": "conv", "in_channels": 8, "out_channels": 16, "kernel_size": 3, "stride": 2}}, {"batch_norm": {"name": "bn"}}, norm(4),
            {"avg_pool2d": {"kernel_size": 2}},
        ],
        **PLANE, "merges": [],
    },
    "transposed_by_rows": {
        "chain": [{"conv_transpose2d": {"name": "conv", "in_channels": 8, "out_channels": 16, "kernel_size": 3}}, norm(4)], **PLANE, "split": 1, "merges": ["product"],
    },
    "grouped": {
        "chain": [{"conv2d": {"name": "conv", "in_channels": 8, "out_channels": 16, "kernel_size": 3, "groups": 4, "padding": 1}}, {"instance_norm": {"name": "norm", "affine": True}}],
        **PLANE, "merges": [],
    },
    "residual": {
        "chain": [{"conv2d": {"name": "conv", "in_channels": 8, "out_channels": 8, "kernel_size": 3, "padding": 1}}, "silu", norm(4), {"add": {"from": "x"}}], **PLANE, "merges": [],
    },
    "norm_first": {"chain": [{"group_norm": {"name": "norm", "num_groups": 4}}, "silu", CONV], "input": {"shape": [8, 9, 7]}, "split": 1, "merges": ["product"]},
    "views": {
        "chain": [CONV, {"flatten": {"name": "flat"}}, {"view": {"sizes": [0, 16, -1]}}, {"mul": {"name": "scale", "shape": [16], "view": [1, 16, 1]}}, {"flatten": {}}],
        **PLANE, "merges": [],
    },
    "pooled_features": {"chain": [LINEAR, {"unsqueeze": {"dim": 1}}, {"max_pool1d": {"kernel_size": 2}}, {"squeeze": {"dim": 1}}], "merges": ["gather"]},
    "again": {"chain": [LINEAR, {"add": {"name": "bias", "shape": [48]}}, norm(3), {"mul": {"name": "again", "parameter": "bias"}}], "merges": ["moments"]},
    "straddling_in_16_bits": {"chain": [LINEAR, "gelu", norm(3), "silu"], "precision": "bf16", "merges": ["moments"]},
    "by_rows_in_16_bits": {"chain": [LINEAR, norm(8), "tanh"], "precision": "fp16", "split": 1, "merges": ["product"]},
}  # fmt: skip
OURS = ("split", "compiled", "merges")


def write_cases(folder: Path, cases: dict[str, dict[str, Any]], names: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The cases with their specs as files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name in names or cases:
        spec = {"name": name, "batch": 6, "input": {"values": "randn"}} | {key: value for key, value in cases[name].items() if key not in OURS}
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(spec))  # JSON is YAML
        found.append({"name": name, "path": str(path)} | {key: cases[name][key] for key in OURS if key in cases[name]})
    return found


def random_cases(folder: Path, count: int, seed: int = 24) -> list[dict[str, Any]]:
    """The first `count` specs of the sweep's sequence that four ranks can share."""
    found = []
    for index in itertools.count():
        spec = draw(seed, index, SMALL, folder)
        try:
            chain_of(spec).shard(4, 0)
        except ShardError:
            continue
        found.append({"name": spec.name, "path": str(folder / f"{spec.name}.yaml")})
        if len(found) == count:
            return found


def allowed(row: dict[str, Any], scatter: float = 1.0) -> float:
    """The error that a divided chain may have: the promise of its precision, and `scatter` times it where few values leave much to chance.

    Partial products of 16 bits are rounded once each, one more than in one product.
    """
    if row["precision"] in ("fp32", "tf32"):
        return scatter * max(1.1 * row["eager"], 3e-7)
    return scatter * (1.5 if "product" in row["collectives"] else 1.05) * row["eager"]
