"""The promises as rules: which measured errors keep them, of one draw and of several, beside each yardstick."""

from dataclasses import replace

import pytest
import torch

from bench.metrics import Errors, compare
from bench.promise import NO_DIGIT, Yardsticks, allowed_error, allowed_outside, pooled, pooled_errors
from codegen.spec import load_spec


def yardsticks(**more):
    nothing = Errors(0.0, 0.0, 0, 100, 0.0, 0.0, None)
    return Yardsticks(**{"eager": nothing, "eager_fp32": nothing, "tf32": None, "rounded": 0.0, "rms": 1.0, **more})


def with_errors(relative=0.0, outside=0):
    return Errors(relative, relative, outside, 100, 0.0, 0.0, None, nearly_outside=outside)


@pytest.mark.parametrize(("precision", "eager", "allowed"), [("fp32", 1e-8, 3e-7), ("fp32", 1e-6, 1.1e-6), ("bf16", 2e-3, 2.1e-3), ("fp16", 0.0, 0.0)])
def test_the_promised_error(precision, eager, allowed):
    spec, by = load_spec("specs/default.yaml", precision), with_errors(eager)
    assert allowed_error(spec, yardsticks(eager=by, eager_fp32=by)) == pytest.approx(allowed)


def test_tf32_is_held_to_its_model_and_never_asked_to_beat_fp32():
    spec = load_spec("specs/default.yaml", "tf32")
    loose = with_errors(1e-2, 10**6)  # PyTorch's own TF32 is no yardstick
    by = yardsticks(eager=loose, eager_fp32=with_errors(1e-6, 4), tf32=with_errors(2e-4, 100))
    assert allowed_error(spec, by) == pytest.approx(2.2e-4) and allowed_outside(spec, by, False) == 130
    assert allowed_error(spec, yardsticks(eager_fp32=with_errors(1e-6), tf32=with_errors())) == pytest.approx(1.1e-6)


def test_tf32_is_allowed_eagers_error_as_far_as_truncated_sums_explain_it():
    """Behind a sum over thousands of results the roundings of operands average away, and the bias of tensor cores that truncate is what is left."""
    spec = load_spec("specs/default.yaml", "tf32")
    bias = 8192 / 8 * 2.0**-24
    for eager, allowed in ((1e-5, 1.1e-5), (1e-2, bias)):
        by = yardsticks(eager=with_errors(eager), eager_fp32=with_errors(1e-7), tf32=with_errors(1e-6))
        assert allowed_error(spec, by) == pytest.approx(allowed)


def test_elements_outside_are_counted_against_eagers():
    fp32, bf16 = load_spec("specs/default.yaml"), load_spec("specs/default.yaml", "bf16")
    by = yardsticks(eager=with_errors(outside=100))
    near = yardsticks(eager=replace(with_errors(), nearly_outside=100))  # none outside, though errors as large as allowed would be
    assert allowed_outside(fp32, near, True) == 0 and allowed_outside(fp32, near, False) == 130
    assert {allowed_outside(spec, by, initial) for spec in (fp32, bf16) for initial in (True, False)} == {130}
    assert allowed_outside(bf16, yardsticks(), False) == 0


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1.1), ("bf16", 1.05)])
def test_the_count_of_elements_outside_agrees_with_the_error_allowed(precision, most):
    """Errors as large as the promise allows keep both of its columns, whatever their distribution; those half as large again keep neither."""
    spec, generator = load_spec("specs/default.yaml", precision), torch.Generator().manual_seed(3)
    tolerance, n = spec.precision.tolerance, 1 << 20
    exact, normal = torch.randn(n, dtype=torch.float64, generator=generator), torch.randn(n, dtype=torch.float64, generator=generator)
    for size in (torch.full((n,), 0.4), 10.0 ** torch.linspace(-4, 3, n)):  # tails of one size, and sizes from far within the tolerance to far outside
        eager, measure = size * normal * tolerance, lambda error, margin=1.0: compare(exact + error, exact, tolerance, None, margin=margin)
        by = yardsticks(eager=measure(eager, most), eager_fp32=measure(eager, most))
        other = eager[torch.randperm(n, generator=generator)] if float(size[0]) == float(size[-1]) else -eager
        assert measure(0.999 * most * other).outside <= allowed_outside(spec, by, False) < measure(1.5 * most * other).outside
        assert measure(0.999 * most * other).relative <= allowed_error(spec, by) < measure(1.5 * most * other).relative


def test_a_few_elements_outside_over_several_draws_need_a_yardstick_whose_worst_is_as_bad():
    """Errors of one size put now and then an element across the tolerance: none of eager's and nine of ours is chance, ten is not."""
    bf16 = load_spec("specs/gemm_groupnorm_hardtanh_small.yaml", "bf16")
    few = lambda outside, largest: [Errors(4e-3, largest, outside if i == 0 else 0, 100, 0.0, 0.0, None) for i in range(25)]  # noqa: E731
    by = [yardsticks(eager=Errors(4e-3, 0.03, 0, 100, 0.0, 0.0, None)) for _ in range(25)]
    assert not pooled(bf16, few(9, 0.025), by, False)[2]
    assert pooled(bf16, few(10, 0.025), by, False)[2] and pooled(bf16, few(1, 0.031), by, False)[2]
    fp32 = load_spec("specs/gemm_groupnorm_hardtanh_small.yaml")
    assert pooled(fp32, few(1, 0.025), by, True)[2]  # on the benchmark's own inputs none at all


def test_errors_that_few_elements_hold_differ_by_more_by_chance():
    """A rounding that carries a value from one bound to the other may hold all of an error: 1.4 times eager's is chance then, and none where all elements err."""
    n = 1 << 16
    exact = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    normal = 1e-6 * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    jump = torch.zeros(n, dtype=torch.float64)
    jump[77] = 4.0
    of = {name: compare(exact + error, exact, 1e-4, None) for name, error in (("normal", normal), ("jump", normal + jump))}
    assert of["normal"].concentration == pytest.approx(3 / n, rel=0.1) and of["jump"].concentration == pytest.approx(1.0)
    assert compare(exact, exact, 1e-4, None).concentration == 0.0
    fp32 = load_spec("specs/default.yaml")
    for name, chance in (("normal", False), ("jump", True)):
        eager, ours = of[name], replace(of[name], relative=1.4 * of[name].relative)
        assert (not pooled(fp32, [ours] * 4, [yardsticks(eager=eager, eager_fp32=eager)] * 4, False)[2]) == chance


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_pytorch_has_no_digit_medians_are_compared(precision):
    """A division by values near zero: one element makes the error, and luck decides in whose result it stands. Roundings twice as large are still found."""
    spec = load_spec("specs/gemm_groupnorm_hardtanh_small.yaml", precision)
    verdicts = {1.0: [], 2.0: []}
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        values, draws = {1.0: [], 2.0: []}, []
        for _ in range(25):
            x, off = torch.randn(512, dtype=torch.float64, generator=generator), lambda: 4e-3 * torch.randn(512, dtype=torch.float64, generator=generator)  # noqa: B023
            measure = lambda error: compare(1 / (x + error), 1 / x, spec.precision.tolerance, None, margin=1.1)  # noqa: B023, E731
            theirs = measure(off())
            draws.append(yardsticks(eager=theirs, eager_fp32=theirs))
            for size in values:
                values[size].append(measure(size * off()))
        if pooled_errors([one.eager for one in draws]).relative > NO_DIGIT:
            for size, ours in values.items():
                verdicts[size].append([problem for problem in pooled(spec, ours, draws, False)[2] if "elements" not in problem])
    assert len(verdicts[1.0]) >= 10 and not any(verdicts[1.0]) and all(verdicts[2.0])
