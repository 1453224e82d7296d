"""Values flow through a plan: what a step reads, an earlier one wrote, and nothing is written for nobody; what a source names, it defines. Over random specs and all targets."""

import re
from dataclasses import replace

import pytest

from bench.sweep.draw import LARGE
from codegen.plan import Library, Refusal
from codegen.plan.model import Plan
from codegen.plan.planner import planned
from codegen.plan.route import Request
from codegen.render import render_kernel
from codegen.targets import DEVICES, TARGETS
from tests import tiers
from tests.fused_draw import draw


def names(step) -> list[str]:
    """What a step names, its result last."""
    return [*(name for name in step.arguments if name is not None), *([step.out] if isinstance(step, Library) else [])]


def assert_flows(planned: Plan) -> None:
    buffers = [buffer.name for buffer in planned.buffers]
    assert len(set(buffers)) == len(buffers)
    places = {name: [at for at, step in enumerate(planned.steps) if name in names(step)] for name in (*buffers, "y")}
    for name in buffers:
        assert len(places[name]) >= 2, f"{name} is named by steps {places[name]} alone: written and not read, or read and not written"
        writer = planned.steps[places[name][0]]
        assert writer.out == name if isinstance(writer, Library) else name in writer.arguments
    assert places["y"] and places["y"][-1] == len(planned.steps) - 1
    known = {"x", "y", *buffers, *(key for key, _ in planned.spec.parameters)}
    for step in planned.steps:
        assert set(names(step)) <= known


def assert_constants_are_there(planned: Plan) -> None:
    """A template names a number that the plan must have listed."""
    for kernel in planned.kernels:
        text = re.sub(r"//.*", "", render_kernel(planned, kernel))
        named = set(re.findall(r"\bk[A-Z]\w*", text))
        given = set(re.findall(r"\bconstexpr [^=;]*?\b(k[A-Z]\w*)(?:\[\])? =", text))
        given |= set(re.findall(r"\b__constant__ const \w+ (k[A-Z]\w*)\[", text)) | set(re.findall(r"\bconstexpr [^;]*, (k[A-Z]\w*)(?:\[\])? =", text))
        given |= {name for parameters in re.findall(r"\btemplate <([^>]*)>", text) for name in re.findall(r"\bk[A-Z]\w*", parameters)}
        given |= {name for names in re.findall(r"\benum \w+ \{([^}]*)\}", text) for name in re.findall(r"\bk[A-Z]\w*", names)}
        assert named <= given, f"{kernel.file(planned.target)} names {', '.join(sorted(named - given))}"


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
@pytest.mark.parametrize("start", tiers.quick(range(0, 400, 100), 0))
def test_what_a_step_reads_an_earlier_one_wrote(tmp_path, target, start):
    count = 0
    for index in range(start, start + 100):
        spec = draw(3, index, LARGE, tmp_path)
        try:
            asked = replace(spec, gemm="generated") if target == "sm_90a" else spec  # also where another is estimated faster
            found = planned(Request(asked, TARGETS[target], DEVICES[TARGETS[target].default_device]))
        except Refusal:
            continue
        assert_flows(found)
        assert_constants_are_there(found)
        count += 1
    assert count >= 10
