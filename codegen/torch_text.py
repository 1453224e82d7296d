"""The chain as PyTorch text: what model.py's constructors create and what its reference computes."""

from __future__ import annotations

from codegen.ir.apply import kept_name
from codegen.ops import Kind
from codegen.spec import Spec, Step

_DRAWS = {"randn": "torch.randn", "rand": "torch.rand", "ones": "torch.ones", "zeros": "torch.zeros"}


def parameters(spec: Spec) -> list[str]:
    """The constructors' parameters behind self, those with defaults last."""
    return [f"{name}={value!r}" if name in spec.defaults else name for name, value in spec.args]


def module_lines(spec: Spec) -> list[str]:
    """Statements that create the parameters, in the chain's order: the order of PyTorch's random draws."""
    lines = []
    for step in spec.chain:
        if step.operator.module is not None:
            lines.append(f"self.{step.name} = {step.operator.module(step.values, step.input_shape)}")
        elif step.parameters:
            (parameter,) = step.parameters
            lines.append(f"self.{step.name} = nn.Parameter({_DRAWS[parameter.initialiser]}({parameter.shape}))")
    return lines


def reference_lines(spec: Spec) -> list[str]:
    """Statements that compute the chain on `v` (x at first) with PyTorch's own operators."""
    kept = spec.kept(spec.chain)
    lines = []
    for step in spec.chain:
        lines.append(f"v = {_call(spec, step)}")
        if step.index in kept:
            lines.append(f"{kept_name(step)} = v")
    return lines


def _call(spec: Spec, step: Step) -> str:
    source = "x" if step.operator.kind is Kind.PRODUCER else "v"
    if step.operator.module is not None:
        return f"self.{step.name}({source})"
    tapped = "v" if step.taps_itself else kept_name(spec.chain[step.tap]) if step.tap is not None else None
    return step.operator.call(step.values).format(v=source, p=tapped or f"self.{step.name}")


def uses_functional(spec: Spec) -> bool:
    """Does the reference call torch.nn.functional?"""
    return any("F." in line for line in reference_lines(spec))
