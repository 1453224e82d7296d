"""The table of passes, and what applies them to a chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from codegen.algebra.identity import identity
from codegen.algebra.merge import merge
from codegen.algebra.pooled_rows import pooled_rows
from codegen.algebra.pooled_taps import pooled_taps
from codegen.algebra.rewriting import Declined, Rewriting
from codegen.algebra.row_sum import row_sum
from codegen.algebra.summed_input import summed_input
from codegen.spec import Spec


@dataclass(frozen=True)
class Pass:
    """A row: the pass's name, its meaning in a line, and the function that makes its first rewrite, or gives None where there is none.

    The function raises Declined where the rewrite would hold and there is a reason against it.
    """

    name: str
    summary: str
    apply: Callable[[Rewriting], Rewriting | None]


PASSES: tuple[Pass, ...] = (
    Pass("identity", "steps that give what they take are left out: reductions and windows over one value, bounds that cannot bite", identity),
    Pass("merge", "two bounds one behind the other become one, and two max or average poolings without padding", merge),
    Pass("row_sum", "a sum or mean over all features of a linear is x times the column sums of W, plus the sum of b", row_sum),
    Pass("pooled_rows", "an average pooling over the features of a linear is a linear of pooled rows of W and a pooled b", pooled_rows),
    Pass("summed_input", "a sum or mean over whole spatial axes behind a convolution is a product with sums of x over those axes", summed_input),
    Pass("pooled_taps", "an average pooling behind a convolution is a convolution of summed taps, where that takes fewer products", pooled_taps),
)


def rewrite(spec: Spec, training: bool = False) -> Rewriting:
    """The chain of a spec in one mode, rewritten by each pass as often as it finds something; as written where the spec says `algebra: false`."""
    plain = spec if type(spec) is Spec else Spec(**{field.name: getattr(spec, field.name) for field in fields(Spec)})  # the rewritten chain may have another form
    found = Rewriting(plain, training)
    if not spec.algebra:
        return found
    changed = True
    while changed:
        changed = False
        for row in PASSES:
            try:
                while (made := row.apply(found)) is not None:
                    found, changed = made, True
            except Declined as reason:
                entry = (row.name, str(reason))
                found = replace(found, declined=tuple(dict.fromkeys((*found.declined, entry))))
    return found


def passes_of(spec: Spec) -> tuple[str, ...]:
    """The passes that rewrite the chain of a spec in any of its modes."""
    return tuple(dict.fromkeys(name for training in ((False, True) if spec.has_modes else (False,)) for name in rewrite(spec, training).names))

