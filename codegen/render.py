"""Plans -> text: the one Jinja environment and the files of a package.

`render(package)` is a pure function to {file name: text}; the same package gives the same bytes everywhere. Nothing is decided here or in
a template: every number comes from a plan.
"""

from __future__ import annotations

import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from codegen.comments import wrapped
from codegen.constants import place, with_constants
from codegen.ir.operand import c_identifier
from codegen.manifest import Package, manifest_text
from codegen.ops import Shape
from codegen.ops.functions import definitions
from codegen.plan.model import Kernel, Plan
from codegen.report import header_lines
from codegen.spec import Spec
from codegen.spec.writer import resolved_yaml
from codegen.torch_text import input_texts, module_lines, parameters, reference_lines, uses_functional, value_variable

TEMPLATES = Path(__file__).parent / "templates"


def _header(package: Spec, plan: Plan, kernel: Kernel) -> str:
    return "\n".join(f"// {line}".rstrip() for line in header_lines(plan, kernel, package)) + "\n"


def environment() -> jinja2.Environment:
    """The Jinja environment: undefined names are errors, block tags leave no blank lines behind."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    env.filters.update(c_identifier=c_identifier, indent_lines=lambda text, width: textwrap.indent(text, " " * width))
    env.globals.update(
        constants=place, range=range, min=min, max=max, zip=zip, enumerate=enumerate, repr=repr,
    )  # fmt: skip
    return env


_ENVIRONMENT = environment()


def render_kernel(plan: Plan, kernel: Kernel) -> str:
    """The source text of one kernel of `plan`."""
    language = "cuda16" if plan.target.language == "cuda" and plan.spec.precision.itemsize == 2 else plan.target.language
    part = next((step.part for step in plan.launches if step.kernel is kernel), None)
    header = partial(_header, plan.spec)
    plan = plan if part is None else replace(plan, spec=part)
    text = _ENVIRONMENT.get_template(kernel.template).render(
        plan=plan, kernel=kernel, spec=plan.spec, target=plan.target, header=header, functions=lambda names: definitions(names, language)
    )
    return _tidy(wrapped(with_constants(kernel, text)))


def render_template(name: str, **context: Any) -> str:
    """A template that is no kernel (model.py, standalone.py)."""
    return _tidy(_ENVIRONMENT.get_template(name).render(**context), blank_lines=2)


def render(package: Package) -> dict[str, str]:
    """All files of a package: sources, model.py, spec.yaml, manifest.json and __init__.py."""
    spec = package.spec
    files = {kernel.file(plan.target): render_kernel(plan, kernel) for plan in (*package.plans, *package.backward_plans) for kernel in plan.kernels}
    half = spec.precision.itemsize == 2
    files["model.py"] = render_template(
        "model/model.py.j2", spec=spec, package=package, modules=module_lines(spec), reference=reference_lines(spec), value=value_variable(spec), functional=uses_functional(spec),
        names=parameters(spec), keywords=[f"{name}={name}" for name, _ in spec.args], init=[repr(value) for value in spec.init_values], half=half,
        x_shape=_shape_text(spec, spec.input_shape, True),
        arguments=[given.name for given in spec.inputs], inputs=input_texts(spec), y_shape=_shape_text(spec, spec.output_shape, spec.rows_are_samples),
    )  # fmt: skip
    files["__init__.py"] = render_template("model/init.py.j2", spec=spec)
    files["spec.yaml"] = resolved_yaml(spec)
    files["manifest.json"] = manifest_text(package, files)
    return files


def _shape_text(spec: Spec, shape: Shape, samples: bool) -> str:
    """A tensor's shape for a reader; of a range of batches the number of `samples` is N."""
    if not spec.batches:
        return str(shape)
    return f"({', '.join(['N', *map(str, shape[1:])])}{',' if len(shape) == 1 else ''})" if samples else f"{shape} for the largest N"


def _tidy(text: str, blank_lines: int = 1) -> str:
    """No trailing blanks, at most `blank_lines` empty lines in a row, one newline at the end."""
    lines: list[str] = []
    for line in text.splitlines():
        line = line.rstrip()
        if line or any(lines[-blank_lines:]):
            lines.append(line)
    return "\n".join(lines).strip("\n") + "\n"


__all__ = ["environment", "render", "render_kernel", "render_template"]
