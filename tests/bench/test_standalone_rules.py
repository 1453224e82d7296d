"""standalone.py of every checked-in package against what KernelBench's loader and static checker refuse, without KernelBench present."""

import ast
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from codegen import index
from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec
from codegen.standalone import render_standalone
from tests import tiers

ROOT = Path(__file__).parents[2]
ENTRIES = index.entries(ROOT / "generated")
COMPILED = [  # one package of each producer and kind of arithmetic; the sources of the others are compiled by tests/codegen
    ("specs/gemm_groupnorm_hardtanh_small.yaml", "fp32"),
    ("specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml", "bf16"),
    ("specs/conv2d_groupnorm_scale_maxpool_clamp.yaml", "fp32"),
]

# What load_inline adds to nvcc's command line besides what the file passes itself.
LOAD_INLINE_FLAGS = [
    "-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr", "--compiler-options", "-fPIC",
]  # fmt: skip


def text_of(path: str, precision: str) -> str:
    package = make_package(load_spec(path, precision))
    return render_standalone(package, render(package))


@pytest.fixture(scope="module", params=ENTRIES, ids=[f"{Path(path).stem}-{precision}" for path, precision in ENTRIES])
def standalone(request) -> tuple[str, str]:
    """(precision, text) of one checked-in package."""
    path, precision = request.param
    return precision, text_of(path, precision)


def code_lines(text: str) -> str:
    """The text as the checker reads it: each line up to its first # or //, wherever that stands."""
    return "\n".join(re.split(r"#|//", line, maxsplit=1)[0] for line in text.splitlines())


def test_it_holds_a_kernel_and_compiles_it_itself(standalone):
    seen = code_lines(standalone[1])
    assert "__global__" in seen and "load_inline" in seen


@pytest.mark.parametrize("word", [r"\btry\s*:", r"\bexcept\b", r"\bpass\b", r"\bthreading\b", r"\bmultiprocessing\b", r"concurrent\.futures", r"PoolExecutor"])
def test_it_holds_nothing_that_is_an_error(standalone, word):
    assert not re.search(word, code_lines(standalone[1]))


def test_it_replaces_no_timer_and_subclasses_no_tensor(standalone):
    seen = code_lines(standalone[1])
    assert not re.search(r"(Event|elapsed_time|synchronize|perf_counter|time\.time|record)\s*=(?!=)", seen)
    assert not re.search(r"_make_subclass|class\s+\w+\((torch\.)?Tensor\)", seen)


def test_it_holds_nothing_that_is_a_warning(standalone):
    precision, text = standalone
    seen = code_lines(text)
    for pattern in (r"functional\b", r"\bF\.", r"\.half\s*\(", r"cuda\.Stream\s*\(", r"wait_stream|record_stream", r"torch\.(mm|bmm|matmul|einsum|conv\w*|\w+_norm|\w*pool\w*)\s*\("):
        assert not re.search(pattern, seen), pattern
    if precision in ("fp32", "tf32"):
        for pattern in (r"__float2half(_rn)?\s*\(", r"static_cast\s*<\s*(__half|half)\s*>", r"\(\s*__half\s*\)\s*\w"):
            assert not re.search(pattern, seen), pattern


def test_its_names_leave_the_reference_alone(standalone):
    """Module-level names overwrite the reference's; only ModelNew, imports and names with an underscore may be there."""
    module = ast.parse(standalone[1])
    names = [node.name for node in module.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    names += [target.id for node in module.body if isinstance(node, ast.Assign) for target in node.targets]
    assert [name for name in names if not name.startswith("_")] == ["ModelNew"]
    imported = {alias.asname or alias.name for node in ast.walk(module) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}
    assert {name for name in imported if not name.startswith("_")} <= {"ctypes", "torch", "nn", "load_inline"}
    assert "__file__" not in standalone[1] and "getsource" not in standalone[1] and "__future__" not in standalone[1]


def test_importing_it_compiles_nothing(standalone):
    """load_inline is called inside a function only."""
    module = ast.parse(standalone[1])
    calls = [node for statement in module.body if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)) for node in ast.walk(statement) if isinstance(node, ast.Call)]
    assert calls == []


def test_it_keeps_no_floating_point_buffer(standalone):
    """The harness's .to(device, dtype) would convert one."""
    assert "register_buffer" not in standalone[1]


@pytest.mark.nvcc
@pytest.mark.parametrize(("path", "precision"), COMPILED)
def test_its_cuda_text_compiles_as_load_inline_would(path, precision):
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("nvcc is not on PATH")
    text = text_of(path, precision)
    found = re.findall(r'_CUDA_(\w+) = r"""\n(.*?)"""', text, re.DOTALL)
    assert found
    for target, cuda in found:
        compiles(nvcc, cuda, {"SM80": "90", "SM90A": "90a"}[target])


def compiles(nvcc, cuda, arch):
    tiers.claim("nvcc")
    command = [nvcc, "-c", "-std=c++17", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}", *LOAD_INLINE_FLAGS, "source.cu", "-o", "source.o"]
    marker = Path(tempfile.gettempdir()) / "standalone-compiled" / hashlib.sha256("\0".join([cuda, *command]).encode()).hexdigest()
    if marker.is_file():
        return  # this very text was compiled with these very flags before
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "source.cu").write_text(cuda)
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr[-3000:]
        assert "block" not in finished.stderr, "the harness takes a message with this word for a lock and tries again"
    marker.parent.mkdir(exist_ok=True)
    marker.touch()
