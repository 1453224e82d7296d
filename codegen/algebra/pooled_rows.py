"""The pass `pooled_rows`: an average pooling over the features of a linear is a linear of pooled rows of W, and of a pooled b.

    mean over n in a window of (x W^T + b)[n]  =  x (mean over n of W[n])^T + mean over n of b[n]
"""

from __future__ import annotations

from dataclasses import replace

from codegen.algebra.chain import AFFINE, behind, chain_on, new_step, one_each, splice
from codegen.algebra.precision import needs_single, single
from codegen.algebra.rewriting import Derived, Rewriting
from codegen.ir.window import Window, window_of
from codegen.ops import Kind
from codegen.spec import Spec, Step


def pooled_rows(given: Rewriting) -> Rewriting | None:
    """Rewrite the first linear whose features are pooled."""
    spec = given.spec
    for producer in spec.chain:
        pool = _pool_behind(spec, producer) if producer.operator.name == "linear" else None
        window = window_of(pool) if pool else None
        if window is None or window.clipped_anywhere or window.divisor is not None or window.output[2] >= window.input[2]:
            continue
        made = _rewritten(spec, producer, pool, window)
        if made is None:
            continue
        needs_single(spec, producer, f"{pool.operator.name} behind {producer.name}")
        left, derived = made
        text = f"{pool.operator.name} over the {window.input[2]} features of {producer.name}: W's rows are averaged first, and {window.output[2]} are left"
        return replace(given.to(single(left), derived), applied=(*given.applied, ("pooled_rows", text)))
    return None


def _pool_behind(spec: Spec, producer: Step) -> Step | None:
    """The average pooling of rank 1 over the features of `producer`, with renamings and scalars alone in between."""
    features = producer.values["out_features"]

    def through(step: Step) -> bool:
        scalar = step.operator.name in AFFINE and one_each(step, (len(step.input_shape) - 1,))
        return step.input_shape[-1] == features and (scalar or step.operator.kind is Kind.SHAPE)

    found = behind(spec, producer, lambda step: step.operator.kind is Kind.POOL, through)
    return found if found and found.operator.name in ("avg_pool1d", "adaptive_avg_pool1d") and found.input_shape[-1] == features else None


def _rewritten(spec: Spec, producer: Step, pool: Step, window: Window) -> tuple[Spec, tuple[Derived, ...]] | None:
    rows, left = window.input[2], window.output[2]
    size, stride = window.size[2], window.stride[2]
    columns = producer.values["in_features"]
    derived = []
    for parameter, across in zip(producer.parameters, ((columns,), ()), strict=False):
        plane = (1, 1, rows, *across)
        pooled = chain_on(
            plane, new_step(f"avg_pool{len(plane) - 2}d", kernel_size=(size, *(1 for _ in across)), stride=(stride, *(1 for _ in across))), new_step("view", sizes=(left, *across)),
        )  # fmt: skip
        derived.append(Derived(producer.key(parameter), (left, *across), producer.key(parameter), plane, pooled))
    middle = [replace(producer, values={**producer.values, "out_features": left})]
    for step in spec.chain[producer.index + 1 : pool.index]:
        middle.append(new_step("view", sizes=(*step.output_shape[:-1], left)) if step.operator.kind is Kind.SHAPE else step)
    found = splice(spec, producer.index, pool.index + 1, middle)
    return None if found is None else (found, tuple(derived))
