"""Emitted sources: no helper that its kernel does not call, shared text is one text, comments keep to the width of a page."""

import re
from pathlib import Path

import pytest

from codegen.comments import WIDTH, wrapped
from codegen.emit import make_package
from codegen.index import entries, prepared
from codegen.plan.model import Plan
from codegen.render import TEMPLATES, render_kernel
from codegen.spec import load_spec
from bench.sweep.draw import LARGE, SMALL
from tests.fused_draw import draw

HELPER = re.compile(r"^__device__ __forceinline__ [\w:]+[&*]? (\w+)\(", re.MULTILINE)
SHIPPED = [(path, precision, False) for path, precision in entries(Path("generated"))] + [(path, precision, True) for path, precision in prepared(Path("generated"))]


def uncalled(text: str) -> set[str]:
    """Names of helpers that a CUDA source defines and nothing in it calls."""
    bare = re.sub(r"//[^\n]*", "", text)
    defined = HELPER.findall(bare)
    return {name for name in defined if len(re.findall(rf"\b{name}\b", bare)) == defined.count(name)}


def uncalled_of(plans: tuple[Plan, ...]) -> dict[str, set[str]]:
    found = {kernel.file(plan.target): uncalled(render_kernel(plan, kernel)) for plan in plans if plan.target.language == "cuda" for kernel in plan.kernels}
    return {file: names for file, names in found.items() if names}


def test_a_helper_without_a_call_is_noticed():
    assert uncalled("__device__ __forceinline__ float a(float v) { return v; }\n__device__ __forceinline__ float b() { return 1; }  // a\nx = b();") == {"a"}


@pytest.mark.parametrize(("path", "precision", "prepack"), SHIPPED)
def test_shipped_kernels_call_every_helper(path, precision, prepack):
    package = make_package(load_spec(path, precision, prepack))
    assert uncalled_of((*package.plans, *package.backward_plans)) == {}


@pytest.mark.parametrize("index", range(24))
def test_drawn_kernels_call_every_helper(index, tmp_path):
    package = make_package(draw(3, index, LARGE if index % 2 else SMALL, tmp_path))
    assert uncalled_of((*package.plans, *package.backward_plans)) == {}


def test_an_instruction_is_written_once():
    """Barriers, registers, fences and waits of Hopper's kernels stand in common/ alone; so does the type of moments."""
    texts = {path.relative_to(TEMPLATES): path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.rglob("*.j2"))}
    for words in ("mbarrier.init", "mbarrier.try_wait", "setmaxnreg", "cluster_ctarank", "barrier.cluster.arrive", "wgmma.mma_async", "wgmma.wait_group", "fence.proxy.async", "mapa.shared::cluster.u32 %0"):
        assert {path.parts[0] for path, text in texts.items() if words in text} == {"common"}, words
    assert [str(path) for path, text in texts.items() if "struct Moments {" in text] == ["common/statistics.cuh.j2"]


def too_wide(text: str) -> list[str]:
    """Lines of a source that are comments, stand behind its header and are wider than a page; headings stay in one line."""
    body = text[text.index("\n\n") :]
    return [line for line in body.splitlines() if line.lstrip().startswith("//") and not line.startswith("// ---") and len(line) > WIDTH]


@pytest.mark.parametrize("index", range(12))
def test_comments_keep_to_the_width_of_a_page(index, tmp_path):
    package = make_package(draw(5, index, LARGE if index % 2 else SMALL, tmp_path))
    texts = [render_kernel(plan, kernel) for plan in (*package.plans, *package.backward_plans) for kernel in plan.kernels]
    assert [too_wide(text) for text in texts] == [[]] * len(texts)
    assert all(wrapped(text) == text for text in texts)


def test_only_comments_that_are_too_wide_are_wrapped():
    wide = " ".join(["word"] * 30)
    text = f"// header: {wide}\n// more\n\n  // short\n  // lines\nint a;  // {wide}\n  // {wide}\n  // and on\n// --- {wide} ---\nint b;\n"
    lines = wrapped(text).splitlines()
    assert lines[:6] == text.splitlines()[:6] and lines[-2:] == text.splitlines()[-2:]
    assert lines[6:-2] == [f"  // {' '.join(['word'] * 23)}", f"  // {' '.join(['word'] * 7)} and on"]
