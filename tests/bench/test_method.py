"""The method itself: verify is fed models that are wrong in known ways, and must see each."""

import copy

import pytest
import torch
import torch.nn.functional as F

from bench.data import Draw
from bench.families import FAMILIES
from bench.metrics import compare
from bench.subject import Subject, emit, round_tf32
from bench.timing import MOST_FLUSHES, flushes_for
from bench.verify import table_of, verify
from codegen.numerics import PRECISIONS
from codegen.spec import load_spec
from tests.fused import load_fused

CPU = torch.device("cpu")


def judged(emitted, change, families):
    """Verify the reference with `change(model, x, correct)` in the place of its forward; the names of the families found wrong."""
    Model = emitted.module.Model

    class Candidate(Model):
        def forward(self, x):
            return change(self, x, lambda v: Model.forward(self, v))

    ours = Candidate(*emitted.module.get_init_inputs())
    return {f.family.name: f.problems for f in verify(Subject(emitted, ours, CPU), families) if not f.ok}


def finish(model, y):
    return F.hardtanh(model.group_norm(y), -2.0, 2.0)


def normalise(model, y, mean, variance):
    """GroupNorm of (batch, channels) from given statistics of (batch, groups)."""
    groups = y.view(y.shape[0], model.group_norm.num_groups, -1)
    normal = ((groups - mean[..., None]) * torch.rsqrt(variance + 1e-5)[..., None]).view_as(y)
    return F.hardtanh(normal * model.group_norm.weight + model.group_norm.bias, -2.0, 2.0)


@pytest.mark.slow
def test_the_reference_itself_is_found_right(small):
    """Where squares stay within fp32's range."""
    families = tuple(name for name, family in FAMILIES.items() if not family.beyond)
    assert judged(small, lambda model, x, correct: correct(x), families) == {}


def test_a_dropped_bias_is_caught(small):
    def wrong(model, x, correct):
        return finish(model, F.linear(x, model.gemm.weight))

    assert set(judged(small, wrong, ("benchmark", "uniform"))) == {"benchmark", "uniform"}


@pytest.mark.slow
def test_a_dropped_affine_is_caught_by_random_parameters(small):
    """At its initial weights the layer cannot show it: gamma = 1, beta = 0."""

    def wrong(model, x, correct):
        return F.hardtanh(F.group_norm(model.gemm(x), model.group_norm.num_groups), -2.0, 2.0)

    assert set(judged(small, wrong, ("benchmark", "uniform", "normal"))) == {"uniform", "normal"}


@pytest.mark.slow
def test_variance_by_squares_is_caught(small):
    def wrong(model, x, correct):
        y = model.gemm(x)
        groups = y.view(y.shape[0], model.group_norm.num_groups, -1)
        mean = groups.mean(-1)
        return normalise(model, y, mean, (groups.square().mean(-1) - mean.square()).clamp_min(0))

    assert "offset" in judged(small, wrong, ("normal", "offset", "constant groups"))


def test_a_swallowed_nan_is_caught(small):
    def wrong(model, x, correct):
        y = model.group_norm(model.gemm(x))
        return torch.fmin(torch.fmax(y, torch.tensor(-2.0)), torch.tensor(2.0))

    found = judged(small, wrong, ("normal", "nonfinite", "nan channel"))
    assert set(found) == {"nonfinite", "nan channel"}
    assert all("NaN" in problems[0] for problems in found.values())


def test_a_nan_that_leaves_its_group_is_caught(small):
    def wrong(model, x, correct):
        y = correct(x)
        return y + 0 * y.sum(1, keepdim=True)

    assert set(judged(small, wrong, ("normal", "nan channel"))) == {"nan channel"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_wrong_row_is_caught(small, precision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    emitted = small if precision == "fp32" else emit("specs/gemm_groupnorm_hardtanh_small.yaml", precision, "cpu")

    def wrong(model, x, correct):
        y = correct(x)
        y[77] = y[76]
        return y

    assert set(judged(emitted, wrong, ("benchmark", "normal"))) == {"benchmark", "normal"}


def test_tf32_passed_off_as_fp32_is_caught(small):
    def wrong(model, x, correct):
        return finish(model, F.linear(round_tf32(x), round_tf32(model.gemm.weight), model.gemm.bias))

    found = judged(small, wrong, ("benchmark", "uniform", "normal"))
    assert set(found) == {"benchmark", "uniform", "normal"}
    assert "relative error" in found["benchmark"][0]


def test_other_bits_at_each_run_are_caught(small):
    calls = []

    def wrong(model, x, correct):
        calls.append(1)
        y = correct(x)
        y[0, len(calls)] *= 1 + 2.0**-23
        return y

    found = judged(small, wrong, ("benchmark",))
    assert "repeated runs" in found["benchmark"][-1]


def test_a_value_too_many_in_the_statistics_is_caught(small):
    """Padding counted in: the result is nearly right everywhere, and its correlation with the reference is 1 to three digits."""

    def wrong(model, x, correct):
        y = model.gemm(x)
        groups = y.view(y.shape[0], model.group_norm.num_groups, -1)
        padded = F.pad(groups, (0, 1))
        return normalise(model, y, padded.mean(-1), padded.var(-1, correction=0))

    found = judged(small, wrong, ("normal",))
    assert any("group's standard deviation" in problem for problem in found["normal"])


def test_an_unscaled_fp16_split_is_caught(small):
    """Right on ordinary data, infinite or lost where operands leave fp16's range."""

    def halves(v):
        high = v.half().float()
        return high, (v - high).half().float()

    def wrong(model, x, correct):
        (x1, x2), (w1, w2) = halves(x), halves(model.gemm.weight)
        y = x1 @ w1.t() + (x1 @ w2.t() + x2 @ w1.t())
        return finish(model, y + model.gemm.bias)

    assert {"split high", "huge", "tiny"} <= set(judged(small, wrong, ("split high", "huge", "tiny")))


def test_statistics_shifted_by_an_outlier_are_caught(small):
    """Values stored as differences from the group's first one have lost their last bits where that one is far off, and only there."""

    def wrong(model, x, correct):
        y = model.gemm(x)
        groups = y.view(y.shape[0], model.group_norm.num_groups, -1)
        shifted = (groups - groups[..., :1]).view_as(y)
        groups = shifted.view_as(groups)
        return normalise(model, shifted, groups.mean(-1), groups.var(-1, correction=0))

    assert set(judged(small, wrong, ("normal", "outlier first"))) == {"outlier first"}


def test_an_fp16_split_scaled_by_the_rows_maximum_is_caught(small):
    """Right on ordinary data and at any scale; what the maximum hides is lost."""

    def halves(v):
        scale = torch.exp2(torch.floor(torch.log2(v.abs().amax(1, keepdim=True).clamp_min(1e-37))))
        scaled = v / scale
        high = scaled.half().float()
        return high, ((scaled - high) * 2048).half().float() / 2048, scale

    def wrong(model, x, correct):
        (x1, x2, sx), (w1, w2, sw) = halves(x), halves(model.gemm.weight)
        y = (x1 @ w1.t() + (x1 @ w2.t() + x2 @ w1.t())) * sx * sw.t()
        return finish(model, y + model.gemm.bias)

    assert set(judged(small, wrong, ("normal", "split high", "huge", "lossy split"))) == {"lossy split"}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["outlier first", "outlier anywhere"])
@pytest.mark.parametrize("path", ["gemm_groupnorm_hardtanh_small", "gemm_biasadd_hardtanh_mish_groupnorm_small", "conv2d_groupnorm_scale_maxpool_clamp_small"])
def test_outliers_stand_where_the_families_say(path, name, precision, small):
    """One value of each group a thousand spreads or more from the others; the very first one in "outlier first"."""
    spec = load_fused(f"specs/{path}.yaml", precision)
    draw = Draw(spec, CPU, 3)
    (x,), parameters = draw.finish(*FAMILIES[name].make(draw))
    weight, bias = (parameters[spec.producer.key(p)].double() for p in spec.producer.parameters)
    y = F.linear(x.double(), weight, bias) if x.dim() == 2 else F.conv2d(x.double(), weight, bias)
    for step in spec.before_norm:
        y = y + parameters[step.key(step.parameters[0])].double() if step.operator.name == "add" else {"hardtanh": F.hardtanh, "mish": F.mish}[step.operator.name](y)
    groups = y.reshape(spec.batch, spec.num_groups, -1)
    ordinary = slice(groups.shape[-1] // 2, None)  # behind a first channel that may be off as a whole
    off = (groups - groups[..., ordinary].median(-1, keepdim=True).values).abs()
    far = off > 1000 * off[..., ordinary].median(-1, keepdim=True).values
    if name == "outlier first":
        assert bool(far[..., 0].all())
        alone = far.sum(-1) == (1 if x.dim() == 2 else torch.tensor([1, spec.spatial]).repeat(spec.num_groups // 2))
        assert bool(alone.all())
    else:
        assert bool((far.sum(-1) == 1).all()) and far.double().argmax(-1).unique().numel() > 4


def test_a_wrong_shape_or_type_is_caught(small):
    assert "expected" in judged(small, lambda model, x, correct: correct(x)[:-1], ("normal",))["normal"][0]
    assert "expected" in judged(small, lambda model, x, correct: correct(x).double(), ("normal",))["normal"][0]


def test_every_family_is_made_for_every_shipped_spec_and_precision():
    for path in ("specs/gemm_biasadd_hardtanh_mish_groupnorm_small.yaml", "specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml"):
        for precision in PRECISIONS:
            spec = load_spec(path, precision)
            for family in (family for family in FAMILIES.values() if family.serves(spec)):
                draw = Draw(spec, CPU, 0)
                (x,), parameters = draw.finish(*family.make(draw))
                assert tuple(x.shape) == spec.input_shape
                assert family.initial or {k: tuple(v.shape) for k, v in parameters.items()} == dict(spec.parameters)
                ordinary = torch.isfinite(x).all() and all(torch.isfinite(v).all() for v in parameters.values())
                assert bool(ordinary) == (family.name not in ("nonfinite", "nan channel")), (path, precision, family.name)


def test_groups_beyond_fp32_need_a_norm_that_holds_them(small):
    """PyTorch's own makes NaN of a group whose squares are infinite, or beta; neither is right."""
    families = tuple(name for name, family in FAMILIES.items() if family.beyond)

    def in_float64(model, x, correct):
        group_norm = copy.deepcopy(model.group_norm).double()
        return F.hardtanh(group_norm(model.gemm(x).double()), -2.0, 2.0).float()

    def beta_alone(model, x, correct):
        beyond = (model.gemm(x).abs() > 2.0**64).any(1, keepdim=True)
        return torch.where(beyond, F.hardtanh(model.group_norm.bias, -2.0, 2.0), in_float64(model, x, correct))

    assert judged(small, in_float64, families) == {}
    assert set(judged(small, beta_alone, families)) == set(judged(small, lambda model, x, correct: correct(x), families)) == set(families)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_yardstick_beyond_fp32_is_rounded_as_often_as_eager(precision, tmp_path, monkeypatch):
    """Samples that stay in range are held to eager itself: a product and a sum rounded to bf16 in front of the norm, one rounding less than eager's, are right."""
    monkeypatch.chdir(tmp_path)
    emitted = emit("specs/matmul_swish_sum_groupnorm_small.yaml", precision, "cpu")
    spec, storage = emitted.spec, getattr(torch, emitted.spec.precision.dtype)
    subject = Subject(emitted, emitted.module.Model(*emitted.module.get_init_inputs()), CPU)
    draw = Draw(spec, CPU, 5)
    x, parameters = draw.finish(*FAMILIES["one square overflows"].make(draw))
    subject.load(parameters)
    eager, yardstick, exact = subject.run_eager(x), subject.run_eager_beside_exact_norm(x), subject.run_exact(x)
    step = torch.finfo(storage).eps  # eager's norm and the exact one may round to neighbours
    torch.testing.assert_close(yardstick[1::2].double(), eager[1::2].double(), rtol=step, atol=4e-6)
    assert compare(yardstick[::2], exact[::2], 1e-2, None).relative < 4 * step < 0.1 * compare(eager[::2], exact[::2], 1e-2, None).relative

    def twice_rounded(model, x, correct):
        product, group_norm = model.matmul(x).double(), copy.deepcopy(model.group_norm).double()
        return group_norm((F.silu(product) + model.bias.double()).to(storage).double()).to(storage)

    families = tuple(name for name, family in FAMILIES.items() if family.beyond)
    assert judged(emitted, twice_rounded, families) == {}


FEW = """
name: few
batch: 2
args: {i: 16, o: 8}
chain:
  - linear: {name: fc, in_features: i, out_features: o}
  - group_norm: {name: norm, num_groups: 2}
  - logsumexp: {}
"""


@pytest.mark.parametrize(("off", "right", "draws"), [(lambda call: 0.0, True, 1), (lambda call: call == 1, True, 25), (lambda call: 1.0, False, 25)])
def test_few_results_are_judged_by_more_draws(off, right, draws, tmp_path, monkeypatch):
    """Two values tell nothing of who errs less: one unlucky draw is forgiven, an error in all of them is not. Groups that are gone are not measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.yaml").write_text(FEW)
    emitted = emit("few.yaml", target="cpu")
    calls = []

    class Candidate(emitted.module.Model):
        def forward(self, x):
            calls.append(1)
            return super().forward(x) * (1 + 4e-6 * off(len(calls)))

    ours = Candidate(*emitted.module.get_init_inputs())
    (found,) = verify(Subject(emitted, ours, CPU), ("normal",), repeats=0)
    assert (found.ok, found.draws) == (right, draws), found.problems
    assert found.ours.group_mean is found.ours.group_std is None
    assert table_of([found], "").columns[7]._cells == ["-"]


@pytest.mark.parametrize(("issue_ms", "flush_ms", "count"), [(0.01, 0.09, 2), (0.05, 0.09, 3), (0.3, 0.09, 8), (50.0, 0.09, 40), (0.3, 2.0, 2)])
def test_the_device_is_kept_busy_until_a_call_is_issued(issue_ms, flush_ms, count):
    """Else the host's time stands in the figure: torch.compile's 0.2 ms of it made a peer of 0.20 ms look like one of 0.30."""
    assert flushes_for(issue_ms, flush_ms) == count
    assert count == MOST_FLUSHES or count * flush_ms > issue_ms
