"""A g++ that keeps what it made, for all tests of a session and the next sessions.

Run as a program it takes g++'s arguments. One source that is compiled or made a shared library goes through the preprocessor first: where the same text
(comments are gone by then, headers are in it) was compiled with the same flags by the same compiler on the same processor, the file made then is copied.
Only files made without a message are kept. Everything else is left to g++.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REAL, OBJECTS, LAUNCHER = "TEST_GXX_REAL", "TEST_GXX_OBJECTS", "TEST_GXX"  # variables of the environment
KEPT_DAYS = 7  # since a file was last used
_OTHER_MODES = ("-E", "-S", "-M", "-save-temps", "-fopt-info", "-fdump", "-fprofile", "--coverage", "@", "-v", "-###")


def gxx() -> str:
    """The path of this program for tests, or plain g++ where a session has not set it up."""
    return os.environ.get(LAUNCHER, "g++")


def set_up(folder: Path) -> None:
    """Make the program known to this process and its children; `folder` holds it and what it keeps. What nobody has used for days is removed."""
    real = shutil.which("g++")
    if real is None:
        return
    objects, launcher = folder / "objects", folder / "g++"
    objects.mkdir(parents=True, exist_ok=True)
    for path in objects.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another session removes it too
            if path.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                path.unlink()
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{Path(__file__).resolve()}" "$@"\n')
    launcher.chmod(0o755)
    os.environ |= {REAL: real, OBJECTS: str(objects), LAUNCHER: str(launcher)}


def main(words: list[str]) -> int:
    """Compile as `words` say, or copy what came of the same before."""
    key = key_of(words)
    if key is None:
        os.execv(os.environ[REAL], [os.environ[REAL], *words])
    kept, made = Path(os.environ[OBJECTS], key), words[words.index("-o") + 1]
    try:
        shutil.copyfile(kept, made)  # a link would be the same library to the loader
        os.chmod(made, 0o755)
        os.utime(kept)
        return 0
    except FileNotFoundError:
        pass
    done = subprocess.run([os.environ[REAL], *words], check=False, stderr=subprocess.PIPE)
    sys.stderr.buffer.write(done.stderr)
    if done.returncode == 0 and not done.stderr:
        handle, temporary = tempfile.mkstemp(dir=kept.parent)
        os.close(handle)
        shutil.copyfile(made, temporary)
        os.replace(temporary, kept)
    return done.returncode


def key_of(words: list[str]) -> str | None:
    """SHA-256 of all that decides what g++ makes of `words`; None where that is not one source's object, library or precompiled header."""
    sources = [word for word in words if word.endswith((".cpp", ".h"))]
    if len(sources) != 1 or "-o" not in words or not {"-c", "-shared", "c++-header"} & set(words) or any(word.startswith(_OTHER_MODES) for word in words):
        return None
    at = words.index("-o")
    flags = [word for word in (*words[:at], *words[at + 2 :]) if word != sources[0]]
    preprocessed = [word for word in flags if word not in ("-c", "-shared")]
    text = subprocess.run([os.environ[REAL], *preprocessed, "-E", "-P", sources[0]], check=False, capture_output=True)
    if text.returncode != 0 or text.stderr:
        return None
    compiler = Path(os.environ[REAL]).resolve()
    status = compiler.stat()
    processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0] if "-march=native" in flags else ""
    processor = "\n".join(line for line in processor.splitlines() if line.startswith(("model", "flags", "Features", "CPU")))
    digest = hashlib.sha256(text.stdout)
    digest.update("\0".join([*(flag for flag in flags if not flag.startswith("-I")), str(compiler), f"{status.st_size} {status.st_mtime_ns}", processor]).encode())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
