"""What generated/ holds in git: few exemplars, whole, and the source keys of every shipped package, all as the specs emit them today."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from codegen import index
from codegen.checked_in import differences, main, package_of, renew, source_keys
from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec

TOP = Path(__file__).parents[2]
GENERATED = TOP / "generated"
EXEMPLARS = index.exemplars(GENERATED)
INDEX = """
exemplars:
  - {spec: specs/gemm_groupnorm_hardtanh_small.yaml, precision: fp32, targets: [cpu], shows: one}
packages:
  - {spec: specs/gemm_groupnorm_hardtanh_small.yaml, precisions: [fp32]}
"""


def test_what_is_checked_in_is_what_the_specs_emit():
    assert not (found := differences(GENERATED)), "run make generate-all\n" + "\n".join(found)


def test_the_exemplars_are_few_and_of_every_kind():
    """The three systems in fp32; each other precision, a small shape, stages and the cpu target alone once."""
    assert len(EXEMPLARS) <= 10 and all(exemplar.shows for exemplar in EXEMPLARS)
    packages = [package_of(exemplar) for exemplar in EXEMPLARS]
    names = {package.spec.package for package in packages}
    assert {"gemm_groupnorm_hardtanh", "gemm_biasadd_hardtanh_mish_groupnorm", "conv2d_groupnorm_scale_maxpool_clamp"} <= names
    assert {package.spec.precision.name for package in packages} == {"fp32", "tf32", "fp16", "bf16"}
    assert any(name.endswith("_small") for name in names)
    assert any(kernel.template.startswith("stages/") for package in packages for plan in package.plans for kernel in plan.kernels)
    assert ["cpu"] in [[plan.target.name for plan in package.plans] for package in packages]


def test_every_shipped_package_has_its_keys_and_the_prepared_ones_are_those_that_a_target_prepares():
    rows = [json.loads(line) for line in (GENERATED / index.SOURCE_KEYS).read_text(encoding="utf-8").splitlines()]
    listed = [(row["spec"], row["precision"], row["prepack"]) for row in rows]
    assert listed == [(*each, False) for each in index.entries(GENERATED)] + [(*each, True) for each in index.prepared(GENERATED)]
    assert len({row["package"] for row in rows}) == len(rows) and all(row["targets"] for row in rows)
    prepares = []
    for path, precision in index.entries(GENERATED):
        targets = json.loads(render(make_package(load_spec(path, precision, True)))["manifest.json"])["targets"]
        prepares += [(path, precision)] if any("prepare" in target for target in targets.values()) else []
    assert prepares == index.prepared(GENERATED)


@pytest.fixture
def made(tmp_path):
    (tmp_path / "index.yaml").write_text(INDEX)
    assert renew(tmp_path) and not renew(tmp_path) and not differences(tmp_path)
    return tmp_path


def test_what_is_stale_foreign_or_changed_is_told(made):
    folder = made / "exemplars" / "gemm_groupnorm_hardtanh_small"
    (folder / "old_sm80.cu").write_text("// Generated from x; do not edit. Again: make generate SPEC=x\n")
    shutil.copytree(folder, made / "exemplars" / "another")
    source, keys = folder / "cpu.cpp", made / index.SOURCE_KEYS
    source.write_text(source.read_text() + "// mine\n")
    keys.write_text(keys.read_text().replace(source_keys(made)[0]["targets"]["sm_80"], "older"))
    found = "\n".join(differences(made))
    assert "old_sm80.cu: is no longer emitted" in found and "another: is no exemplar" in found and "-// mine" in found
    assert '-{"package":"gemm_groupnorm_hardtanh_small"' in found and "older" in found
    check = CliRunner().invoke(main, ["--check", "--out", str(made)])
    assert check.exit_code == 1 and "run make generate-all" in check.output
    shutil.rmtree(made / "exemplars" / "another")
    assert CliRunner().invoke(main, ["--out", str(made)]).exit_code == 0
    assert CliRunner().invoke(main, ["--check", "--out", str(made)]).exit_code == 0


def test_without_an_index_there_is_nothing_to_check(tmp_path):
    done = CliRunner().invoke(main, ["--check", "--out", str(tmp_path)])
    assert done.exit_code == 1 and "index.yaml lists no packages" in done.output


def test_git_ignores_every_package_but_the_exemplars(tmp_path):
    """By the repository's own .gitignore: a user's package leaves no trace, and a new file of an exemplar does not go unseen."""
    shutil.copy(TOP / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    paths = ["generated/mine/model.py", "generated/gemm_groupnorm_hardtanh/cpu.cpp", "generated/exemplars/layer/new_sm80.cu", "generated/index.yaml", "generated/source_keys.jsonl"]
    done = subprocess.run(["git", "check-ignore", *paths], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == paths[:2]
