"""Runs one program as long as the process that asked for it lives: ``python supervisor.py PARENT PROGRAM ARGUMENT...``

When the parent dies, of whatever cause, or when a signal asks for it, the program and all that it started are ended: the
compilers below ninja or nvcc too, which are no children of this process. They share its session, which the parent made new.
This file is run by its path, in a Python without site-packages, so it imports nothing of this package.
"""

import os
import resource
import signal
import sys
import time

POLL_SECONDS = 0.5  # how long the death of the parent can go unnoticed
GRACE_SECONDS = 2.0  # what a program has for its own cleaning up before it is killed
LONGEST_ENDING_SECONDS = POLL_SECONDS + 2 * GRACE_SECONDS  # from the parent's death to that of the last program
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)  # and by what it starts, if nothing is done about it
NOT_STARTED = "supervisor: the program could not be started, errno "


def main(parent: int, argv: list[str]) -> int:
    """Runs ``argv``; returns its exit status, below zero for the signal that ended it."""
    awaited = {*ASKED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    for number in awaited:
        signal.signal(number, signal.SIG_DFL)  # what the parent ignores would never arrive here
    try:
        child = os.posix_spawn(argv[0], argv, os.environ, setsigmask=(), setsigdef=IGNORED_BY_PYTHON)
    except OSError as error:
        print(f"{NOT_STARTED}{error.errno}", flush=True)
        return 1
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        received = signal.sigtimedwait(awaited, POLL_SECONDS)
        if os.getppid() != parent or (received is not None and received.si_signo in ASKED):
            end_session()


def end_session() -> None:
    """Ends every other process of this session, and then this one."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        end = time.monotonic() + seconds
        while others := members():
            for process in others:
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    continue
            if time.monotonic() > end:
                break
            time.sleep(0.05)
    os._exit(128 + signal.SIGTERM)


def members() -> list[int]:
    """The living processes of this session but for this one."""
    own, found = os.getsid(0), []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, _, session = file.read().rpartition(")")[2].split()[:4]
        except OSError:  # it has just ended
            continue
        if int(session) == own and state not in "ZX":
            found.append(int(name))
    return found


if __name__ == "__main__":
    status = main(int(sys.argv[1]), sys.argv[2:])
    if status < 0:  # ends as the program did
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    sys.exit(status)
