"""The sanitizer's child runs only our kernels on the device, and its report is read rightly."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from bench import sanitize
from codegen import index
from codegen.package import make_package
from codegen.spec import load_spec
from runtime import launch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(launch, "call_of", launch.call_of)  # so that the original comes back
    sanitize.compute_library_steps_on_the_cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_library_steps_are_computed_in_float32_on_the_cpu(patched, dtype):
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 8, 5, 5), (4, 4, 3, 3), (4,)))
    options = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 2}
    y = launch.call_of("conv2d", options, "fp32")(x, weight, bias)
    assert torch.equal(y, F.conv2d(x.float(), weight.float(), bias.float(), padding=1, groups=2).to(dtype)) and y.is_contiguous()
    a, b = x.flatten(1), torch.randn(6, 200).to(dtype)
    assert torch.equal(launch.call_of("linear", {}, "fp32")(a, b, None), F.linear(a.float(), b.float()).to(dtype))


def test_no_library_call_is_made_for_another_device(monkeypatch):
    """The runtime's factory is asked for fp32 and gets operands of the CPU, whatever device the program is for: no CUDA flag, no cuBLAS."""
    seen, factory, cpu = [], launch.call_of, torch.Tensor.cpu

    def watched(name, options, precision):
        compute = factory(name, options, precision)
        return lambda *operands: seen.append((precision, {operand.device.type for operand in operands})) or compute(*operands)

    monkeypatch.setattr(launch, "call_of", watched)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda v: torch.zeros(v.shape) if v.is_meta else cpu(v))
    sanitize.compute_library_steps_on_the_cpu()
    y = launch.call_of("linear", {}, "tf32")(*(torch.empty(shape, device="meta") for shape in ((2, 3), (4, 3), (4,))))
    assert seen == [("fp32", {"cpu"})] and y.device.type == "meta" and y.shape == (2, 4)


def test_the_tools_report_is_read():
    clean = sanitize.parse("finite results: 5 of 5\n========= ERROR SUMMARY: 0 errors\n", 0)
    assert clean == {"clean": True, "summary": "ERROR SUMMARY: 0 errors", "errors": []}
    race = sanitize.parse("========= Error: Race reported between A\nfinite results: 5 of 5\n========= RACECHECK SUMMARY: 1 hazard displayed\n", 9)
    assert not race["clean"] and race["errors"] == ["Error: Race reported between A"]
    assert not sanitize.parse("========= ERROR SUMMARY: 0 errors\n", 0)["clean"]  # the model never ran
    assert sanitize.parse("", -1)["summary"] == "ended after the time allowed"


def test_jobs_cover_every_tool_and_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = sanitize._jobs([("specs/gemm_groupnorm_hardtanh_small.yaml", "fp32")], ["sm_80"], sanitize.TOOLS)
    assert [job.tool for job in jobs] == list(sanitize.TOOLS) and len({job.folder for job in jobs}) == 1
    assert jobs[0].identity == ("gemm_groupnorm_hardtanh_small", "fp32", "sm_80", sanitize.TOOLS[0]) and jobs[0].kernels


def test_every_checked_in_package_is_examined_by_the_kernels_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").symlink_to(ROOT / "codegen" / "specs")
    for path, precision in index.entries(ROOT / "generated"):
        spec = load_spec(path, precision)
        for plan in make_package(spec).plans:
            if plan.target.name == "cpu":
                continue
            _, kernels = sanitize.small_package(spec, plan.target.name)
            assert set(kernels) == {kernel.file(plan.target).removesuffix(".cu") for kernel in plan.kernels}, (path, precision, plan.target.name)


def jobs_of(*names, tool="memcheck", target="sm_80"):
    return [sanitize.Job(SimpleNamespace(name=name), target, tool, "key", Path(name), ("gemm_sm80",)) for name in names]


def test_a_child_examines_several_packages_of_one_tool_and_target():
    jobs = [*jobs_of(*"abc"), *jobs_of("d", target="sm_90a"), *jobs_of("e", tool="racecheck")]
    groups = [[job.spec.name for job in group] for group in sanitize._groups(jobs, 2)]
    assert sorted(groups) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_what_is_not_clean_together_is_examined_alone(monkeypatch):
    asked = []

    def examine(sanitizer, jobs, timeout_s, threads):
        asked.append(([job.spec.name for job in jobs], timeout_s))
        return {"clean": "b" not in asked[-1][0], "seconds": 1.0}

    monkeypatch.setattr(sanitize, "examine", examine)
    found = sanitize.examine_each("tool", jobs_of("a", "b", "c"), lambda: 100.0, 60.0, 1)
    assert [(job.spec.name, one["clean"]) for job, one in found] == [("a", True), ("b", False), ("c", True)]
    assert asked == [(["a", "b", "c"], 100.0), (["a"], 60.0), (["b"], 60.0), (["c"], 60.0)]
    assert sanitize.examine_each("tool", jobs_of("a", "c"), lambda: 100.0, 60.0, 1)[1][1]["clean"] and len(asked) == 5


def test_a_report_over_several_packages_needs_all_their_results():
    assert sanitize.parse("finite results: 5 of 5\nfinite results: 2 of 2\n", 0, 2)["clean"]
    assert not sanitize.parse("finite results: 5 of 5\n", 0, 2)["clean"]
