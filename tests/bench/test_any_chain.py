"""verify of chains beyond a producer and a norm: several inputs, two modes, running statistics, masks; and models that are wrong in known ways."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from bench.data import Draw
from bench.families import FAMILIES
from bench.machine import describe
from bench.measure import measure
from bench.subject import Subject, WholeTails, WithinStride, construct, emit
from bench.sweep.judge import judge
from bench.timing import Ceilings
from bench.verify import STATE_MARGIN, _examine, state_problems, table_of, verify
from runtime import products

CPU = torch.device("cpu")
MODES = """\
name: any_chain
batch: 6
inputs: {x: {shape: [8, 6, 10, 10]}, residual: {shape: [16, 1, 1, 1], batched: false}}
chain:
  - dropout: {p: 0.2}
  - avg_pool3d: {kernel_size: 2}
  - conv_transpose3d: {name: conv, in_channels: 8, out_channels: 16, kernel_size: 3, stride: 2, padding: 1, output_padding: 1}
  - batch_norm: {name: bn}
  - add: {from: residual}
  - dropout: {p: 0.3}
  - mul: {name: scale, shape: [1]}
  - div: {name: by, shape: [16, 1, 1, 1]}
"""
POOLED = """\
name: pooled
batch: 3
input: {depth: 6, height: 7, width: 8}
chain:
  - conv3d: {name: conv, in_channels: 4, out_channels: 6, kernel_size: 3}
  - avg_pool3d: {kernel_size: 2}
  - tanh
"""
TWO = """\
name: two_products
batch: 32
precision: tf32
chain:
  - linear: {name: a, in_features: 64, out_features: 48}
  - sigmoid
  - linear: {name: b, in_features: 48, out_features: 24}
  - logsumexp: {dim: 1}
"""


@pytest.fixture(scope="module")
def emitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    made = {}
    for text in (MODES, TWO):
        path = folder / f"{text.split()[1]}.yaml"
        path.write_text(text)
        made[path.stem] = emit(str(path), target="cpu")
    return made


def judged(emitted, change) -> dict[str, tuple[str, ...]]:
    """Verify the reference with `change(model, reference's forward, inputs)` in the place of its forward; what is wrong, by family and mode."""
    Model = emitted.module.Model

    class Candidate(Model):
        def forward(self, *inputs):
            return change(self, lambda *given: Model.forward(self, *given), inputs)

    ours = Candidate(*emitted.module.get_init_inputs())
    return {found.name: found.problems for found in verify(Subject(emitted, ours, CPU), repeats=1) if not found.ok}


def test_generated_models_are_right_in_both_modes(emitted):
    for one in emitted.values():
        found = verify(Subject(one, construct(one, CPU, "cpu"), CPU), repeats=1)
        assert all(finding.ok for finding in found), [finding.problems for finding in found]
        assert {finding.mode for finding in found} == ({"training", "evaluation"} if one.spec.has_modes else {""})
        assert {"benchmark", "shifted"} <= {finding.family.name for finding in found}


def test_running_statistics_that_stay_or_drift_are_caught(emitted):
    def frozen(model, correct, inputs):
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        y = correct(*inputs)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        return y

    found = judged(emitted["any_chain"], frozen)
    assert all(name.endswith("training") for name in found) and any("running_mean" in text for text in found["uniform, training"])
    assert any("num_batches_tracked" in text for text in found["uniform, training"])


def test_statistics_of_the_wrong_mode_are_caught(emitted):
    def always_running(model, correct, inputs):
        model.bn.eval()
        return correct(*inputs)

    assert "normal, training" in judged(emitted["any_chain"], always_running)


def test_a_dropout_of_another_mask_is_caught(emitted):
    def other(model, correct, inputs):
        torch.rand(1)
        return correct(*inputs)

    found = judged(emitted["any_chain"], other)
    assert found and all(name.endswith("training") for name in found)


def test_a_dropped_second_input_is_caught(emitted):
    found = judged(emitted["any_chain"], lambda model, correct, inputs: correct(inputs[0], torch.zeros_like(inputs[1])))
    assert {"benchmark, training", "normal, evaluation"} <= set(found)


def test_a_dropped_bias_of_a_second_product_is_caught(emitted):
    def wrong(model, correct, inputs):
        return torch.logsumexp(F.linear(torch.sigmoid(model.a(*inputs)), model.b.weight), 1)

    assert {"benchmark", "uniform", "normal", "shifted"} <= set(judged(emitted["two_products"], wrong))


def test_random_state_and_divisors_are_those_of_some_training(emitted):
    spec = emitted["any_chain"].spec
    draw = Draw(spec, CPU, 0)
    inputs, parameters = draw.finish(*FAMILIES["shifted"].make(draw))
    assert [tuple(given.shape) for given in inputs] == [given.shape for given in spec.inputs]
    assert set(parameters) == {key for key, _ in spec.parameters} | {key for key, _, _ in spec.buffers}
    assert float(parameters["bn.running_var"].min()) > 0 and float(parameters["bn.running_mean"].std()) > 0
    assert parameters["bn.num_batches_tracked"].dtype is torch.int64 and float(parameters["by"].abs().min()) >= 0.5


def test_any_chain_is_timed_beside_its_peers(emitted):
    one = emitted["any_chain"]
    record = measure(one, construct(one, CPU, "cpu"), CPU, describe(CPU), Ceilings(10.0, 0.1, 0.1, 0.1, 0.1), ("eager", "library"), 0.2)
    assert record["ours"]["rel_error"] <= 3e-7 and record["speedup_torch"] > 0 and set(record["peers"]) == {"eager"}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_what_pytorch_lacks_in_16_bits_on_a_cpu_is_judged_and_said(tmp_path, precision):
    path = tmp_path / "pooled.yaml"
    path.write_text(POOLED)
    one = emit(str(path), precision, "cpu")
    lacked = [] if precision == "fp32" else ["avg_pool3d"]
    ours = construct(one, CPU, "cpu")
    subject = Subject(one, ours, CPU)
    found = verify(subject, repeats=1)
    assert all(finding.ok and finding.record().get("eager_in_fp32", []) == lacked for finding in found)
    assert all(row.get("eager_in_fp32", []) == lacked for row in judge(subject, ("benchmark",)))
    text = io.StringIO()
    Console(file=text, width=200).print(table_of(found, "pooled"))
    assert ("eager computes avg_pool3d in fp32 and rounds once" in text.getvalue()) == bool(lacked)
    x = torch.randn(one.spec.input_shape).to(getattr(torch, one.spec.precision.dtype))
    exact = copy.deepcopy(subject.eager).double()
    for model, v in ((ours, x.requires_grad_()), (exact, x.detach().double().requires_grad_())):
        model(v).sum().backward()
        wanted = v.grad
    assert float((x.grad.double() - wanted).norm() / wanted.norm()) <= 4 * torch.finfo(x.dtype).eps


def test_eager_that_cannot_run_is_a_peer_that_failed(tmp_path):
    path = tmp_path / "pooled.yaml"
    path.write_text(POOLED)
    one = emit(str(path), "fp16", "cpu")
    record = measure(one, construct(one, CPU, "cpu"), CPU, describe(CPU), Ceilings(10.0, 0.1, 0.1, 0.1, 0.1), ("eager",), 0.1)
    assert not record["peers"] and "avg_pool3d" in record["failed"]["eager"] and record["ours"]["ms"] > 0


OVERFLOWS = """\
name: overflows
batch: 1
precision: fp16
chain:
  - linear: {name: a, in_features: 16, out_features: 16384, bias: false}
  - rdiv: {value: -1.44}
  - group_norm: {name: norm, num_groups: 1}
  - tanh
"""


def test_draws_in_which_pytorch_overflows_judge_nothing_while_there_are_others(tmp_path):
    """-1.44 over a number near 0 is beyond fp16 now and then: eager's result is NaN there and its error 0, which ours cannot keep."""
    path = tmp_path / "overflows.yaml"
    path.write_text(OVERFLOWS)
    one = emit(str(path), target="cpu")
    subject = Subject(one, construct(one, CPU, "cpu"), CPU)
    draws = [_examine(subject, FAMILIES["normal"], "", 0, seed) for seed in range(1, 9)]
    assert {found.by.overflowed for found in draws} == {True, False}
    assert all(finding.ok for finding in verify(subject, repeats=1))


def test_running_statistics_at_tf32_are_held_to_the_tf32_model_too():
    """cuDNN takes fp32 for some convolutions though TF32 is allowed: its statistics are then closer than TF32's can be."""
    exact = {"mean": torch.rand(16, dtype=torch.float64) + 1.0}
    rounded = {"mean": exact["mean"].float() * (1 + 1e-4)}
    eager = {"mean": exact["mean"].float()}
    assert not state_problems(rounded, (eager, rounded), exact)
    assert "relative error 1.00e-04" in state_problems(rounded, (eager,), exact)[0]
    assert state_problems({"mean": rounded["mean"] * 1.001}, (eager, rounded), exact)


def test_the_tf32_model_s_running_statistics_are_those_that_are_asked(tmp_path, monkeypatch):
    path = tmp_path / "normed.yaml"
    path.write_text("name: normed\nbatch: 16\nprecision: tf32\nchain:\n  - linear: {name: a, in_features: 64, out_features: 48}\n  - batch_norm: {name: bn}\n")
    asked = []
    monkeypatch.setattr("bench.verify.state_problems", lambda ours, theirs, exact: asked.append((theirs, exact)) or [])
    one = emit(str(path), None, "cpu", tmp_path)
    subject = Subject(one, construct(one, CPU, "cpu"), CPU)
    _examine(subject, FAMILIES["normal"], "training", 0, 0)
    ((eager, model), exact) = asked[0]
    off = {name: float((state["bn.running_mean"].double() - exact["bn.running_mean"]).norm() / exact["bn.running_mean"].norm()) for name, state in (("eager", eager), ("model", model))}
    assert off["eager"] <= STATE_MARGIN * torch.finfo(torch.float32).eps < off["model"] < 1e-2


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_an_output_padding_that_cudnn_refuses_is_one_that_it_takes(rank, monkeypatch):
    monkeypatch.setattr(products, "on_cuda", lambda x: True)
    given = []
    original = getattr(F, f"conv_transpose{rank}d")
    layer = getattr(torch.nn, f"ConvTranspose{rank}d")(3, 4, 2, stride=2, dilation=6, output_padding=5).double()
    x = torch.randn(2, 3, *(4, 3, 5)[:rank], dtype=torch.float64)

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is original:
                given.append(list(args[5]))
            return func(*args, **(kwargs or {}))

    with Noting(), WithinStride():
        y = layer(x)
    torch.testing.assert_close(y, layer(x), rtol=1e-12, atol=1e-12)
    assert given[0] == [1] * rank


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_the_exact_gelu_keeps_its_small_values(approximate):
    v = torch.linspace(-12, 12, 2401, dtype=torch.float64)
    with WholeTails():
        y = torch.nn.GELU(approximate)(v)
    near = v > -3
    assert bool((y[v < 0] < 0).all())
    torch.testing.assert_close(y[near], F.gelu(v[near], approximate=approximate), rtol=1e-12, atol=0)
