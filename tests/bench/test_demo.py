"""`fsk demo`: it prints what can be copied, takes the options of `fsk generate`, and concludes what its times show."""

import random

import pytest

from bench.comparison import LEAST_ROUNDS, compare_rounds
from tests.fsk import fsk

SMALL = "specs/gemm_groupnorm_hardtanh_small.yaml"


def test_the_demo_says_what_it_wrote_what_it_shows_and_what_to_type_next(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = tmp_path / "a folder with a rather long name, longer than forty columns"
    result = fsk("demo", SMALL, "--precision", "bf16", "--target", "cpu", "--out", out, "--seconds", "0")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert (
        lines[0] == f"wrote {out}/gemm_groupnorm_hardtanh_small_bf16: __init__.py, cpu.cpp, cpu_backward.cpp, model.py"
    )
    assert lines[-1].endswith(f"fsk explain {SMALL} --precision bf16 --target cpu") and str(out) in lines[-1]
    text = " ".join(result.output.split())
    assert "interval" in text and f"{LEAST_ROUNDS} rounds" in text
    assert "It cannot show the speed of the CUDA kernels" in text and "PyTorch's linear alone takes" in text


def test_a_spec_that_is_not_there_is_a_sentence(tmp_path):
    result = fsk("demo", "nowhere.yaml", "--out", tmp_path)
    assert result.exit_code == 2 and "nowhere.yaml" in result.output and "Traceback" not in result.output


def noisy(draw: random.Random, rounds: int, factor: float) -> tuple[list[float], list[float]]:
    """Times of two calls on a busy machine: a round has its speed, a call its delay, now and then a long one."""
    ours, other = [], []
    for _ in range(rounds):
        speed = draw.choice((1.0, 1.0, 2.0, 20.0))
        delay = lambda: 1.0 + draw.expovariate(10.0) + (draw.random() < 0.05) * draw.expovariate(0.2)  # noqa: E731
        ours.append(speed * delay())
        other.append(speed * factor * delay())
    return ours, other


@pytest.mark.parametrize("rounds", [LEAST_ROUNDS, 9, 25])
def test_equal_calls_seldom_seem_to_differ(rounds):
    """The interval excludes 1 in at most 5 % of the cases: of 2000, at most 100 and five standard deviations."""
    draw = random.Random(rounds)
    wrong = sum(compare_rounds(*noisy(draw, rounds, 1.0)).differs for _ in range(2000))
    assert wrong <= 100 + 5 * (2000 * 0.05 * 0.95) ** 0.5


def test_a_difference_is_found_and_named():
    found = compare_rounds(*noisy(random.Random(1), 40, 1.5))
    assert found.low > 1 and found.low <= found.ratio <= found.high
    assert found.sentence("ModelNew", "PyTorch").startswith("ModelNew is faster than PyTorch")
    slower = compare_rounds(*reversed(noisy(random.Random(1), 40, 1.5)))
    assert slower.high < 1 and slower.sentence("ModelNew", "PyTorch").startswith("ModelNew is slower than PyTorch")
    same = compare_rounds([1.0] * 8, [1.0] * 8)
    assert not same.differs and same.sentence("ModelNew", "PyTorch").startswith("No difference shows")


def test_few_rounds_are_refused():
    with pytest.raises(ValueError, match="at least 6"):
        compare_rounds([1.0] * 5, [2.0] * 5)
