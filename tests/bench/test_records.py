"""The ledger: a record holds for the sources it was measured on, and the README claims no more."""

import json
from pathlib import Path

import pytest

from bench import records
from bench.machine import slug_of
from bench.records import conclude, find, keep, ledger, lend_fastest_peers, name_of, present_keys, state_of
from bench.store import EVIDENCE, RESULTS, read
from bench.tables import BEGIN, END, SHOWN, cards_of, claims, put_table, readme_table, results_page
from codegen import index

pytestmark = pytest.mark.usefixtures("manifests_once")

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
    assert state_of(record(keys["sm_80"], verified=False, verification=[{"family": "normal", "ok": False}]), keys) == "wrong"
    assert state_of(record(keys["sm_80"], verified=None), keys) == state_of(record(keys["sm_80"], verified=False), keys) == "unverified"
    assert state_of(None, keys) == "missing"


def test_the_key_is_the_manifests():
    from codegen.package import make_package
    from codegen.render import render
    from codegen.spec import load_spec

    targets = json.loads(render(make_package(load_spec(SPEC)))["manifest.json"])["targets"]
    assert present_keys(SPEC, "fp32") == {name: entry["source_key"] for name, entry in targets.items()}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """One verified and nothing else on one card."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "results"
    keep(folder, "h200", record(present_keys(SPEC, "fp32")["sm_80"]))
    return folder


def table_of(results: Path) -> str:
    return readme_table(cards_of(records.read_all(results), ledger(results), results))


def page_of(results: Path) -> str:
    return results_page(cards_of(records.read_all(results), ledger(results), results))


def test_the_ledger_lists_what_is_not_verified(results):
    states = {(s.spec, s.precision): s.state for s in ledger(results)}
    assert states[(NAME, "fp32")] == "verified"
    assert states[(NAME, "bf16")] == "missing"


@pytest.mark.parametrize("written", [table_of, page_of])
def test_a_table_says_unverified_once_a_kernel_changed(results, written):
    before = written(results)
    assert "| yes |" in before and "unverified" in before
    keep(results, "h200", {**find(results, "h200", NAME, "fp32"), "key": "older"})
    after = written(results)
    assert "| yes |" not in after and "unverified (sources changed since)" in after


def test_other_systems_have_a_table_of_their_own_and_what_was_not_measured_is_named(results):
    page = page_of(results)
    assert "Other systems:" not in page and "matmul_swish_sum_groupnorm (fp32, fp16, bf16)" in page.split("Not measured yet on this card, so unverified: ")[1]
    other = "specs/matmul_swish_sum_groupnorm.yaml"
    keep(results, "h200", {**record(present_keys(other, "fp32")["sm_80"]), "spec": "matmul_swish_sum_groupnorm", "path": other})
    first, second = page_of(results).split("Other systems:")
    assert f"| {NAME} | fp32" in first and "| matmul_swish_sum_groupnorm | fp32" not in first
    assert "| matmul_swish_sum_groupnorm | fp32" in second and "matmul_swish_sum_groupnorm (fp16, bf16)" in first


def test_the_tables_show_the_target_that_the_loader_picks_and_name_the_others_apart(results):
    keys = present_keys(SPEC, "fp32")
    keep(results, "h200", {**record(keys["sm_90a"]), "target": "sm_90a"}, asked_target="sm_90a")
    rows = lambda text: [line for line in text.splitlines() if line.startswith(f"| {NAME} | fp32")]  # noqa: E731
    (row,) = rows(table_of(results))
    assert "| sm_90a |" in row and row.endswith("| yes |")
    loaders, named = page_of(results).split("Targets that were asked for by name:")
    assert ["| sm_90a |" in row for row in rows(loaders)] == [True] and ["| sm_80 |" in row for row in rows(named)] == [True]


def test_a_record_of_another_target_than_the_loader_picks_today_is_named(results):
    """It is verified for its own sources, but it is not what a caller gets."""
    said = f"Measured with another target than the loader picks there today, which no record has: {NAME} (fp32)."
    assert said in table_of(results) and said in page_of(results)
    keep(results, "h200", {**record(present_keys(SPEC, "fp32")["sm_90a"]), "target": "sm_90a"}, asked_target="sm_90a")
    assert "Measured with another target" not in table_of(results) + page_of(results)


def test_prepared_weights_have_a_row_and_a_state_of_their_own(results):
    """Their package is another one, with other sources."""
    keys = present_keys(SPEC, "fp32", prepack=True)
    assert keys["sm_90a"] != present_keys(SPEC, "fp32")["sm_90a"]
    mine = {**record(keys["sm_90a"]), "target": "sm_90a", "weights": "prepared", "prepare": {"ms": 0.2, "bytes": 1}}
    assert name_of(mine) == f"{NAME}.fp32.prepared" and name_of({**mine, "asked_target": "sm_90a"}) == f"{NAME}.fp32.sm_90a.prepared"
    keep(results, "h200", mine)
    rows = [line for line in page_of(results).splitlines() if line.startswith(f"| {NAME}")]
    assert [row.split(" | ")[0] for row in rows if " | fp32 | " in row] == [f"| {NAME}", f"| {NAME}, weights prepared"] and rows[1].endswith("| yes |")
    assert {s.target for s in ledger(results) if (s.spec, s.precision) == (NAME, "fp32")} == {"sm_80"}
    keep(results, "h200", {**mine, "key": "another"})
    assert "unverified (sources changed since)" in page_of(results)
    assert len(read(EVIDENCE, results, "h200")) == 2


def test_the_readme_has_at_most_eight_rows_the_least_speed_up_among_them(results):
    """However many packages are measured; what flatters less is not left out."""
    entries = index.entries(Path("generated"))
    for number, (path, precision) in enumerate(entries):
        keep(results, "h200", conclude({**record("k"), "spec": Path(path).stem.replace("default", NAME), "precision": precision, "path": path,
                                        "ours": row(1.0 + number / 100, 3e-7, outside=0, max_error=1e-6)}))  # fmt: skip
    found = claims(table_of(results))
    last = entries[-1]
    assert len(found) == len(SHOWN) + 1 == 8 and [claim[1:3] for claim in found] == [*SHOWN, (Path(last[0]).stem, last[1])]
    assert len(claims(page_of(results))) == len(entries)
    assert {claim[0] for claim in found} == {claim[0] for claim in claims(page_of(results))} == {"NVIDIA H200"}


def test_without_a_gpu_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "every kernel is unverified" in table_of(tmp_path) and "every kernel is unverified" in page_of(tmp_path)


def test_the_table_goes_between_its_markers(tmp_path, results):
    readme, table = tmp_path / "README.md", table_of(results)
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert put_table(readme, table)
    assert not put_table(readme, table)
    assert readme.read_text().startswith("before\n") and readme.read_text().endswith("\nafter\n")
    assert claims(readme.read_text()) == [("NVIDIA H200", NAME, "fp32", "sm_80", True)]


@pytest.fixture(scope="module")
def cards(manifests):
    """The repository's own records beside today's sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(records, "present_manifest", manifests)
        return cards_of(records.read_all(), ledger(), RESULTS)


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_no_kernel_is_called_verified_that_is_not(cards, name):
    """Runs on the repository itself: what a table calls verified must be so for today's sources, on the card named."""
    verified = {
        (card.gpu, r["spec"] + (", weights prepared" if r["weights"] == records.PREPARED else ""), r["precision"], r["target"])
        for card in cards for r, state in zip(card.records, card.states, strict=True) if state == "verified"
    }  # fmt: skip
    found = claims((ROOT / name).read_text(encoding="utf-8"))
    wrong = [claim[:4] for claim in found if claim[4] and claim[:4] not in verified]
    assert found and not wrong, f"{name} calls these verified, but their sources changed since: {wrong}; run make report (and make evidence on a GPU)"


def test_the_results_page_is_what_the_records_say(cards):
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == results_page(cards), "run make report"


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
