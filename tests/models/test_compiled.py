"""The backend of torch.compile and the pass of Inductor: what they put into a graph computes the same, nothing is recompiled, and caches stay of use."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import fixed_shape_kernels as fsk
from fixed_shape_kernels.models import compiled, judge
from tests.models.twins import backward_both, same_gradients_and_buffers

TOP = Path(__file__).parents[2]


class Net(nn.Module):
    """A convolution with batch norm, a linear layer, a bare parameter, a buffer, and an operator that no chain has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.head, self.norm = nn.Linear(512, 6), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.register_buffer("shift", torch.ones(6))

    def forward(self, x):
        x = torch.cumsum(self.body(x), 2)
        return F.gelu(self.norm(self.head(x.flatten(1)))) * self.scale + self.shift


def example(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def fresh(one_thread):
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def compiled_net(model: nn.Module, folder: Path, **options):
    """(the compiled model, the reports of its graphs): every chain that is right, however slow here."""
    reports: list = []
    options = {"min_gain": 0.0, "against": "eager", "cache_dir": str(folder), "on_report": reports.append} | options
    return torch.compile(model, backend="fixed_shapes", fullgraph=True, dynamic=False, options=options), reports


def test_chains_run_in_one_graph_that_is_compiled_once_and_judged_once(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, x = Net().eval(), example()
    call, reports = compiled_net(model, folder)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-6)
        (report,) = reports
        assert [(row.path, row.chain) for row in report.replaced] == [("body.0", "conv2d -> batch_norm -> relu"), ("head", "flatten -> linear -> layer_norm -> gelu -> mul -> add")]
        assert all(row.error < 1e-6 and row.where.startswith("test_compiled.py:") for row in report.replaced)
        assert counters["stats"]["unique_graphs"] == 1 and counters["aot_autograd"]["autograd_cache_saved"] == 1 and not counters["aot_autograd"]["autograd_cache_bypass"]
        model.head.weight.mul_(3.0)  # the parameters are inputs of the graph
        torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-6)
        torch._dynamo.reset()
        counters.clear()
        monkeypatch.setattr(judge, "compared", lambda *given: pytest.fail("judged again"))
        again, reports = compiled_net(model, folder)
        torch.testing.assert_close(again(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(reports[0].replaced) == 2


def test_training_gives_the_model_s_gradients_and_running_statistics(folder):
    torch.manual_seed(0)
    model = Net().train()
    twin = copy.deepcopy(model)
    call, reports = compiled_net(model, folder)
    for _ in range(2):
        backward_both(call(example()), twin(example()))
    same_gradients_and_buffers(model, twin)
    assert [row.chain for row in reports[0].replaced] == ["conv2d -> batch_norm -> relu", "flatten -> linear -> layer_norm -> gelu -> mul -> add"]


class Writes(nn.Module):
    """Writes over what a chain would take, and over something else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x, other):
        h = self.head(x)
        other.add_(1.0)
        kept = torch.tanh(h)
        h[0] = 0.0
        h[:, 0].mul_(2.0)
        return self.norm(kept + h) + other


def test_operators_in_place_keep_their_effect(folder):
    """A model of torch.compile may write into slices, which a trace of modules cannot."""
    torch.manual_seed(0)
    model = Writes().eval()
    call, reports = compiled_net(model, folder)
    with torch.no_grad():
        mine, theirs = torch.ones(6), torch.ones(6)
        x = torch.randn(4, 6)
        torch.testing.assert_close(call(x, mine), model(x, theirs), rtol=1e-5, atol=1e-6)
    assert torch.equal(mine, theirs) and reports


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda call: (torch._dynamo.mark_dynamic(x := torch.randn(5, 6), 0), call(x))[1], "sizes of its tensors change"),
        (lambda call: torch.autocast("cpu", dtype=torch.bfloat16)(call)(torch.randn(3, 6)), "autocast is on"),
    ],
)
def test_what_the_graph_is_left_to_inductor_for_is_named(prepare, why, folder):
    model, reports = Turns().eval(), []
    call = torch.compile(model, backend="fixed_shapes", options={"min_gain": 0.0, "against": "eager", "cache_dir": str(folder), "on_report": reports.append})
    with torch.no_grad():
        prepare(call)
    assert any(why in row.why for row in reports[-1].rows) and not reports[-1].replaced


def test_a_parameter_of_a_subclass_or_a_weight_that_is_computed_stays(folder):
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return torch.tanh(F.linear(x, self.weight * 2.0))

    model, x = Computed().eval(), torch.randn(3, 6)
    call, reports = compiled_net(model, folder)
    with torch.no_grad():
        torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-6)
    assert not reports[0].replaced and [row.status for row in reports[0].rows] == ["unsupported"] and reports[0].rows[0].why


def test_options_that_nobody_has_are_refused_with_the_nearest_name():
    gm = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(ValueError, match="'min_gian' is an option neither of fixed_shapes .* did you mean min_gain"):
        compiled.fixed_shapes(gm, [], options={"min_gian": 1.0})
    with pytest.raises(ValueError, match="against: 'tvm'; inductor or eager"):
        compiled.fixed_shapes(gm, [], options={"against": "tvm"})
    with pytest.raises(ValueError, match="max_autotune: no option of this pass"):
        fsk.inductor_pass(max_autotune=True)


def test_strict_says_what_stays(folder):
    call, _ = compiled_net(Turns().eval(), folder, strict=True, min_gain=1e9)
    with pytest.raises(Exception, match="slower"), torch.no_grad():
        call(torch.randn(3, 6))


ORDERS = {
    "fsk first": "import fixed_shape_kernels, sys; assert 'torch' not in sys.modules; import torch",
    "torch first": "import torch; import fixed_shape_kernels",
    "behind the list": "import torch; torch.compiler.list_backends(); import fixed_shape_kernels",
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_name_is_known_whatever_is_imported_first(order):
    code = f"{ORDERS[order]}\nassert 'fixed_shapes' in torch.compiler.list_backends()\nfrom torch._dynamo.backends.registry import lookup_backend\nlookup_backend('fixed_shapes')"
    subprocess.run([sys.executable, "-c", code], cwd=TOP, check=True, timeout=300)


@pytest.mark.slow
def test_inductor_s_code_is_what_a_chain_is_timed_beside(folder, tmp_path):
    torch.manual_seed(0)
    for training in (False, True):
        torch._dynamo.reset()
        model = Turns().train(training)
        call, reports = compiled_net(model, tmp_path, against="inductor")
        x = torch.randn(3, 6)
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-6)
        assert [row.status for row in reports[0].rows] == ["replaced"] and reports[0].rows[0].torch_ms


PASS = """
import torch, fixed_shape_kernels as fsk
from torch._dynamo.utils import counters
torch.manual_seed(0)
model, x, reports = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh()).eval(), torch.randn(3, 8), []
made = fsk.inductor_pass(min_gain=0.0, against="eager", cache_dir="packages", on_report=reports.append)
call = torch.compile(model, fullgraph=True, options={"pre_grad_custom_pass": made})
with torch.no_grad():
    torch.testing.assert_close(call(x), model(x), rtol=1e-5, atol=1e-6)
print(made.uuid(), [report.summary for report in reports], counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_a_second_process_takes_the_pass_s_graph_from_inductor_s_cache(tmp_path):
    run = lambda: subprocess.run(  # noqa: E731
        [sys.executable, "-c", PASS], cwd=tmp_path, check=True, timeout=300, capture_output=True, text=True, env={"PYTHONPATH": str(TOP), "PATH": "/usr/bin:/bin", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    ).stdout.split(None, 1)
    (first, said), (second, later) = run(), run()
    assert first == second and "1 of 1 chains replaced" in said and said.strip().endswith("0") and later.strip().endswith("1")
