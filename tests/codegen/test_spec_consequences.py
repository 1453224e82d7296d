"""One mistake in a spec is told once: what only follows from it is no fault of its own. And axes may be counted from the end."""

import copy

import pytest
import yaml

from codegen.ir.fused_form import departure
from codegen.spec import Spec, SpecError, chain_reader, load_spec
from codegen.spec.writer import resolved_yaml

LINEAR = """\
name: layer
batch: 4
input: {values: randn}
args: {in_features: 8, out_features: 6, num_groups: 3, low: -0.5}
defaults: {epsilon: 1.0e-3}
chain:
  - linear: {name: gemm, in_features: in_features, out_features: out_features}
  - add: {name: bias, shape: [out_features]}
  - group_norm: {name: norm, num_groups: num_groups, eps: epsilon}
  - hardtanh: {name: act, min_val: low, max_val: 0.75}
  - mul: {from: act}
  - sum: {dim: 1, keepdim: true}
"""

CONV = """\
name: layer
batch: [2, 4]
precision: bf16
input: {height: 9, width: 10}
args: {channels: 4, kernel: 3, window: 2}
chain:
  - conv2d: {name: conv, in_channels: 2, out_channels: channels, kernel_size: [kernel, 3]}
  - mish
  - group_norm: {name: norm, num_groups: 2}
  - relu: {name: act}
  - add: {from: act}
  - max_pool2d: {kernel_size: window}
  - gelu: {approximate: tanh}
"""


def problems(tmp_path, data) -> list[str]:
    path = tmp_path / "layer.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))
    try:
        load_spec(path)
    except SpecError as error:
        return str(error).splitlines()
    return []


def places(data, at=()):
    """Every place of the data: (path, is it a key)."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield (*at, key), True
            yield from places(value, (*at, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from places(value, (*at, index))
    else:
        yield at, False


def changed(data, path, is_key, change):
    made = copy.deepcopy(data)
    holder = made
    for step in path[:-1]:
        holder = holder[step]
    last = path[-1]
    if is_key:
        items = [(change(key) if key == last else key, value) for key, value in holder.items()]
        holder.clear()
        holder.update(items)
    else:
        holder[last] = change(holder[last])
    return made


MISTAKES = {
    "misspelt": lambda value: value[:-1] + "q" + value[-1] if isinstance(value, str) else value,
    "a letter more": lambda value: value + "x" if isinstance(value, str) else value,
    "another type": lambda value: {"a": 1} if not isinstance(value, str) else value + "x",
    "a list": lambda value: value + "_" if isinstance(value, str) else [[value]],
    "nothing like it": lambda value: "zzzzzzzz" if isinstance(value, str) else "zz",
    "negative": lambda value: -7 if isinstance(value, int) and not isinstance(value, bool) else value,
    "no word": lambda value: "a b" if isinstance(value, str) else value,
}


def test_the_specs_are_sound_before_the_mistakes(tmp_path):
    assert problems(tmp_path, LINEAR) == problems(tmp_path, CONV) == []


@pytest.mark.parametrize("what", MISTAKES)
@pytest.mark.parametrize("text", [LINEAR, CONV], ids=["linear", "conv"])
def test_one_mistake_is_told_at_most_once(text, what, tmp_path):
    data = yaml.safe_load(text)
    told = 0
    for path, is_key in places(data):
        made = changed(data, path, is_key, MISTAKES[what])
        found = problems(tmp_path, made)
        # A word like no other: what it stands for is not known, and what is missing in its place is told beside it.
        told_apart = is_key and what in ("nothing like it", "no word")
        assert len(found) <= (3 if told_apart else 1), (path, found)
        told += len(found)
    assert told > 5 or what == "negative"


@pytest.mark.parametrize("text", [LINEAR, CONV], ids=["linear", "conv"])
def test_a_whole_value_of_another_kind_is_told_once(text, tmp_path):
    data = yaml.safe_load(text)
    for key in data:
        for value in (None, 3, "word", [1], {"a": 1}):
            made = {**data, key: value}
            if key == "batch" and value in (3, [1]):
                continue
            found = problems(tmp_path, made)
            assert len(found) <= 1 or (key in ("args", "defaults") and isinstance(value, dict)), (key, value, found)
    for index in range(len(data["chain"])):
        for value in (None, 3, [1], {"a": 1, "b": 2}, {}):
            made = copy.deepcopy(data)
            made["chain"][index] = value
            found = problems(tmp_path, made)
            assert len(found) == 1, (index, value, found)


def test_two_mistakes_are_told_both(tmp_path):
    text = LINEAR.replace("hardtanh:", "hardtahn:").replace("[out_features]", "[7]")
    assert len(problems(tmp_path, text)) == 2


def test_a_first_operator_without_a_shape_is_told_once(tmp_path):
    data = yaml.safe_load(LINEAR)
    data["chain"].insert(0, "mish")
    (said,) = problems(tmp_path, data)
    assert "mish comes first, so the input's shape is needed" in said


def spec(tmp_path, text: str) -> Spec:
    path = tmp_path / "layer.yaml"
    path.write_text(text)
    return load_spec(path)


@pytest.mark.parametrize("operator", ["sum", "mean", "min", "max", "logsumexp"])
@pytest.mark.parametrize(("text", "rank"), [(LINEAR, 2), (CONV.replace("  - max_pool2d: {kernel_size: window}\n  - gelu", "  - sum: {dim: 1}\n  - gelu").replace(", window: 2", ""), 4)])
def test_axes_from_the_end_are_those_from_the_start(operator, text, rank, tmp_path):
    text = text.replace("- sum:", f"- {operator}:")
    for axis in range(-6, 7):
        made = text.replace("dim: 1", f"dim: {axis}")
        if -rank <= axis < rank:
            found, same = spec(tmp_path, made), spec(tmp_path, text.replace("dim: 1", f"dim: {axis % rank}"))
            assert found.output_shape == same.output_shape and departure(found.chain) == departure(same.chain)
        else:
            (said,) = problems(tmp_path, made)
            assert f"dim: {axis} is no axis of" in said


def test_an_axis_may_be_an_argument(tmp_path):
    text = LINEAR.replace("low: -0.5}", "low: -0.5, axis: -1}").replace("dim: 1", "dim: axis")
    found = spec(tmp_path, text)
    assert found.args[-2] == ("axis", -1) and found.chain[-1].values["dim"] in (1, -1)
    again = spec(tmp_path, resolved_yaml(found))
    assert again == found and "dim: axis" in resolved_yaml(found)


EVERY_KEY = """\
name: layer
batch: 4
precision: fp32
inputs: {x: {shape: [8], values: randn}, min_: {shape: [6], batched: false}}
args: {width: 8, spare: 3}
defaults: {low: -0.5}
ignored: [spare]
chain:
  - linear: {name: gemm, in_features: width, out_features: 6}
  - add: {name: bias, shape: [6], init: zeros}
  - hardtanh: {name: min, min_val: low}
  - mul: {parameter: bias, view: [1, -1]}
  - add: {from: min, detach: false}
  - sub: {from: min_}
  - gelu: {approximate: tanh}
unused:
  - parameter: {name: dead, shape: [3]}
created: [gemm, bias, dead]
targets: [cpu]
math: ffma
gemm: generated
library: producers
algebra: true
prepack: false
pad_batch: false
"""


@pytest.mark.parametrize("wrapped", [lambda value: [value], lambda value: {str(value): value}, lambda value: [], lambda value: {}, lambda value: [[value]]], ids=["list", "mapping", "empty list", "empty mapping", "lists"])
def test_a_list_or_mapping_in_any_place_is_read_or_refused_in_a_sentence(wrapped, tmp_path):
    """What is written in place of a word may be no word: neither a lookup nor a comparison of it may fail."""
    data = yaml.safe_load(EVERY_KEY)
    assert problems(tmp_path, data) == []
    refused = 0
    for path, is_key in places(data):
        if not is_key:
            found = problems(tmp_path, changed(data, path, False, wrapped))
            assert all(line.split("layer.yaml:", 1)[1].split(":")[0].isdigit() for line in found)
            refused += bool(found)
    assert refused > 25


@pytest.mark.parametrize("entry", ["nosuch: {name: %s}", "relu: {name: %s}", "add: {from: %s}", "add: {parameter: %s}", "linear: {name: %s}"])
@pytest.mark.parametrize("given", ["[a]", "{a: b}", "[]", "{}", "[[a]]", "3", "true"])
def test_a_name_that_is_no_word_is_refused_where_it_stands(entry, given, tmp_path):
    text = LINEAR + f"  - {entry % given}\n  - add: {{from: gemm}}\n"
    found = problems(tmp_path, text)
    assert found and all(line.split("layer.yaml:", 1)[1].startswith("13:") for line in found), found


@pytest.mark.parametrize("word", ["min", "F", "getattr"])
def test_what_hides_a_name_is_refused_of_inputs_alone(word, tmp_path):
    """An operator's name is an attribute of the module, an input's a variable of forward."""
    text = LINEAR.replace("name: act", f"name: {word}").replace("from: act", f"from: {word}")
    assert problems(tmp_path, text) == []
    assert problems(tmp_path, LINEAR.replace("name: bias", f"name: {word}") + f"  - mul: {{parameter: {word}, view: [1, -1]}}\n") == []
    (said,) = problems(tmp_path, LINEAR.replace("input: {values: randn}", f"inputs: {{x: {{shape: [8]}}, {word}: {{shape: [1]}}}}") + f"  - add: {{from: {word}}}\n")
    assert f"inputs: {word} has a meaning of its own" in said


@pytest.mark.parametrize("key", ["targets", "created", "ignored", "unused"])
def test_an_empty_list_is_no_choice(key, tmp_path):
    (said,) = problems(tmp_path, f"{LINEAR}{key}: []\n")
    assert f":13:{len(key) + 3}: {key}: " in said


def test_a_chain_of_a_thousand_entries_takes_each_name_once(tmp_path, monkeypatch):
    """The work is in proportion to the entries: none reads the names of all in front of it again."""
    calls = []
    monkeypatch.setattr(chain_reader, "_name", lambda item, name=chain_reader._name: calls.append(1) or name(item))
    assert problems(tmp_path, LINEAR + "  - relu\n" * 1000) == []
    assert len(calls) <= 1006
