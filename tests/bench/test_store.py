"""Records one a line: equal records give equal bytes, nothing is lost, and what cannot be read is named by file and line."""

import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.store import EVIDENCE, FORMAT, KINDS, MACHINE, RESULTS, SWEEP, RecordError, cards, find, put, read, replace

TOP = Path(__file__).parents[2]
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8)
FIELDS = st.dictionaries(st.text(min_size=1).filter(lambda name: name not in (*SWEEP.identity, "format")), VALUES, max_size=4)
CASES = st.dictionaries(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 20)), FIELDS, max_size=5)


def case(key, **fields):
    return {"format": FORMAT, **dict(zip(SWEEP.identity, key, strict=True)), **fields}


@given(CASES)
def test_what_is_written_is_read_and_written_again_as_the_same_bytes(tmp_path_factory, cases):
    results = tmp_path_factory.mktemp("results")
    records = [case(key, **fields) for key, fields in cases.items()]
    put(SWEEP, results, "h200", records)
    path = SWEEP.path(results, "h200")
    text = path.read_text(encoding="utf-8")
    found = read(SWEEP, results, "h200")
    assert sorted(found, key=SWEEP.key) == sorted(records, key=SWEEP.key) and text.count("\n") == len(records)
    turned = [dict(reversed(record.items())) for record in reversed(records)]  # other orders of fields and of records
    replace(SWEEP, results, "h200", turned)
    assert path.read_text(encoding="utf-8") == text


def test_a_changed_record_is_one_changed_line(tmp_path):
    put(SWEEP, tmp_path, "h200", [case((False, 0, index), ms=1.0) for index in range(12)])
    path = SWEEP.path(tmp_path, "h200")
    before = path.read_text().splitlines()
    put(SWEEP, tmp_path, "h200", [case((False, 0, 10), ms=2.0)])
    after = path.read_text().splitlines()
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [(before[10], before[10].replace("1.0", "2.0"))], "10 stands behind 9"


def test_an_optional_field_of_the_identity_may_be_missing(tmp_path):
    plain = {"format": FORMAT, "spec": "layer", "precision": "fp32", "weights": "not prepared", "ms": 1.0}
    put(EVIDENCE, tmp_path, "h200", [plain, plain | {"asked_target": "sm_80", "ms": 2.0}, plain | {"batch": 4, "ms": 3.0}])
    named = {"spec": "layer", "precision": "fp32", "weights": "not prepared"}
    assert [find(EVIDENCE, tmp_path, "h200", **named, **more)["ms"] for more in ({}, {"asked_target": "sm_80"}, {"batch": 4})] == [1.0, 2.0, 3.0]
    assert find(EVIDENCE, tmp_path, "h200", **named, batch=8) is None and find(EVIDENCE, tmp_path, "a100", **named) is None


@pytest.mark.parametrize(("line", "fault"), [
    ('{"format":1,"small":fal', r"is no JSON \(.*\).*take it from git again"),
    (">>>>>>> theirs", "is no JSON"),
    ("[1]", "holds list where a record is expected"),
    ('{"format":2,"small":false,"seed":0,"index":1}', "is of format 2, and this version reads format 1"),
    ('{"small":false,"seed":0,"index":1}', "is of format None"),
    ('{"format":1,"small":false,"index":1}', "names no seed, and a record of sweep needs it"),
    ('{"format":1,"small":false,"seed":0,"index":0,"ms":2.0}', r"differs from line 1, and both are of small False, seed 0, index 0; delete one"),
])  # fmt: skip
def test_what_cannot_be_read_is_named_and_left_as_it_is(tmp_path, line, fault):
    put(SWEEP, tmp_path, "h200", [case((False, 0, 0), ms=1.0)])
    path = SWEEP.path(tmp_path, "h200")
    broken = path.read_text() + "\n" + line + "\n"
    path.write_text(broken)
    for act in (lambda: read(SWEEP, tmp_path, "h200"), lambda: put(SWEEP, tmp_path, "h200", [case((False, 0, 2))])):
        with pytest.raises(RecordError, match=rf"sweep\.jsonl:3: .*{fault}"):
            act()
    assert path.read_text() == broken


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    path = SWEEP.path(tmp_path, "h200")
    path.parent.mkdir()
    path.write_bytes(b'{"format": "\xff"}\n')
    with pytest.raises(RecordError, match=r"sweep\.jsonl: is not UTF-8"):
        read(SWEEP, tmp_path, "h200")


def test_lines_of_two_branches_are_read_together(tmp_path):
    """As git's union leaves them: out of order, and what both added twice."""
    put(SWEEP, tmp_path, "h200", [case((False, 0, index), ms=1.0) for index in (0, 1)])
    path = SWEEP.path(tmp_path, "h200")
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[1], lines[0], lines[1], ""]))
    assert [record["index"] for record in read(SWEEP, tmp_path, "h200")] == [0, 1]


def test_a_file_is_written_whole_or_stays(tmp_path):
    put(SWEEP, tmp_path, "h200", [case((False, 0, 0), ms=1.0)])
    path = SWEEP.path(tmp_path, "h200")
    before = path.read_bytes()
    for value in (object(), float("nan"), float("inf")):
        with pytest.raises((TypeError, ValueError)):
            put(SWEEP, tmp_path, "h200", [case((False, 0, 1), ms=value)])
        assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir() if not p.name.endswith(".lock")] == ["sweep.jsonl"]


def test_writers_at_once_lose_nothing(tmp_path):
    """Each reads, adds its own and writes."""
    threads = [threading.Thread(target=put, args=(SWEEP, tmp_path, "h200", [case((False, seed, 0))])) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [record["seed"] for record in read(SWEEP, tmp_path, "h200")] == list(range(16))


def test_the_repositorys_records_are_as_they_would_be_written():
    """Every file is read, has a kind, and stands in the order and form that makes a change of one record a change of one line."""
    kinds = {kind.name: kind for kind in KINDS}
    files = sorted(RESULTS.glob("*/*.jsonl"))
    assert files and {path.parent.name for path in files} == set(cards(RESULTS, *KINDS))
    assert not list(RESULTS.glob("*/*.json")), "records are kept one a line"
    for path in files:
        kind, card = kinds[path.stem], path.parent.name
        assert path.read_text(encoding="utf-8") == "".join(kind.line(record) + "\n" for record in read(kind, RESULTS, card)), path
        assert all(json.loads(line)["format"] == FORMAT for line in path.read_text(encoding="utf-8").splitlines())
    for card in cards(RESULTS, EVIDENCE):
        assert find(MACHINE, RESULTS, card, measured_by="evidence")


def test_git_merges_what_two_branches_added(tmp_path):
    """By the repository's own .gitattributes: neighbouring lines are no conflict, and both stay."""
    shutil.copy(TOP / ".gitattributes", tmp_path)
    results = tmp_path / "bench" / "results"
    git = lambda *words: subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=tmp_path, check=True, capture_output=True)  # noqa: E731
    git("init", "-b", "main")
    for branch, index in (("main", 0), ("mine", 1), ("theirs", 2)):
        git("checkout", "-B", branch, *(() if branch == "main" else ("main",)))
        put(SWEEP, results, "h200", [case((False, 0, index))])
        git("add", ".gitattributes", "bench/results/h200/sweep.jsonl")
        git("commit", "-m", branch)
    git("merge", "mine", "-m", "both")
    assert [record["index"] for record in read(SWEEP, results, "h200")] == [0, 1, 2]
