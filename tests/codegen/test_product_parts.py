"""Products without a norm in plans: which kernels multiply, what their epilogues take of a chain, and the reasons that are given."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codegen.plan import Launch, Library, plan
from codegen.plan.model import Plan, Refusal
from codegen.spec import Spec, SpecError, load_spec
from tests.codegen.cpu_chains import make_spec

FIRST = {"linear": {"name": "first", "in_features": 1024, "out_features": 2048}}
SECOND = {"linear": {"name": "second", "in_features": 2048, "out_features": 512}}


def layer(folder: Path, *chain: Any, precision: str = "fp32", batch: int = 4096, **keys: Any) -> Spec:
    return replace(make_spec(folder, list(chain), batch, precision), **keys)


def kinds(found: Plan) -> list[str]:
    """The steps in order: the kernels without the number of their part, and library steps."""
    return [step.kernel.name.split("_", 1)[1] if isinstance(step, Launch) else f"torch {step.operation}" for step in found.steps]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_element_wise_operators_end_in_the_epilogue(tmp_path, target):
    found = plan(layer(tmp_path, FIRST, "silu", {"add": {"name": "shift", "shape": [2048]}}, {"add": {"from": "first"}}), target, "h200")
    assert kinds(found)[-1] == "gemm" and not any(isinstance(step, Library) for step in found.steps)
    assert found.steps[-1].arguments[-1] == "y" and {"first.bias", "shift"} <= set(found.steps[-1].arguments)


def test_costly_operators_wait_for_a_kernel_that_hides_them(tmp_path):
    """One that reads the result anyway, or at 16 bits a pass of its own; what is cheap, or has neither, is in the epilogue."""
    ends = lambda precision, *tail: kinds(plan(layer(tmp_path, FIRST, *tail, precision=precision, gemm="generated"), "sm_90a", "h200"))[-2:]  # noqa: E731
    assert ends("fp32", "relu", "gelu") == ["split_x", "gemm"] and ends("fp32", "gelu", {"softmax": {"dim": 1}}) == ["gemm", "rows"]
    assert ends("bf16", "relu", "gelu") == ["gemm", "map"] and ends("bf16", "relu", {"mul": {"value": 2.0}}) == ["gemm"]
    found = plan(layer(tmp_path, FIRST, {"relu": {"name": "act"}}, "gelu", {"add": {"from": "first"}}, precision="bf16", gemm="generated"), "sm_90a", "h200")
    assert kinds(found) == ["gemm", "map"] and found.steps[0].arguments[-1] == "value:0"  # reused behind the costly one


def test_each_product_of_a_chain_is_a_part(tmp_path):
    found = plan(layer(tmp_path, FIRST, "gelu", SECOND, {"softmax": {"dim": 1}}), "sm_90a", "h200")
    assert kinds(found) == ["split_x", "gemm", "split_x", "gemm", "rows"]


def test_what_a_later_operator_reuses_ends_a_part(tmp_path):
    found = plan(layer(tmp_path, FIRST, {"relu": {"name": "act"}}, "tanh", {"softmax": {"dim": 1}}, {"mul": {"from": "act"}}), "sm_90a", "h200")
    gemm = next(step for step in found.steps if isinstance(step, Launch) and step.kernel.name.endswith("gemm"))
    assert [item.comment for item in gemm.kernel.before] == ["relu()"] and gemm.arguments[-1] == "value:1"


def test_a_value_without_its_gradient_is_one_of_the_forward(tmp_path):
    found = plan(layer(tmp_path, FIRST, {"mul": {"value": 0.5}}, {"add": {"from": "first", "detach": True}}), "sm_90a", "h200")
    assert kinds(found) == ["split_x", "gemm"]


def test_few_results_of_a_long_sum_are_added_by_the_kernel_that_ends_the_chain(tmp_path):
    long = {"linear": {"name": "first", "in_features": 32768, "out_features": 256}}
    found = plan(layer(tmp_path, long, "relu", batch=128, gemm="generated"), "sm_90a", "h200")
    assert kinds(found)[-2:] == ["gemm", "end_slices"] and found.steps[-1].arguments[-1] == "y"


def test_the_library_multiplies_where_it_is_estimated_faster(tmp_path):
    spec = layer(tmp_path, FIRST, "relu", precision="fp16")
    found = plan(spec, "sm_80", "h200")
    assert kinds(found)[0] == "torch linear" and any("torch's GEMM: " in reason and "against" in reason for reason in found.why)
    assert "gemm" in kinds(plan(replace(spec, gemm="generated"), "sm_80", "h200"))
    with pytest.raises(Refusal):  # of this target, where nothing of ours is left
        plan(replace(spec, gemm="library"), "sm_90a", "h200")


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_long_sums_at_tf32_are_left_to_the_library(tmp_path, target):
    """What tensor cores cut off would be more than the error of rounded operands where all products have one sign; for results so few the vendor cuts K into parts."""
    few = {"linear": {"name": "first", "in_features": 1024, "out_features": 512}}
    with pytest.raises(Refusal, match="loses more to truncation than tf32 allows"):
        plan(layer(tmp_path, few, "relu", precision="tf32", gemm="generated", batch=256), target, "h200")
    short = {"linear": {"name": "first", "in_features": 512, "out_features": 2048}}
    assert "gemm" in kinds(plan(layer(tmp_path, short, "relu", precision="tf32", gemm="generated"), target, "h200"))


def test_long_sums_at_tf32_are_ours_on_hopper_where_results_are_many(tmp_path):
    """The vendor's TF32 adds 8 products at a time and loses more than our halves, of which 16 are added; the promise allows what PyTorch shows."""
    spec = layer(tmp_path, FIRST, "relu", precision="tf32", gemm="generated", batch=2048)
    assert "gemm" in kinds(plan(spec, "sm_90a", "h200"))
    with pytest.raises(Refusal, match="loses more to truncation"):
        plan(spec, "sm_80", "a100")


def test_promotion_restores_what_truncation_takes_of_products_alone(tmp_path):
    """Averages of results would have it whole; a norm divides by it."""
    norm = {"group_norm": {"name": "norm", "num_groups": 8}}
    alone, normed = (plan(layer(tmp_path, FIRST, *tail), "sm_90a", "h200") for tail in (["relu"], ["relu", norm]))
    restored = [{c.name: c.text for c in launch.kernel.constants}.get("kRestored") for found in (alone, normed) for launch in found.steps if launch.kernel.name.endswith("gemm")]
    assert restored == ["1.0000001f", None]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
def test_a_weight_without_a_module_is_multiplied_too(tmp_path, target):
    bare = {"linear": {"name": "first", "in_features": 1024, "out_features": 2048, "bias": False, "init": "randn"}}
    found = plan(layer(tmp_path, bare, {"div": {"value": 2.0}}, {"max": {"dim": 1}}), target, "h200")
    assert kinds(found)[-2:] == ["gemm", "rows"] and "first" in found.steps[-2].arguments


def test_the_cpu_leaves_products_to_the_library(tmp_path):
    assert kinds(plan(layer(tmp_path, FIRST, "relu"), "cpu")) == ["torch linear", "map"]


def test_a_kernel_of_ours_that_is_asked_for_and_cannot_be_is_refused_with_the_reason(tmp_path):
    short = {"linear": {"name": "first", "in_features": 40, "out_features": 2048}}
    with pytest.raises(Refusal, match="in_features: 40 gives fewer than"):
        plan(layer(tmp_path, short, "relu", gemm="generated"), "sm_90a", "h200")


DROPPED = (FIRST, "relu", {"dropout": {"p": 0.5}}, {"softmax": {"dim": 1}})


@pytest.mark.parametrize(
    ("library", "chain", "target", "refused"),
    [
        ("forbid", (FIRST, "relu"), "sm_90a", None),
        ("forbid", (FIRST, "relu"), "cpu", "library: forbid leaves linear to no one"),
        ("producers", (FIRST, "relu"), "cpu", None),
        ("producers", DROPPED, "cpu", "library: producers leaves dropout to no one"),
        ("forbid", DROPPED, "sm_90a", "library: forbid leaves dropout to no one"),
        ("allow", DROPPED, "cpu", None),
    ],
)
def test_what_the_library_may_compute(tmp_path, library, chain, target, refused):
    spec = layer(tmp_path, *chain, library=None if library == "allow" else library)
    with pytest.raises(Refusal, match=refused) if refused else nullcontext():
        plan(spec, target)


def test_where_the_library_is_forbidden_kernels_of_ours_multiply_whatever_the_estimates_say(tmp_path):
    assert "gemm" in kinds(plan(layer(tmp_path, FIRST, "relu", precision="fp16", library="forbid"), "sm_80", "h200"))


def test_a_library_that_is_asked_for_and_forbidden_is_a_fault_of_the_spec(tmp_path):
    path = tmp_path / "layer.yaml"
    path.write_text("name: layer\nbatch: 4\ngemm: library\nlibrary: forbid\nchain:\n- linear: {name: a, in_features: 8, out_features: 8}\n")
    with pytest.raises(SpecError, match="library: forbid contradicts gemm: library"):
        load_spec(path)
