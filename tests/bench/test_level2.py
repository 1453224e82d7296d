"""KernelBench's level 2: problems in child processes, records that a later call goes on with, classes apart, the page."""

import io
import json
import math
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from bench import harness, level2, store
from bench.harness import reference_source, work_tree
from bench.kernelbench import main
from bench.level2_classes import CLASSES, MEANINGS, ORDINARY, class_of
from bench.level2_case import todays_key
from bench.level2_page import page
from bench.machine import Machine
from bench.store import LEVEL2
from codegen.spec import load_spec

GOOD = """\
name: two_products
batch: 16
chain:
  - linear: {name: a, in_features: 24, out_features: 16}
  - sigmoid
  - linear: {name: b, in_features: 16, out_features: 8}
  - logsumexp: {dim: 1}
"""
BAD = GOOD.replace("in_features: 16", "in_features: 15")


def call(folder, results, work, *more):
    arguments = ["--level", "2", "--no-harness", "--specs", folder, "--device", "cpu", "--results", results, "--work", work, "--seconds", "0.1", *more]
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path):
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / "45_two_products.yaml").write_text(GOOD)
    (specs / "45_two_products_small.yaml").write_text(GOOD)
    return specs


@pytest.mark.slow
def test_problems_are_verified_timed_and_gone_on_with(folder, tmp_path):
    (folder / "80_again.yaml").write_text(GOOD.replace("two_products", "again"))
    (folder / "70_bad.yaml").write_text(BAD)
    results, work = tmp_path / "results", tmp_path / "work"
    first = call(folder, results, work)
    assert first.exit_code == 1 and "2 of 3 verified" in first.output, first.output
    found = {record["problem"]: record for record in store.read(LEVEL2, results, "cpu")}
    right = found[45]
    assert right["verified"] and right["class"] == ORDINARY and right["algebra"] is False and right["error"] <= 3e-7 and right["eager_error"] <= 3e-7
    assert right["library_steps"] == ["linear", "linear"] and set(right["peers"]) == {"eager", "compile"}
    assert right["speedup_torch"] == pytest.approx(min(right["peers"].values()) / right["ours_ms"], rel=2e-3)
    assert found[80]["class"] == "constant" and not found[70]["verified"] and "linear takes" in found[70]["failure"]

    (folder / "70_bad.yaml").unlink()
    path = LEVEL2.path(results, "cpu")
    before = path.read_text()
    again = call(folder, results, work, "--problem", "45", "--problem", "80")
    assert again.exit_code == 0 and "2 of 2 verified" in again.output and "right" not in again.output
    assert path.read_text() == before, "what holds for today's sources is not measured again"

    (folder / "45_two_products.yaml").write_text(GOOD.replace("sigmoid", "tanh"))
    assert call(folder, results, work, "--verify-only").exit_code == 0
    changed = store.find(LEVEL2, results, "cpu", problem=45, precision="fp32", algebra=False)
    assert changed["key"] != right["key"] and "ours_ms" not in changed, "times of other sources leave the record"
    text = page(results)
    assert "| 45 | two_products | yes |" in text and text.index("| 45 |") < text.index("Listed apart") < text.index("| 80 | again")


@pytest.mark.slow
def test_a_verdict_of_earlier_sources_is_not_counted_where_time_is_too_short_for_a_new_one(folder, tmp_path, monkeypatch):
    results, work = tmp_path / "results", tmp_path / "work"
    assert call(folder, results, work, "--verify-only").exit_code == 0
    (folder / "45_two_products.yaml").write_text(GOOD.replace("sigmoid", "tanh"))
    run = level2.Level.run
    monkeypatch.setattr(level2.Level, "run", lambda self, work, *more, **setting: work == "build" and run(self, work, *more, **setting))
    short = call(folder, results, work, "--verify-only")
    assert short.exit_code == 1 and "0 of 1 verified" in short.output and "stopped for lack of time" in short.output


def test_specs_are_found_by_number_and_one_each(folder):
    (problem,) = level2.problems_in(folder, (), ("fp32",))
    assert (problem.number, problem.name, problem.spec.batch) == (45, "two_products", 16)
    with pytest.raises(click.ClickException, match="no spec of problem 3"):
        level2.problems_in(folder, (3,), ("fp32",))
    (folder / "45_other.yaml").write_text(GOOD)
    with pytest.raises(click.ClickException, match="two specs of problem 45"):
        level2.problems_in(folder, (), ("fp32",))


def test_a_level_without_a_checkout_needs_no_harness(folder, tmp_path):
    refused = CliRunner().invoke(main, ["--level", "2", "--specs", str(folder)])
    assert refused.exit_code == 2 and "--no-harness" in refused.output
    (tmp_path / "empty").mkdir()
    with pytest.raises(click.ClickException, match="no checkout of KernelBench"):
        work_tree(tmp_path / "empty", tmp_path)


def record(problem, precision="fp32", **more):
    return {
        "format": 1, "problem": problem, "precision": precision, "name": "chain", "class": class_of(problem), "gpu": "CPU", "torch": "2", "cuda": None, "verified": True,
        "error": 1e-7, "eager_error": 1e-7, "library_steps": ["linear"], "kernels": 1, "problems": {}, "failed": {}, **more,
    }  # fmt: skip


def timed(ratio):
    return {"ours_ms": 1.0, "peers": {"eager": 2 * ratio, "graph": 3 * ratio, "compile": ratio}, "best_torch": "compile", "speedup_torch": ratio}


def test_means_are_of_ordinary_verified_and_timed_problems(tmp_path):
    rows = [
        record(1, **timed(2.0)), record(2, **timed(8.0)), record(9, **timed(1000.0)), record(3, **timed(0.001) | {"verified": False}), record(4),
        record(5, "bf16", **timed(3.0)), record(66, harness={"verdict": "wrong", "ms": 1.0, "eager_ms": 2.0, "tf32_reference": True}),
    ]  # fmt: skip
    store.replace(LEVEL2, tmp_path, "cpu", rows)
    text = page(tmp_path)
    assert "Over the 2 ordinary ones that are both: 4.000 times" in text and "### bf16" in text and "(TF32)" in text
    assert level2.geometric_mean(list(level2.speedups(rows[:3]))) == pytest.approx(math.sqrt(16.0))
    assert "Without a record: 5 to 8, 10 to 65, 67 to 100." in text


def test_records_of_earlier_sources_are_shown_and_left_out_of_counts_and_means(folder, tmp_path):
    path = str(folder / "45_two_products.yaml")
    now = {"path": path, "target": "cpu", "key": todays_key(path, "fp32", "cpu")}
    store.replace(LEVEL2, tmp_path, "cpu", [record(1, **timed(2.0), **now), record(2, **timed(8.0), **now | {"key": "0" * 64}), record(3, **timed(8.0), **now | {"path": "gone.yaml"})])
    text = page(tmp_path)
    assert "3 of 100 problems have a record; 1 of them are verified and 1 are timed" in text and "Over the 1 ordinary ones that are both: 2.000 times" in text
    assert "2 records are of earlier sources" in text and text.count("| earlier sources |") == 2


def test_a_record_of_a_target_that_the_card_no_longer_runs_is_of_earlier_sources():
    """A product of ours on Hopper takes over from a library step: what was measured of sm_80's package says nothing of it."""
    path = "specs/kernelbench/level2/09_matmul_subtract_multiply_relu.yaml"
    assert todays_key(path, "fp32", "sm_80") and todays_key(path, "fp32", "sm_80", "a100") == todays_key(path, "fp32", "sm_80")
    assert todays_key(path, "fp32", "sm_80", "h200") is None and todays_key(path, "fp32", "sm_90a", "h200")
    assert todays_key(path, "fp32", "cpu", "h200") and todays_key(path, "fp32", "sm_90a", "") == todays_key(path, "fp32", "sm_90a", "h200")


def test_the_page_needs_no_record(tmp_path):
    text = page(tmp_path)
    assert "No card has been measured yet" in text and all(f"| {number} | {kind} |" in text for number, (kind, _) in CLASSES.items())


def test_every_degenerate_problem_has_a_class_and_a_line():
    assert all(1 <= number <= 100 and kind in MEANINGS and why and "\n" not in why for number, (kind, why) in CLASSES.items())
    assert class_of(30) == ORDINARY and len(CLASSES) == 9


def test_references_of_several_inputs(tmp_path):
    path = tmp_path / "layer.yaml"
    path.write_text("name: layer\nbatch: 2\ninputs: {x: {shape: [4]}, other: {shape: [4]}}\nchain:\n  - relu\n  - add: {from: other}\n")
    scope: dict = {}
    exec(reference_source(load_spec(path)), scope)
    x, other = scope["get_inputs"]()
    assert scope["Model"]()(x, other).equal(x.relu() + other)


def test_records_are_lines(tmp_path):
    store.replace(LEVEL2, tmp_path, "cpu", [record(2), record(1)])
    assert [json.loads(line)["problem"] for line in LEVEL2.path(tmp_path, "cpu").read_text().splitlines()] == [1, 2]


HARNESS = """
import pathlib, sys
kernel = [a.split("=", 1)[1] for a in sys.argv if a.startswith("kernel_src_path=")][0]
found = "ModelNew" in pathlib.Path(kernel).read_text()
print("[INFO] Evaluating")
print(f"compiled=True correctness={found} runtime=1.0 runtime_stats={{'mean': 1.0, 'std': 0.01}} ref_runtime_stats={{'mean': 2.0, 'std': 0.01}}")
print("[Eval] Reference Eager exec time: 2.0 ms")
print("[Eval] Custom Kernel exec time: 1.0 ms")
"""


@pytest.mark.parametrize("asked", ["--harness-only", "--verdicts"])
@pytest.mark.parametrize("left_out", ["--no-harness", "--verify-only"])
def test_a_call_that_would_do_nothing_is_refused(folder, asked, left_out):
    refused = CliRunner().invoke(main, ["--level", "2", "--specs", str(folder), "--device", "cpu", asked, left_out])
    assert refused.exit_code == 2 and "ask the harness" in refused.output


def test_a_harness_that_does_not_start_judges_nothing(tmp_path):
    """What it lacks is said once, instead of a verdict for every problem."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run_and_check.py").write_text("import a_module_that_is_nowhere")
    with pytest.raises(click.ClickException, match="No module named 'a_module_that_is_nowhere'"):
        harness.check_start(tmp_path, harness.environment(tmp_path, tmp_path))


def test_the_harness_judges_each_file_once(folder, tmp_path, monkeypatch):
    """A stand-in for the script; what it says goes into the record beside our own figures, and is asked for again only where times are wanted and missing."""
    scripts, problems = tmp_path / "kb" / "scripts", tmp_path / "kb" / "KernelBench" / "level2"
    scripts.mkdir(parents=True), problems.mkdir(parents=True)
    (scripts / "run_and_check.py").write_text(HARNESS)
    (problems / "45_Gemm_Sigmoid_LogSumExp.py").write_text("")
    monkeypatch.setattr(level2, "cards", lambda device: ("0",))
    monkeypatch.setattr(harness, "prebuild", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    machine, told = Machine("NVIDIA H200", "h200", "2.11.0", "13.0", None), io.StringIO()
    store.put(LEVEL2, tmp_path, "h200", [record(45, **machine.facts, **timed(2.0))])
    for timing, expected in ((False, 1), (False, 0), (True, 1), (False, 0), (True, 0)):
        level = level2.Level(machine, torch.device("cuda"), tmp_path, Console(file=told), None, 60.0, 0.1, tmp_path / "packages")
        chosen = level2.problems_in(folder, (), ("fp32",))
        told.truncate(0)
        assert level2.run_harness(level, chosen, work_tree(tmp_path / "kb", tmp_path), tmp_path / "work", 60.0, timing=timing)
        assert told.getvalue().count("correct") == expected
        assert timing or expected == 0 or store.find(LEVEL2, tmp_path, "h200", problem=45, precision="fp32", algebra=False)["harness"]["ms"] is None
    made = store.find(LEVEL2, tmp_path, "h200", problem=45, precision="fp32", algebra=False)
    assert made["harness"]["verdict"] == "correct" and made["harness"]["ms"] == 1.0 and made["harness"]["tf32_reference"] is False
    assert made["speedup_torch"] == 2.0 and "correct, 1 / 2" in page(tmp_path)


def test_a_reference_of_tf32_that_disagrees_is_asked_again_with_fp32(tmp_path, monkeypatch):
    """What the harness finds wrong beside a convolution of TF32 it judges beside one of fp32 too; once."""
    problem = level2.problems_in(level2.SPECS, (5,), ("fp32",))
    monkeypatch.setattr(level2, "cards", lambda device: ("0",))
    monkeypatch.setattr(harness, "prebuild", lambda *args: None)
    monkeypatch.setattr(harness, "check_start", lambda *args: None)
    monkeypatch.setattr(harness, "problem_file", lambda checkout, number: tmp_path)
    monkeypatch.setattr(harness, "write_standalone", lambda spec, work: (Path(__file__), "sm_90a", ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    asked = []

    def answer(command, checkout, env, timeout_s):
        exact = all(env[name] == value for name, value in harness.FP32_REFERENCE.items() if name in env) and "NVIDIA_TF32_OVERRIDE" in env
        asked.append(exact)
        return f"[INFO] Evaluating\ncompiled=True correctness={exact}\nCustom Kernel exec time: 1.0 ms\nReference Eager exec time: 3.0 ms"

    monkeypatch.setattr(harness, "call", answer)
    machine = Machine("NVIDIA H200", "h200", "2.11.0", "13.0", None)
    store.put(LEVEL2, tmp_path, "h200", [record(5, **machine.facts)])
    for timing in (True, False, True):
        level = level2.Level(machine, torch.device("cuda"), tmp_path, Console(file=io.StringIO()), None, 60.0, 0.1, tmp_path / "packages")
        assert level2.run_harness(level, problem, tmp_path, tmp_path / "work", 60.0, timing=timing)
        assert asked == [False, True]
    found = store.find(LEVEL2, tmp_path, "h200", problem=5, precision="fp32", algebra=False)["harness"]
    assert found["verdict"] == "wrong" and found["tf32_reference"] and found[level2.EXACT]["verdict"] == "correct"
    assert "1 more beside a reference that keeps fp32" in page(tmp_path) and "correct beside fp32, 1 / 3 |" in page(tmp_path)


def test_rewritten_chains_stand_beside_those_as_written(folder, tmp_path):
    """What no pass rewrites has one record; any other has two, and the headline is that of chains as written."""
    (folder / "14_row_sum.yaml").write_text("name: row_sum\nbatch: 16\nchain:\n  - linear: {name: a, in_features: 24, out_features: 16}\n  - sum\n")
    ours = {(p.number, p.identity["algebra"], p.spec.algebra) for algebra in (True, False) for p in level2.problems_in(folder, (), ("fp32",), algebra)}
    assert ours == {(14, True, True), (14, False, False), (45, False, True)}, "as it is where nothing would be rewritten"
    path = str(folder / "14_row_sum.yaml")
    assert todays_key(path, "fp32", "cpu") != todays_key(path, "fp32", "cpu", "", False)
    rows = [
        record(algebra=algebra, passes=["row_sum"] if algebra else [], path=path, target="cpu", key=todays_key(path, "fp32", "cpu", "", algebra), problem=14, **timed(ratio))
        for algebra, ratio in ((False, 2.0), (True, 32.0))
    ]  # fmt: skip
    store.replace(LEVEL2, tmp_path, "cpu", [*rows, record(1, algebra=False, **timed(2.0))])
    assert len(store.read(LEVEL2, tmp_path, "cpu")) == 3
    text = page(tmp_path)
    assert "2 of 100 problems have a record" in text and "Over the 2 ordinary ones that are both: 2.000 times" in text
    assert "With algebra, where a chain has any: 8.000 times as fast." in text and "| 14 | chain | row_sum | yes |" in text and "| **2.00x** | **32.00x** |" in text


@pytest.mark.slow
def test_a_chain_is_measured_rewritten_and_as_written(tmp_path):
    specs = tmp_path / "specs"
    specs.mkdir()
    (specs / "14_row_sum.yaml").write_text("name: row_sum\nbatch: 16\nchain:\n  - linear: {name: a, in_features: 24, out_features: 16}\n  - sum\n")
    results, work = tmp_path / "results", tmp_path / "work"
    for more in ((), ("--no-algebra",)):
        made = call(specs, results, work, "--verify-only", *more)
        assert made.exit_code == 0, made.output
    rewritten, written = sorted(store.read(LEVEL2, results, "cpu"), key=lambda found: not found["algebra"])
    assert (rewritten["algebra"], rewritten["passes"], rewritten["library_steps"]) == (True, ["row_sum"], [])
    assert (written["algebra"], written["passes"], written["library_steps"]) == (False, [], ["linear"]) and written["key"] != rewritten["key"]
