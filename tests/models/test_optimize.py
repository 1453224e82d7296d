"""Whole models: which chains are found, that what is put in place computes the same, and that whatever does not fit is left alone and named."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

import fixed_shape_kernels as fsk
from fixed_shape_kernels.cli import main
from fixed_shape_kernels.models import NotReplaced, building, explain_model, optimized
from fixed_shape_kernels.models.report import Report, Row
from tests.models.twins import backward_both, same_gradients_and_buffers


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.second(self.act(self.norm(self.first(x)))) + x)


class Net(nn.Module):
    """A convolutional net with residuals, a bare parameter, a constant argument and an operator that no chain has."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.block = Block(8)
        self.scale = nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, x, flip: bool = False):
        x = self.block(self.stem(x)) * self.scale
        x = torch.cumsum(x, 2)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        x = F.log_softmax(self.head(x), dim=1)
        return -x if flip else x


def example() -> torch.Tensor:
    return torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def all_of(model: nn.Module, *given, **options):
    """Optimised with every chain that is right, however slow here."""
    return fsk.optimize(model, *given, min_gain=0.0, **options)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    return all_of(net().eval(), example(), cache_dir=tmp_path_factory.mktemp("models"))


def test_chains_end_where_a_second_product_or_an_unknown_operator_begins(evaluated):
    chains = [row.chain for row in evaluated.report.replaced]
    assert chains == [
        "conv2d -> group_norm -> silu", "conv2d -> batch_norm -> relu", "conv2d -> add -> relu -> mul", "adaptive_avg_pool2d -> flatten -> linear -> log_softmax",
    ]  # fmt: skip
    assert [row.path for row in evaluated.report.replaced] == ["stem.0", "block.first", "block.second", "head"]
    assert all(row.error is not None and row.error < 1e-6 and row.ours_ms and row.torch_ms for row in evaluated.report.replaced)
    assert evaluated.report.replaced[1].where.startswith("test_optimize.py:")


def test_it_computes_what_the_model_does_with_the_model_s_own_state(evaluated):
    model, x = evaluated._model, example()
    with torch.no_grad():
        torch.testing.assert_close(evaluated(x), model(x), rtol=1e-5, atol=1e-6)
        assert list(evaluated.state_dict()) == list(model.state_dict()) and not evaluated.fallbacks
        assert all(a is b for a, b in zip(evaluated.parameters(), model.parameters(), strict=True))
        before = model.head.weight.clone()
        try:
            model.head.weight.mul_(3.0)
            model.scale.add_(1.0)
            torch.testing.assert_close(evaluated(x), model(x), rtol=1e-5, atol=1e-6)
        finally:
            model.head.weight.copy_(before)
            model.scale.sub_(1.0)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda opt: opt(torch.ones(3, 3, 12, 12)), "x is (3, 3, 12, 12), the kernels are for (2, 3, 12, 12)"),
        (lambda opt: opt(example(), flip=True), "flip differ from the example's"),
        (lambda opt: opt(example().requires_grad_()), "gradients are asked for"),
    ],
)
def test_a_call_that_the_kernels_are_not_for_runs_the_model_s_own_modules(evaluated, call, why):
    """Counted each time, and warned of once."""
    evaluated.fallbacks.clear()
    with warnings.catch_warnings(record=True) as told, torch.set_grad_enabled(why.startswith("gradients")):
        warnings.simplefilter("always")
        first, again = call(evaluated), call(evaluated)
        with evaluated.disabled():
            wanted = call(evaluated)
    assert torch.equal(first, again) and torch.equal(first, wanted)
    assert sum(why in str(one.message) for one in told) == 1 and [count for (_, said), count in evaluated.fallbacks.items() if why in said] == [2]


def test_another_mode_and_autocast_run_the_model_s_own_modules(evaluated):
    evaluated.fallbacks.clear()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = {name: buffer.clone() for name, buffer in evaluated.named_buffers()}
        for part in (evaluated, evaluated._model.block.norm):
            part.train()
            evaluated(example())
            evaluated.eval()
        assert list(evaluated.fallbacks.values()) == [2]
        for name, buffer in evaluated.named_buffers():
            buffer.copy_(kept[name])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            evaluated(example())
    assert any("in training, or a part of it, and the kernels are for evaluation" in why for _, why in evaluated.fallbacks) and any("autocast" in why for _, why in evaluated.fallbacks)


def test_another_shape_can_be_added(tmp_path):
    """Each call finds its own kernels; what neither is for runs the model's own modules."""
    model = net().eval()
    opt, wide = all_of(model, example(), cache_dir=tmp_path), torch.cat([example(), example()])
    report = opt.add_shape(wide)
    assert [row.status for row in report.rows] == [row.status for row in opt.report.rows] and report.rows[0].shapes.startswith("4x3x12x12")
    with torch.no_grad():
        for x in (example(), wide):
            torch.testing.assert_close(opt(x), model(x), rtol=1e-5, atol=1e-6)
        assert not opt.fallbacks
        with pytest.warns(UserWarning, match="x is"):
            opt(wide[:3])
    assert opt.restore() is model and not any("forward" in vars(module) for module in model.modules())


def test_a_saved_one_is_loaded_without_judging(tmp_path, monkeypatch):
    """Into the same model alone; weights are the model's that it is loaded into."""
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4), nn.Softmax(1)).eval(), torch.randn(3, 8)
    opt = all_of(model, x, cache_dir=tmp_path / "cache")
    opt.add_shape(torch.randn(5, 8))
    fsk.save_optimized(opt, tmp_path / "saved")
    monkeypatch.setattr(optimized, "Judge", lambda *given, **more: pytest.fail("judged"))
    other = copy.deepcopy(opt.restore())
    with torch.no_grad():
        other[0].weight.mul_(2.0)
    loaded = fsk.load_optimized(other, tmp_path / "saved")
    assert loaded.report.to_json() == opt.report.to_json()
    with torch.no_grad():
        for given in (x, torch.randn(5, 8)):
            torch.testing.assert_close(loaded(given), other(given), rtol=1e-5, atol=1e-6)
    assert not loaded.fallbacks
    with pytest.raises(RuntimeError, match="optimise it again"):
        loaded.add_shape(x)
    for wrong, said in ((nn.Sequential(nn.Linear(8, 7), nn.Tanh()).eval(), "was saved for another model"), (loaded.restore().train(), "training False")):
        with pytest.raises(ValueError, match=said):
            fsk.load_optimized(wrong, tmp_path / "saved")
    with pytest.raises(ValueError, match="holds no optimised model"):
        fsk.load_optimized(other, tmp_path)
    with pytest.raises(FileExistsError):
        fsk.save_optimized(opt, tmp_path)


def test_a_copy_of_the_model_runs_its_own_forward(evaluated):
    """Deep copies, as averages of weights take them, and pickled ones; the optimised module itself says what to do instead."""
    x = example()
    for other in (copy.deepcopy(evaluated._model), pickle.loads(pickle.dumps(evaluated._model))):
        with torch.no_grad():
            other.head.weight.zero_()
            assert torch.equal(other(x), torch.log_softmax(other.head.bias, 0).expand(2, 5)) and not torch.equal(evaluated(x), other(x))
    with pytest.raises(TypeError, match="save_optimized"):
        copy.deepcopy(evaluated)


def test_torch_compile_takes_the_model_s_own_modules_without_a_break(evaluated):
    x = example()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(evaluated, backend="eager", fullgraph=True)(x), evaluated._model(x), rtol=1e-5, atol=1e-6)


def test_restoring_gives_the_model_back(tmp_path):
    model = net().eval()
    opt = all_of(model, example(), cache_dir=tmp_path)
    assert any("forward" in vars(module) for module in model.modules())
    assert opt.restore() is model and not any("forward" in vars(module) for module in model.modules())


def test_training_renews_running_statistics_and_gives_the_model_s_gradients(tmp_path):
    model, twin = net().train(), net().train()
    opt = all_of(model, example(), training=True, cache_dir=tmp_path)
    assert torch.equal(model.block.norm.running_mean, twin.block.norm.running_mean) and int(model.block.norm.num_batches_tracked) == 0  # looking changes nothing
    y, wanted = opt(example()), twin(example())
    backward_both(y, wanted)
    same_gradients_and_buffers(model, twin)
    assert not opt.fallbacks


def test_a_chain_that_computes_something_else_is_not_installed(tmp_path, monkeypatch):
    shared = building.shared

    def damaged(made, chain):
        made = shared(made, chain)
        if "linear" in chain.words:
            forward = made.forward
            made.forward = lambda *given: forward(*given) * (1 + 1e-4)
        return made

    monkeypatch.setattr(building, "shared", damaged)
    opt = all_of(net().eval(), example(), cache_dir=tmp_path)
    (wrong,) = [row for row in opt.report.rows if row.status == "wrong"]
    assert wrong.path == "head" and "relative error" in wrong.why
    with torch.no_grad():
        torch.testing.assert_close(opt(example()), opt._model(example()), rtol=1e-5, atol=1e-6)


def test_a_chain_that_is_not_faster_stays_and_strict_says_so(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh()).eval()
    opt = fsk.optimize(model, torch.randn(2, 8), min_gain=1e9, cache_dir=tmp_path)
    assert [row.status for row in opt.report.rows] == ["slower"] and not opt._places
    with pytest.raises(NotReplaced, match="slower") as raised:
        fsk.optimize(model, torch.randn(2, 8), min_gain=1e9, strict=True, cache_dir=tmp_path)
    assert raised.value.report.rows[0].chain == "linear -> tanh"


class Turns(nn.Module):
    """Its course depends on data; one part is called twice, one has a hook, one never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.twice = nn.Linear(6, 6)
        self.hooked = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)

    def forward(self, x):
        x = self.twice(self.twice(self.one(x)))
        return self.hooked(x) if x.sum() < 1e30 else self.never(x)


def test_what_cannot_be_traced_is_named_with_its_reason(tmp_path):
    model = Turns().eval()
    model.hooked.register_forward_hook(lambda module, given, result: result + 1)
    opt = all_of(model, torch.randn(3, 6), cache_dir=tmp_path)
    said = {row.path: (row.status, row.why) for row in opt.report.rows}
    assert said["one.0"][0] == "replaced"
    assert "course depends on what its tensors hold" in said["(Turns)"][1]
    assert said["twice"] == ("not traced", "called 2 times in one run of the model")
    assert said["hooked"][0] == "unsupported" and "hooks" in said["hooked"][1]
    assert said["never"] == ("not traced", "never called by the example")
    with torch.no_grad():
        x = torch.randn(3, 6)
        torch.testing.assert_close(opt(x), model(x), rtol=1e-5, atol=1e-6)


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.inner = nn.ReLU(inplace=True), nn.Linear(6, 6)

    def forward(self, x):
        h = self.inner(x)
        kept = h.sigmoid()
        self.act(h)  # h itself is the rectified one from here on
        return kept + h


def test_an_operator_in_place_keeps_its_effect(tmp_path):
    model, x = Overwrites().eval(), torch.randn(4, 6)
    opt = all_of(model, x, cache_dir=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(opt(x), model(x), rtol=1e-5, atol=1e-6)


class Norm(nn.LayerNorm):
    """A layer norm as libraries have them: a class of their own that calls the function."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Norm, product and gelu on sequences, and an input that is taken twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_and_sixteen_bits(dtype, tmp_path):
    model, x = Attention().eval().to(dtype), torch.randn(2, 7, 16, dtype=dtype)
    opt = all_of(model, x, cache_dir=tmp_path)
    assert [row.chain for row in opt.report.replaced] == ["layer_norm -> linear -> gelu", "linear -> add"]
    with torch.no_grad():
        model.norm.weight.mul_(2.0)
        torch.testing.assert_close(opt(x), model(x), rtol=1e-5 if dtype is torch.float32 else 3e-2, atol=1e-6 if dtype is torch.float32 else 3e-2)


def test_tf32_is_held_to_its_model(tmp_path):
    """On a CPU its products are those of fp32, well within what rounded operands give."""
    model, x = nn.Sequential(nn.Linear(16, 8), nn.GELU()).eval(), torch.randn(4, 16)
    (row,) = all_of(model, x, precision="tf32", cache_dir=tmp_path).report.rows
    assert (row.status, row.precision) == ("replaced", "tf32") and row.error < 1e-6
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()  # its running statistics are held to that model, too
    (row,) = all_of(model, torch.randn(2, 3, 6, 6), precision="tf32", training=True, cache_dir=tmp_path).report.rows
    assert (row.status, row.precision) == ("replaced", "tf32"), row.why
    with pytest.raises(ValueError, match="precision: 'fp64'"):
        fsk.optimize(model, x, precision="fp64")


def test_a_chain_ends_before_dropout_in_training_and_goes_through_it_in_evaluation(tmp_path):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)), torch.randn(4, 8)
    found = lambda: [row.chain for row in fsk.explain(model, x).rows]  # noqa: E731
    assert found() == ["linear -> relu", "linear"] and fsk.explain(model.eval(), x).summary == "1 of 2 chains can be served by kernels"
    opt = all_of(model.train(), x, training=True, cache_dir=tmp_path)
    torch.manual_seed(5)
    y = opt(x)
    torch.manual_seed(5)
    torch.testing.assert_close(y, model(x), rtol=1e-5, atol=1e-6)


def test_explain_compiles_nothing_and_needs_no_data(monkeypatch):
    monkeypatch.setattr(optimized, "build_all", lambda *given: pytest.fail("built"))
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8192, 8192), nn.GELU(), nn.Softmax(1)).eval(), torch.rand(1024, 8192)
    report = fsk.explain(model, x)
    assert [(row.chain, row.status) for row in report.rows] == [("linear -> gelu -> softmax", "found")]
    assert report.rows[0].plan.startswith("sm_90a: ") and report.rows[0].estimated_ms > 0
    assert report.summary == "1 of 1 chains can be served by kernels" and explain_model(model, x).to_json() == report.to_json()


def test_a_report_is_a_table_json_and_a_page_that_escapes_names():
    rows = [Row("a<script>", "linear -> relu", "replaced", plan="cpu: 1 kernel", ours_ms=1.0, torch_ms=2.0, error=1e-7), Row("b", "cumsum", "unsupported", "no operator", "m.py:3")]
    report = Report("Net", "cpu", rows, 4.2, 1.9)
    assert report.summary == "1 of 1 chains replaced, 4.2 -> 1.9 ms" and str(report).endswith(report.summary)
    assert json.loads(report.to_json())["rows"][0]["ours_ms"] == 1.0
    page = report.to_html()
    assert "a&lt;script&gt;" in page and "<script" not in page and "2.00x" in page and "http" not in page


BUILD = """\
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh()), torch.randn(2, 8)


def wrong():
    return 3
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["model.py:build", "--explain"], 0, "1 of 1 chains can be served by kernels"),
        (["model.py:build", "--min-gain", "0", "--device", "cpu", "--report", "out/r.html"], 0, "1 of 1 chains replaced"),
        (["model.py:build", "--min-gain", "1e9", "--strict"], 1, "0 of 1 chains replaced"),
        (["model.py:wrong"], 1, "expected (model, example)"),
        (["model.py:none"], 1, "has no function none"),
        (["model.py"], 1, "has no Model, get_inputs and get_init_inputs"),
        (["nowhere.py:build"], 1, "nowhere.py is no file"),
    ],
)
def test_the_command(arguments, code, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(BUILD)
    done = CliRunner().invoke(main, ["optimize", *arguments])
    assert done.exit_code == code and said in done.output, done.output
    if "--report" in arguments:
        assert "<title>Sequential</title>" in (tmp_path / "out" / "r.html").read_text()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return F.dropout(self.linear(x), 0.5, self.training)


class Ways(nn.Module):
    """What a trace has of parts that can change afterwards: a mode that a part's own forward asks for, tied parameters, one module twice, numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = Noisy()
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.norm = nn.LayerNorm(16)
        self.p = nn.Parameter(torch.rand(16))
        self.q = self.p

    def forward(self, x, power: int = 1):
        x = self.norm(self.again(F.relu(self.first(self.noisy(x))))) * self.q
        return x.softmax(-1) if isinstance(power, int) and not isinstance(power, bool) else x


def _eps(model: Ways) -> None:
    model.norm.eps = 1.0


def _forward(model: Ways) -> None:
    model.norm.forward = lambda x: x


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (lambda model: model.noisy.train(), ()),
        (lambda model: setattr(model, "q", nn.Parameter(torch.rand(16))), ()),
        (lambda model: setattr(model, "again", nn.Linear(16, 16)), ()),
        (lambda model: nn.utils.parametrizations.weight_norm(model.first), ()),
        (_eps, ()),
        (_forward, ()),
        (lambda model: None, (1.0,)),
        (lambda model: None, (True,)),
    ],
)
def test_what_changes_after_the_trace_sends_the_call_to_the_models_own_modules(change, arguments, tmp_path):
    torch.manual_seed(1)
    model, x = Ways().eval(), torch.randn(3, 16)
    opt = fsk.optimize(model, x, min_gain=0, cache_dir=tmp_path)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt(x)
        assert opt.report.replaced and not opt.fallbacks
        change(model)
        torch.manual_seed(2)
        expected = model(x, *arguments)
        torch.manual_seed(2)
        assert torch.equal(opt(x, *arguments), expected) and sum(opt.fallbacks.values()) == 1
