"""Programmatic dependent launch: a kernel that may be launched early waits for the one in front of it, before it reads anything."""

import re
from pathlib import Path

import pytest

from codegen.plan import plan
from codegen.render import render_kernel
from codegen.targets import CUDA_FLAGS
from runtime.kernel_report import device_code
from tests.codegen.gemm_cases import Case

REPOSITORY = Path(__file__).resolve().parents[2]
EARLY = "cudaLaunchAttributeProgrammaticStreamSerialization"
KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\((.*?)\) \{\n(.*?)\n\}\n", re.DOTALL)
MEMORY = re.compile(r"\b(?:ld|st|cp|atom|red)\.(?:async\.\w+\.shared\.)?global\S*")

SOURCES = sorted(path for target in ("sm80", "sm90a") for path in (REPOSITORY / "generated" / "exemplars").glob(f"*/*_{target}.cu"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in SOURCES}
# Hopper's GEMM and convolution have launchers of their own; the GEMM fetches W, which no kernel writes, before it waits for the split of x.
EARLY_SOURCES = [path for path, text in TEXTS.items() if EARLY in text and "wait_for_previous_kernel" not in text]


SHARED = re.compile(r"^ *(?:alignas\(\d+\) )?__shared__ [^;]*;[^\n]*\n", re.MULTILINE)  # declares, and does nothing


@pytest.mark.parametrize("path", EARLY_SOURCES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_kernel_that_may_start_early_begins_by_waiting(path):
    kernels = KERNEL.findall(TEXTS[path])
    assert kernels
    for name, _, body in kernels:
        assert SHARED.sub("", body).lstrip().startswith("await_previous_kernel();"), name


KINDS = ("align_rows", "add_slices", "group_norm", "conv_finish")


@pytest.fixture
def sources(tmp_path, share):
    """A source of every kernel: the checked-in ones by name, and those that only other shapes need; some: the first of each kind."""
    found = {path.stem: path for path in EARLY_SOURCES}
    cases = (Case("odd_rows", 256, 4097, 512, 4), Case("word_rows", 64, 21046, 400, 80), Case("split_groups", 2, 72, 65536, 1), Case("long_groups", 300, 72, 65536, 1))
    for case in cases:
        made = plan(case.spec(tmp_path, "fp16", None), "sm_80", "h100")
        for kernel in made.kernels:
            path = tmp_path / f"{case.name}_{kernel.file(made.target)}"
            path.write_text(render_kernel(made, kernel), encoding="utf-8")
            found[path.stem] = path
    return list(found.values()) if share == "all" else [next(path for name, path in found.items() if kind in name) for kind in KINDS]


@pytest.mark.parametrize("share", ["some", pytest.param("all", marks=pytest.mark.nvcc)])
def test_no_read_is_moved_in_front_of_the_wait(sources):
    """What a kernel takes as read-only the one in front of it writes, so the compiler would be free to, but for the wait's claim on memory."""
    for path in sources:
        text = device_code(path, CUDA_FLAGS, "sm_90a", "ptx").read_text()
        entries = text.split(".entry ")[1:]
        assert entries
        for entry in entries:
            before, wait, _ = entry.partition("griddepcontrol.wait")
            assert wait and not (found := MEMORY.findall(before)), (path.name, found)
