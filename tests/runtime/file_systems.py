"""File systems with a fault, for tests: mounted in a child, by root or by the root of a user namespace of its own.

Where neither is allowed, the child's ``mount`` has Python itself answer as such a file system would, so the tests hold there too.
"""

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

from .tiny_package import child_environment

# Runs in the child before a test's own code, which finds ``folder`` there, and ``mount`` and ``remount`` for it.
PREAMBLE = """
import errno, os, pathlib, subprocess, sys, warnings

folder, mounts = pathlib.Path(sys.argv[1]), sys.argv[2] == "mounted"
folder.mkdir(exist_ok=True)
options = ""

def mount(wanted):
    global options
    options = wanted
    if mounts:
        subprocess.run(["mount", "-t", "tmpfs", "-o", wanted, "tmpfs", str(folder)], check=True)

def remount(wanted):
    global options
    options = wanted
    if mounts:
        subprocess.run(["mount", "-o", "remount," + wanted, str(folder)], check=True)

def answer(event, arguments):
    name = str(arguments[0]) if arguments else ""
    inside = name.startswith(str(folder))
    if "noexec" in options and (event == "mmap.__new__" and os.readlink(f"/proc/self/fd/{name}").startswith(str(folder)) or event == "ctypes.dlopen" and inside):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    number = errno.EROFS if "ro" in options.split(",") else errno.ENOSPC if "size=" in options else 0
    writes = event in ("os.mkdir", "os.rename", "os.remove", "os.chmod") or event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if number and writes and inside:
        raise OSError(number, os.strerror(number), name)

if not mounts:
    sys.addaudithook(answer)
"""


@functools.cache
def mounting() -> tuple[str, ...] | None:
    """The command in front of Python in which it may mount; None where this machine allows no such thing."""
    for command in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        try:
            probe = subprocess.run([*command, "sh", "-c", "mount -t tmpfs tmpfs /mnt"], capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if probe.returncode == 0:
            return command
    return None


def run_on_mount(folder: Path, code: str, simulated: bool = False, **environment) -> subprocess.CompletedProcess:
    """Runs ``code`` in a Python that mounts on ``folder``; nobody else sees the mounts, and they end with it."""
    command = None if simulated else mounting()
    mode = "mounted" if command else "simulated"
    text = PREAMBLE + textwrap.dedent(code)
    return subprocess.run([*(command or ()), sys.executable, "-c", text, str(folder), mode], env=child_environment(**environment),
                          capture_output=True, text=True, timeout=240)  # fmt: skip
