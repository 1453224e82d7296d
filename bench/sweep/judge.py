"""A verdict on a random spec: bench.verify's, on fewer families of data, as plain rows."""

from __future__ import annotations

from bench.children import Result
from bench.subject import Subject
from bench.verify import Finding, rounded, verify

FAMILIES = ("benchmark", "normal", "offset", "constant groups", "nonfinite")  # of data that a sweep judges by


def judge(subject: Subject, families: tuple[str, ...] = ()) -> list[Result]:
    """One row for each family that applies: family, ok, rel_error, allowed, eager_rel_error, problems, draws, and eager_in_fp32 where there is any."""
    return [_row(found) for found in verify(subject, families, repeats=1)]


def _row(found: Finding) -> Result:
    return {
        "family": found.name, "ok": found.ok, "rel_error": rounded(found.ours.relative), "allowed": rounded(found.allowed),
        "eager_rel_error": rounded(found.by.eager.relative), "problems": list(found.problems), "draws": found.draws,
        **({"eager_in_fp32": list(found.eager_in_single)} if found.eager_in_single else {}),
        **({"unknown": found.unknown} if found.unknown else {}),
    }  # fmt: skip
