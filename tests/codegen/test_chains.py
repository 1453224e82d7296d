"""Results that are taken once more: by the cpu target's kernels against PyTorch, and the statements that CUDA kernels get."""

from __future__ import annotations

import re
import shutil

import pytest

from codegen.ir.fused_form import departure
from codegen.manifest import manifest_text
from codegen.package import make_package
from codegen.plan import Refusal, plan
from codegen.render import render, render_kernel
from codegen.spec import SpecError
from tests import tiers
from tests.codegen.cpu_chains import build, conv_chain, linear_chain, make_spec
from tests.codegen.test_cpu import PRECISIONS, check

POOL = {"max_pool2d": {"name": "pool", "kernel_size": 3, "stride": 2, "padding": 1}}
SHARED_ROWS = {"max_pool2d": {"name": "pool", "kernel_size": 2}}


def named(operator: str, **values) -> dict:
    return {operator: {"name": f"the_{operator}", **values}}


TAPS = {
    "twice": ([], [named("leaky_relu"), {"add": {"from": "the_leaky_relu"}}]),
    "squared": ([named("tanh"), {"mul": {"from": "the_tanh"}}], [{"mul": {"from": "norm"}}]),
    "product": ([], ["tanh", "hardswish", {"add": {"from": "PRODUCER"}}]),
    "input": (["relu", named("add", value=0.5)], ["silu", {"mul": {"from": "the_add"}}, "tanh"]),
    "norm": ([], [{"mul": {"name": "scale", "shape": [1]}}, "sigmoid", {"mul": {"from": "norm"}}]),
    "before": (["tanh", named("elu"), {"add": {"from": "PRODUCER"}}, "relu", {"mul": {"from": "the_elu"}}], []),
    "several": ([named("relu"), "tanh", {"add": {"from": "the_relu"}}], [named("silu"), "relu", {"add": {"from": "norm"}}, {"mul": {"from": "the_silu"}}]),
}


def renamed(steps: list, producer: str) -> list:
    text = lambda step: {k: {a: producer if v == "PRODUCER" else v for a, v in arguments.items()} for k, arguments in step.items()}  # noqa: E731
    return [text(step) if isinstance(step, dict) else step for step in steps]


def linear(name: str, channels: int = 60, groups: int = 5) -> list:
    before, after = TAPS[name]
    return linear_chain(renamed(before, "gemm"), renamed(after, "gemm"), channels, groups)


def conv(name: str, tail: tuple = (), channels: int = 12, groups: int = 3) -> list:
    before, after = TAPS[name]
    return conv_chain(renamed(before, "conv"), [*renamed(after, "conv"), *tail], channels, groups)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@tiers.shares
@pytest.mark.parametrize("name", TAPS)
def test_results_taken_once_more(tmp_path, name: str, share: str) -> None:
    """Behind a linear, behind a convolution, in front of poolings whose windows share rows or not, and behind a pooling."""
    behind = (SHARED_ROWS, "tanh", {"add": {"from": "pool"}})
    specs = []
    for precision in PRECISIONS:
        specs.append(make_spec(tmp_path, linear(name), 4, precision))
        specs += [make_spec(tmp_path, conv(name, tail), 2, precision, (9, 70)) for tail in ((), (POOL,), behind)]
    for chain in build(tmp_path, tiers.share_of(share, TAPS, name, specs)):
        check(chain, chain.source(), steeper=2.0 if name == "squared" else 1.0)


@pytest.mark.parametrize("name", TAPS)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_cuda_kernels_keep_what_is_taken_once_more(tmp_path, name: str, target: str) -> None:
    """Every variable that is kept is read further on in the same function; a target that keeps nothing says so."""
    chains = [linear(name, 512, 8), linear(name, 3 * 8192, 1), conv(name), conv(name, (POOL,)), conv(name, (SHARED_ROWS, "tanh", {"add": {"from": "pool"}}))]
    chains[0][0]["linear"]["in_features"] = chains[1][0]["linear"]["in_features"] = 1024
    for chain in chains:
        spec = make_spec(tmp_path, chain, 160, "fp32", None if "linear" in chain[0] else (12, 20))
        try:
            planned = plan(spec, target)
        except Refusal as error:
            assert target == "sm_90a" and len(str(error)) > 40
            continue
        kept = [variable for kernel in planned.kernels for variable in re.findall(r"const float (\w+_kept) = ", render_kernel(planned, kernel))]
        assert len(kept) >= len(spec.kept(spec.chain)) and (target == "sm_80" or not kept)
        for kernel in planned.kernels:
            text = render_kernel(planned, kernel)
            for variable in set(re.findall(r"\b\w+_kept\b", text)):
                first = re.search(rf"\b{variable}\b", text)
                assert text[: first.start()].endswith("const float ") and len(re.findall(rf"\b{variable}\b", text)) >= 2


def test_gradients_are_generated_whatever_is_taken_once_more(tmp_path) -> None:
    for name in TAPS:
        package = make_package(make_spec(tmp_path, linear(name), 4), ("cpu", "sm_80"))
        files = render(package)
        assert {"cpu_backward.cpp", "backward_sm80.cu"} <= set(files) and '"backward": {}' not in manifest_text(package, files)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ([], [{"add": {"from": "nowhere"}}], "nowhere is no operator in front of this one"),
        ([], [{"add": {"from": "later"}}, {"relu": {"name": "later"}}], "later is no operator in front of this one"),
        ([], [SHARED_ROWS, {"add": {"from": "norm"}}], r"\(2, 8, 8, 8\) does not broadcast with the value\'s \(2, 8, 4, 4\)"),
        ([], [{"add": {"from": "norm", "value": 2.0}}], "add: give either shape"),
        ([], [{"add": {"from": 3}}], "3 is no identifier"),
    ],
)
def test_what_cannot_be_taken_once_more(tmp_path, before: list, after: list, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(tmp_path, conv_chain(before, after, 8, 2), 2, "fp32", (8, 8))


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_a_result_from_before_the_norms_input_is_taken_by_a_plan_in_parts(tmp_path, target: str) -> None:
    spec = make_spec(tmp_path, conv_chain(["relu"], [{"add": {"from": "conv"}}], 8, 2), 2, "fp32", (8, 8))
    assert departure(spec.chain) == "add takes a result from before the norm's input"
    assert any(line.startswith("parts, ") and departure(spec.chain) in line for line in plan(spec, target).why)
