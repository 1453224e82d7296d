"""A small copy of a spec that keeps the structure of its kernels: the same chain and group width, fewer samples, groups and input features."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from codegen.ir.fused_form import FusedSpec
from codegen.spec import Spec, load_spec
from codegen.spec.writer import resolved

BATCHES = (160, 512)  # 160 is no multiple of a tile of 64 or 128: the ragged edge is run too, where the full shape's kernel takes one
GROUPS, CHANNELS, DEPTH = 4, 1024, 1088  # at least so many groups and channels; fp32 splits from a depth of 1024 on
CONV_BATCH = 3


def shrunken(spec: Spec, library: bool = False, batch: int = BATCHES[0]) -> dict[str, Any]:
    """The small spec of one of the fused form as plain data. Linear layers keep their group width, convolutions everything but the batch.

    `library` says that the full spec's plan multiplies with torch's own GEMM or convolution; the small one then does too, and otherwise does not.
    """
    form, data = FusedSpec.of(spec), copy.deepcopy(resolved(spec))
    data["name"] = f"{spec.name}_tiny"
    linear = not form.producer.operator.rank
    data.pop("pad_batch", None)
    data["batch"] = min(spec.batch, batch if linear else CONV_BATCH)
    groups = min(form.num_groups, max(GROUPS, CHANNELS // form.group_channels)) if linear else form.num_groups
    channels = groups * form.group_channels
    for step, entry in zip(form.chain, data["chain"], strict=True):
        if isinstance(entry, str):
            continue
        (arguments,) = entry.values()
        changes: dict[str, Any] = {}
        if step is form.producer and linear:
            changes = {step.operator.takes: min(spec.input_shape[1], DEPTH), step.operator.gives: channels}
        elif step.operator.name == "group_norm":
            changes = {"num_groups": groups}
        elif step.values.get("shape"):
            changes = {"shape": [channels if size == form.channels else size for size in step.values["shape"]]}
        for key, value in changes.items():
            source = step.sources.get(key)
            if source is None:
                arguments[key] = value
            else:
                data["args"][source] = value
    data["gemm"] = "library" if library else "generated"
    return data


def shrink(spec: Spec, folder: Path, library: bool = False, batch: int = BATCHES[0]) -> Spec:
    """Write the small spec under `folder` and load it. Raises SpecError where the chain does not allow it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{spec.package}_tiny.yaml"
    path.write_text(yaml.safe_dump(shrunken(spec, library, batch), sort_keys=False), encoding="utf-8")
    return load_spec(path)
