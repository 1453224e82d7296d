"""The command: deterministic bytes, whole files or none, nothing outside the output folder, checked-in packages current."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import index
from codegen.folder import write_if_different
from codegen.manifest import source_key
from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec, shipped
from codegen.spec.docs import example, reference
from codegen.standalone import render_standalone
from tests.fsk import fsk

TOP = Path(__file__).parents[2]
CASES = index.entries(TOP / "generated")


HEADLINE = ("default", "gemm_biasadd_hardtanh_mish_groupnorm", "conv2d_groupnorm_scale_maxpool_clamp")


def test_the_index_lists_every_shipped_spec():
    """Small shapes in fp32, the systems that this project exists for in every precision, the others in those that KernelBench asks for."""
    listed = {spec: [precision for name, precision in CASES if name == spec] for spec in shipped()}
    assert sum(map(len, listed.values())) == len(CASES)
    for spec, precisions in listed.items():
        stem = Path(spec).stem
        assert precisions == (["fp32"] if stem.endswith("_small") else ["fp32", "tf32", "fp16", "bf16"] if stem in HEADLINE else ["fp32", "fp16", "bf16"]), spec


def test_the_same_bytes_in_another_process_folder_and_hash_seed(tmp_path):
    digests = set()
    for seed, where in (("1", tmp_path / "a"), ("2", tmp_path / "with space")):
        where.mkdir()
        subprocess.run(
            [sys.executable, "-m", "fixed_shape_kernels", "standalone", "specs/default.yaml", "--precision", "bf16", "--out", str(where / "out")],
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
            assert not re.search(r'#include\s*[<"](torch|ATen|c10|pybind11)', text), name
            assert "double" not in text, name


def test_an_unchanged_package_is_not_touched(tmp_path):
    arguments = ["specs/gemm_groupnorm_hardtanh_small.yaml", "--out", str(tmp_path)]
    assert fsk("generate", *arguments).exit_code == 0
    folder = tmp_path / "gemm_groupnorm_hardtanh_small"
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    result = fsk("generate", *arguments)
    assert "unchanged" in result.output and before == {p: p.stat().st_mtime_ns for p in folder.iterdir()}


def test_stale_sources_go_and_other_files_stay(tmp_path):
    header = "// Generated from x.yaml; do not edit. Again: make generate SPEC=x.yaml\n"
    write_if_different(tmp_path, {"old.cu": header, "model.py": "1\n"})
    (tmp_path / "mine.cu").write_text("// my own\n")
    write_if_different(tmp_path, {"new.cu": header, "model.py": "1\n"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.cu", "model.py", "new.cu"]


def test_a_module_that_is_replaced_within_a_second_is_imported_anew(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    for value in ("1", "2"):
        write_if_different(tmp_path, {"model.py": f"print({value})\n"})
        os.utime(tmp_path / "model.py", (1e9, 1e9))
        done = subprocess.run([sys.executable, "-c", "import model"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == value and list(tmp_path.glob("__pycache__/model.*.pyc"))


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
    result = fsk("generate", str(bad), "specs/default.yaml", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2 and "bad.yaml:2:8" in result.output and not (tmp_path / "out").exists()


LAYER = """\
name: layer
batch: 4
chain:
  - linear: {name: gemm, in_features: 64, out_features: 64}
  - group_norm: {name: norm, num_groups: 4}
"""


def test_defaults_are_defaults_of_every_constructor(tmp_path):
    path = tmp_path / "layer.yaml"
    path.write_text(LAYER.replace("num_groups: 4}", "num_groups: groups, eps: eps}").replace("chain:", "args: {groups: 4}\ndefaults: {eps: 1.0e-3}\nchain:"))
    package = make_package(load_spec(path), ("cpu", "sm_80"))
    files = render(package)
    assert files["model.py"].count("def __init__(self, groups, eps=0.001):") == 2 and "return [4]\n" in files["model.py"]
    assert "super().__init__(PACKAGE, groups=groups, eps=eps)" in files["model.py"]
    assert json.loads(files["manifest.json"])["init_args"] == [["groups", 4], ["eps", 0.001]]
    text = render_standalone(package, files)
    assert "def __init__(self, groups, eps=0.001):" in text and "given = (groups, eps,)" in text and "folded = (4, 0.001)" in text


def test_a_package_of_another_spec_is_not_replaced(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(LAYER)
    second.write_text(LAYER.replace("batch: 4", "batch: 8"))
    arguments = ["--target", "cpu", "--out", str(tmp_path / "out")]
    assert fsk("generate", str(first), *arguments).exit_code == 0
    refused = fsk("generate", str(second), *arguments)
    assert refused.exit_code == 1 and "first.yaml" in refused.output and "second.yaml" in refused.output
    assert fsk("generate", str(second), *arguments, "--force").exit_code == 0


def test_files_that_are_no_package_are_not_replaced(tmp_path):
    (tmp_path / "layer.yaml").write_text(LAYER)
    mine = tmp_path / "out" / "layer" / "model.py"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine\n")
    arguments = [str(tmp_path / "layer.yaml"), "--target", "cpu", "--out", str(tmp_path / "out")]
    refused = fsk("generate", *arguments)
    assert refused.exit_code == 1 and "holds no generated package" in refused.output and "--force" in refused.output
    assert [p.name for p in mine.parent.iterdir()] == ["model.py"] and mine.read_text() == "mine\n"
    assert fsk("generate", *arguments, "--force").exit_code == 0
    (mine.parent / "manifest.json").write_text("damaged")
    assert fsk("generate", *arguments).exit_code == 0, "a damaged package is still one"


def test_the_spec_of_a_package_is_the_spec_that_it_was_generated_from(tmp_path):
    """Unchanged it emits the same bytes, for another precision too; changed it is the package's new spec."""
    out = ["--target", "cpu", "--out", str(tmp_path / "out")]
    (tmp_path / "layer.yaml").write_text(LAYER)
    for precision in ([], ["--precision", "bf16"]):
        assert fsk("generate", str(tmp_path / "layer.yaml"), *precision, *out).exit_code == 0
    own = tmp_path / "out" / "layer" / "spec.yaml"
    for precision in ([], ["--precision", "bf16"]):
        result = fsk("generate", str(own), *precision, *out)
        assert result.exit_code == 0 and "(unchanged)" in result.output, result.output
    own.write_text(own.read_text().replace("batch: 4", "batch: 8"))
    assert fsk("generate", str(own), *out).exit_code == 0
    assert "layer.yaml" not in own.read_text() and "batch: 8" in own.read_text()
    assert "(unchanged)" in fsk("generate", str(own), *out).output
    assert fsk("generate", str(tmp_path / "layer.yaml"), *out).exit_code == 1


def test_messages_name_the_file_and_sources_do_not_depend_on_where_it_lies(tmp_path):
    path = tmp_path / "layer.yaml"
    path.write_text(LAYER)
    out = ["--target", "cpu", "--out", str(tmp_path / "out")]
    assert fsk("generate", str(path), *out).exit_code == 0
    assert "// Generated from .../layer.yaml; do not edit.\n// Again: make generate SPEC=generated/layer/spec.yaml\n" in (tmp_path / "out" / "layer" / "cpu.cpp").read_text()
    path.write_text(LAYER.replace("batch: 4", "batch: 0"))
    assert fsk("generate", str(path), *out).output.startswith(f"{path}:2:8: ")


def test_a_target_that_cannot_serve_the_spec_is_named_with_its_place(tmp_path):
    path = tmp_path / "layer.yaml"
    path.write_text(LAYER.replace("chain:", "targets: [cpu, sm_90a]\nchain:"))
    result = fsk("explain", str(path))
    assert result.exit_code == 1 and f"{path}:3:16: targets: sm_90a cannot serve this spec: " in result.output
    result = fsk("explain", str(path), "--target", "sm_90a")
    assert result.exit_code == 1 and f"{path}: targets: sm_90a cannot serve this spec: " in result.output


@pytest.mark.parametrize(("spec", "what"), [("", "is a folder"), ("/dev/null", "is no regular file"), ("missing.yaml", "no such file")])
def test_a_spec_that_is_no_file(tmp_path, spec, what):
    result = fsk("generate", spec or str(tmp_path))
    assert result.exit_code == 2 and what in result.output


def test_a_name_that_ends_in_a_precision_is_refused(tmp_path):
    (tmp_path / "t.yaml").write_text(LAYER.replace("layer", "t_fp16"))
    result = fsk("generate", str(tmp_path / "t.yaml"), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2 and "t.yaml:1:7: name: t_fp16 ends in _fp16" in result.output


def test_a_device_class_that_fits_no_target_is_refused(tmp_path):
    result = fsk("generate", "specs/default.yaml", "--target", "cpu", "--device-class", "h100", "--out", str(tmp_path))
    assert result.exit_code == 1 and "h100 goes with sm_90a, sm_80" in result.output


def test_an_output_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    result = fsk("generate", "specs/default.yaml", "--out", str(tmp_path / "file" / "out"))
    assert result.exit_code != 0 and "Traceback" not in result.output and result.exception.__class__ is SystemExit


def test_debug_bounds_the_waits_of_sm_90a(tmp_path):
    texts = []
    for flags in ([], ["--debug"]):
        out = tmp_path / str(len(texts))
        assert fsk("generate", "specs/default.yaml", "--target", "sm_90a", "--out", str(out), *flags).exit_code == 0
        texts.append((out / "gemm_groupnorm_hardtanh" / "gemm_sm90a.cu").read_text())
    assert "__trap" not in texts[0] and "__trap" in texts[1]


def test_comments_name_no_constant_that_is_not_there():
    for spec, precision in CASES:
        for name, text in render(make_package(load_spec(spec, precision))).items():
            if name.endswith((".cu", ".cpp")):
                defined = set(re.findall(r"\bk[A-Z]\w*", re.sub(r"//[^\n]*", "", text)))
                named = {word for comment in re.findall(r"//[^\n]*", text) for word in re.findall(r"\bk[A-Z]\w*", comment)}
                assert named <= defined, (spec, precision, name, named - defined)


def test_every_helper_of_a_cpu_source_is_used():
    for spec, precision in CASES:
        for name, text in render(make_package(load_spec(spec, precision), ("cpu",))).items():
            if name.endswith(".cpp"):
                bare = re.sub(r"//[^\n]*", "", text)
                for helper in re.findall(r"inline [\w:]+ (\w+)\(", bare):
                    assert len(re.findall(rf"\b{helper}\(", bare)) > 1, (spec, precision, name, helper)


def test_no_spec_is_a_usage_error():
    result = fsk("generate")
    assert result.exit_code == 2 and "specs/default.yaml" in result.output


@pytest.mark.parametrize(("spec", "precision"), CASES)
def test_explain_names_kernels_floor_and_reasons(spec, precision):
    result = fsk("explain", spec, "--precision", precision)
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
    assert (TOP / "docs" / "spec.md").read_text(encoding="utf-8") == reference(example()), "run python -m codegen.spec.docs > docs/spec.md"


def test_emitting_imports_no_torch():
    code = "import sys, codegen.emit, fixed_shape_kernels.emitting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=TOP).returncode == 0
