"""The page: one file that needs no network and fits a phone, the same at each build."""

import re
from pathlib import Path

import pytest

from bench.kernel_tables import CARD, RATES, ROW, renewed
from bench.harness import noisy, parse, reference_source, spreads
from bench.kernelbench import PROBLEMS, SMALL, Run
from bench.pictures import _label, merged
from bench.records import backward_keys, conclude, find, keep, ledger, name_of, present_keys, read_all
from bench.report import build
from bench.shrink import shrink
from bench.store import EVIDENCE, KERNELBENCH, MODELS, RESULTS, put, read
from bench.tables import cards_of, results_page
from codegen.ir.fused_form import FusedSpec
from tests.fused import load_fused

pytestmark = pytest.mark.usefixtures("manifests_once")

TOP = Path(__file__).parents[2]
NAME = "gemm_groupnorm_hardtanh"

CEILINGS = {"copy_gbs": 4240.0, "fp32_tflops": 51.0, "tf32_tflops": 400.0, "fp16_tflops": 760.0, "bf16_tflops": 777.0}


@pytest.fixture
def results(tmp_path):
    """A card with one record."""
    row = {"ms": 1.0, "rel_error": 3e-7, "max_error": 1e-6, "spread": 0.01, "tflops": 137.0, "gbs": 335.0, "trials": 60}
    record = conclude({
        "format": 1, "spec": "gemm_groupnorm_hardtanh", "path": "specs/default.yaml", "package": "gemm_groupnorm_hardtanh", "precision": "fp32", "target": "sm_80",
        "key": "k", "gpu": "NVIDIA <H200>", "torch": "2.11.0", "cuda": "13.0", "driver": None, "verified": True, "floor_ms": 0.4, "weights": "not prepared",
        "flop": 1.374e11, "bytes": 3.35e8, "ceilings": CEILINGS, "ours": {**row, "outside": 0, "roofline_share": 0.4},
        "peers": {"eager": {**row, "ms": 2.8, "ours_ms": 1.0}, "library GEMM alone": {**row, "ms": 2.7, "rel_error": None, "ours_ms": 1.0}},
        "overhead_us": {"ours": {"host": 12.0, "call": 20.0, "replay": None}}, "failed": {"triton": "ImportError: <none>"},
    })  # fmt: skip
    keep(tmp_path / "results", "h200", record)
    return tmp_path / "results"


def test_the_page_stands_alone(results, tmp_path):
    page = build(results, tmp_path / "page").read_text()
    assert '<meta name="viewport" content="width=device-width' in page
    assert not re.search(r'(src|href)="(?!#)', re.sub(r'xlink:href="#|xmlns[^ >]*', "", page))
    assert page.count("<svg") == 3 and "NVIDIA &lt;H200&gt;" in page and "unverified" in page
    made = {path.name for path in (tmp_path / "page" / "h200").iterdir()}
    assert {"roofline.svg", "roofline.png", "speedups.svg", "error-gemm_groupnorm_hardtanh.png"} <= made


@pytest.mark.parametrize("path", ["mine.yaml", "gone.yaml"])
def test_a_spec_of_ones_own_is_unverified_once_its_sources_changed(results, tmp_path, path):
    """What generated/index.yaml does not list is judged by its spec as it is now, on the page as in the tables; a spec that is gone is no evidence."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\nbatch: 64\nchain:\n  - linear: {name: fc, in_features: 64, out_features: 64}\n  - relu: {}\n")
    (record,) = read(EVIDENCE, results, "h200")
    own = record | {"spec": "mine", "path": str(tmp_path / path), "package": "mine", "key": present_keys(str(mine), "fp32")["sm_80"]}
    if path == "gone.yaml":
        own["backward"] = {"target": "sm_80", "key": "k", "ours": {"ms": 1.0, "spread": 0.1, "rel_errors": {"x": 1e-6}, "peak_bytes": 1}, "peers": {}, "best_torch": None, "speedup_torch": None}
    verified = re.compile(r'class="good">yes')
    keep(results, "h200", own)
    assert bool(verified.search(build(results, tmp_path / "page").read_text())) == (path == "mine.yaml")
    keep(results, "h200", own | {"key": "of earlier sources"})
    assert not verified.search(build(results, tmp_path / "page").read_text())
    cards = cards_of(read_all(results), ledger(results), results)
    assert dict(zip([one["spec"] for one in cards[0].records], cards[0].states, strict=True))["mine"] == "changed"


def test_the_page_is_the_same_each_time(results, tmp_path):
    assert build(results, tmp_path / "a").read_bytes() == build(results, tmp_path / "b").read_bytes()


def test_labels_of_neighbours_are_joined_and_cover_nothing():
    import matplotlib.pyplot as plt

    assert merged([("a", 0.5, 0.5), ("b", 0.51, 0.49), ("a", 0.52, 0.5), ("c", 0.9, 0.5)]) == [("a, b", 0.5, 0.5), ("c", 0.9, 0.5)]
    figure, axis = plt.subplots()
    points = [("eager", 1.0, 1.0), ("eager in a CUDA graph", 1.005, 1.0), ("compile", 1.1, 1.0), ("another one", 1.1, 1.12)]
    axis.scatter([x for _, x, _ in points], [y for _, _, y in points])
    axis.set(xlim=(0, 2), ylim=(0, 2))
    notes = _label(axis, points, [(x, y) for _, x, y in points])
    boxes = [note.get_window_extent() for note in notes]
    plt.close(figure)
    assert [note.get_text() for note in notes] == ["eager, eager in a CUDA graph", "compile", "another one"]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_the_harness_output_is_read():
    text = (
        "[WARN] Static check warnings: ['w']\n[Eval] Kernel eval result: compiled=True correctness=True metadata={}\n"
        "[Timing] PyTorch Reference Eager exec time: 2.85 ms\n[Timing] PyTorch Reference torch.compile time: 2.72 ms\n[Timing] Custom Kernel exec time: 0.61 ms\n"
        "[Speedup] Speedup over eager: 4.67x\n[Speedup] Speedup over torch.compile: 4.46x\n"
    )
    found = parse(text)
    assert (found["verdict"], found["speedup_eager"], found["speedup_compile"], found["ours_ms"]) == ("correct", 4.67, 4.46, 0.61)
    assert found["static_warnings"] == "['w']"
    assert parse("AssertionError: Static check failed. Errors: ['e']. Warnings: []")["verdict"] == "static check failed"
    assert parse("compiled=True correctness=False")["verdict"] == "wrong"
    assert parse("Segmentation fault")["verdict"] == "did not run"


def test_a_noisy_run_is_told_from_a_steady_one():
    line = "correctness=True runtime=1.0 runtime_stats={{'mean': 1.0, 'std': {}, 'hardware': 'H'}} ref_runtime=2.0 ref_runtime_stats={{'mean': 2.0, 'std': {}}}"
    assert spreads(line.format(0.31, 0.02)) == {"ours": 0.31, "reference": 0.01}
    assert noisy(line.format(0.31, 0.02)) and noisy(line.format(0.01, 0.7)) and not noisy(line.format(0.3, 0.6))
    assert spreads("runtime=-1.0 runtime_stats={} ref_runtime=0.4") == {} and not noisy("Segmentation fault")


HARNESS = """
import pathlib, sys
count = pathlib.Path(__file__).with_name("count")
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
print("[INFO] Evaluating", number)
print("compiled=True correctness=True runtime=1.0 runtime_stats={'mean': 1.0, 'std': %s} ref_runtime_stats={'mean': 2.0, 'std': 0.01}" % (0.5 if number == 2 else 0.01))
"""


def test_the_harness_is_warmed_and_run_again_where_it_is_noisy(tmp_path, monkeypatch):
    """A stand-in for the script counts its calls: one to warm up, a noisy one, one more that counts; an earlier record is kept."""
    import torch
    from click.testing import CliRunner

    from bench import kernelbench
    from bench.machine import Machine

    (tmp_path / "kb" / "scripts").mkdir(parents=True)
    (tmp_path / "kb" / "scripts" / "run_and_check.py").write_text(HARNESS)
    machine = Machine("NVIDIA H200", "h200", "2.11.0", None, None)
    monkeypatch.setattr(kernelbench, "describe", lambda device: machine)
    monkeypatch.setattr(kernelbench, "cards", lambda device: ("0", "1"))
    monkeypatch.setattr(kernelbench, "prebuild", lambda *args: None)
    monkeypatch.setattr(kernelbench, "check_start", lambda *args: None)  # it would count as a call
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    other = {"format": 1, **machine.facts, "problem": 94, "shapes": "current", "precision": "fp32", "key": "k", "correct": True}
    put(KERNELBENCH, tmp_path / "results", machine.slug, [other, {**other, "problem": 85, "torch": "2.0"}])
    chosen = ["--problem", "30", "--shapes", "first version", "--precision", "fp32", "--warm"]
    folders = ["--checkout", str(tmp_path / "kb"), "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(kernelbench.main, [*folders, *chosen])
    assert result.exit_code == 0, result.output
    kept, made = read(KERNELBENCH, tmp_path / "results", machine.slug)
    assert kept == other, "and that of another torch is gone"
    assert made["noisy"] and made["spread"] == {"ours": 0.01, "reference": 0.005}
    assert made["output"][0].endswith("3") and made["first_output"][0].endswith("2")


@pytest.mark.parametrize("number", list(PROBLEMS))
def test_the_emitted_reference_is_the_layer(number, small):
    """It runs, has the spec's shapes, and draws the same initial weights as the package's own reference."""
    import torch

    run = Run(number, "first version", "fp32")
    scope: dict = {}
    exec(reference_source(run.spec), scope)
    torch.manual_seed(42)
    model = scope["Model"](*scope["get_init_inputs"]())
    assert [(key, tuple(value.shape)) for key, value in model.state_dict().items()] == list(run.spec.parameters)
    x = scope["get_inputs"]()[0]
    assert tuple(x.shape) == run.spec.input_shape and tuple(model(x).shape) == run.spec.output_shape
    if SMALL[number] == small.spec.path:
        torch.manual_seed(42)
        other = small.module.Model(*small.module.get_init_inputs())
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("path", [*PROBLEMS.values(), *SMALL.values()])
def test_a_shrunken_spec_keeps_the_chain_and_the_groups(path, tmp_path):
    spec = load_fused(path)
    tiny = FusedSpec.of(shrink(spec, tmp_path))
    assert [s.operator.name for s in tiny.chain] == [s.operator.name for s in spec.chain]
    assert (tiny.group_channels, tiny.precision) == (spec.group_channels, spec.precision)
    assert tiny.batch <= spec.batch and tiny.producer.parameters[0].shape <= spec.producer.parameters[0].shape


def test_prepared_weights_are_named_with_their_cost(results, tmp_path):
    keep(results, "h200", {**find(results, "h200", NAME, "fp32"), "weights": "prepared", "prepare": {"ms": 0.21, "bytes": 268_000_000}})
    page = build(results, tmp_path / "page").read_text()
    assert page.count("gemm_groupnorm_hardtanh, weights prepared") == 2 and "0.21 ms, 268 MB kept" in page


def test_forward_and_backward_have_a_table_of_their_own(results, tmp_path):
    record = find(results, "h200", NAME, "fp32")
    row = {"ms": 3.0, "spread": 0.01, "trials": 60, "rel_errors": {"x": 3e-7, "gemm.bias": None}, "peak_bytes": 10**9}
    made = {
        "target": "sm_80", "key": "old", "torch": "2.11.0", "ours": row, "peers": {"compile": {**row, "ms": 6.0}}, "failed": {},
        "best_torch": "compile", "speedup_torch": 2.0,
    }  # fmt: skip
    keep(results, "h200", {**record, "backward": made})
    page = build(results, tmp_path / "page").read_text()
    assert "A forward and its backward" in page and "sources have changed since" in page and "<td>2.00x</td><td>1000</td>" in page
    keep(results, "h200", {**record, "backward": {**made, "key": backward_keys("specs/default.yaml", "fp32")["sm_80"]}})
    assert "sources have changed since" not in build(results, tmp_path / "page").read_text()


def test_the_kernels_page_repeats_the_records(tmp_path):
    """Every row that names a record has its figures, and what a record says otherwise shows."""
    text = (TOP / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) > 10 and RATES.search(text)
    found = {name_of(record): record for record in read(EVIDENCE, RESULTS, CARD)}
    assert set(rows) <= set(found)
    assert renewed(text, RESULTS) == text, "make report renews it"
    found[rows[0]]["ours"]["ms"] = 10.0
    put(EVIDENCE, tmp_path, CARD, [found[rows[0]]])
    (changed,) = set(renewed(text, tmp_path).splitlines()) - set(text.splitlines())
    assert changed.startswith(f"| `{rows[0]}` |") and "| 10.0 |" in changed


def test_whole_models_have_a_table_of_their_own(tmp_path):
    card = tmp_path / "h200"
    card.mkdir()
    (card / "evidence.jsonl").write_text((RESULTS / "h200" / "evidence.jsonl").read_text(encoding="utf-8").splitlines()[0] + "\n", encoding="utf-8")
    common = {"precision": "fp32", "chains": 4, "replaced": 3}
    records = [
        {**common, "model": "timed", "ms": {"eager": 3.0, "compile": 2.0, "ours": 1.25, "ours_compile": 1.0}, "rel_errors": {"ours": 1e-7, "eager": 2e-7}},
        {**common, "model": "not_compiled", "ms": {"eager": 3.0, "ours": 6.0}, "rel_errors": {"ours": 1e-7}},
        {**common, "model": "failed", "ms": {"eager": 3.0}, "rel_errors": {}},
    ]
    put(MODELS, tmp_path, "h200", records)
    rows = {line.split(" | ")[0]: line for line in results_page(cards_of(read_all(tmp_path), [], tmp_path)).splitlines() if "3 of 4" in line}
    assert "| **2.00x** | 1.0e-07 | 2.0e-07 |" in rows["| timed"] and "| **0.50x** | 1.0e-07 | - |" in rows["| not_compiled"] and "| - | - | - |" in rows["| failed"]
