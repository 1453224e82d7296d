"""A range of batches: what its spec may say, what is emitted for each size, and that one size alone stays as it was."""

import json
import re

import pytest

from codegen.package import make_package
from codegen.plan import Refusal
from codegen.render import render
from codegen.spec import SpecError, load_spec
from codegen.standalone import render_standalone
from tests.fsk import fsk

CHAIN = """\
chain:
  - linear: {name: gemm, in_features: 32, out_features: 64}
  - group_norm: {name: norm, num_groups: 8}
  - mish
"""
WIDE = CHAIN.replace("32", "4096").replace("64", "4096")
REDUCED = CHAIN + "  - min: {keepdim: true}\n  - add: {name: bias, shape: %s}\n"


def read(tmp_path, batch, more="", chain=CHAIN, name="layer", precision=None):
    path = tmp_path / "layer.yaml"
    path.write_text(f"name: {name}\nbatch: {batch}\n{more}{chain}")
    return load_spec(path, precision)


def problems(tmp_path, *args, **options):
    with pytest.raises(SpecError) as caught:
        read(tmp_path, *args, **options)
    return [line.split("layer.yaml:", 1)[1] for line in str(caught.value).splitlines()]


# ---- the spec --------------------------------------------------------------------------------------------------------


def test_the_sizes_are_sorted_and_each_is_the_spec_of_its_batch(tmp_path):
    spec = read(tmp_path, "[64, 1, 8]")
    assert (spec.batches, spec.batch) == ((1, 8, 64), 64)
    for size in spec.sizes:
        assert size == read(tmp_path, str(size.batch)) and size.sizes == (size,)


def test_one_batch_in_a_list_is_one_batch(tmp_path):
    assert read(tmp_path, "[8]") == read(tmp_path, "8")


def test_what_is_emitted_does_not_depend_on_the_order(tmp_path):
    assert render(make_package(read(tmp_path, "[64, 1, 8]"))) == render(make_package(read(tmp_path, "[1, 8, 64]")))


@pytest.mark.parametrize(("batch", "more"), [("[1, 8, 64]", ""), ("[1, 8]", "pad_batch: true\n"), ("8", "pad_batch: true\n")])
def test_the_resolved_spec_is_the_same_spec(tmp_path, batch, more):
    files = render(make_package(read(tmp_path, batch, more), ("cpu",)))
    again = tmp_path / "again.yaml"
    again.write_text(files["spec.yaml"])
    spec, other = read(tmp_path, batch, more), load_spec(again)
    assert (other.batches, other.pad_batch, other.chain[0].input_shape) == (spec.batches, spec.pad_batch, spec.chain[0].input_shape)
    assert len(other.batches) > 1 or other.pad_batch


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("[1, 8, 8]", "2:15: batch: 8 is listed twice, first on line 2, column 12"),
        ("[1, 0]", "2:12: batch: 0; expected an integer from 1 to 2147483647"),
        ("[1, -4]", "2:12: batch: -4; expected an integer from 1 to 2147483647"),
        ("[1, 2.5]", "2:12: batch: 2.5; expected an integer from 1 to 2147483647"),
        ("[true, 2]", "2:9: batch: true; expected an integer from 1 to 2147483647"),
        ('["8", 2]', '2:9: batch: "8"; expected an integer from 1 to 2147483647'),
        ("[1, [2]]", "2:12: batch: a list; expected an integer from 1 to 2147483647"),
        ("[1, {a: 2}]", "2:12: batch: a mapping; expected an integer from 1 to 2147483647"),
        ("[1, 99999999999]", "2:12: batch: 99999999999; expected an integer from 1 to 2147483647"),
        ("[]", "2:8: batch: an empty list; expected an integer, or a list of them such as [1, 8, 64]"),
        (str(list(range(1, 18))), "2:8: batch: 17 sizes; at most 16 make one package, as each is compiled"),
    ],
)
def test_a_list_that_cannot_be_is_refused_where_it_stands(tmp_path, batch, expected):
    assert problems(tmp_path, batch) == [expected]


def test_all_faults_of_a_list_are_reported_at_once(tmp_path):
    found = problems(tmp_path, "[0, 4, 4, x]", "pad_batch: 1\n")
    assert [line.split(":")[:2] for line in found] == [["2", "9"], ["2", "15"], ["2", "18"], ["3", "12"]]
    assert found[-1].endswith("pad_batch: 1; expected true or false")


def test_sixteen_sizes_are_allowed(tmp_path):
    assert len(read(tmp_path, str(list(range(1, 17)))).batches) == 16


def test_a_size_that_the_chain_does_not_take_is_named(tmp_path):
    assert problems(tmp_path, "[1, 4, 8]", chain=REDUCED % "[8, 1]") == [
        "2:12: batch: 4 does not go with the chain: a parameter of shape (8, 1) does not broadcast with the value's (4, 1)"
    ]


@pytest.mark.parametrize(("shape", "allowed"), [("[1, 5]", True), ("[5]", True), ("[1, 64, 1, 1]", False), ("[8, 1]", False)])
def test_padding_needs_rows_that_are_samples(tmp_path, shape, allowed):
    """With [8, 1] a batch of 8 gives 8 rows, and so does a batch of 1: what the rows are is not told by their number."""
    chain = REDUCED % shape
    if allowed:
        assert read(tmp_path, "[1, 8]", "pad_batch: true\n", chain).pad_batch
    else:
        (found,) = problems(tmp_path, "[1, 8]", "pad_batch: true\n", chain)
        assert found.startswith("3:12: pad_batch: an operator joins samples, moves them from the first axis or takes a parameter or input along it")


SEVERAL = """\
inputs: {x: {shape: %s}, other: {shape: %s, batched: %s}}
chain:
  - relu: {name: first}
  - add: {from: other}
  - mul: {from: first}
"""


@pytest.mark.parametrize(
    ("shape", "other", "batched", "allowed"),
    [
        ("[8]", "[8]", "true", True),
        ("[8]", "[1]", "true", True),
        ("[3, 8]", "[1, 8]", "true", True),
        ("[8, 8]", "[8]", "true", False),  # its samples meet the second axis of x
        ("[8]", "[8, 8]", "true", False),
        ("[8]", "[8]", "false", True),
        ("[8]", "[1, 8]", "false", True),
        ("[8]", "[8, 8]", "false", False),  # 8 rows whatever the batch, which happen to be as many as the samples
        ("[8]", "[8, 1]", "false", False),
        ("[8]", "[1, 8, 8]", "false", False),
    ],
)
def test_padding_needs_inputs_whose_rows_go_with_the_samples(tmp_path, shape, other, batched, allowed):
    chain = SEVERAL % (shape, other, batched)
    if allowed:
        assert read(tmp_path, "8", "pad_batch: true\n", chain).pad_batch
    else:
        (found,) = problems(tmp_path, "8", "pad_batch: true\n", chain)
        assert found.startswith("3:12: pad_batch: an operator joins samples")


def test_padding_needs_earlier_results_whose_rows_go_with_the_samples(tmp_path):
    """A result over (8, 8) with the samples in front, added to one of (8, 8, 8), meets the second axis with them."""
    chain = "inputs: {x: {shape: [8, 8]}}\nchain:\n  - relu: {name: whole}\n  - sum: {dim: 1, keepdim: %s}\n  - add: {from: whole}\n"
    assert read(tmp_path, "8", "pad_batch: true\n", chain % "true").pad_batch
    assert len(problems(tmp_path, "8", "pad_batch: true\n", chain % "false")) == 1


@pytest.mark.parametrize(("batch", "more"), [("[4, 8]", ""), ("8", "pad_batch: true\n"), ("[4, 8]", "pad_batch: true\n")])
def test_several_batches_need_samples_in_the_first_input(tmp_path, batch, more):
    """The first input's rows tell the batch."""
    text = "inputs:\n  x: {shape: [8, 4], batched: false}\n  other: {shape: [1]}\nchain:\n  - relu\n  - add: {from: other}\n"
    (found,) = problems(tmp_path, batch, more, text)
    assert found.startswith(f"{5 if more else 4}:31: batched: x comes first")
    assert read(tmp_path, "8", "", text).input_shape == (8, 4)
    turned = text.replace(", batched: false", "").replace("[1]", "[1, 1, 1], batched: false")
    assert read(tmp_path, batch, more, turned).inputs[1].shape == (1, 1, 1)


# ---- what is emitted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [CHAIN, WIDE, REDUCED % "[1, 64, 1, 1]"], ids=["small", "wide", "reduced"])
def test_a_sizes_sources_are_those_of_its_batch_alone_but_for_names(tmp_path, chain):
    batches = (1, 512)
    files = render(make_package(read(tmp_path, list(batches), chain=chain)))
    seen = set()
    for batch in batches:
        alone = render(make_package(read(tmp_path, batch, chain=chain)))
        mine = {name: text for name, text in files.items() if re.search(rf"_b{batch}[._]", name)}
        plain = {name.replace(f"_b{batch}", ""): text.replace(f"_b{batch}", "") for name, text in mine.items()}
        assert plain == {name: text for name, text in alone.items() if name.endswith((".cu", ".cpp"))}
        seen |= set(mine)
    assert seen == {name for name in files if name.endswith((".cu", ".cpp"))}


def test_the_manifest_holds_every_size_and_what_they_share_once(tmp_path):
    manifest = json.loads(render(make_package(read(tmp_path, "[1, 8]", "pad_batch: true\n")))["manifest.json"])
    assert manifest["format"] == 2 and manifest["pad_batch"] is True
    assert not {"batch", "input", "output", "targets", "plan", "backward"} & set(manifest)
    assert [size["batch"] for size in manifest["sizes"]] == [1, 8]
    for size in manifest["sizes"]:
        alone = json.loads(render(make_package(read(tmp_path, size["batch"])))["manifest.json"])
        assert set(size) == set(alone) - {"format", "name", "spec", "regenerate", "precision", "init_args", "parameters"}
        assert (size["input"], size["output"], list(size["targets"])) == (alone["input"], alone["output"], list(alone["targets"]))
        for name, target in size["targets"].items():
            assert target["flags"] == alone["targets"][name]["flags"] and target["source_key"] != alone["targets"][name]["source_key"]


def test_no_two_sizes_share_a_file_or_a_function(tmp_path):
    sizes = json.loads(render(make_package(read(tmp_path, "[1, 8, 512]", chain=WIDE)))["manifest.json"])["sizes"]
    for kind in ("targets", "backward"):
        sources = [source for size in sizes for target in size[kind].values() for source in target["sources"]]
        launched = [step["launch"] for size in sizes for target in size[kind].values() for step in target["steps"] if "launch" in step]
        assert len(sources) == len(set(sources)) and len(launched) == len(set(launched))


def test_a_target_may_leave_a_size_to_another_for_the_same_machines(tmp_path):
    spec = read(tmp_path, "[1, 1024]", chain=WIDE)
    for targets in ((), ("sm_80", "sm_90a")):
        package = make_package(spec, targets)
        assert [package.sizes[i].plan_for("sm_90a") is not None for i in (0, 1)] == [False, True]
        assert [name for name, _ in package.skipped] == ["sm_90a at batch 1"]
    with pytest.raises(Refusal, match=r"^batch 1: .*Hopper's tiles would"):
        make_package(spec, ("sm_90a",))
    with pytest.raises(Refusal, match=r"^batch 1: .*Hopper's tiles would"):
        make_package(spec, ("cpu", "sm_90a"))


def test_a_target_that_serves_no_size_is_refused_where_it_was_asked_for(tmp_path):
    with pytest.raises(Refusal, match=r"layer.yaml: targets: sm_90a serves no batch of the range: Hopper's tiles would"):
        make_package(read(tmp_path, "[1, 2]", chain=WIDE), ("sm_80", "sm_90a"))


def test_sizes_that_prepare_the_same_say_so(tmp_path):
    """The batch is in the names of what prepares, and in nothing else; another width is another layout."""

    def layouts(chain):
        spec = read(tmp_path, "[512, 1024, 2048]", "prepack: true\n", chain)
        sizes = json.loads(render(make_package(spec))["manifest.json"])["sizes"]
        return {size["targets"]["sm_90a"]["prepare"]["layout"] for size in sizes}

    one, other = layouts(WIDE), layouts(WIDE.replace("in_features: 4096", "in_features: 2048"))
    assert len(one) == len(other) == 1 and one != other
    alone = json.loads(render(make_package(read(tmp_path, "1024", "prepack: true\n", WIDE)))["manifest.json"])
    assert "layout" not in alone["targets"]["sm_90a"]["prepare"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_explain_shows_the_plan_of_every_size(tmp_path):
    read(tmp_path, "[1, 8, 64]")
    result = fsk("explain", str(tmp_path / "layer.yaml"), "--target", "cpu")
    assert result.exit_code == 0
    assert re.findall(r"x \((\d+), 32\) -> y", result.output) == ["1", "8", "64"]


def test_files_of_a_size_that_is_listed_no_more_are_removed(tmp_path):
    command = [str(tmp_path / "layer.yaml"), "--target", "cpu", "--out", str(tmp_path / "out")]
    for batch, kept in (("[1, 8]", {"cpu_b1.cpp", "cpu_b8.cpp"}), ("[8, 64]", {"cpu_b8.cpp", "cpu_b64.cpp"}), ("8", {"cpu.cpp"})):
        read(tmp_path, batch)
        assert fsk("generate", *command).exit_code == 0
        assert {path.name for path in (tmp_path / "out" / "layer").glob("cpu*.cpp") if "backward" not in path.name} == kept


# ---- standalone.py ---------------------------------------------------------------------------------------------------


def standalone(spec):
    package = make_package(spec)
    text = render_standalone(package, render(package))
    names = {}
    exec(compile(text, "standalone.py", "exec"), names)
    return text, names


def test_standalone_has_a_forward_for_every_size_on_every_card(tmp_path):
    """Where a size has no plan for sm_90a, that part holds the one for sm_80, which the same card runs."""
    text, names = standalone(read(tmp_path, "[1, 1024]", chain=WIDE))
    for target in ("sm_80", "sm_90a"):
        assert all(hasattr(names["ModelNew"], f"_{target}_b{batch}") for batch in (1, 1024))
    for part in ("_CUDA_SM80", "_CUDA_SM90A"):
        functions = re.findall(r'extern "C" int (\w+)\(', names[part])
        assert len(functions) == len(set(functions)) and any("_b1_" in name for name in functions)
    launched = set(re.findall(r'_launch\("(\w+)"', text))
    assert launched <= set(re.findall(r'extern "C" int (\w+)\(', names["_CUDA_SM80"] + names["_CUDA_SM90A"]))


def test_standalone_refuses_and_pads_as_the_package_does(tmp_path):
    import torch

    model = standalone(read(tmp_path, "[2, 8]"))[1]["ModelNew"]()
    with pytest.raises(ValueError, match=r"generated for batch 2 or 8, got 3; the next larger is 8: .* run make generate SPEC="):
        model(torch.rand(3, 32))
    names = standalone(read(tmp_path, "[2, 8]", "pad_batch: true\n"))[1]
    names["_target"] = lambda device: ("sm_80", "", "")
    model = names["ModelNew"]()
    model._sm_80_b8 = lambda x: x * 2 + x.sum(1, keepdim=True).isnan()  # in the kernels' place, which need a GPU
    x = torch.rand(3, 32)
    y = model(x)
    assert torch.equal(y, x * 2) and y.untyped_storage().nbytes() == y.nbytes
    with pytest.raises(ValueError, match=r"expected N up to 8, got 9; generate again with larger sizes: make generate SPEC="):
        model(torch.rand(9, 32))
