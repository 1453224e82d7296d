"""Measuring commands under torchrun: each rank has its share, records are merged, and what a run left that was cut short is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fleet import OWN, Fleet, fleet
from bench.store import SWEEP, put, read

TOP = Path(__file__).resolve().parents[2]
CASE = {"small": True, "seed": 0, "torch": "2", "verified": True}


def run(folder, count, text):
    """Run a script on `count` ranks; what they printed."""
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), str(script)]
    return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(TOP)}, capture_output=True, text=True, timeout=200, check=False)


def test_one_rank_keeps_its_records_where_they_belong(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with fleet(tmp_path) as made:
        assert (made.size, made.results, list(made.mine(range(3))), made.heard("x")) == (1, tmp_path, [0, 1, 2], ["x"])


def test_every_case_is_one_rank_s():
    shares = [list(Fleet(3, rank, None).mine(range(8))) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]


@pytest.mark.slow
def test_records_of_ranks_are_merged_with_what_an_earlier_run_left(tmp_path):
    put(SWEEP, tmp_path, "cpu", [CASE | {"index": 0, "error": 1.0}])
    put(SWEEP, tmp_path / OWN / "5", "cpu", [CASE | {"index": 7, "error": 2.0}, CASE | {"index": 0, "error": 3.0}])
    done = run(tmp_path, 2, f"""
import sys
from bench.fleet import fleet
from bench.store import SWEEP, put, read
from pathlib import Path
with fleet(Path({str(tmp_path)!r})) as made:
    assert [case["index"] for case in read(SWEEP, made.results, "cpu")] == [0, 7]
    for index in made.mine(range(1, 4)):
        put(SWEEP, made.results, "cpu", [{CASE!r} | {{"index": index, "error": float(made.rank)}}])
    sys.exit(0)
""")
    assert done.returncode == 0, done.stderr
    found = {case["index"]: case["error"] for case in read(SWEEP, tmp_path, "cpu")}
    assert found == {0: 3.0, 1: 0.0, 2: 1.0, 3: 0.0, 7: 2.0} and not (tmp_path / OWN).exists()
    assert "the records of 2 ranks are merged" in done.stdout


@pytest.mark.slow
def test_a_sweep_on_two_ranks_goes_on_where_it_stopped(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fixed_shape_kernels", "sweep", "--small", "--device", "cpu"]
    command += ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"), "--family", "benchmark", "--count"]
    for count, ran in ((2, 2), (3, 1)):
        done = subprocess.run([*command, str(count)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(TOP)}, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / "results" / "cpu" / "sweep.jsonl").read_text().splitlines()
        assert [json.loads(line)["index"] for line in lines] == list(range(count)) and done.stdout.count("right[/], error") + done.stdout.count(": right, error") == ran
