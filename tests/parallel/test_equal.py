"""Chains divided among processes, over gloo: right, repeatable, with no more exchanged than must be, and refused in a sentence."""

import pytest

from tests.parallel.cases import EQUAL, MORE, allowed, random_cases, write_cases
from tests.parallel.processes import run_ranks

RANDOM = 10
SCATTER = 3.0  # a random spec may leave a few dozen values, whose error says as much about luck as about kernels; a mistake shows in the first digit
QUICK = {name: {key: value for key, value in case.items() if key != "compiled"} for name, case in EQUAL.items()}
REFUSALS = {
    "plan": "norm: the plan says rowwise, and over 2 ranks it is local_colwise",
    "path": "nrm: the chain has no such parameters; did you mean norm?",
    "no spec": "Model is no generated module, so the style needs the spec",
    "output": "leaves its result in parts of dimension 1 and can gather it",
    "another module": "gemm.weight is missing, expected (48, 24)",
    "library": "library: forbid, and over 2 ranks torch's operators compute norm",
    "twice": "problem_30 is divided among ranks already",
    "shape": "x: expected (6, 24) torch.float32 ((6, 24) whole on each rank), got (2, 24)",
    "inputs": "problem_30 takes x; 2 tensors",
    "gradients": "has no gradients yet; call it under torch.no_grad()",
    "hook": "gemm: a child was added or changed, or has hooks",
    "changed": "norm: a child was added or changed",
    "plain parameter": "gemm.weight is a Parameter, and expected is a DTensor in parts of dimension 0",
    "writes": "[True, True]",
    "rows from a DTensor": "DTensor True",
}


def check(row, count):
    known = (EQUAL | MORE).get(row["name"])
    assert row["error"] <= allowed(row, SCATTER if known is None else 1.0), row
    assert row["parity"] is None and row["repeatable"] and row.get("compiled", True), row
    assert count == 1 and not row["collectives"] or known is None or row["collectives"] == known["merges"], row


def test_two_ranks_compute_what_one_does_and_say_what_is_wrong(tmp_path):
    """One start of two processes for the cases and the refusals of make test."""
    cases = write_cases(tmp_path / "specs", QUICK)
    (forbidden,) = write_cases(tmp_path / "specs", {"forbidden": EQUAL["straddling"] | {"library": "forbid"}})
    ended = run_ranks(tmp_path, 2, {"equal": {"cases": cases}, "refused": {"path": cases[0]["path"], "straddling": forbidden["path"]}})
    assert ended.codes == [0, 0], ended.errors
    found = ended.results[0]
    assert [row["name"] for row in found["equal"]] == list(QUICK)
    for row in found["equal"]:
        check(row, 2)
    for fault, said in REFUSALS.items():
        assert said in found["refused"][fault], fault


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_of_ranks_computes_what_one_does(count, tmp_path):
    cases = write_cases(tmp_path / "specs", EQUAL | MORE) + random_cases(tmp_path / "random", RANDOM)
    ended = run_ranks(tmp_path, count, {"equal": {"cases": cases}}, limit_s=560)
    assert ended.codes == [0] * count, ended.errors
    found = {row["name"]: row for row in ended.results[0]["equal"]}
    assert list(found) == [case["name"] for case in cases]
    for row in found.values():
        check(row, count)
    own = 16 // count
    assert found["transposed"]["parts"] == {
        "conv.weight": [8, own, 3, 3], "bn.num_batches_tracked": [], **dict.fromkeys(("conv.bias", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "norm.weight", "norm.bias"), [own]),
    }  # fmt: skip
    assert found["by_rows"]["parts"]["gemm.weight"] == [48, 24 // count] and found["transposed_by_rows"]["parts"]["conv.weight"] == [8 // count, 16, 3, 3]


@pytest.mark.slow
def test_a_checkpoint_of_four_ranks_is_read_by_two_and_by_one(tmp_path):
    (case,) = write_cases(tmp_path / "specs", EQUAL, ["problem_85"])
    task = {"path": case["path"], "checkpoint": str(tmp_path / "checkpoint")}
    for count, write in ((4, True), (2, False), (1, False)):
        ended = run_ranks(tmp_path / f"ranks_{count}", count, {"saved": task | {"write": write}})
        assert ended.codes == [0] * count, ended.errors
        (found,) = ended.results[0]["saved"]
        assert found["difference"] <= 1e-5 and sorted(found["keys"]) == ["conv.bias", "conv.weight", "norm.bias", "norm.weight", "scale"], found


@pytest.mark.slow
def test_a_layer_is_divided_along_one_dimension_of_a_mesh_of_two(tmp_path):
    (case,) = write_cases(tmp_path / "specs", EQUAL, ["straddling"])
    ended = run_ranks(tmp_path, 4, {"nested": {"path": case["path"]}})
    assert ended.codes == [0] * 4, ended.errors
    for rank, found in enumerate(ended.results):
        (one,) = found["nested"]
        assert one["difference"] < 1e-5 and "this one has 2; pass one of them" in one["said"] and f"straddling, fp32, rank {rank % 2} of 2" in one["of"]


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others_with_a_sentence_within_a_minute(tmp_path):
    (case,) = write_cases(tmp_path / "specs", EQUAL, ["straddling"])
    ended = run_ranks(tmp_path, 4, {"dies": {"path": case["path"]}}, limit_s=120)
    assert ended.codes[1] == 3 and all(code not in (0, 3) for rank, code in enumerate(ended.codes) if rank != 1)
    assert ended.seconds < 110, ended.seconds
    for rank in (0, 2, 3):
        last = ended.errors[rank].strip().splitlines()
        assert any("another rank has ended, or does not answer" in line and f"rank {rank} of 4" in line for line in last), ended.errors[rank]
