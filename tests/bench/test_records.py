"""The ledger: a record holds for the sources it was measured on, and the README claims no more."""

import json
from pathlib import Path

import pytest

from bench import records
from bench.machine import slug_of
from bench.records import conclude, ledger, lend_fastest_peers, path_of, present_keys, read, state_of, write_json
from bench.tables import BEGIN, END, claims, put_table, readme_table, state_today

ROOT = Path(__file__).parents[2]
SPEC, NAME = "specs/default.yaml", "gemm_groupnorm_hardtanh"


def row(ms, error, **more):
    return {"ms": ms, "rel_error": error, "spread": 0.01, "tflops": 1.0, "gbs": 1.0, **more}


def record(key="k", verified=True, **more):
    return conclude({
        "format": 1, "spec": NAME, "path": SPEC, "package": NAME, "precision": "fp32", "target": "sm_80", "key": key, "gpu": "NVIDIA H200", "torch": "2.11.0", "weights": "not prepared",
        "verified": verified, "floor_ms": 0.4, "ours": row(1.0, 3e-7, outside=0, max_error=1e-6),
        "peers": {"eager": row(2.8, 1.5e-6), "compile": row(2.7, 1.5e-6), "Triton bf16x3": row(1.3, 4.2e-6), "Triton tf32x3": row(1.7, 3.2e-7), "library GEMM alone": row(0.5, None)},
        **more,
    })  # fmt: skip


def test_speedup_is_over_the_fastest_peer_of_equal_accuracy():
    made = record()
    assert (made["best_peer"], made["speedup"]) == ("Triton tf32x3", 1.7)
    assert (made["best_torch"], made["speedup_torch"]) == ("compile", 2.7)


def test_a_peer_is_compared_with_our_time_in_its_own_process():
    made = record()
    made["peers"]["Triton tf32x3"]["ours_ms"] = 1.7
    assert conclude(made)["speedup"] == 1.0


def test_a_peers_fastest_time_on_a_card_counts_for_every_record_of_the_package():
    slow, fast = (
        conclude(
            {"spec": "a", "precision": "fp16", "torch": "2", "gpu": "g", "ours": {"ms": 1.0, "rel_error": 1e-4}}
            | {"peers": {"eager": {"ms": 4.0, "rel_error": 1e-4, "ours_ms": 1.0}, "compile": {"ms": ms, "rel_error": 1e-4, "ours_ms": 0.5}}}
        )
        for ms in (3.0, 1.5)
    )
    lend_fastest_peers([slow, fast])
    assert (slow["best_torch"], slow["speedup_torch"], slow["speedup"]) == ("compile", 1.5, 1.5)
    assert fast["speedup_torch"] == 3.0  # its own time, in its own process


def test_without_peers_there_is_no_speedup():
    made = conclude({**record(), "peers": {}})
    assert made["best_peer"] is None and made["speedup"] is None and made["speedup_torch"] is None


def test_a_changed_kernel_is_unverified():
    keys = present_keys(SPEC, "fp32")
    assert state_of(record(keys["sm_80"]), keys) == "verified"
    assert state_of(record("another"), keys) == "changed"
    assert state_of(record(keys["sm_80"], verified=False), keys) == "wrong"
    assert state_of(None, keys) == "missing"


def test_the_key_is_the_manifests():
    from codegen.emit import make_package
    from codegen.render import render
    from codegen.spec import load_spec

    targets = json.loads(render(make_package(load_spec(SPEC)))["manifest.json"])["targets"]
    assert present_keys(SPEC, "fp32") == {name: entry["source_key"] for name, entry in targets.items()}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """One verified and nothing else on one card."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "results"
    write_json(path_of(folder, "h200", NAME, "fp32"), record(present_keys(SPEC, "fp32")["sm_80"]))
    return folder


def test_the_ledger_lists_what_is_not_verified(results):
    states = {(s.spec, s.precision): s.state for s in ledger(results)}
    assert states[(NAME, "fp32")] == "verified"
    assert states[(NAME, "bf16")] == "missing"


def test_the_table_says_unverified_once_a_kernel_changed(results):
    at = path_of(results, "h200", NAME, "fp32")
    before = readme_table(records.read_all(results), ledger(results))
    assert "| yes |" in before and "unverified" in before
    write_json(at, {**read(at), "key": "older"})
    after = readme_table(records.read_all(results), ledger(results))
    assert "| yes |" not in after and "unverified (sources changed since)" in after


def test_other_systems_have_a_table_of_their_own_and_what_was_not_measured_is_named(results):
    table = readme_table(records.read_all(results), ledger(results))
    assert "Other shipped systems" not in table and "matmul_swish_sum_groupnorm (fp32, fp16, bf16)" in table.split("Not measured yet on this card, so unverified: ")[1]
    other = "specs/matmul_swish_sum_groupnorm.yaml"
    write_json(path_of(results, "h200", "matmul_swish_sum_groupnorm", "fp32"), {**record(present_keys(other, "fp32")["sm_80"]), "spec": "matmul_swish_sum_groupnorm", "path": other})
    first, second = readme_table(records.read_all(results), ledger(results)).split("Other shipped systems:")
    assert f"| {NAME} | fp32" in first and "| matmul_swish_sum_groupnorm | fp32" not in first
    assert "| matmul_swish_sum_groupnorm | fp32" in second and "matmul_swish_sum_groupnorm (fp16, bf16)" in second


def test_the_table_shows_the_target_that_the_loader_picks(results):
    keys = present_keys(SPEC, "fp32")
    write_json(path_of(results, "h200", NAME, "fp32", "sm_90a"), {**record(keys["sm_90a"]), "target": "sm_90a"})
    rows = [line for line in readme_table(records.read_all(results), ledger(results)).splitlines() if line.startswith(f"| {NAME} | fp32")]
    assert len(rows) == 1 and "| sm_90a |" in rows[0] and rows[0].endswith("| yes |")


def test_prepared_weights_have_a_row_and_a_state_of_their_own(results):
    """Their package is another one, with other sources."""
    keys = present_keys(SPEC, "fp32", prepack=True)
    assert keys["sm_90a"] != present_keys(SPEC, "fp32")["sm_90a"]
    mine = {**record(keys["sm_90a"]), "target": "sm_90a", "weights": "prepared", "prepare": {"ms": 0.2, "bytes": 1}}
    path = path_of(results, "h200", NAME, "fp32", "sm_90a", mine["weights"])
    assert path.name == f"{NAME}.fp32.sm_90a.prepared.json" and path_of(results, "h200", NAME, "fp32", None, "prepared").name == f"{NAME}.fp32.prepared.json"
    before = readme_table(records.read_all(results), ledger(results))
    write_json(path, mine)
    after = readme_table(records.read_all(results), ledger(results))
    rows = [line for line in after.splitlines() if line.startswith(f"| {NAME}")]
    assert [row.split(" | ")[0] for row in rows if " | fp32 | " in row] == [f"| {NAME}", f"| {NAME}, weights prepared"] and rows[1].endswith("| yes |")
    assert "except where a row says so" in after and "except where" not in before
    assert {s.target for s in ledger(results) if (s.spec, s.precision) == (NAME, "fp32")} == {"sm_80"}
    write_json(path, {**mine, "key": "another"})
    assert "unverified (sources changed since)" in readme_table(records.read_all(results), ledger(results))


def test_the_table_goes_between_its_markers(tmp_path, results):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert put_table(readme, readme_table(records.read_all(results), ledger(results)))
    assert not put_table(readme, readme_table(records.read_all(results), ledger(results)))
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("\nafter\n")
    assert claims(readme) == [(NAME, "fp32", "sm_80", True)]


def test_records_are_written_whole_and_the_same_each_time(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_json(path, {"format": 1, "x": 1.5})
    first = path.read_bytes()
    write_json(path, {"format": 1, "x": 1.5})
    assert path.read_bytes() == first and [p.name for p in path.parent.iterdir()] == ["b.json"]
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert path.read_bytes() == first and [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_the_readme_claims_no_kernel_that_is_unverified(monkeypatch):
    """Runs on the repository itself: what the table calls verified must be so for today's sources."""
    monkeypatch.chdir(ROOT)
    verified = {(s.spec, s.precision, s.target) for s in ledger() if s.verified}
    prepared = [r for mine in records.read_all().values() for r in mine if r["weights"] == records.PREPARED and state_today(r) == "verified"]
    verified |= {(f"{r['spec']}, weights prepared", r["precision"], r["target"]) for r in prepared}
    wrong = [claim[:3] for claim in claims(ROOT / "README.md") if claim[3] and claim[:3] not in verified]
    assert not wrong, f"the README calls these verified, but their sources changed since: {wrong}; run make report (and make evidence on a GPU)"


@pytest.mark.parametrize(("card", "slug"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("Odd Card (1)", "odd-card-1"),
])  # fmt: skip
def test_a_cards_folder(card, slug):
    assert slug_of(card) == slug


def test_a_peer_that_was_not_timed_again_stays():
    """New sources of ours change nothing about a peer, and the table is not to lose the strongest one with them; another card's or torch's is no peer."""
    same = {"spec": "s", "precision": "fp32", "batch": 8, "weights": "plain", "torch": "2.11", "gpu": "a card"}
    before = same | {"ours": {"ms": 1.0, "rel_error": 1e-7}, "peers": {"eager": {"ms": 4.0, "rel_error": 1e-7}, "triton": {"ms": 2.0, "rel_error": 1e-7}}}
    new = same | {"ours": {"ms": 0.8, "rel_error": 1e-7}, "peers": {"eager": {"ms": 4.4, "rel_error": 1e-7}}}
    found = records.with_peers_of(new, before)
    assert found["best_peer"] == "triton" and found["speedup"] == 2.5 and found["peers"]["eager"]["ms"] == 4.4 and found["peers"]["triton"]["kept"]
    assert records.with_peers_of(new, before | {"gpu": "another"}) is new and records.with_peers_of(new, None) is new
