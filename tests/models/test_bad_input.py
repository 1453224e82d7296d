"""Models that kernels are not for in some way: the report says so, nothing fails that did not fail before, and the model computes what it did."""

from __future__ import annotations

import copy

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import fixed_shape_kernels as fsk
from fixed_shape_kernels.cli import main


def all_of(model: nn.Module, *given, **options):
    return fsk.optimize(model, *given, min_gain=0.0, **options)


def reasons(report) -> str:
    return "; ".join(f"{row.status}: {row.why}" for row in report.rows if row.why)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh()).eval()


def same(opt, model, *given):
    with torch.no_grad():
        torch.testing.assert_close(opt(*given), model(*given), rtol=1e-5, atol=1e-6)


def test_a_model_on_two_devices_is_looked_at_by_parts():
    """Here the second device holds no data, and only a part that nobody asks is there."""
    with torch.device("meta"):
        model, x = layers(), torch.randn(3, 8)
    model.register_buffer("elsewhere", torch.zeros(2))
    report = fsk.explain(model, x)
    assert "its tensors are on cpu and meta" in reasons(report) and [row.path for row in report.rows if row.status == "not traced"] == ["(Sequential)"]
    assert {row.path for row in report.rows} >= {"0", "2"}


class Parents(nn.Module):
    """Two parents with one part."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.one, self.other = nn.Sequential(inner), nn.Sequential(inner, nn.Tanh())

    def forward(self, x):
        return self.one(x) + self.other(-x)


def test_a_chain_that_two_parents_share_runs_in_both(tmp_path):
    torch.manual_seed(0)
    model, x = Parents().train(), torch.randn(3, 8)
    twin = copy.deepcopy(model)
    opt = all_of(model, x, training=True, cache_dir=tmp_path)
    assert len(opt.report.replaced) == 2 and {row.path for row in opt.report.replaced} == {"one.0.0"}
    for each in (opt, twin):
        each(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            mine.mul_(2.0)
    same(opt, model, x)


def test_hooks_of_a_part_run_around_it_whenever_they_came(tmp_path):
    """One that is there before is heard at each call, with real values; one that comes later sends the whole to the model's own modules."""
    model, x, heard = nn.Sequential(layers(), nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 8), []
    model[0].register_forward_hook(lambda module, given, result: heard.append(type(result)) or 2.0 * result)
    opt = all_of(model, x, cache_dir=tmp_path)
    assert [row.path for row in opt.report.replaced] == ["1", "0.0", "0.2"]
    heard.clear()
    same(opt, model, x)
    assert heard == [torch.Tensor, torch.Tensor] and not opt.fallbacks
    handle = model[1].register_forward_pre_hook(lambda module, given: (given[0] + 1.0,))
    with pytest.warns(UserWarning, match="a part of it has hooks by now"):
        same(opt, model, x)
    handle.remove()
    same(opt, model, x)
    assert opt.fallbacks.total() == 1


def test_parts_of_other_types_stay(tmp_path):
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wide, self.narrow = nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8).bfloat16()

        def forward(self, x):
            x = torch.relu(self.first(x))
            x = torch.relu(self.wide(x.double())).float()
            return torch.relu(self.narrow(x.bfloat16())).float()

    torch.manual_seed(0)
    model, x = Wide().eval(), torch.randn(3, 8)
    opt = all_of(model, x, cache_dir=tmp_path)
    assert {(row.path, row.precision) for row in opt.report.replaced} == {("first", "fp32"), ("narrow", "bf16")}
    assert "float64" in next(row.why for row in opt.report.rows if row.path == "wide")
    with torch.no_grad():
        torch.testing.assert_close(opt(x), model(x), rtol=2e-2, atol=2e-2)


def test_parameters_of_another_class_stay(tmp_path):
    class Own(nn.Parameter):
        pass

    model, x = layers(), torch.randn(3, 8)
    model[0].weight = Own(model[0].weight.detach())
    opt = all_of(model, x, cache_dir=tmp_path)
    assert "its parameters are Own and Parameter" in reasons(opt.report) or "its parameters are Own" in reasons(opt.report)
    assert [row.chain for row in opt.report.replaced] == ["relu -> linear -> tanh"]
    same(opt, model, x)


def test_without_a_compiler_every_chain_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "cache"))
    model, x = layers(), torch.randn(3, 8)
    opt = all_of(model, x, cache_dir=tmp_path / "packages")
    assert {row.status for row in opt.report.rows} == {"failed"} and all("no-compiler" in row.why for row in opt.report.rows), reasons(opt.report)
    same(opt, model, x)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_command_says_so(tmp_path):
    (tmp_path / "model.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(8, 8), torch.randn(2, 8)\n")
    done = CliRunner().invoke(main, ["optimize", f"{tmp_path / 'model.py'}:build", "--device", "cuda"])
    assert done.exit_code == 1 and done.output.startswith("Error: ") and "cuda" in done.output.lower() and isinstance(done.exception, SystemExit)


def test_what_the_model_raises_is_raised_and_leaves_no_mark():
    model = layers()
    kept = [(dict(vars(part)), dict(part._buffers)) for part in model.modules()]
    for given in ((torch.randn(3, 7),), (), (torch.randn(3, 8), 1)):
        with pytest.raises((RuntimeError, TypeError)):
            fsk.explain(model, *given)
    assert kept == [(vars(part), part._buffers) for part in model.modules()]


def test_a_model_without_shapes_is_refused_untouched():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU()).eval()
    with pytest.raises(ValueError, match="0.weight has no shape yet; call the model once"):
        fsk.explain(model, torch.randn(2, 8))
    assert model(torch.randn(2, 8)).shape == (2, 4)
