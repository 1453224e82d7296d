"""standalone.py: the package as one file that imports nothing of ours and compiles its CUDA text with torch's load_inline.

The best CUDA target of the package is used. The text keeps to what KernelBench's loader and static checker accept (docs/kernelbench.md).
"""

from __future__ import annotations

import re

from codegen.manifest import Package
from codegen.plan import PlanError
from codegen.plan.model import Launch, Library, Plan
from codegen.torch_text import module_lines

_PREFERENCE = ("sm_90a", "sm_80")


def render_standalone(package: Package, files: dict[str, str]) -> str:
    """The text of standalone.py, from the package's rendered files. Raises PlanError when the package has no CUDA target."""
    from codegen.render import render_template  # render imports nothing of this module; this keeps it so

    plan = next((p for name in _PREFERENCE if (p := package.plan_for(name))), None)
    if plan is None:
        raise PlanError("standalone.py needs a CUDA target; emit sm_80 or sm_90a")
    spec = package.spec
    sources = "\n".join(files[name] for name in dict.fromkeys(kernel.file(plan.target) for kernel in plan.kernels))
    buffers = [
        (buffer.name, f"torch.empty({buffer.bytes}, dtype=torch.uint8, device=x.device)")
        if buffer.bytes
        else (buffer.name, f"torch.empty({buffer.shape}, dtype=torch.{buffer.dtype}, device=x.device)")
        for buffer in plan.buffers
        if buffer.name not in {step.out for step in plan.steps if isinstance(step, Library)}
    ]
    return render_template(
        "model/standalone.py.j2", spec=spec, package=package, plan=plan, sources=_plain_comments(sources), modules=module_lines(spec),
        names=[name for name, _ in spec.args], buffers=buffers, steps=[_statement(step, plan) for step in plan.steps],
        half=spec.precision.itemsize == 2, parameters=[key for key, _ in spec.parameters],
        init_args=tuple(value for _, value in spec.args),
    )  # fmt: skip


def _plain_comments(text: str) -> str:
    """CUDA text as the body of a raw Python string that the static checker accepts."""
    if '"""' in text or re.search(r'^[^"\n]*(//|#)[^\n]*__global__', text, re.MULTILINE):
        raise PlanError("an emitted source holds text that standalone.py cannot carry")
    return text.rstrip("\n")


def _tensor(name: str | None, plan: Plan) -> str:
    keys = {key for key, _ in plan.spec.parameters}
    return "None" if name is None else f"self.{name}" if name in keys else name


def _statement(step: Launch | Library, plan: Plan) -> str:
    if isinstance(step, Launch):
        arguments = ", ".join(_tensor(name, plan) for name in step.kernel.arguments)
        return f'_launch("{step.kernel.function(plan.target)}", {arguments})'
    x, weight, bias = (_tensor(name, plan) for name in step.arguments)
    if step.operation == "linear":
        return f"{step.out} = torch.mm({x}, {weight}.t())" if bias == "None" else f"{step.out} = torch.addmm({bias}, {x}, {weight}.t())"
    o = step.options
    return (
        f"{step.out} = torch.ops.aten.cudnn_convolution({x}, {weight}, {list(o['padding'])}, {list(o['stride'])}, {list(o['dilation'])}, "
        f"{o['groups']}, False, False, {o['allow_tf32']})"
    )
