"""What only two GPUs show: chains divided among them over NCCL, in CUDA graphs and torch.compile too.

    python -m pytest -m two_gpus tests/parallel
"""

import pytest

from .cases import EQUAL, allowed, write_cases
from .processes import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """What each rank found, by case."""
    folder = tmp_path_factory.mktemp("two_gpus")
    cases = [case | {"graph": True} for case in write_cases(folder / "specs", EQUAL)]
    ended = run_ranks(folder, 2, {"equal": {"cases": cases}}, "cuda", 500)
    assert ended.codes == [0, 0], "\n".join(ended.errors)
    return {row["name"]: row for row in ended.results[0]["equal"]}


@pytest.mark.parametrize("name", EQUAL)
def test_two_gpus_compute_what_one_does(rows, name):
    row = rows[name]
    assert row["error"] <= allowed(row) and row["parity"] is None and row["repeatable"] and row["graph"] and row.get("compiled", True)
