"""`make demo`: what it prints can be copied, and it takes the options of `make generate`."""

from click.testing import CliRunner

from bench.demo import main

SMALL = "specs/gemm_groupnorm_hardtanh_small.yaml"


def test_the_demo_says_what_it_wrote_and_what_to_type_next(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = tmp_path / "a folder with a rather long name, longer than forty columns"
    result = CliRunner().invoke(main, [SMALL, "--precision", "bf16", "--target", "cpu", "--out", str(out), "--trials", "1"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"wrote {out}/gemm_groupnorm_hardtanh_small_bf16: __init__.py, cpu.cpp, cpu_backward.cpp, model.py"
    assert lines[-1].endswith(f"make explain SPEC={SMALL} PRECISION=bf16 TARGETS=cpu") and str(out) in lines[-1]


def test_a_spec_that_is_not_there_is_a_sentence(tmp_path):
    result = CliRunner().invoke(main, ["nowhere.yaml", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "nowhere.yaml" in result.output and "Traceback" not in result.output
