"""docs/spec.md from the operator table: `python -m codegen.spec.docs` prints it, a test compares."""

from __future__ import annotations

from codegen.numerics import ARITHMETICS, MATH_CHOICES, PRECISIONS
from codegen.ops import ALIASES, FILLS, OPERATORS, REQUIRED, Argument, Kind
from codegen.spec.reader import resolve
from codegen.spec.types import MAX_SIZES
from codegen.targets import DEFAULT_TARGETS, DEVICES, TARGETS

_TYPES = {
    "size": "integer >= 1", "count": "integer >= 0", "number": "finite number", "bound": "finite number, or left out", "flag": "true or false",
    **{name: "integer >= 1" + more for name, more in (("single", ""), ("pair", ", or two of them"), ("triple", ", or three of them"))},
    **{f"count_{name}": "integer >= 0" + more for name, more in (("single", ""), ("pair", ", or two of them"), ("triple", ", or three of them"))},
    "axis": "an axis, from the end where it is negative", "axes": "an axis or a list of them, from the end where negative; `null` for all",
    "shape": "list of integers >= 1, `[]` for one value without axes", "extents": "integer >= 1, or a list of them",
    "view": "list of integers >= 1; 0 keeps the size in its place, -1 is whatever is left", "tap": "the `name` of an operator in front of this one, or of an input",
    "owner": "the `name` of an operator in front that has a `shape`", "fill": f"{', '.join(f'`{word}`' for word in FILLS)} or a number",
}  # fmt: skip

_HEAD = """\
# The spec

*Written by `python -m codegen.spec.docs` from the operator table; a test keeps it current.*

A spec is one YAML file: what a layer computes and for which exact shapes.

```yaml
{example}```

| key | what it is |
|--|--|
| `name` | a Python identifier: the package under `generated/`. At a precision other than fp32 the package is `<name>_<precision>`; with `prepack`, `_prepacked` follows |
| `batch` | samples in x; or a list of up to {sizes} batches, each with kernels of its own ("Several batches", below) |
| `pad_batch` | `true`: a batch that is not listed runs the next larger one; default `false`: it is refused |
| `precision` | {precisions} (default fp32); `PRECISION=` on the command line overrides it |
| `input` | `values: rand` (uniform on [0, 1), default) or `randn`: how `get_inputs` fills x; and its sizes: `shape`, that of a sample, or where a convolution comes first `length`, `depth`, `height`, `width`, as many as it has |
| `inputs` | several inputs by the names of forward's arguments, the first of which the chain starts with: `{{x: {{shape: [320, 64, 64]}}, residual: {{shape: [320, 64, 64]}}}}`; each with `values`, and `batched: false` where its shape has no samples |
| `args` | the constructor's arguments of `ModelNew`, in order; every one is folded into the kernels, and `ModelNew` refuses other values |
| `defaults` | further arguments behind those, each with its value as its default: `get_init_inputs` leaves them out |
| `ignored` | arguments that the constructor takes and nothing reads |
| `chain` | the operators, in order. Each takes the value of the one before it. A producer, element-wise operators, a norm, then poolings and a reduction over channels run in fused kernels; other chains run in parts |
| `unused` | what `state_dict` holds and no operator reads, as entries of a list: `- parameter: {{name: bias, shape: [64, 1, 1]}}`, or a producer or norm as in the chain, a norm with `takes`, the shape of a sample. They get no gradient |
| `created` | the names of all that hold parameters, in the order in which the constructor creates them, where that is not the order of the chain with `unused` behind it: random numbers are drawn in that order, and `state_dict` has it |
| `targets` | a list out of {targets}, of which each has to serve the spec; default: those of {defaults} that do, and what one of them cannot serve is left out |
| `math` | forces an arithmetic: {maths} |
| `gemm` | `library` (torch's GEMM in front of our norm kernel) or `generated`, which also keeps every target from being left to a faster one; default: the planner's choice |
| `library` | what torch's library may compute where no kernel of ours does: `allow` (default) anything, `producers` only products and convolutions, `forbid` nothing. A target whose plan needs more is refused, with the operators; gradients are not asked |
| `algebra` | `false`: the chain is computed operator by operator, as written. Default `true`: where another chain gives the same result for all weights and inputs, up to rounding, plans compute that one; `fsk explain` names each rewrite. Gradients are those of the chain as written. `--no-algebra` on the command line turns it off too |
| `prepack` | `true`: at fp32 and tf32, `sm_90a` multiplies with a split copy of a linear's weights, which the model keeps and renews (docs/runtime.md, "Prepared weights"); elsewhere it changes nothing; default `false`; `PREPACK=1` on the command line asks for it too |

A value in the chain, by itself or in a list, is a literal or the name of an entry in `args`. `name` is the attribute that holds an operator's parameters: `state_dict` has
the keys of the PyTorch module, in the same order.

`from` gives arithmetic the result of an operator in front of it once more, or an input: `- add: {{from: conv}}` adds the convolution's result, and where `from` names the
operator right before, v meets itself (`x + x`). With `detach: true` no gradient goes that way. `parameter` takes the tensor of an operator in front once more. A parameter may have any shape
that broadcasts with the value, whose shape it may change; `view` gives it another one for that, as `[1, -1, 1, 1]` for a vector of channels. `init` is how it starts: a word, or a number
that all of it is. A `linear` with `init` has a bare parameter as its weight, under `name` itself. Anchors, aliases and tags are refused, and so are numbers that the versions of YAML read differently
(`010`, `0x1F`, `1_000`, `1:30`); all faults of a file are reported at once, each as `file:line:column: what is wrong`.

A number is checked as the kernels hold it: a bound (`hardtanh`, `clamp`, `softshrink`) in the type of y, any other in float32. One that would become infinite or 0 there, or lose
digits because it lies below 1.2e-38, is refused, and so are two bounds that would become one.

## Several batches

`batch: [1, 8, 64, 1024]` makes one package with kernels for each of these batches, and `ModelNew` runs those of `x.shape[0]`. The order does not matter. Every size is planned
for itself (`make explain` shows each), and its sources are those of a spec for that batch alone but for the batch in their names. The sizes are compiled in parallel into one library
a target, so a package of four sizes takes about four times the work of one to compile, and the first of them that the machine needs waits for all. Where one size has no plan for
`sm_90a`, as small batches have none, `sm_80`'s serves it on the same card.

A batch that is not listed is refused with the listed ones, the next larger one and the command that makes the package again. With `pad_batch: true` it runs the next larger size: x is copied
into a tensor of that many rows with zeros behind, and the result is a copy of the first rows. That costs the larger size's time and memory, two more passes over the larger x and one over the result,
and three launches; gradients go the same way. No row reads another, so what stands in one, NaN too, stays there. A batch beyond the largest is refused in any case, and so is `pad_batch` with a parameter behind a reduction that changes
the shape so that the result's rows are not samples, or with an input or earlier result whose first axis does not meet the samples. The first of several `inputs` tells the batch, so it
has samples where there is more than one batch to run.
"""


def _argument(argument: Argument) -> str:
    kind = " or ".join(f"`{word}`" for word in argument.type) if isinstance(argument.type, tuple) else _TYPES[argument.type]
    kind = kind.replace("number", f"number, {argument.sign}") if argument.sign else kind
    if argument.default is REQUIRED:
        return f"`{argument.name}`: {kind}, required"
    if argument.default is None:
        return f"`{argument.name}`: {kind}, optional"
    default = {True: "true", False: "false"}.get(argument.default) if isinstance(argument.default, bool) else argument.default
    return f"`{argument.name}`: {kind}, default {default[0] if isinstance(default, tuple) else default}"


def reference(example: str) -> str:
    """The text of docs/spec.md; `example` is the YAML shown at the top."""
    maths = "; ".join(f"{precision}: {', '.join(f'`{m}`' for m in choices)}" for precision, choices in MATH_CHOICES.items())
    parts = [_HEAD.format(example=example, sizes=MAX_SIZES, precisions=", ".join(f"`{p}`" for p in PRECISIONS), targets=", ".join(f"`{t}`" for t in TARGETS), maths=maths, defaults=", ".join(f"`{t}`" for t in DEFAULT_TARGETS))]
    for kind in Kind:
        parts.append(f"\n## {kind.value.capitalize()} operators\n\n| operator | computes | arguments |\n|--|--|--|\n")
        for operator in OPERATORS.values():
            if operator.kind is kind:
                names = [operator.name, *(alias for alias, target in ALIASES.items() if target == operator.name)]
                name = ["`name`: identifier" + (", required" if operator.requires_name else "")] if operator.takes_name else []
                cells = "; ".join(name + [_argument(a) for a in operator.arguments])
                parts.append(f"| {', '.join(f'`{n}`' for n in names)} | {operator.summary.replace('|', chr(92) + '|')} | {cells} |\n")
    parts.append("\n## Arithmetics\n\n| `math` | how a GEMM multiplies | relative error at K = 8192 |\n|--|--|--|\n")
    parts += [f"| `{a.name}` | {a.summary} | {a.error:.1e} |\n" for a in ARITHMETICS.values()]
    parts.append("\n## Targets\n\n| target | what it is |\n|--|--|\n")
    parts += [f"| `{t.name}` | {t.summary} |\n" for t in TARGETS.values()]
    parts.append("\n## Device classes\n\nThe planner plans for a class of card, never for the card that happens to be present (`DEVICE=`).\n\n| class | card | targets |\n|--|--|--|\n")
    parts += [f"| `{d.name}` | {d.summary} | {', '.join(d.targets)} |\n" for d in DEVICES.values()]
    return "".join(parts)


def example() -> str:
    """The default spec's text, as the reference shows it."""
    return resolve("specs/default.yaml")[0].read_text(encoding="utf-8")


if __name__ == "__main__":
    print(reference(example()), end="")
