"""standalone.py: the package as one file that imports nothing of ours and compiles its CUDA text with torch's load_inline.

It carries every CUDA target of the package and compiles the best one for the device that it finds. The text keeps to what KernelBench's loader and static checker accept (docs/kernelbench.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from codegen.ir.fused_form import departure
from codegen.ir.value import value_name
from codegen.manifest import Package
from codegen.ops import OPERATORS, Kind
from codegen.plan import Refusal
from codegen.plan.model import Launch, Library, Plan
from codegen.render import render_template
from codegen.spec import Spec
from codegen.targets import TARGETS, Target, cuda_targets, preference
from codegen.torch_text import as_operand, local_name, module_lines, parameters, torch_call

PRODUCTS = frozenset(row.name for row in OPERATORS.values() if row.name == "linear" or (row.kind is Kind.PRODUCER and row.rank))


@dataclass(frozen=True)
class Forward:
    """The forward of one target for one batch: the method's name and its statements up to the return, those of training where they differ."""

    method: str
    steps: tuple[str, ...]
    training: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """What standalone.py holds of one target: its CUDA text, and its forward for every batch.

    Where a size of a range has no plan for the target, its part holds that of the next target, which the same device runs too.
    """

    target: str
    arch: str
    capability: tuple[int, int]
    source_name: str
    sources: str
    forwards: tuple[Forward, ...]


def render_standalone(package: Package, files: dict[str, str]) -> str:
    """The text of standalone.py, from the package's rendered files. Raises Refusal when the package has no CUDA target."""
    targets = [name for name in preference(cuda_targets().values()) if package.plan_for(name)]
    if not targets:
        raise Refusal(f"standalone.py needs a CUDA target; emit {' or '.join(cuda_targets())}")
    spec = package.spec
    parts = [_part(name, package, files) for name in targets]
    statements = [line for part in parts for run in part.forwards for line in (*run.steps, *run.training)]
    return render_template(
        "model/standalone.py.j2", spec=spec, package=package, parts=parts, modules=module_lines(spec), inputs=[given.name for given in spec.inputs],
        kernels=any(part.sources for part in parts), functional=any("F." in line for line in statements), products=[name for name in ("_product", "_single_product") if any(f" {name}(" in line for line in statements)],
        needed=_needed(TARGETS[targets[-1]]), names=[name for name, _ in spec.args], signature=parameters(spec),
        result=_variable("y", spec), local=lambda name: local_name(spec, name), half=spec.precision.itemsize == 2, parameters=[key for key, _ in spec.parameters], init_args=tuple(value for _, value in spec.args),
        sizes_text=f"up to {spec.batch}" if spec.pad_batch else " or ".join(filter(None, (", ".join(map(str, spec.batches[:-1])), str(spec.batch)))),
    )  # fmt: skip


def _needed(target: Target) -> str:
    capability = ".".join(map(str, target.min_capability))
    return f"{capability} or later" if target.arch == "native" else capability


def _part(name: str, package: Package, files: dict[str, str]) -> Part:
    target = TARGETS[name]
    able = preference(cuda_targets().values())
    able = able[able.index(name) :]
    of_sizes = [next((plan for other in able if (plan := size.plan_for(other))), None) for size in package.sizes or (package,)]
    plans = [plan for plan in of_sizes if plan is not None]
    sources = "\n".join(files[file] for plan in plans for file in dict.fromkeys(kernel.file(plan.target) for kernel in plan.kernels))
    method = lambda plan: f"_{name}_b{plan.spec.batch}" if package.sizes else f"_{name}"  # noqa: E731
    return Part(
        name, target.arch, target.min_capability, f"_CUDA_{target.suffix.upper()}", _plain_comments(sources),
        tuple(_forward(method(plan), plan) for plan in plans),
    )  # fmt: skip


def _forward(method: str, plan: Plan) -> Forward:
    steps = tuple(_statements(plan, plan.steps))
    return Forward(method, steps, tuple(_statements(plan, plan.training)) if plan.training not in ((), plan.steps) else ())


def _statements(plan: Plan, steps: tuple[Launch | Library, ...]) -> Iterator[str]:
    """A mode's forward: tensors for what its kernels write, its steps, and the running statistics that they made put in the place of the old ones."""
    spec = plan.spec
    launched = {name for step in steps if isinstance(step, Launch) for name in step.arguments}
    made_by_torch = {step.out for step in steps if isinstance(step, Library)}
    on = f"device={spec.inputs[0].name}.device"
    for buffer in plan.buffers:
        if buffer.name in launched - made_by_torch:
            size = f"{buffer.bytes}, dtype=torch.uint8" if buffer.bytes else f"{buffer.shape}, dtype=torch.{buffer.dtype}"
            yield f"{_variable(buffer.name, spec)} = torch.empty({size}, {on})"
    if "y" not in made_by_torch:
        yield f"{_variable('y', spec)} = torch.empty({spec.output_shape}, dtype=torch.{spec.precision.dtype}, {on})"
    yield from (_statement(step, plan) for step in steps)
    renewed = [name.removeprefix("state:") for name in (buffer.name for buffer in plan.buffers) if name.startswith("state:") and name in launched]
    yield from (f"self.{key}.copy_({_variable(f'state:{key}', spec)})" for key in renewed)
    norms = {key.rpartition(".")[0] for key in renewed}
    yield from (f"self.{key}.add_(1)" for key, _, _ in spec.buffers if key.endswith(".num_batches_tracked") and key.rpartition(".")[0] in norms)


def _plain_comments(text: str) -> str:
    """CUDA text as the body of a raw Python string that the static checker accepts."""
    if '"""' in text or re.search(r'^[^"\n]*(//|#)[^\n]*__global__', text, re.MULTILINE):
        raise Refusal("an emitted source holds text that standalone.py cannot carry")
    return text.rstrip("\n")


def _tensor(name: str | None, plan: Plan) -> str:
    keys = {key for key, _ in plan.spec.parameters} | {key for key, _, _ in plan.spec.buffers}
    if name == "x":
        return plan.spec.inputs[0].name
    return "None" if name is None else f"self.{name}" if name in keys else _variable(name, plan.spec)


def _variable(name: str, spec: Spec) -> str:
    """The local variable of a plan's value: `input:residual` is the argument, `value:3` v_3, `part0:sums` part0_sums, `state:bn.running_var`
    new_bn_running_var; with a trailing underscore where an input has that name."""
    kind, _, own = name.partition(":")
    if kind == "input":
        return own
    return local_name(spec, {"state": f"new_{own.replace('.', '_')}", "value": f"v_{own}"}.get(kind, name.replace(":", "_")))


def _statement(step: Launch | Library, plan: Plan) -> str:
    if isinstance(step, Launch):
        arguments = ", ".join(_tensor(name, plan) for name in step.arguments)
        return f'_launch("{step.kernel.function(plan.target)}", {arguments})'
    out = _variable(step.out, plan.spec)
    if step.operation in PRODUCTS:
        return f"{out} = {_product(step, plan)}"
    own = step.computes or next(other for other in plan.spec.chain if value_name(plan.spec, other.index) == step.out)
    if own.operator.kind is Kind.PRODUCER:
        raise Refusal(f"standalone.py has no text of {step.operation} in the arithmetic that the precision promises; load the package instead")
    second = next((_tensor(name, plan) for name in step.arguments[1:] if name is not None), None)
    made = torch_call(own, _tensor(step.arguments[0], plan), second and as_operand(own, second))
    return f"{out} = ({made}).contiguous()" if own.operator.expression else f"{out} = {made}.contiguous()"


def _product(step: Library, plan: Plan) -> str:
    """The expression of a producer by torch's library, in exactly the arithmetic that the precision promises: what cuDNN takes from a switch is an
    argument here, and `_product`, which the file defines, sees to that of matrix products."""
    x, weight, bias = (_tensor(name, plan) for name in step.arguments)
    precision = step.options.get("precision", plan.spec.precision.name)
    tf32 = precision == "tf32"
    if step.operation == "linear":
        if departure(plan.spec.chain) is not None:
            return f"_{'' if precision == plan.spec.precision.name else 'single_'}product({x}, {weight}, {bias})"
        return f"torch.mm({x}, {weight}.t())" if bias == "None" else f"torch.addmm({bias}, {x}, {weight}.t())"
    o = {key: list(value) if isinstance(value, tuple) else value for key, value in step.options.items()}
    flat = step.operation.endswith("1d")
    axes = {key: ([1 if key in ("stride", "dilation") else 0] if flat else []) + o[key] for key in ("padding", "stride", "dilation", "output_padding") if key in o}
    if "output_padding" in o:  # cuDNN refuses one of a stride or more, which is a step of zeros at x's end
        steps = [size // step for size, step in zip(o["output_padding"], o["stride"])]
        axes["output_padding"] = [size % step for size, step in zip(axes["output_padding"], axes["stride"])]
        x = f"F.pad({x}, {[size for step in reversed(steps) for size in (0, step)]})" if any(steps) else x
    operands = f"{x}.unsqueeze(2), {weight}.unsqueeze(2)" if flat else f"{x}, {weight}"
    tail = f"{o['groups']}, False, False, {tf32})" + (".squeeze(2)" if flat else "")
    if OPERATORS[step.operation].transposed:
        text = f"torch.ops.aten.cudnn_convolution_transpose({operands}, {axes['padding']}, {axes['output_padding']}, {axes['stride']}, {axes['dilation']}, {tail}"
    else:
        text = f"torch.ops.aten.cudnn_convolution({operands}, {axes['padding']}, {axes['stride']}, {axes['dilation']}, {tail}"
    text += ".contiguous()" if departure(plan.spec.chain) is not None else ""
    return text if bias == "None" else f"{text}.add_({bias}.view({', '.join(['1', '-1', *['1'] * len(o['stride'])])}))"
