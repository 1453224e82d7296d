"""The chain as PyTorch text: what model.py's constructors create and what its reference computes."""

from __future__ import annotations

from codegen.ir.apply import kept_name
from codegen.ops import Parameter
from codegen.spec import Spec, Step

_DRAWS = {"randn": "torch.randn", "rand": "torch.rand", "ones": "torch.ones", "zeros": "torch.zeros"}


def parameters(spec: Spec) -> list[str]:
    """The constructors' parameters behind self, those with defaults last."""
    return [f"{name}={value!r}" if name in spec.defaults else name for name, value in spec.args]


def module_lines(spec: Spec) -> list[str]:
    """Statements that create the parameters, in the order of PyTorch's random draws."""
    lines = []
    for step in spec.creating:
        if step.module is not None:
            lines.append(f"self.{step.name} = {step.module}")
        else:
            (parameter,) = step.parameters
            lines.append(f"self.{step.name} = nn.Parameter({_filled(parameter)})")
    return lines


def _filled(parameter: Parameter) -> str:
    """The expression of a tensor that starts as the parameter does."""
    if isinstance(parameter.initialiser, float):
        return f"torch.full({parameter.shape}, {parameter.initialiser!r})"
    return f"{_DRAWS[parameter.initialiser]}({parameter.shape})"


def input_texts(spec: Spec) -> list[str]:
    """Expressions that draw the inputs, of a range with `batch` samples."""
    cast = f".to(torch.{spec.precision.dtype})" if spec.precision.itemsize == 2 else ""
    texts = []
    for given in spec.inputs:
        sizes = ["batch", *given.shape[1:]] if spec.batches and given.batched else given.shape
        texts.append(f"torch.{given.values}({', '.join(map(str, sizes))}){cast}")
    return texts


def local_name(spec: Spec, name: str) -> str:
    """`name`, or the next one that no input has, for a variable of a function whose arguments are the inputs."""
    taken = {given.name for given in spec.inputs}
    while name in taken:
        name += "_"
    return name


def value_variable(spec: Spec) -> str:
    """The variable that holds the chain's value in `reference_lines`."""
    return local_name(spec, "v")


def reference_lines(spec: Spec) -> list[str]:
    """Statements that compute the chain of the inputs with PyTorch's own operators, into `value_variable`."""
    value, kept = value_variable(spec), spec.kept(spec.chain)
    lines = []
    for step in spec.chain:
        lines.append(f"{value} = {_call(spec, step)}")
        if step.index in kept:
            lines.append(f"{local_name(spec, kept_name(step))} = {value}")
    return lines


def _call(spec: Spec, step: Step) -> str:
    source = value_variable(spec) if step.index else spec.inputs[0].name
    return torch_call(step, source, _other(spec, step, source))


def torch_call(step: Step, source: str, other: str | None) -> str:
    """The PyTorch expression of an operator on the variable `source` and, where it takes a second value, `other`."""
    if step.module is not None:
        return f"self.{step.name}({source})"
    return step.operator.call(step.values).format(v=source, p=other, axes=tuple(range(len(step.input_shape))))


def _other(spec: Spec, step: Step, source: str) -> str:
    """What an operator takes beside its value: an earlier result, an input, or a parameter."""
    if step.tap is not None:
        taken = source if step.taps_itself else local_name(spec, kept_name(spec.chain[step.tap]))
    else:
        taken = step.reads or f"self.{step.owned[0] if step.owned else step.name}"
    return as_operand(step, taken)


def as_operand(step: Step, taken: str) -> str:
    """The tensor `taken` as the operator's second value: detached or viewed, as the spec says."""
    if step.values.get("detach"):
        return f"{taken}.detach()"
    return f"{taken}.view({', '.join(map(str, step.operand[1]))})" if step.values.get("view") is not None else taken


def uses_functional(spec: Spec) -> bool:
    """Does the reference call torch.nn.functional?"""
    return any("F." in line for line in reference_lines(spec))
