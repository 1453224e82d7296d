"""Starts the ranks of a test as processes, bounded in time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How the ranks ended: exit codes, what they wrote to stderr, their results (None of one that left none), and the seconds that it took."""

    codes: list[int]
    errors: list[str]
    results: list[Any]
    seconds: float


def run_ranks(folder: Path, count: int, tasks: dict[str, dict[str, Any]], device: str = "cpu", limit_s: float = 240.0, worker: str = "tests.parallel.worker") -> Ended:
    """Run tasks of the module `worker` on `count` ranks; results are by task. What still runs after `limit_s` seconds is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "task.json"
    path.write_text(json.dumps({"device": device, "tasks": tasks}))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": TOP}
    begun, processes = time.monotonic(), []
    for rank in range(count):
        environment = os.environ | {name: str(value) for name, value in shared.items()} | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(folder / f"stderr.{rank}", "w") as errors:
            processes.append(subprocess.Popen([sys.executable, "-m", worker, str(path)], env=environment, stderr=errors, cwd=folder))
    try:
        for process in processes:
            process.wait(max(0.1, limit_s - (time.monotonic() - begun)))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [path.with_suffix(f".{rank}.json") for rank in range(count)]
    results = [json.loads(one.read_text()) if one.exists() else None for one in found]
    return Ended([process.returncode for process in processes], [(folder / f"stderr.{rank}").read_text() for rank in range(count)], results, time.monotonic() - begun)
