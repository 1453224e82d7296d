"""A plan in words and numbers: the header of every source, `--explain`, and the explanation kept in the manifest."""

from __future__ import annotations

import shlex
from typing import Any

from codegen.comments import paragraph
from codegen.ir.apply import describe
from codegen.plan.model import Kernel, Launch, Plan
from codegen.spec import ELSEWHERE, Spec
from codegen.targets import DeviceClass


def chain_text(plan: Plan) -> str:
    """The chain in one line: `linear -> group_norm -> hardtanh`."""
    return " -> ".join(step.operator.name for step in plan.spec.chain)


def regenerate(spec: Spec, device: DeviceClass | None) -> str:
    """The command that makes a package again; `device` where it is not the target's default.

    Of a spec whose folder sources do not name, the package's own spec.yaml stands for it, where packages lie by default.
    """
    path = shlex.quote(f"generated/{spec.package}/spec.yaml" if spec.path.startswith(ELSEWHERE) else spec.path)
    precision = "" if spec.precision.name == "fp32" else f" PRECISION={spec.precision.name}"
    prepack = " PREPACK=1" if spec.prepack_asked else ""
    algebra = " ALGEBRA=0" if spec.algebra_asked else ""
    return f"make generate SPEC={path}{precision}{prepack}{algebra}" + (f" DEVICE={device.name}" if device else "")


def header_lines(plan: Plan, kernel: Kernel, package: Spec) -> list[str]:
    """The comment at the top of a source: what it computes, by which plan, and how to make it again. `package` is the spec of the whole chain."""
    spec = plan.spec
    device = plan.device if plan.device.name != plan.target.default_device else None
    lines = [
        *_wrapped(f"{package.package}: {kernel.summary}"),
        "",
        *(line for step in spec.chain for line in _wrapped(f"{describe(step)}{f'  # {step.name}' if step.name else ''}", "  ")),
        f"  x {spec.input_shape} -> y {spec.output_shape}, {spec.precision.name}",
        "",
        f"Plan for {plan.target.name} on {plan.device.name}:",
        *(line for note in kernel.notes for line in _wrapped(note, "  ")),
    ]
    if kernel.blocks:
        lines.append(f"  {kernel.blocks} blocks of {kernel.threads} threads, {kernel.smem_bytes} bytes of shared memory")
    lines += ["", f"Generated from {package.path}; do not edit.", f"Again: {regenerate(package, device)}"]
    return lines


def _wrapped(text: str, indent: str = "") -> list[str]:
    """An entry of the header as lines behind `// `."""
    return [line[3:] for line in paragraph(text, f"// {indent}", "  ")]


def explanation(plan: Plan) -> dict[str, Any]:
    """The plan as data: kernels, memory, floor and reasons."""
    floor = plan.floor
    return {
        "chain": chain_text(plan),
        "target": plan.target.name,
        "device_class": plan.device.name,
        "why": list(plan.why),
        **({"algebra": list(plan.algebra)} if plan.algebra else {}),
        "kernels": [
            {
                "name": kernel.function(plan.target), "file": kernel.file(plan.target), "summary": kernel.summary, "blocks": kernel.blocks or None,
                "threads": kernel.threads or None, "smem_bytes": kernel.smem_bytes, "max_registers": kernel.max_registers if kernel.threads else None,
                "waves": _waves(plan, kernel), "notes": _own_notes(plan, kernel),
            }
            for kernel in plan.kernels
        ],
        "workspace_bytes": plan.workspace_bytes,
        **({"prepared_bytes": plan.prepared_bytes} if plan.preparing else {}),
        "floor": {
            "flop": floor.flop, "bytes": floor.bytes, "compute_ms": round(floor.compute_ms, 5) or None, "memory_ms": round(floor.memory_ms, 5) or None,
            "ms": round(floor.ms, 5) or None,
        },
    }  # fmt: skip


def _own_notes(plan: Plan, kernel: Kernel) -> list[str]:
    """The kernel's notes that the plan's reasons do not hold already."""
    return [note for note in kernel.notes if note not in plan.why]


def _waves(plan: Plan, kernel: Kernel) -> float | None:
    """Rounds of blocks over the device's multiprocessors, by threads and shared memory alone."""
    if not kernel.blocks or not kernel.threads or plan.target.language != "cuda":
        return None
    per_sm = min(2048 // kernel.threads, 32)
    if kernel.smem_bytes:
        per_sm = min(per_sm, plan.device.smem_per_sm // (kernel.smem_bytes + 1024))
    if kernel.max_registers:
        per_sm = min(per_sm, 65536 // (kernel.max_registers * kernel.threads))
    return round(kernel.blocks / (max(per_sm, 1) * plan.device.sms), 2)


def explain(plan: Plan) -> str:
    """The plan for a reader at a terminal."""
    spec, floor = plan.spec, plan.floor
    lines = [
        f"{spec.package} for {plan.target.name} ({plan.target.summary}), planned for {plan.device.name}",
        f"  {chain_text(plan)}: x {spec.input_shape} -> y {spec.output_shape}, {spec.precision.name}",
        "",
        "steps",
    ]
    waves = {row["name"]: row["waves"] for row in explanation(plan)["kernels"]}
    for number, step in enumerate(plan.steps, 1):
        if not isinstance(step, Launch):
            lines.append(f"  {number}. torch's own {step.operation} -> {step.out}")
            continue
        kernel = step.kernel
        lines.append(f"  {number}. {kernel.file(plan.target)}: {kernel.summary}" + (", once for given parameters" if step.prepares else ""))
        if kernel.blocks:
            lines.append(
                f"     {kernel.blocks} blocks of {kernel.threads} threads ({waves[kernel.function(plan.target)]} waves on {plan.device.sms} SMs), "
                f"{kernel.smem_bytes / 1024:.1f} KB of shared memory, at most {kernel.max_registers} registers"
            )
        lines += [f"     {note}" for note in _own_notes(plan, kernel)]
    lines += ["", "why", *(f"  {reason}" for reason in plan.why), "", "memory"]
    for buffer in plan.buffers:
        lines.append(f"  {buffer.name}: " + (f"{buffer.bytes} bytes" if buffer.bytes else f"{buffer.shape} {buffer.dtype}"))
    lines.append(f"  workspace per call: {plan.workspace_bytes / 1e6:.2f} MB")
    if plan.preparing:
        lines.append(f"  prepared: {plan.prepared_bytes / 1e6:.2f} MB ({', '.join(plan.prepared)}), kept by each model on each device")
    lines += ["", "floor", f"  {floor.flop / 1e9:.2f} GFLOP, {floor.bytes / 1e6:.1f} MB read and written once"]
    if floor.ms:
        lines.append(f"  compute {floor.compute_ms:.4f} ms, memory {floor.memory_ms:.4f} ms: at least {floor.ms:.4f} ms on {plan.device.summary}")
    return "\n".join(lines) + "\n"
