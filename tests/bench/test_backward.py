"""Forward and backward timed together: what is compared with what, that a wrong gradient shows, and where the figures are kept."""

import json
from pathlib import Path

import pytest
import torch

from bench import backward as module
from bench.backward import exact_gradients, measure_backward, relative_errors, step_of, table_of
from bench.machine import describe
from bench.records import backward_keys, find, with_backward_of
from bench.subject import construct, emit
from bench.timing import Ceilings
from tests.fsk import fsk

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
TENSORS = {"x", "gemm.weight", "gemm.bias", "group_norm.weight", "group_norm.bias"}


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "cache"))


def test_ours_beside_peers_with_each_gradients_error(small):
    made = measure_backward(small, construct(small, CPU), CPU, describe(CPU), ("eager", "graph"), budget_s=0.1)
    assert set(made["peers"]) == {"eager"} and made["failed"] == {} and made["best_torch"] == "eager"  # what cannot train is left out
    for row in (made["ours"], made["peers"]["eager"]):
        assert row["ms"] > 0 and row["trials"] >= 5 and row["rel_errors"].keys() == TENSORS and row["peak_bytes"] is None
        assert all(error < 1e-5 for error in row["rel_errors"].values()), row  # fp32 on sums of at most 1024 products, no kink met
    assert made["target"] == "cpu" and made["key"] == small.manifest["backward"]["cpu"]["source_key"]
    shown = table_of("name", "fp32", "card", made)
    assert [column.header for column in shown.columns][5:] == list(made["ours"]["rel_errors"]) and shown.row_count == 2
    json.dumps(made)


def test_a_wrong_gradient_shows(small):
    class Wrong(small.module.Model):
        def forward(self, x):
            y = super().forward(x)
            return y + (self.gemm.bias - self.gemm.bias.detach())  # the right value, and a gradient too many

    made = measure_backward(small, Wrong(*small.module.get_init_inputs()), CPU, describe(CPU), (), budget_s=0.1)
    errors = made["ours"]["rel_errors"]
    assert errors.pop("gemm.bias") > 0.1 and max(errors.values()) < 1e-5
    assert made["best_torch"] is None and made["speedup_torch"] is None


def test_a_peer_that_cannot_be_run_is_a_fact(small, monkeypatch):
    def broken(name, *rest):
        raise RuntimeError("no such backend\nand more")

    monkeypatch.setattr(module, "_peer", broken)
    made = measure_backward(small, construct(small, CPU), CPU, describe(CPU), ("eager",), budget_s=0.1)
    assert made["failed"] == {"eager": "RuntimeError: no such backend"} and made["peers"] == {}


@pytest.mark.slow
def test_torch_compile_trains_beside_ours(small):
    made = measure_backward(small, construct(small, CPU), CPU, describe(CPU), ("compile",), budget_s=0.1)
    assert made["failed"] == {} and max(made["peers"]["compile"]["rel_errors"].values()) < 1e-5


def test_exact_gradients_are_the_same_in_chunks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    emitted = emit("specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml", target="cpu")
    torch.manual_seed(0)
    model, (x,) = emitted.module.Model(*emitted.module.get_init_inputs()), emitted.module.get_inputs()
    grad_y = torch.randn(emitted.spec.output_shape)
    chunked, whole = exact_gradients(model, x, grad_y, True), exact_gradients(model, x, grad_y, False)
    assert max(relative_errors(chunked, whole).values()) < 1e-12
    assert max(relative_errors(step_of(model, model, x.requires_grad_(), grad_y)(), whole).values()) < 1e-2  # one window may choose another value in fp32


def test_the_command_keeps_them_in_the_forwards_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = "specs/gemm_groupnorm_hardtanh_small.yaml"
    monkeypatch.setattr("bench.run.measure_ceilings", lambda where: Ceilings(10.0, 0.1, 0.1, 0.1, 0.1))
    run = lambda *more: fsk("bench", spec, "--device", "cpu", "--peers", "eager", "--seconds", "0.1", *more)  # noqa: E731
    result = run("--backward")
    assert result.exit_code == 0 and "forward and backward on CPU" in result.output and "of the roofline" not in result.output
    result = run("--backward", "--results", "results")
    assert result.exit_code == 0 and "of the roofline" in result.output, "there was no record of the forward"
    recorded = lambda: find(tmp_path / "results", "cpu", "gemm_groupnorm_hardtanh_small", "fp32")  # noqa: E731
    first = recorded()
    assert first["backward"]["ours"]["rel_errors"].keys() == TENSORS and first["backward"]["key"] == backward_keys(spec, "fp32")["cpu"]
    result = run("--backward", "--results", "results")
    second = recorded()
    assert "of the roofline" not in result.output and {**second, "backward": None} == {**first, "backward": None}
    run("--results", "results")
    assert recorded()["backward"] == second["backward"], "timing the forward again leaves them"


def test_a_new_record_keeps_what_the_old_one_says_of_the_backward():
    assert with_backward_of({"a": 2}, {"a": 1, "backward": {"b": 3}}) == {"a": 2, "backward": {"b": 3}}
    assert with_backward_of({"a": 2}, {"a": 1}) == with_backward_of({"a": 2}, None) == {"a": 2}
