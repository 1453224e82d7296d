"""Comments of emitted sources, wrapped to the width of a page: a template's text depends on the plan, and so does the length of its lines."""

from __future__ import annotations

import re
import textwrap

WIDTH = 120
_COMMENT = re.compile(r"( *)// (?!---)(.*)")


def paragraph(text: str, indent: str = "", hanging: str = "") -> list[str]:
    """`text` as lines of WIDTH columns at most behind `indent`, further ones behind `hanging` too. Words are not broken."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + hanging, break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def wrapped(text: str) -> str:
    """A source whose comments of a line or more are wrapped anew where one of their lines is too long. Its header, the first comment, stays as it is."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if not line.startswith("//")), len(lines))
    made, block = lines[:start], []
    for line in [*lines[start:], ""]:
        found = _COMMENT.fullmatch(line)
        if block and (found is None or found[1] != block[0][1]):
            made += _block(block)
            block = []
        if found is None:
            made.append(line)
        else:
            block.append(found)
    return "\n".join(made)


def _block(found: list[re.Match]) -> list[str]:
    if all(len(line[0]) <= WIDTH for line in found):
        return [line[0] for line in found]
    return paragraph(" ".join(line[2] for line in found), f"{found[0][1]}// ")
