"""What is said about a compiled source, with the real nvcc."""

import errno
import os

import pytest

from runtime import BuildError, kernel_report
from runtime.cache import CacheWarning, default_cache
from runtime.kernel_report import compile_report

FLAGS = ("-O3", "-std=c++17")

SPILLING = """
template <int N>
__global__ void __launch_bounds__(1024) spill_kernel(const float* in, float* out, int shift) {
  __shared__ float tile[256];
  float held[N];
#pragma unroll
  for (int i = 0; i < N; ++i) held[i] = in[i * 1024 + threadIdx.x];
  tile[threadIdx.x % 256] = held[0];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) out[i * 1024 + threadIdx.x] = held[N - 1 - i] * held[(i * 7) % N] + tile[(threadIdx.x + i) % 256];
}
template __global__ void spill_kernel<200>(const float*, float*, int);
"""
DOUBLE = "__global__ void k(float* x) { x[0] = x[0] * 0.1; int unused = 3; }\n"


def write(tmp_path, text):
    path = tmp_path / "k.cu"
    path.write_text(text)
    return path


def test_a_small_kernel(tiny):
    report = compile_report(tiny.path / "scale_sm80.cu", FLAGS, "sm_80")
    (kernel,) = report.kernels
    assert kernel.short_name == "scale_kernel" and 0 < kernel.registers < 64
    assert (kernel.stack, kernel.spill_stores, kernel.spill_loads, kernel.static_shared) == (0, 0, 0, 0)
    assert not report.uses_double and report.warnings == ()


def test_spills_and_shared_memory_are_seen(tmp_path):
    (kernel,) = compile_report(write(tmp_path, SPILLING), FLAGS, "sm_80").kernels
    assert kernel.short_name == "spill_kernel"
    assert kernel.static_shared == 1024 and kernel.registers == 64
    assert kernel.spill_stores > 0 and kernel.spill_loads > 0 and kernel.stack > 0


def test_double_and_warnings_are_seen(tmp_path):
    report = compile_report(write(tmp_path, DOUBLE), FLAGS, "sm_80")
    assert report.uses_double
    assert any("unused" in warning for warning in report.warnings)


def test_an_error_shows_its_line(tmp_path):
    with pytest.raises(BuildError, match=r"k.cu, line 1: .*undefined[\s\S]*> 1 \| .*nothing"):
        compile_report(write(tmp_path, "__global__ void k() { nothing; }\n"), FLAGS, "sm_80")


@pytest.fixture
def kept(tiny, monkeypatch):
    """The source whose report is kept, and the report; from here on nothing may be compiled."""
    path = tiny.path / "scale_sm80.cu"
    report = compile_report(path, FLAGS, "sm_80")
    monkeypatch.setattr(kernel_report, "_compile", lambda *_: pytest.fail("compiled again"))
    return path, report


def test_the_answer_is_kept(kept):
    path, report = kept
    assert compile_report(path, FLAGS, "sm_80") == report
    with pytest.raises(pytest.fail.Exception):
        compile_report(path, FLAGS, "sm_90a")


def test_edited_comments_compile_nothing_and_edited_code_does(kept):
    path, report = kept
    text = path.read_text()
    path.write_text("// a line more\n\n" + text.replace("\n  y[i]", "  /* the\n     column's */\n  y[i]").replace(";\n", ";  // said\n"))
    assert path.read_text() != text and compile_report(path, FLAGS, "sm_80") == report
    path.write_text(text.replace("* 8 +", "* 4 +"))
    with pytest.raises(pytest.fail.Exception):
        compile_report(path, FLAGS, "sm_80")


def test_a_report_with_warnings_is_not_kept(tmp_path):
    """Its lines move with the comments above them."""
    path = write(tmp_path, DOUBLE)
    (first,) = compile_report(path, FLAGS, "sm_80").warnings
    path.write_text("// a line more\n" + DOUBLE)
    (second,) = compile_report(path, FLAGS, "sm_80").warnings
    assert first != second


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ('a; // b\n/* c */ d;', "a;\n  d;"), ('s = "// no /* comment"; // b', 's = "// no /* comment";'), (r's = "\" // no"; // b', r's = "\" // no";'),
        ("c = '\"'; // b\ns = \"// no\";", "c = '\"';\ns = \"// no\";"), ("n = 1'000; // it's\nm;", "n = 1'000;\nm;"), ("#define A a  // b\n\n\nx", "#define A a\nx"),
        ("a / b * c // d", "a / b * c"), ('"/* no */" /* b\n */ c', '"/* no */"   c'), (r"c = '\''; // b", r"c = '\'';"),
    ],
)  # fmt: skip
def test_comments_end_where_a_compiler_ends_them(text, bare):
    assert kernel_report.without_comments(text) == bare


def test_a_report_that_cannot_be_kept_is_given_all_the_same(tiny, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(CacheWarning, match="report cannot be kept .*the disk is full"):
        assert compile_report(tiny.path / "scale_sm80.cu", ("-O1",), "sm_80").kernels
    assert list(default_cache().reports.iterdir()) == []
