"""What float64 itself does not know: such elements are held to what roundings explain, all others to the promise as ever."""

import copy

import pytest
import torch

from bench.doubt import RUNS, UNIT, doubt_of, overflows
from bench.families import FAMILIES
from bench.metrics import compare
from bench.subject import Subject, construct, emit
from bench.verify import _examine, verify
from codegen.numerics import PRECISIONS

CPU = torch.device("cpu")
FP32 = PRECISIONS["fp32"]
ZERO = """\
name: zero
batch: 4
chain:
  - linear: {name: a, in_features: 16, out_features: 8}
  - group_norm: {name: norm, num_groups: 2}
  - mean: {keepdim: true}
"""
POLE = """\
name: pole
batch: 5
input: {values: randn, shape: [2, 21, 4]}
chain:
  - conv2d: {name: conv, in_channels: 2, out_channels: 4, kernel_size: 1, stride: 3, padding: 3}
  - maximum: {value: 1.11}
  - silu
  - instance_norm: {name: norm}
  - rdiv: {name: over, shape: [1, 1], init: rand}
  - dropout
  - add: {name: shift, shape: [4, 1, 1]}
"""


def emitted(tmp_path, text, precision):
    path = tmp_path / f"{text.split()[1]}.yaml"
    path.write_text(text)
    return emit(str(path), precision, "cpu")


def judged(one, change=None):
    """What is wrong with the generated model on the benchmark's data, or with the reference whose result `change` alters, by mode."""
    Model = one.module.Model

    class Candidate(Model):
        def forward(self, x):
            return change(self, Model.forward(self, x))

    ours = Candidate(*one.module.get_init_inputs()) if change else construct(one, CPU, "cpu")
    return {found.name: found for found in verify(Subject(one, ours, CPU), ("benchmark",), repeats=1)}


def test_what_is_well_conditioned_is_known():
    a, b = torch.randn(2, 40, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for precision in PRECISIONS.values():
        doubt = doubt_of(lambda: torch.nn.functional.group_norm(torch.nn.functional.silu(a @ b.T), 8) + 1.0, precision)
        assert not doubt.any and len(doubt.others) == RUNS + 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_element_is_unknown_where_roundings_move_it_by_more_than_the_types_own(precision):
    """a + d - a is d known to 2^-53 a / d of itself: known by the type's unit where d is 2^8 times what that takes, unknown where it is 2^8 times less."""
    step = 2.0 ** -(PRECISIONS[precision].mantissa_bits + 1)
    a = torch.ones(256, dtype=torch.float64) * 1.25
    for factor, unknown in ((2.0**8, 0), (2.0**-8, 256)):
        d = factor * UNIT / step
        assert doubt_of(lambda d=d: (a + d) - a, PRECISIONS[precision]).unknown == unknown


def test_roundings_of_the_type_itself_stay_within_the_limit():
    """The mean of normalised values in fp32; a number of that size that is not a rounding is beyond it."""
    x = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    run = lambda v: torch.nn.functional.layer_norm(v, (32,)).mean(1)  # noqa: E731
    exact, doubt = run(x), doubt_of(lambda: run(x), FP32)
    y = run(x.float())
    assert doubt.unknown == 64 and doubt.beyond(y, exact) == 0
    assert doubt.beyond(y + 1e-4, exact) == 64 and float(doubt.limit.max()) < 64 * 2.0**-24


def test_a_value_that_is_unknown_may_be_zero_and_a_quotient_infinite():
    """Masks make 0 of a large number and NaN of an infinite one: seen in the run with zeros alone."""
    x, mask = torch.full((8, 7), 0.1, dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64).repeat(4)
    quotient = lambda: (1.0 / torch.nn.functional.layer_norm(x, (7,)).sum(1)) * mask + 3.0  # noqa: E731
    doubt = doubt_of(quotient, FP32)
    assert doubt.any and torch.isnan(doubt.others[-1][::2]).all() and torch.isinf(doubt.others[-1][1::2]).all()


def test_running_statistics_are_those_of_one_run():
    plain = torch.nn.BatchNorm1d(6).double()
    other = copy.deepcopy(plain)
    x = torch.randn(20, 6, dtype=torch.float64)
    plain(x)
    doubt_of(lambda: other(x), FP32)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), other.buffers(), strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_result_that_is_zero_but_for_roundings_is_right(tmp_path, precision):
    """The generated model's and eager's own, which is 0 in 16 bits."""
    one = emitted(tmp_path, ZERO, precision)
    for found in (judged(one)["benchmark"], judged(one, lambda model, y: y)["benchmark"]):
        assert found.ok and found.unknown == found.ours.elements


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_result_that_should_be_zero_and_is_not_is_wrong(tmp_path, precision):
    """An offset as large as the values that cancel."""
    assert not judged(emitted(tmp_path, ZERO, precision), lambda model, y: y + 1)["benchmark"].ok


def test_quotients_of_roundings_may_be_infinite(tmp_path):
    found = judged(emitted(tmp_path, POLE, "fp32"))
    assert set(found) == {"benchmark, training", "benchmark, evaluation"} and all(one.ok for one in found.values()), [one.problems for one in found.values()]
    assert all(0 < one.unknown < one.ours.elements * one.draws and "unknown" in one.record() for one in found.values())


def test_beside_quotients_of_roundings_all_else_is_judged_as_ever(tmp_path):
    """What float64 makes of the roundings is the largest by far, so that nothing else would show in an error relative to it."""
    one = emitted(tmp_path, POLE, "fp32")
    off = judged(one, lambda model, y: torch.where(y.abs() < 1e4, y * 1.1, y))
    lost = judged(one, lambda model, y: torch.where(y.abs() < 1e4, torch.nan, y))
    infinite = judged(one, lambda model, y: torch.where(y.abs() < 1e4, torch.inf, y))
    for found in (off, lost, infinite):
        assert not found["benchmark, evaluation"].ok and not found["benchmark, training"].ok
    assert "NaN" in lost["benchmark, evaluation"].problems[0]


def test_nothing_is_in_doubt_where_the_promise_is_kept(tmp_path):
    """At random weights the shifts of a norm have a mean of their own."""
    one = emitted(tmp_path, ZERO, "fp32")
    found = _examine(Subject(one, construct(one, CPU, "cpu"), CPU), FAMILIES["normal"], "", 0, 1)
    assert found.ok and not found.unknown and "unknown" not in found.record()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_only_a_value_at_the_edge_of_its_range_may_overflow(dtype):
    largest = torch.finfo(dtype).max
    v = torch.tensor([largest / 2, largest / 2 - largest / 64, 0.0, -1.0, torch.inf, torch.nan], dtype=dtype)
    assert overflows(lambda: v * 2).tolist() == [True, False, False, False, False, False]
    assert overflows(lambda: (v.view(3, 2).t() * 2).amax(0)).tolist() == [True, False, False]


def test_an_infinity_is_right_where_a_last_bit_decides_and_wrong_elsewhere():
    """1 / v of what a sum leaves at the type's least numbers: one order of additions gives a number, another an infinity."""
    v = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float16)
    rest = torch.tensor([1.526e-5, 1.0, -0.5], dtype=torch.float16)  # 1 / 1.526e-5 = 65530: beyond the range by half a unit
    run = lambda: 1 / (v * rest)  # noqa: E731
    eager, exact = run(), 1 / torch.tensor([1.5275e-5, 1.0, -0.5], dtype=torch.float64)
    unsure = torch.where(overflows(run), torch.nan, eager)
    assert unsure.isnan().tolist() == [True, False, False]
    finite = torch.tensor([65472.0, 1.0, -2.0], dtype=torch.float16)
    for place, right in ((0, True), (1, False), (2, False)):
        y = finite.clone()
        y[place] = torch.inf
        assert (compare(y, exact, 1e-2, None, unsure).parity is None) is right


def test_where_pytorch_has_another_infinity_than_the_exact_result_either_is_right():
    """As behind a softmax of a row whose largest value overflowed: NaN in PyTorch, -70000 exactly, which is -inf in fp16; a number is neither."""
    exact = torch.tensor([-70000.0, -70000.0, -70000.0, -2.0], dtype=torch.float64)
    eager = torch.tensor([torch.nan, -torch.inf, -60000.0, -2.0], dtype=torch.float16)
    for place, value, right in (
        (0, torch.nan, True), (0, torch.inf, False), (0, -3.0, True), (1, torch.nan, False), (1, -3.0, False), (2, -3.0, True), (2, torch.inf, False), (3, torch.nan, False),
    ):  # fmt: skip
        y = exact.half()
        y[place] = value
        assert (compare(y, exact, 1e-2, None, eager).parity is None) is right, (place, value)
