"""Commands that the environment names, such as ``CXX="ccache g++ -pthread"``: launchers, the compiler, flags."""

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from typing import Mapping

from .errors import ToolchainError

FORM = "launchers, the compiler and its flags, as in CXX='ccache g++ -pthread'; quote a path that holds blanks"

HOST_OPTIONS = ("-ccbin", "--compiler-bindir")  # nvcc's own, for the g++ that it calls

# How compilers are called: with a prefix for the machine, a suffix for the version. Others are found by their place.
COMPILER = re.compile(r"(?:[^=]*[-_])?(?:g\+\+|c\+\+|gcc|cc|clang|clang\+\+|icpx|nvcc|nvc\+\+)(?:[-_.][\w.+-]*)?")


# Launchers that change how long a compiler takes and nothing else: used where they are installed, left out elsewhere.
ACCELERATORS = frozenset("buildcache ccache distcc icecc sccache".split())


@dataclass(frozen=True)
class Command:
    """A compiler by its absolute path, what is called in front of it, and the flags that it is given on every call.

    ``left_out`` are the launchers that are not installed and not needed.
    """

    path: str
    launcher: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def asked_through(self) -> tuple[str, ...]:
        """The launcher for a question, which needs no acceleration."""
        return () if self.launcher and os.path.basename(self.launcher[0]) in ACCELERATORS else self.launcher


def split_command(variable: str, text: str) -> Command | None:
    """The command that ``text``, the value of ``variable``, spells as a shell would read it; None where it is blank.

    Raises ToolchainError where it has no balanced quotes, names no compiler, or names a program that is not there.
    """
    if not text.strip():
        return None
    if (whole := find_program(text.strip())) is not None:  # a path that holds blanks
        return Command(whole)
    try:
        words = shlex.split(text)
    except ValueError as error:
        reason = str(error)[:1].lower() + str(error)[1:]
        raise ToolchainError(f"{variable} is {text!r}, which cannot be split into words ({reason}); write {FORM}.") from error
    at = _place_of_compiler(words)
    if at is None:
        raise ToolchainError(f"{variable} is {text!r}, which names no compiler; write {FORM}.")
    launcher, compiler, flags = words[:at], words[at], words[at + 1 :]
    left_out = []
    while launcher and os.path.basename(launcher[0]) in ACCELERATORS and find_program(launcher[0]) is None:
        left_out.append(launcher.pop(0))
    path = find_program(compiler)
    if path is None:
        raise ToolchainError(f"{variable} names {compiler!r}, which was not found; install it, or set {variable} to {FORM}.")
    if launcher:
        first = find_program(launcher[0])
        if first is None:
            raise ToolchainError(f"{variable} names {launcher[0]!r} in front of {compiler!r}, which was not found; install it, or set {variable} to {FORM}.")
        launcher[0] = first
    return Command(path, tuple(launcher), tuple(flags), tuple(left_out))


def _place_of_compiler(words: list[str]) -> int | None:
    """The first word that is called like a compiler, else the last one in front of the flags."""
    for index, word in enumerate(words):
        if COMPILER.fullmatch(os.path.basename(word)) and not word.startswith("-"):
            return index
    front = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    return front - 1 if front else None


def find_program(name: str, path: str | None = None) -> str | None:
    """The absolute path of a program: builds run in folders of their own, where a relative one means nothing."""
    found = shutil.which(name, path=path)
    return None if found is None else os.path.abspath(found)


def first_named(variables: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, str]:
    """The first of ``variables`` that is set to more than blanks, and its value; two empty texts where none is."""
    for name in variables:
        if environment.get(name, "").strip():
            return name, environment[name]
    return "", ""


def split_host_option(flags: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """nvcc's ``flags`` without the host compiler, and the last host compiler that they name."""
    kept, host, words = [], "", iter(flags)
    for word in words:
        option, equals, value = word.partition("=")
        if option in HOST_OPTIONS:
            host = value if equals else next(words, "")
        else:
            kept.append(word)
    return tuple(kept), host
