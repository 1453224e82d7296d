"""The named constants at the head of a source: which of its kernel's table it shows.

A plan gives its kernel a table of constants: the numbers that decided it, each with a name, a value and where it comes from. Which of them the code needs is
decided by the template's text, which a planner does not see: kRows only bounds a grid whose last block is ragged, and kWarpsM vanishes where a warp's index
is one number. So a template marks the place of the table, and the source shows the constants that its code names, directly or through the value of one that
is shown. A comment that names another one of the table says it in words.

What stands in a table or a template to no purpose is an error. A constant of the template's own that nothing uses, or two of the table with one name, fail
here; one of the table that no source shows fails tests/test_golden.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from codegen.ir.apply import Constant
from codegen.plan.model import Kernel

_PLACE = "\0"  # in front of the name of each constant of the table, a line each
_COMMENT = re.compile(r"//[^\n]*")
_WORD = re.compile(r"\w+")
_OWN = re.compile(r"^ *constexpr [\w:]+ (k[A-Z]\w*)(?:\[.*\])? = ", re.MULTILINE)


class ConstantError(Exception):
    """A kernel's constants and its template do not belong together: a fault of the generator, whatever the spec."""


def place(table: Iterable[Constant]) -> str:
    """What a template has where the constants of `table` belong."""
    return "\n".join(_PLACE + constant.name for constant in table)


def with_constants(kernel: Kernel, text: str) -> str:
    """`text`, which the kernel's template gave, with the constants that its code uses in their place; raises ConstantError."""
    known = {constant.name: constant for constant in kernel.constants}
    if len(known) < len(kernel.constants):
        twice = Counter(constant.name for constant in kernel.constants).most_common(1)[0][0]
        raise ConstantError(f"kernel {kernel.name} ({kernel.template}): {twice} stands twice among its constants")
    lines = text.splitlines(keepends=True)
    words = Counter(_WORD.findall(_COMMENT.sub("", "".join(line for line in lines if not line.startswith(_PLACE)))))
    for name in _OWN.findall(text):
        if words[name] == 1:
            raise ConstantError(f"kernel {kernel.name} ({kernel.template}): the template's {name} is used by nothing")
    shown = _reached(words, known)
    filled = []
    for line in lines:
        name = line.removeprefix(_PLACE).rstrip("\n")
        if not line.startswith(_PLACE):
            filled.append(line)
        elif name in shown:
            filled.append(f"{known[name]}\n")
    hidden = known.keys() - shown
    return _COMMENT.sub(lambda comment: _WORD.sub(lambda word: _in_words(word[0]) if word[0] in hidden else word[0], comment[0]), "".join(filled))


def _reached(words: Iterable[str], known: dict[str, Constant]) -> set[str]:
    """The names of `known` among `words` and, from there on, among the words of their values."""
    reached, new = set(), known.keys() & set(words)
    while new:
        reached |= new
        new = {word for name in new for word in _WORD.findall(known[name].text)} & known.keys() - reached
    return reached


def _in_words(constant: str) -> str:
    """kGroupChannels: group_channels."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", constant[1:]).lower()


__all__ = ["ConstantError", "place", "with_constants"]
