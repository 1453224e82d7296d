"""The command: deterministic bytes, whole files or none, nothing outside the output folder, checked-in packages current."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from codegen import index
from codegen.emit import main, make_package, write_if_different
from codegen.manifest import source_key
from codegen.render import render
from codegen.spec import load_spec, shipped
from codegen.spec_docs import example, reference

TOP = Path(__file__).parents[2]
CASES = index.entries(TOP / "generated")


def test_the_index_lists_the_three_systems_in_every_precision_and_their_small_shapes():
    assert len(CASES) == 15 and {spec for spec, _ in CASES} == set(shipped())


@pytest.mark.parametrize(("spec", "precision"), CASES)
def test_checked_in_packages_are_what_their_specs_emit(spec, precision):
    package = make_package(load_spec(spec, precision))
    for name, text in render(package).items():
        path = TOP / "generated" / package.spec.package / name
        assert path.read_text(encoding="utf-8") == text, f"{path} differs; run make generate-all"


def test_the_same_bytes_in_another_process_folder_and_hash_seed(tmp_path):
    digests = set()
    for seed, where in (("1", tmp_path / "a"), ("2", tmp_path / "with space")):
        where.mkdir()
        subprocess.run(
            [sys.executable, "-m", "codegen.emit", "specs/default.yaml", "--precision", "bf16", "--standalone", "--out", str(where / "out")],
            check=True, capture_output=True, cwd=where, env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(TOP), "TZ": f"UTC{seed}"},
        )  # fmt: skip
        files = sorted((where / "out" / "gemm_groupnorm_hardtanh_bf16").iterdir())
        digests.add(hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in files)).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize(("spec", "precision"), CASES[::3])
def test_no_path_no_date_no_double_literal_in_the_sources(spec, precision):
    files = render(make_package(load_spec(spec, precision)))
    for name, text in files.items():
        assert str(TOP) not in text and "/tmp/" not in text, name
        if name.endswith(".cu"):
            assert "torch" not in text.split("*/")[-1].split("#include", 1)[1].split("\n", 1)[0]
            assert "double" not in text, name


def test_an_unchanged_package_is_not_touched(tmp_path):
    runner = CliRunner()
    arguments = ["specs/gemm_groupnorm_hardtanh_small.yaml", "--out", str(tmp_path)]
    assert runner.invoke(main, arguments).exit_code == 0
    folder = tmp_path / "gemm_groupnorm_hardtanh_small"
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    result = runner.invoke(main, arguments)
    assert "unchanged" in result.output and before == {p: p.stat().st_mtime_ns for p in folder.iterdir()}


def test_stale_sources_go_and_other_files_stay(tmp_path):
    header = "// Generated from x.yaml; do not edit. Again: make generate SPEC=x.yaml\n"
    write_if_different(tmp_path, {"old.cu": header, "model.py": "1\n"})
    (tmp_path / "mine.cu").write_text("// my own\n")
    write_if_different(tmp_path, {"new.cu": header, "model.py": "1\n"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.cu", "model.py", "new.cu"]


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    write_if_different(tmp_path, {"a.cu": "old\n"})

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        write_if_different(tmp_path, {"a.cu": "new\n"})
    assert [p.name for p in tmp_path.iterdir()] == ["a.cu"] and (tmp_path / "a.cu").read_text() == "old\n"


def test_a_bad_spec_writes_nothing_and_exits_with_2(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: x\nbatch: 0\nchain: []\n")
    result = CliRunner().invoke(main, [str(bad), "specs/default.yaml", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "bad.yaml:2:8" in result.output and not (tmp_path / "out").exists()


def test_no_spec_is_a_usage_error():
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2 and "specs/default.yaml" in result.output


@pytest.mark.parametrize(("spec", "precision"), CASES)
def test_explain_names_kernels_floor_and_reasons(spec, precision):
    result = CliRunner().invoke(main, [spec, "--precision", precision, "--explain"])
    assert result.exit_code == 0, result.output
    for word in ("steps", "why", "floor", "workspace per call", "GFLOP"):
        assert word in result.output


def test_the_source_key_ignores_comments_and_white_space_only():
    base = source_key({"a.cu": 'int f() { return 1; }  // one\nconst char* s = "//x";\n'}, ("-O3",), "sm_80")
    assert base == source_key({"a.cu": 'int f() {\n  return 1; /* uno */ }\nconst char* s = "//x";'}, ("-O3",), "sm_80")
    assert base != source_key({"a.cu": 'int f() { return 2; }\nconst char* s = "//x";'}, ("-O3",), "sm_80")
    assert base != source_key({"a.cu": 'int f() { return 1; }\nconst char* s = "//y";'}, ("-O3",), "sm_80")
    assert base != source_key({"a.cu": 'int f() { return 1; }\nconst char* s = "//x";'}, ("-O2",), "sm_80")
    assert base != source_key({"a.cu": 'int f() { return 1; }\nconst char* s = "//x";'}, ("-O3",), "sm_90a")


def test_manifest_is_complete(tmp_path):
    files = render(make_package(load_spec("specs/default.yaml")))
    manifest = json.loads(files["manifest.json"])
    for name, target in manifest["targets"].items():
        known = {"x", "y", None, *(p["key"] for p in manifest["parameters"]), *target["buffers"]}
        for step in target["steps"]:
            assert set(step["args"]) <= known, name
        assert set(target["sources"]) <= set(files)


def test_the_spec_reference_is_current():
    assert (TOP / "docs" / "spec.md").read_text(encoding="utf-8") == reference(example()), "run python -m codegen.spec_docs > docs/spec.md"


def test_emitting_imports_no_torch():
    code = "import sys, codegen.emit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=TOP).returncode == 0
