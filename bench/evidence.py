"""`make evidence`, `make evidence-peers`: verify and time every checked-in package on this card and write bench/results/<gpu>/.

First all packages are built and verified and their peers compiled, several at once; then each is timed alone, in a child process. Each record is written as soon as it is complete, and one that is up to date is not
made again, so a run that is cut short is continued by the next. A package that crashes the child or hangs it is reported, and a new child
goes on with the rest.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import click
import torch
from rich.console import Console

from bench.children import run_jobs
from bench.machine import Machine, choose_device, describe
from bench.measure import ceilings_record, measure, save_machine, with_verification
from bench.peers import CHOICES, EVIDENCE
from bench.records import RESULTS, Record, path_of, read, write_json
from bench.run import ceilings_line
from bench.subject import Emitted, Subject, construct, emit
from bench.timing import measure_ceilings
from bench.verify import verify
from codegen import index
from codegen.spec import load_spec
from runtime import Package, RuntimeFailure
from runtime.load import best_target

EXAMINING = 0.6  # of a budget, at most, goes to what is done before the timing
BROKEN = 70  # exit code of a child whose CUDA context is lost
Job = tuple[str, str]  # (spec path, precision)


def up_to_date(record: Record | None, key: str, torch_version: str, peers: tuple[str, ...], autotuned: bool) -> bool:
    """Does the record hold for these sources and this torch, with a verdict and everything that was asked for timed?"""
    if record is None or record["key"] != key or record["torch"] != torch_version or "verification" not in record:
        return False
    return set(peers) <= set(record.get("asked", ())) and (not autotuned or record.get("autotuned", False))


def _target_for(emitted: Emitted, device: torch.device, target: str | None) -> str:
    """The target that the loader would choose."""
    if target or device.type == "cpu":
        return target or "cpu"
    best = best_target(Package(emitted.folder), torch.cuda.get_device_capability(device))
    if best is None:
        raise RuntimeFailure(f"no target of {emitted.spec.package} runs on this card")
    return best.name


def _examine(jobs: list[tuple[Job, bool]], options: dict, target: str | None, console: Console) -> dict[Job, Record]:
    """Build the packages, verify those that ask for it and compile their peers, several at once. Returns what came out, by job.

    What fails here is tried again when the package's turn comes, and reported there.
    """
    workers = max(1, min(6, (os.cpu_count() or 2) // 2, len(jobs)))
    setting = {"device": options["device"], "target": target, "out": str(options["out"]), "peers": list(options["peers"])}
    listed = {f"{number:03}": {"path": path, "precision": precision, "verify": wanted} for number, ((path, precision), wanted) in enumerate(jobs)}
    found: dict[Job, Record] = {}
    start = time.perf_counter()

    def collect(name: str, result: dict) -> None:
        if "failure" not in result:
            found[jobs[int(name)][0]] = result

    deadline = time.time() + EXAMINING * options["budget_s"] if options["budget_s"] else None
    run_jobs(lambda folder: [sys.executable, "-m", "bench.examine", str(folder)], setting, listed, workers, options["limit_s"], deadline, collect)
    console.print(f"{len(found)} of {len(jobs)} packages built, verified and their peers compiled, {workers} at a time, in {time.perf_counter() - start:.0f} s")
    return found


def make_record(
    emitted: Emitted, device: torch.device, machine: Machine, ceilings, target: str | None, peers, seconds: float, verdict: Record | None
) -> Record:  # fmt: skip
    """Measure, and verify first where no `verdict` on the same sources is given."""
    ours = construct(emitted, device, target)
    findings = None if verdict else verify(Subject(emitted, ours, device))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    record = measure(emitted, ours, device, machine, ceilings, peers, seconds)
    if verdict:
        record["verified"], record["verification"] = verdict["verified"], verdict["verification"]
    else:
        record = with_verification(record, findings)
    record["asked"] = list(peers)
    return record


def _line(record: Record) -> str:
    verdict = "[green]right[/]" if record["verified"] else "[bold red]WRONG[/] " + "; ".join(
        f"{f['family']}: {', '.join(f['problems'])}" for f in record["verification"] if not f["ok"]
    )
    return (
        f"{record['package']} ({record['target']}): {verdict}, {record['ours']['ms']:.4f} ms, error {record['ours']['rel_error']:.1e}, "
        f"{record['speedup']}x {record['best_peer']}, {record['speedup_torch']}x {record['best_torch']}"
    )


def bundle(results: Path, slug: str, archive: Path) -> None:
    """All JSON of one card in one tar, to be unpacked in bench/results/."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    temporary = archive.with_name(f".{archive.name}.tmp")
    with tarfile.open(temporary, "w") as tar:
        for path in sorted((results / slug).glob("*.json")):
            tar.add(path, arcname=f"{slug}/{path.name}")
    os.replace(temporary, archive)


def worker(jobs: list[Job], options: dict, state: Path) -> int:
    """Do the jobs; `state` holds the one in hand. Returns the number of packages found wrong."""
    console = Console(width=None if sys.stdout.isatty() else 200, soft_wrap=not sys.stdout.isatty())
    device = choose_device(options["device"])
    machine, target, results, peers = describe(device), options["target"], options["results"], options["peers"]
    autotuned = set(peers) != set(EVIDENCE)
    start, longest, wrong = time.perf_counter(), 0.0, 0
    pending = []
    for path, precision in jobs:
        emitted = emit(path, precision, target or ("cpu" if device.type == "cpu" else None), options["out"])
        name = _target_for(emitted, device, target)
        at = path_of(results, machine.slug, emitted.spec.name, precision, target)
        old = read(at)
        if not options["force"] and up_to_date(old, emitted.key(name), machine.torch, peers, autotuned):
            console.print(f"{emitted.spec.package} ({name}): up to date" + ("" if old["verified"] else ", [bold red]WRONG[/]"))
            wrong += not old["verified"]
            continue
        kept = old if old and old["key"] == emitted.key(name) and old.get("verification") and autotuned else None
        pending.append(((path, precision), emitted, at, kept))
    if not pending:
        return wrong
    examined = _examine([(job, kept is None) for job, _, _, kept in pending], options, target or ("cpu" if device.type == "cpu" else None), console)
    ceilings = measure_ceilings(device)
    console.print(ceilings_line(ceilings, machine))
    save_machine(results, machine, ceilings)
    for number, (job, emitted, at, kept) in enumerate(pending, 1):
        left = options["budget_s"] - (time.perf_counter() - start) if options["budget_s"] else float("inf")
        if left < longest * 1.1:
            console.print(f"stopped with {len(pending) - number + 1} packages left: the next may take {longest:.0f} s, {left:.0f} s remain; run again to go on")
            break
        state.write_text(f"{job[0]} {job[1]}")
        began = time.perf_counter()
        try:
            record = make_record(emitted, device, machine, ceilings, target, peers, options["seconds"], kept or examined.get(job))
        except (RuntimeFailure, RuntimeError) as error:
            console.print(f"[bold red]{emitted.spec.package} could not be measured:[/] {str(error).strip().splitlines()[0]}", highlight=False)
            wrong += 1
            if "CUDA error" in str(error) or "CUDA error" in repr(error.__cause__):
                sys.stdout.flush()
                os._exit(BROKEN)  # the CUDA context is lost: an ordinary exit would wait for it
            continue
        record["autotuned"] = autotuned
        record["ceilings"] = ceilings_record(ceilings)
        write_json(at, record)
        wrong += not record["verified"]
        if options["bundle"]:
            bundle(results, machine.slug, options["bundle"])
        longest = max(longest, time.perf_counter() - began)
        console.print(f"[{number}/{len(pending)}] {_line(record)} ({time.perf_counter() - began:.0f} s)", highlight=False, markup=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    state.write_text("")
    return wrong


def _supervise(jobs: list[Job], arguments: list[str], budget_s: float, limit_s: float) -> int:
    """Run children until every job is done, crashed or out of time. Returns the exit code."""
    begun, remaining, failed, wrong = time.perf_counter(), list(jobs), [], 0
    while remaining:
        left = budget_s - (time.perf_counter() - begun) if budget_s else 0.0
        if budget_s and left < 20:
            break
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder) / "state"
            state.write_text("")
            command = [sys.executable, "-m", "bench.evidence", *arguments, "--budget-s", str(left), "--worker", str(state)]
            command += [word for job in remaining for word in ("--job", *job)]
            child = subprocess.Popen(command)
            code = _wait(child, state, limit_s)
            in_hand = state.read_text().split()
        if code in (0, 1):
            wrong = code
            break
        if not in_hand:
            print(f"the measuring process ended with code {code} before its first package", file=sys.stderr)
            return 2
        failed.append(tuple(in_hand))
        print(f"{' '.join(in_hand)}: {'hung and was ended' if code == -9 else f'ended the process with code {code}'}; going on without it", file=sys.stderr, flush=True)
        remaining = [job for job in remaining if job not in failed]
    return int(bool(wrong or failed))


def _wait(child: subprocess.Popen, state: Path, limit_s: float) -> int:
    """The child's exit code; it is killed when one package takes longer than `limit_s`."""
    since, before = time.perf_counter(), ""
    while child.poll() is None:
        time.sleep(0.3)
        now = state.read_text()
        if now != before:
            since, before = time.perf_counter(), now
        elif now and time.perf_counter() - since > limit_s:
            child.kill()
            child.wait()
            return -9
    return child.returncode


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("specs", nargs=-1)
@click.option("--precision", "precisions", multiple=True, help="Only this precision (repeatable).")
@click.option("--autotuned", is_flag=True, help="Time the autotuned peers too (minutes a package).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]))
@click.option("--target", help="Measure this target instead of the loader's choice; its records carry its name.")
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder for the records; default bench/results.")
@click.option("--bundle", "archive", type=click.Path(dir_okay=False, path_type=Path), help="Keep a tar of the card's records here, renewed after each package.")
@click.option("--budget-s", default=0.0, help="Stop cleanly before this many seconds are over; 0 means no limit.")
@click.option("--limit-s", default=240.0, show_default=True, help="A package that takes longer is given up.")
@click.option("--seconds", default=2.0, show_default=True, help="Time for the trials of one package.")
@click.option("--force", is_flag=True, help="Measure again what is up to date.")
@click.option("--cache", type=click.Path(file_okay=False, path_type=Path), envvar="PEERS_CACHE", help="Keep Inductor's and Triton's caches here ($PEERS_CACHE).")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("generated"), show_default=True, help="Folder for the packages.")
@click.option("--worker", "state", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
@click.option("--job", "listed", nargs=2, multiple=True, hidden=True)
def main(specs, precisions, autotuned, device, target, results, archive, budget_s, limit_s, seconds, force, cache, out, state, listed) -> None:
    """Measure SPECS (all packages of generated/index.yaml when none is named) and write the records."""
    if state:
        peers = CHOICES if autotuned else EVIDENCE
        options = {
            "device": device, "target": target, "results": results, "bundle": archive, "budget_s": budget_s, "seconds": seconds, "force": force,
            "out": out, "peers": peers, "limit_s": limit_s,
        }  # fmt: skip
        sys.exit(bool(worker(list(listed), options, state)))
    entries = index.entries(Path("generated"))
    jobs = [job for job in entries if (not specs or load_spec(job[0]).path in {load_spec(s).path for s in specs}) and (not precisions or job[1] in precisions)]
    known = {load_spec(path).path for path, _ in entries}
    jobs += [(s, p) for s in specs if load_spec(s).path not in known for p in precisions or (load_spec(s).precision.name,)]
    if cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"] = str((cache / "inductor").resolve()), str((cache / "triton").resolve())
    arguments = ["--results", str(results), "--limit-s", str(limit_s), "--seconds", str(seconds), "--out", str(out)]
    for flag, value in (("--device", device), ("--target", target), ("--bundle", archive)):
        arguments += [flag, str(value)] if value else []
    arguments += ["--autotuned"] if autotuned else []
    arguments += ["--force"] if force else []
    sys.exit(_supervise(jobs, arguments, budget_s, limit_s))


if __name__ == "__main__":
    main()
