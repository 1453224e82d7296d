"""A chain divided among ranks computes what the whole one does, and exchanges no more than it must."""

import pytest

from tests.parallel.cases import EQUAL, MORE, allowed, write_cases
from tests.parallel.processes import run_ranks

ALL = EQUAL | MORE


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What the first rank found, by number of ranks and case; the ranks of a number run once."""
    made = {}

    def get(count, cases):
        if count not in made:
            folder = tmp_path_factory.mktemp(f"ranks_{count}")
            ended = run_ranks(folder, count, {"task": "equal", "cases": write_cases(folder / "specs", cases)}, 500)
            assert ended.codes == [0] * count, ended.errors
            made[count] = {row["name"]: row for row in ended.results[0]}
        return made[count]

    return get


def check(row, count):
    assert row["error"] <= allowed(row), row
    assert row["parity"] is None and row["repeatable"] and row.get("compiled", True), row
    assert row["collectives"] == (ALL[row["name"]]["merges"] if count > 1 else []), row


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_compute_what_one_does(rows, name):
    check(rows(2, EQUAL)[name], 2)
