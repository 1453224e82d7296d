"""The sweep: what is drawn, how few values are judged, how children die, what the summary says, and thirty random specs that must be right."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from bench.children import run_jobs
from bench.promise import DRAWS, draws_for, margin
from bench.report import build
from bench.store import SWEEP, put, read
from bench.subject import Subject
from bench.sweep import summary
from bench.sweep.draw import LARGE, SMALL, draw, footprint, producer_flop
from bench.sweep.judge import judge
from codegen.numerics import PRECISIONS
from codegen.ops import OPERATORS
from codegen.package import make_package

REPOSITORY = Path(__file__).resolve().parents[2]


def test_every_operator_and_precision_is_drawn(tmp_path):
    """An operator that joins the table is drawn from then on."""
    specs = [draw(0, index, SMALL, tmp_path) for index in range(300)]
    assert {step.operator.name for spec in specs for step in spec.chain} == set(OPERATORS)
    assert {spec.precision.name for spec in specs} == set(PRECISIONS)
    assert {argument for spec in specs for step in spec.chain for argument, value in step.values.items() if value is not None} == {
        argument.name for operator in OPERATORS.values() for argument in operator.arguments
    }


def test_a_case_is_what_its_seed_and_index_say(tmp_path):
    first = [draw(7, index, LARGE, tmp_path / "a") for index in (3, 4)]
    again = [draw(7, index, LARGE, tmp_path / "b") for index in (4, 3)][::-1]
    assert [replace(spec, path="") for spec in first] == [replace(spec, path="") for spec in again]
    assert (tmp_path / "a" / "sweep_7_003.yaml").read_bytes() == (tmp_path / "b" / "sweep_7_003.yaml").read_bytes()


def test_cases_stay_within_their_limits_and_what_a_target_refuses_has_a_reason(tmp_path):
    for index in range(40):
        spec = draw(0, index, LARGE, tmp_path)
        assert producer_flop(spec) <= LARGE.flop and footprint(spec) <= LARGE.bytes
        package = make_package(spec)
        assert package.plan_for("cpu") and all(len(reason.split()) > 5 for _, reason in package.skipped)


def test_few_values_are_drawn_again_and_errors_still_found(small):
    """A result three times as far off as is allowed is wrong however often it is drawn; one that keeps the promise is right."""
    assert margin(DRAWS[1], 1) > 1.5 and margin(draws_for(10**6), 10**6) < 1.01

    class Off(small.module.Model):
        def forward(self, x):
            y = super().forward(x.double()) if self.gemm.weight.dtype is x.double().dtype else super().forward(x)
            return y * (1 + self.error)

    rows = {}
    for error in (0.0, 1e-6):
        ours = Off(*small.module.get_init_inputs())
        ours.error = error
        rows[error] = judge(Subject(small, ours, next(ours.parameters()).device), ("normal",))[0]
    assert rows[0.0]["ok"] and not rows[1e-6]["ok"]
    assert rows[1e-6]["draws"] > 1 and "relative error" in rows[1e-6]["problems"][0]


_CHILD = """
import os, sys, time
from pathlib import Path
from bench.children import take_jobs

def work(job, setting):
    {body}
    return {{"value": job}}

take_jobs(Path(sys.argv[1]), work)
"""


def _run(tmp_path, jobs, body, **options):
    """Run `jobs` in children whose work is `body`; what became of each."""
    script = tmp_path / "child.py"
    script.write_text(_CHILD.format(body=body))
    found = {}
    options = {"workers": 2, "limit_s": 60.0, "deadline": None, "environment": {"PYTHONPATH": str(REPOSITORY)}} | options
    complete = run_jobs(lambda folder: [sys.executable, str(script), str(folder)], {}, jobs, on_result=found.__setitem__, **options)
    return complete, found


def test_a_crash_and_a_hang_are_one_job_each(tmp_path):
    jobs = {str(i): i for i in range(6)}
    complete, found = _run(tmp_path, jobs, "job == 1 and os._exit(9); job == 3 and time.sleep(60)", limit_s=3.0)
    assert complete and set(found) == set(jobs)
    assert "code 9" in found["1"]["failure"] and "longer than 3 s" in found["3"]["failure"]
    assert all(found[name] == {"value": i} for name, i in jobs.items() if i not in (1, 3))


def test_every_child_sees_one_card_and_a_new_one_the_card_of_the_lost(tmp_path):
    body = "card = os.environ['CUDA_VISIBLE_DEVICES']; time.sleep(0.3); job == 0 and os._exit(9); open(f'{card}.card', 'a').write('x')"
    complete, found = _run(tmp_path, {str(i): i for i in range(8)}, f"os.chdir({str(tmp_path)!r}); {body}", cards=("GPU-a", "GPU-b"))
    assert complete and "code 9" in found["0"]["failure"]
    assert {path.stem for path in tmp_path.glob("*.card")} == {"GPU-a", "GPU-b"}
    assert all(len(path.read_text()) >= 2 for path in tmp_path.glob("*.card"))


def test_no_job_begins_behind_the_deadline(tmp_path):
    complete, found = _run(tmp_path, {"a": 1, "b": 2}, "pass", deadline=time.time() - 1)
    assert not complete and not found


def test_children_that_cannot_start_are_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="code 3 before it took a job"):
        run_jobs(lambda folder: [sys.executable, "-c", "raise SystemExit(3)"], {}, {"a": 1}, on_result=lambda job, result: None, workers=1, limit_s=60.0, deadline=None)


def _case(index, producer, precision, ours, peer, verified=True):
    best = {"ms": peer, "rel_error": 1e-7, "tflops": 1.0}
    return {
        "seed": 0, "index": index, "small": False, "spec": "name: a\nchain:\n- linear: {name: p}\n- relu\n", "package": f"sweep_0_{index:03d}",
        "precision": precision,
        "producer": producer, "target": "sm_80", "key": "k", "flop": 1e9, "bytes": 1e7 * (index + 1), "route": "gemm_sm80", "limiter": "memory", "why": [],
        "verified": verified, "verification": [] if verified else [{"family": "normal", "ok": False, "problems": ["relative error"]}], "floor_ms": ours / 2,
        "ours": {"ms": ours}, "peers": {"eager": best}, "best_peer": "eager", "speedup": peer / ours, "best_torch": "eager", "speedup_torch": peer / ours,
    }  # fmt: skip


def test_the_summary_counts_and_names_the_slowest():
    cases = [_case(0, "linear", "fp32", 1.0, 2.0), _case(1, "linear", "fp32", 1.0, 8.0), _case(2, "conv2d", "bf16", 1.0, 0.9)]
    cases.append(_case(3, "linear", "tf32", 1.0, 1.0, verified=False))
    rows = {row["name"]: row for row in summary.classes(cases)}
    assert rows["linear, fp32"]["speedup"] == pytest.approx(4.0) and rows["conv2d, all precisions"]["below"] == 1
    assert summary.counts(cases) == {"right": 3, "wrong": 1, "failed": 0, "open": 0}
    assert [case["index"] for case in summary.slowest(cases, 2)] == [2, 3]
    assert summary.cause(cases[2]) == "gemm_sm80; bound by memory, 50% of this card's roofline"


def test_the_page_shows_the_sweep(tmp_path):
    cases = [_case(0, "linear", "fp32", 1.0, 2.0), _case(1, "conv2d", "fp16", 1.0, 3.0, False)]
    facts = {"gpu": "NVIDIA H100", "torch": "2.11.0", "cuda": "13.0", "driver": None}
    put(SWEEP, tmp_path / "results", "h100", [case | facts for case in cases])
    page = build(tmp_path / "results", tmp_path / "page").read_text()
    assert "Random specs" in page and "2 specs drawn" in page and (tmp_path / "page" / "h100" / "sweep.svg").is_file()


@pytest.mark.slow
def test_thirty_random_specs_are_right(tmp_path):
    """`make sweep SMALL=1 COUNT=30 ON=cpu`, in a folder of its own; sources and cache keys are the same at each run."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "fixed_shape_kernels", "sweep", "--small", "--count", "30", "--device", "cpu", "--results", "results", "--work", "work"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = read(SWEEP, tmp_path / "results", "cpu")
    assert len(cases) == 30 and all(case["verified"] for case in cases)
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and "examine" not in again.stdout
