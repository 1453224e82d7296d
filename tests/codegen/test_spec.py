"""A spec is read exactly or refused with the place and the remedy."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codegen.spec import SpecError, load_spec, resolve, shipped
from codegen.spec.reserved import RESERVED
from codegen.spec.writer import resolved_yaml
from runtime import GeneratedModule
from tests.fused import load_fused

GOOD = """\
name: layer
batch: 4
args: {in_features: 8, out_features: 6, num_groups: 3}
chain:
  - linear: {name: gemm, in_features: in_features, out_features: out_features}
  - group_norm: {name: norm, num_groups: num_groups}
  - hardtanh
"""

CONV = """\
name: layer
batch: 4
input: {height: 9, width: 9}
chain:
  - conv2d: {name: conv, in_channels: 2, out_channels: 4, kernel_size: 3}
  - group_norm: {name: norm, num_groups: 2}
  - max_pool2d: {kernel_size: 2}
"""


def read(tmp_path: Path, text: str, precision: str | None = None):
    path = tmp_path / "layer.yaml"
    path.write_text(text)
    return load_spec(path, precision)


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("path", shipped())
def test_shipped_specs_load_and_survive_a_round_trip(path, tmp_path):
    spec = load_spec(path)
    again = read(tmp_path, resolved_yaml(spec))
    assert (again.name, again.batch, again.args, again.input_shape, again.output_shape, again.parameters) == (
        spec.name, spec.batch, spec.args, spec.input_shape, spec.output_shape, spec.parameters,
    )  # fmt: skip
    assert [(s.operator.name, s.name, s.values) for s in again.chain] == [(s.operator.name, s.name, s.values) for s in spec.chain]
    assert resolved_yaml(again).split("\n", 1)[1] == resolved_yaml(spec).split("\n", 1)[1]


def test_numbers_of_the_default_spec():
    spec = load_fused("specs/default.yaml")
    assert (spec.input_shape, spec.output_shape, spec.group_channels, spec.group_size, spec.spatial) == ((1024, 8192), (1024, 8192), 512, 512, 1)
    assert spec.parameters == (("gemm.weight", (8192, 8192)), ("gemm.bias", (8192,)), ("group_norm.weight", (8192,)), ("group_norm.bias", (8192,)))
    assert spec.package == "gemm_groupnorm_hardtanh" and spec.with_precision("bf16").package == "gemm_groupnorm_hardtanh_bf16"


def test_own_parameters_come_before_those_of_children():
    assert [key for key, _ in load_spec("specs/gemm_biasadd_hardtanh_mish_groupnorm.yaml").parameters][:2] == ["bias", "gemm.weight"]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("batch: 4", "batch: 0", 2, "expected an integer from 1"),
        ("batch: 4", "batch: -3", 2, "expected an integer from 1"),
        ("batch: 4", "batch: 2.5", 2, "expected an integer from 1"),
        ("batch: 4", "batch: true", 2, "expected an integer from 1"),
        ("batch: 4", 'batch: "4"', 2, "expected an integer from 1"),
        ("batch: 4", "batch: 99999999999", 2, "expected an integer from 1"),
        ("batch: 4", "bacth: 4", 2, "did you mean batch?"),
        ("name: layer", "name: 3layer", 1, "no identifier"),
        ("name: layer", "name: a-b", 1, "no identifier"),
        ("name: layer", "name: ../x", 1, "no identifier"),
        ("name: layer", "name: class", 1, "a meaning of its own"),
        ("name: gemm", "name: forward", 5, "a meaning of its own"),
        ("name: norm", "name: gemm", 6, "taken by the operator on line 5"),
        ("num_groups: num_groups", "num_groups: 4", 6, "does not divide the 6 channels"),
        ("num_groups: num_groups", "num_groups: 6", 6, "leaves one value in each group; its variance is always 0, and the result does not depend on the values"),
        ("num_groups: num_groups", "num_groups: num_gruops", 6, "did you mean num_groups?"),
        ("num_groups: num_groups", "num_groups: num_groups, eps: 0.0", 6, "must be positive"),
        ("num_groups: num_groups", "num_groups: num_groups, eps: .nan", 6, "expected a finite number"),
        ("num_groups: num_groups", "num_groups: num_groups, groups: 2", 6, "no such argument"),
        ("- hardtanh", "- hardtahn", 7, "did you mean hardtanh?"),
        ("- hardtanh", "- hardtanh: {min_val: 1.0, max_val: 1.0}", 7, "must be less than"),
        ("- hardtanh", "- hardtanh: {min_val: -.inf}", 7, "expected a finite number"),
        ("- hardtanh", "- hardtanh: {min_val: 1e39}", 7, "beyond the range of float32"),
        ("- hardtanh", "- add: {name: norm_weight, shape: [6]}", 7, "would be one identifier"),
        ("- hardtanh", "- add: {name: t0, shape: [6]}", 7, "a meaning of its own"),
        ("- hardtanh", "- clamp", 7, "at least one of min and max"),
        ("- hardtanh", "- hardtanh: 3", 7, "arguments as a mapping"),
        ("- hardtanh", "- linear: {name: l2, in_features: 5, out_features: 6}", 7, "linear takes (batch, ..., 5), the input here is (4, 6)"),
        ("- hardtanh", "- max_pool2d: {kernel_size: 2}", 7, "takes (batch, channels, height, width)"),
        ("- hardtanh", "- add: {shape: [6]}", 7, "name: add needs one"),
        ("- hardtanh", "- add: {name: b, shape: [5]}", 7, "a parameter of shape (5,) does not broadcast with the value's (4, 6)"),
        ("- hardtanh", "- add: {name: b}", 7, "give either shape"),
        ("- hardtanh", "- group_norm: {name: n2, num_groups: 4}", 7, "does not divide the 6 channels"),
        ("- hardtanh", "- [hardtanh]", 7, "is an operator"),
        ("- hardtanh", "- !!python/object/apply:os.system {x: 1}", 7, "tags are not allowed"),
        ("- hardtanh", "- &a hardtanh", 7, "anchors are not allowed"),
        ("- hardtanh", "- *a", 7, ""),
        ("batch: 4", "batch: 4\nbatch: 5", 3, "given twice, first on line 2"),
        ("batch: 4", "batch: 4\nmath: fp16x3\nprecision: fp16", 3, "math at fp16: fp16x3"),
        ("num_groups: 3}", "num_groups: 3, spare: 1}", 3, "spare: is never used"),
        ("batch: 4", "batch: 4\ninput: {height: 3}", 3, "belong to a convolution, not to linear"),
        ("batch: 4", "batch: 4\ntargets: [sm_91]", 3, "targets: sm_91"),
    ],
)
def test_faults_are_placed_and_explained(tmp_path, old, new, line, message):
    assert GOOD.count(old) == 1
    found = problems(tmp_path, GOOD.replace(old, new))
    assert any(re.search(rf":{line}:\d+: ", text) and message in text for text in found), found


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kernel_size: 3", "kernel_size: 12", "does not fit"),
        ("kernel_size: 3", "kernel_size: [3, 3, 3]", "3 values; expected one or 2"),
        ("kernel_size: 3", "kernel_size: 3, groups: 4", "does not divide in_channels"),
        ("kernel_size: 3", "kernel_size: 3, padding: -1", "expected an integer from 0"),
        ("kernel_size: 2}", "kernel_size: 2, padding: 2}", "more than half"),
        ("kernel_size: 2}", "kernel_size: 9}", "window (9, 9) does not fit into (7, 7) with padding (0, 0)"),
        ("kernel_size: 2}", "kernel_size: 2, dilation: 7}", "window (2, 2) does not fit into (7, 7) with padding (0, 0) and dilation (7, 7)"),
        ("kernel_size: 3", "kernel_size: 3, dilation: [4, 5]", "kernel (3, 3) does not fit into (9, 9) with padding (0, 0) and dilation (4, 5)"),
        ("input: {height: 9, width: 9}", "input: {height: 9}", "needs the input's width"),
        ("input: {height: 9, width: 9}", "input: {height: 9, width: 9, values: normal}", "allowed: rand, randn"),
    ],
)
def test_convolution_faults(tmp_path, old, new, message):
    found = problems(tmp_path, CONV.replace(old, new))
    assert any(message in text for text in found), found


def test_tensors_beyond_31_bits_of_elements_are_refused(tmp_path):
    """The kernels index with 32 bits. The result, a weight and the input, each as large as it may be and one step larger."""
    text = "name: big\nbatch: {batch}\nchain:\n  - linear: {{name: gemm, in_features: {inner}, out_features: {outer}}}\n  - group_norm: {{name: norm, num_groups: 1}}\n"
    for large in ("batch outer", "inner outer", "batch inner"):
        first, second = large.split()
        fits = {"batch": 2, "inner": 2, "outer": 4, first: 32767, second: 65536}
        read(tmp_path, text.format(**fits))
        found = problems(tmp_path, text.format(**{**fits, first: 32768}))
        assert any("2147483647" in problem for problem in found), (large, found)


@pytest.mark.parametrize(("rank", "pool", "refused"), [(3, "avg_pool3d", True), (3, "max_pool3d", False), (2, "avg_pool2d", False)])
def test_a_window_that_padding_alone_makes_room_for_is_what_torch_says_it_is(tmp_path, rank, pool, refused):
    """avg_pool3d alone looks at the extents without their padding."""
    shape = [2, 3, 1, *[4] * (rank - 1)]
    text = f"name: pooled\nbatch: 2\ninputs: {{v: {{shape: {shape[1:]}}}}}\nchain:\n  - {pool}: {{kernel_size: 2, padding: 1}}\n  - relu\n"
    call = lambda: getattr(torch.nn.functional, pool)(torch.zeros(shape), 2, padding=1)  # noqa: E731
    if refused:
        with pytest.raises(RuntimeError):
            call()
        with pytest.raises(SpecError, match="larger than .* whatever the padding"):
            read(tmp_path, text)
    else:
        assert tuple(call().shape) == read(tmp_path, text).output_shape


def test_bounds_must_fit_the_storage_type(tmp_path):
    text = GOOD.replace("- hardtanh", "- hardtanh: {max_val: 70000.0}")
    assert read(tmp_path, text, "bf16").chain[-1].values["max_val"] == 70000.0
    with pytest.raises(SpecError, match="7:25: max_val: 70000.0 is beyond the range of float16"):
        read(tmp_path, text, "fp16")


def test_all_faults_are_reported_at_once(tmp_path):
    text = GOOD.replace("batch: 4", "batch: 0").replace("- hardtanh", "- hardtahn").replace("name: layer", "name: 1")
    assert [re.search(r":(\d+):", line).group(1) for line in problems(tmp_path, text)] == ["1", "2", "7"]


@pytest.mark.parametrize(("chain", "shape"), [
    (["max_pool2d: {kernel_size: 2}", "conv2d: {name: conv, in_channels: 2, out_channels: 4, kernel_size: 3}", "group_norm: {name: norm, num_groups: 2}"], (4, 4, 2, 2)),
    (["group_norm: {name: norm, num_groups: 1}", "silu", "conv2d: {name: conv, in_channels: 2, out_channels: 4, kernel_size: 3}"], (4, 4, 7, 7)),
    (["conv2d: {name: conv, in_channels: 2, out_channels: 4, kernel_size: 3}", "batch_norm: {name: bn}", "group_norm: {name: norm, num_groups: 2}"], (4, 4, 7, 7)),
    (["conv2d: {name: conv, in_channels: 2, out_channels: 4, kernel_size: 3}", "softmax: {dim: 1}", "mean: {dim: [2, 3]}"], (4, 4)),
    (["flatten", "linear: {name: fc, in_features: 162, out_features: 6}", "sum: {dim: 1, keepdim: true}"], (4, 1)),
])  # fmt: skip
def test_operators_stand_in_any_order_and_no_norm_is_needed(tmp_path, chain, shape):
    text = CONV[: CONV.index("input:")] + "inputs: {x: {shape: [2, 9, 9]}}\nchain:\n" + "".join(f"  - {step}\n" for step in chain)
    spec = read(tmp_path, text)
    assert spec.output_shape == shape and read(tmp_path, resolved_yaml(spec)) == spec


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "name: [", "a: b: c", "\x00", "- " * 5000, "{" * 3000, "? [a]\n: b"], ids=["empty", "list", "number", "open", "colons", "nul", "deep", "braces", "key"]
)
def test_no_yaml_at_all(tmp_path, text):
    assert problems(tmp_path, text)


def test_every_attribute_of_a_module_is_reserved():
    taken = {name for name in {*dir(torch.nn.Module()), *dir(GeneratedModule)} if not name.startswith("_")}
    assert taken <= RESERVED, sorted(taken - RESERVED)


def test_a_file_that_is_not_there_names_the_shipped_ones():
    with pytest.raises(SpecError, match=r"specs/default\.yaml"):
        load_spec("specs/defualt.yaml")


def test_aliases_cannot_explode(tmp_path):
    bomb = "a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20))
    assert all("not allowed" in line for line in problems(tmp_path, bomb))


def test_the_shown_path_does_not_depend_on_where_the_command_runs(monkeypatch, tmp_path):
    first = resolve("specs/default.yaml")
    monkeypatch.chdir(tmp_path)
    assert resolve("specs/default.yaml")[1] == first[1] == "specs/default.yaml"
    (tmp_path / "own.yaml").write_text(GOOD)
    assert resolve(str(tmp_path / "own.yaml"))[1] == resolve("own.yaml")[1] == "own.yaml"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve(str(tmp_path / "own.yaml"))[1] == ".../own.yaml"


DEFAULTS = GOOD.replace("num_groups: num_groups}", "num_groups: num_groups, eps: eps}").replace("chain:", "defaults: {eps: 1.0e-3}\nchain:")


def test_defaults_are_the_last_arguments(tmp_path):
    spec = read(tmp_path, DEFAULTS)
    assert spec.args[-1] == ("eps", 1e-3) and spec.defaults == ("eps",) and spec.init_values == (8, 6, 3) and spec.chain[1].values["eps"] == 1e-3
    again = read(tmp_path, resolved_yaml(spec))
    assert (again.args, again.defaults) == (spec.args, spec.defaults)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("{eps: 1.0e-3}", "{eps: 1.0e-3, num_groups: 3}", 4, "num_groups: is an argument on line 3 already"),
        ("{eps: 1.0e-3}", "{eps: 1.0e-3, slope: 3.0}", 4, "slope: is never used"),
        ("{eps: 1.0e-3}", "{eps: small}", 4, "expected a finite number"),
        ("{eps: 1.0e-3}", "[eps]", 4, "defaults: a list; expected a mapping"),
    ],
)
def test_faults_of_defaults(tmp_path, old, new, line, message):
    found = problems(tmp_path, DEFAULTS.replace(old, new))
    assert any(re.search(rf":{line}:\d+: ", text) and message in text for text in found), found


def test_an_element_of_a_list_may_name_an_argument(tmp_path):
    text = CONV.replace("chain:", "args: {k: 3, c: 4}\nchain:").replace("kernel_size: 3}", "kernel_size: [k, 5]}").replace("- max_pool2d", "- mul: {name: scale, shape: [c, 1, 1]}\n  - max_pool2d")
    spec = read(tmp_path, text)
    assert spec.chain[0].values["kernel_size"] == (3, 5) and spec.chain[2].values["shape"] == (4, 1, 1)
    written = resolved_yaml(spec)
    assert "kernel_size: [k, 5]" in written and "shape: [c, 1, 1]" in written and read(tmp_path, written) == spec
    assert any("kernel_size: q is neither a value nor an entry of args" in line for line in problems(tmp_path, text.replace("[k, 5]", "[q, 5]")))
    assert any("kernel_size: k = 0; expected an integer" in line for line in problems(tmp_path, text.replace("k: 3", "k: 0")))


@pytest.mark.parametrize(("old", "new", "said"), [
    ("batch: 4", 'batch: "4"', 'batch: "4"; expected an integer'),
    ("batch: 4", "batch: 4\npad_batch: 'true'", 'pad_batch: "true"; expected true or false'),
    ("num_groups: num_groups}", 'num_groups: num_groups, eps: "1.0"}', 'eps: "1.0" is neither a value nor an entry of args'),
])  # fmt: skip
def test_messages_show_quotes(tmp_path, old, new, said):
    assert any(said in line for line in problems(tmp_path, GOOD.replace(old, new)))


def test_a_list_of_args_may_hold_what_its_arguments_take(tmp_path):
    """Zeros and numbers below it are for the argument to judge: counts, axes and the sizes of views have them."""
    text = CONV.replace("chain:", "args: {apart: [0, 1], axes: [-1, -2], sizes: [0, -1]}\nchain:").replace("kernel_size: 3}", "kernel_size: 3, padding: apart}")
    text = text.replace("  - max_pool2d: {kernel_size: 2}", "  - sum: {dim: axes, keepdim: true}\n  - view: {sizes: sizes}")
    spec = read(tmp_path, text)
    assert (spec.chain[0].values["padding"], spec.chain[2].values["dim"], spec.output_shape) == ((0, 1), (-1, -2), (4, 4))
    assert read(tmp_path, resolved_yaml(spec)) == spec
    (said,) = problems(tmp_path, text.replace("[0, 1]", "[0, -1]"))
    assert said.endswith("padding: -1; expected an integer from 0 to 2147483647")
    (said,) = problems(tmp_path, text.replace("kernel_size: 3,", "kernel_size: apart,"))
    assert "kernel_size: 0; expected an integer from 1" in said


@pytest.mark.parametrize("wide", [
    "  - view: {sizes: [4, 4, 1, 1, 1, 1, 1, 1, 1]}", "  - sum: {dim: [2, 3]}\n" + "  - unsqueeze: {dim: -1}\n" * 7, "  - add: {name: bias, shape: [1, 1, 1, 1, 1, 1, 1, 1, 1]}",
])  # fmt: skip
def test_a_value_has_at_most_eight_axes(tmp_path, wide):
    text = CONV.replace("  - max_pool2d: {kernel_size: 2}", "  - max_pool2d: {kernel_size: 2}\n  - max_pool2d: {kernel_size: [3, 2]}\n" + wide)
    (said,) = problems(tmp_path, text)
    assert "gives 9 axes" in said and said.endswith("a value has at most 8")


@pytest.mark.parametrize(("given", "axes"), [
    ("shape: [1, 1, 1, 1, 1, 1, 1, 1]", "9 axes with that of the samples"), ("shape: [1, 1, 1, 1, 1, 1, 1, 1, 1], batched: false", "9 axes"),
])  # fmt: skip
def test_an_input_has_at_most_eight_axes(tmp_path, given, axes):
    text = f"name: layer\nbatch: 2\ninput: {{{given}}}\nchain: [relu]\n"
    (said,) = problems(tmp_path, text)
    assert said.endswith(f"3:16: shape: {axes}; a value has at most 8")
    assert len(read(tmp_path, text.replace("shape: [1, ", "shape: [")).input_shape) == 8


TAPS = GOOD.replace("  - group_norm", "  - mish\n  - group_norm").replace("  - hardtanh", "  - add: {from: %s}")


@pytest.mark.parametrize(("word", "message"), [
    ("mish", "from: mish stands in front of this one and has no name; give mish a name to use it"),
    ("gem", "from: gem is no operator in front of this one and no input; did you mean gemm?"),
])  # fmt: skip
def test_from_suggests_what_it_takes(tmp_path, word, message):
    (found,) = problems(tmp_path, TAPS % word)
    assert found.endswith(message)
    named = (TAPS % word).replace("- mish", "- mish: {name: act}").replace("from: mish", "from: act")
    if word == "mish":
        assert read(tmp_path, named).chain[-1].tap == 1


def test_from_reaches_any_earlier_result(tmp_path):
    assert read(tmp_path, TAPS % "gemm").chain[-1].tap == 0


@given(data=st.data())
def test_any_mangled_spec_is_read_or_refused(tmp_path_factory, data):
    """Deleting, repeating or replacing any stretch of text never raises anything but SpecError."""
    text = data.draw(st.sampled_from([GOOD, CONV]))
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    filler = data.draw(st.sampled_from(["", "x", "-1", "0", "true", "null", "[", "{", "&a", "*a", "!!x", ": ", "\n", "1e999", "[1, 2]", "{a: b}", "batch", text[start:end] * 2]))
    try:
        read(tmp_path_factory.mktemp("mangled"), text[:start] + filler + text[end:])
    except SpecError as error:
        assert error.problems and all(p.line >= 1 and p.column >= 1 and p.message for p in error.problems)
