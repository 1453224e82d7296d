"""Text from outside, such as a file's name, in what is emitted: one function makes it harmless in every language at once."""

from __future__ import annotations

_PUNCTUATION = frozenset(" _-./+,=@~()[]:")


def source_text(text: str) -> str:
    """`text` as it may stand in a comment or a string of Python, C++, CUDA, YAML or JSON, and in a shell's or make's command.

    Letters and digits of any script and a few signs stay; every other character is written as its UTF-8 bytes, `%22` for a quote. That takes out
    quotes, backslashes, line breaks of every kind, ends of comments, trigraphs, directional marks and what a shell expands. Two texts never become one.
    """
    return "".join(c if c in _PUNCTUATION or (c.isalnum() and c.isprintable()) else _as_bytes(c) for c in text)


def is_source_text(text: str) -> bool:
    """Could `text` have come from `source_text`?"""
    return source_text(text.replace("%", "")) == text.replace("%", "")


def printable(text: str) -> str:
    """`text` for a terminal: what would move the cursor, change colours or turn the direction of writing is shown as an escape; line breaks stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def _as_bytes(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogateescape" if "\udc80" <= character <= "\udcff" else "surrogatepass"))
