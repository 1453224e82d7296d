"""Evidence follows the machine code: a record of sources that were reworded gets today's key, one whose code changed stays as it is and is named."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import rekey, same_code
from bench.rekey import claims_of, code_of, difference, with_new_key
from bench.same_code import Unit, digest_of, without_name
from bench.store import EVIDENCE, KERNELBENCH, LEVEL2, SANITIZE, SWEEP, put, read
from codegen.emit import make_package, write_if_different
from codegen.render import render
from codegen.spec import load_spec
from codegen.targets import TARGETS

TOP = Path(__file__).parents[2]
SPEC = "name: sweep_0_000\nbatch: 4\ntargets: [cpu]\nprecision: fp32\nchain:\n- linear: {name: gemm, in_features: 8, out_features: 8}\n- group_norm: {name: norm, num_groups: 2}\n- relu\n"
RECORD = {
    "format": 1, "small": True, "seed": 0, "index": 0, "package": "sweep_0_000", "spec": SPEC, "precision": "fp32", "target": "cpu", "device_class": "host", "key": "k",
}  # fmt: skip


def cpu(text):
    return Unit("a.cpp", text, TARGETS["cpu"], TARGETS["cpu"].flags)


def test_names_of_locals_and_comments_are_no_machine_code():
    first = digest_of(cpu("int twice(int v) { return 2 * v; }"), None)
    assert digest_of(cpu("// two times\nint twice(int value) { const int sum = value + value; return sum; }"), None) == first
    assert digest_of(cpu("int twice(int v) { return 3 * v; }"), None) != first
    assert digest_of(cpu("int double_of(int v) { return 2 * v; }"), None) != first, "a loader looks for the name"


@pytest.mark.nvcc
def test_cuda_sources_are_compared_as_device_and_host_code():
    text = """namespace k { namespace {
    struct Moments { float mean, m2; };
    __device__ __forceinline__ Moments merge(Moments a, Moments b) { return {a.mean + b.mean, a.m2 * b.m2}; }
    __global__ void kernel(float* y) { const Moments all = merge({y[0], y[1]}, {y[2], y[3]}); y[4] = all.mean + all.m2; }
    } }
    extern "C" int launch(float* y) { k::kernel<<<1, 32>>>(y); return cudaGetLastError(); }
    """
    digest = lambda text: digest_of(Unit("some.cu", text, TARGETS["sm_90a"], TARGETS["sm_90a"].flags), (9, 0))  # noqa: E731
    first = digest(text)
    assert digest(f"\n\n// moved and renamed\n{text.replace('Moments', 'Sums').replace('m2', 'product')}") == first
    assert digest(text.replace("a.m2 * b.m2", "a.m2 / b.m2")) != first, "device code"
    assert digest(text.replace("<<<1, 32>>>", "<<<1, 64>>>")) != first, "host code"
    assert digest(text.replace("(float* y) {", "(float* y, int) {").replace("kernel<<<1, 32>>>(y)", "kernel<<<1, 32>>>(y, 0)")) != first, "parameters"


def test_the_hashes_in_nvccs_name_of_a_source_count_for_nothing():
    name, other = "_c4d24583_4_k_cu_becb7e9d", "_4246372d_4_k_cu_becb7e00"
    first, second = (without_name(f"_ZN36_GLOBAL__N_{each}4gemmE".encode(), each) for each in (name, other))
    assert first == second == b"_ZN36_GLOBAL__N__00000000_4_k_cu_000000004gemmE"
    assert without_name(b"_4246372d_4_k_cu_becb7e00", name) == b"_4246372d_4_k_cu_becb7e00"


def test_a_record_keeps_its_measured_key_first():
    once = with_new_key({"key": "a", "ms": 1.0}, (), "b", "g++ 12")
    assert with_new_key(once, (), "c", "g++ 13") == {
        "key": "c", "ms": 1.0, "same_code_as": [{"key": "a", "compilers": "g++ 12"}, {"key": "b", "compilers": "g++ 13"}],
    }  # fmt: skip
    inner = with_new_key({"key": "a", "backward": {"key": "d"}}, ("backward",), "e", "g++ 12")
    assert inner == {"key": "a", "backward": {"key": "e", "same_code_as": [{"key": "d", "compilers": "g++ 12"}]}}


def test_every_kind_of_record_says_what_its_key_stands_for():
    level2 = {"problem": 30, "precision": "fp32", "path": "specs/default.yaml", "key": "k", "target": "sm_80", "harness": {"key": "h"}}
    evidence = {"spec": "layer", "precision": "fp32", "path": "layer.yaml", "weights": "prepared", "target": "sm_90a", "key": "k", "backward": {"target": "sm_80", "key": "b"}}
    claimed = {
        kind.name: [(claim.package.spec, claim.section, claim.target, claim.key) for claim in claims_of(kind, "h200", record, {"layer": "layer.yaml"})]
        for kind, record in (
            (EVIDENCE, evidence), (LEVEL2, level2), (SANITIZE, {"spec": "layer", "precision": "fp32", "target": "sm_80", "tool": "memcheck", "key": "k"}),
            (KERNELBENCH, {"problem": 30, "shapes": "current", "precision": "fp32", "target": "sm_90a", "key": "k"}),
            (SWEEP, {"package": "p", "spec": "name: p", "precision": "fp16", "target": "sm_80", "device_class": "h200", "key": "k"}),
        )
    }  # fmt: skip
    assert claimed == {
        "evidence": [("layer.yaml", "targets", "sm_90a", "k"), ("layer.yaml", "backward", "sm_80", "b")],
        "level2": [("specs/default.yaml", "targets", "sm_80", "k"), ("specs/default.yaml", "standalone", "sm_80", "h")],
        "sanitize": [("layer.yaml", "targets", "sm_80", "k")], "kernelbench": [("specs/default.yaml", "targets", "sm_90a", "k")],
        "sweep": [("p.yaml", "targets", "sm_80", "k")],
    }  # fmt: skip


def test_steps_and_buffers_are_part_of_what_must_be_the_same(tmp_path):
    (tmp_path / "layer.yaml").write_text(SPEC)
    write_if_different(tmp_path / "p", render(make_package(load_spec(tmp_path / "layer.yaml"))))
    (claim,) = claims_of(SWEEP, "cpu", RECORD, {})
    first = code_of(claim, tmp_path / "p")
    assert difference(first, first, None) is None
    manifest = tmp_path / "p" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"library": "linear"', '"library": "conv2d"'))
    assert "steps, buffers or flags" in difference(first, code_of(claim, tmp_path / "p"), None)


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository of the generator alone, whose working tree is "this version"."""
    shutil.copytree(TOP / "codegen", tmp_path / "clone" / "codegen", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(rekey, "TOP", tmp_path / "clone")
    git(tmp_path / "clone", "init", "-q", "-b", "main")
    commit(tmp_path / "clone")
    return tmp_path / "clone"


def git(folder, *words):
    identity = {f"GIT_{who}_{what}": "t@t" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, env={**os.environ, **identity})


def commit(folder):
    git(folder, "add", "codegen")
    git(folder, "commit", "-q", "-m", "a version")


def rewrite(clone, old, new):
    path = clone / "codegen" / "templates" / "cpu" / "parts.cpp.j2"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_records_follow_the_machine_code_from_version_to_version(tmp_path, clone):
    results = tmp_path / "results"
    (tmp_path / "spec").mkdir()
    (tmp_path / "spec" / "sweep_0_000.yaml").write_text(SPEC)
    key = make_package_key(tmp_path / "spec" / "sweep_0_000.yaml")
    record = RECORD | {"key": key, "ms": 1.0}
    put(SWEEP, results, "cpu", [record, record | {"index": 1, "key": "of no version"}])
    call = lambda *more: CliRunner().invoke(rekey.main, ["--from", "HEAD", "--results", str(results), *more], catch_exceptions=False)  # noqa: E731

    rewrite(clone, "deviation", "difference")
    assert "1 keys renewed (dry run" in call("--dry-run").output and read(SWEEP, results, "cpu")[0] == record
    done = call()
    assert done.exit_code == 0 and "1 keys renewed, 0 of other machine code; 0 were current, 1 of neither version" in done.output
    renewed, other = read(SWEEP, results, "cpu")
    assert renewed["key"] != key and renewed["ms"] == 1.0 and other["key"] == "of no version"
    assert renewed["same_code_as"] == [{"key": key, "compilers": same_code.compilers(False)}]
    assert "0 keys renewed, 0 of other machine code; 1 were current" in call().output

    commit(clone)
    rewrite(clone, "sum / count", "sum / (count + 1)")
    done = call()
    assert done.exit_code == 1 and "cpu sweep True 0 0: cpu.cpp: other machine code" in done.output
    assert read(SWEEP, results, "cpu") == [renewed, other]


def make_package_key(path):
    """The key of the only target's sources."""
    return json.loads(render(make_package(load_spec(path)))["manifest.json"])["targets"]["cpu"]["source_key"]


def test_an_unknown_commit_is_a_sentence(tmp_path):
    put(SWEEP, tmp_path, "cpu", [RECORD])
    done = CliRunner().invoke(rekey.main, ["--from", "no-such-commit", "--results", str(tmp_path)])
    assert done.exit_code == 1 and "--from no-such-commit" in done.output
