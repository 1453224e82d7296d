"""The one way this package starts another program."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

from .supervisor import NOT_STARTED

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))


@dataclass(frozen=True)
class Finished:
    """What a program left behind: its exit status and everything it printed (stdout and stderr interleaved)."""

    status: int
    output: str


def run_program(
    argv: Sequence[str],
    cwd: str | os.PathLike | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    limit_s: float | None = None,
) -> Finished:
    """Runs ``argv`` to its end, without a shell, with messages in English and nothing on its standard input.

    ``env`` adds to the environment; ``on_line`` is called with each line as it is printed. Raises OSError where the
    program cannot be started. A status below zero is the signal that ended it. After ``limit_s`` seconds the program is
    killed and TimeoutError raised.

    The program gets a session of its own. Without a limit a supervisor ends all of the session as soon as this process
    has ended, by whatever signal, or gives up.
    """
    command = [str(argument) for argument in argv]
    supervised = limit_s is None and bool(sys.executable)
    environment = {**os.environ, "LC_ALL": "C", **(env or {})}
    lines = []
    with subprocess.Popen(
        [sys.executable, "-I", "-S", SUPERVISOR, str(os.getpid()), *command] if supervised else command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        overdue = threading.Event()
        watch = threading.Timer(limit_s or 0, lambda: (overdue.set(), os.killpg(process.pid, signal.SIGKILL)))
        if limit_s is not None:
            watch.start()
        try:
            for line in process.stdout:
                if supervised and line.startswith(NOT_STARTED):
                    number = int(line.removeprefix(NOT_STARTED))
                    raise OSError(number, os.strerror(number), command[0])
                lines.append(line)
                if on_line is not None:
                    on_line(line)
        except BaseException:
            process.terminate() if supervised else os.killpg(process.pid, signal.SIGKILL)
            process.wait()  # a supervisor takes two grace periods at most
            raise
        finally:
            watch.cancel()
    if overdue.is_set():
        raise TimeoutError(f"{argv[0]} did not end within {limit_s:g} seconds")
    return Finished(process.returncode, "".join(lines))
