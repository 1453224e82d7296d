"""One mistake in a spec is told once: what only follows from it is no fault of its own. And axes may be counted from the end."""

import copy

import pytest
import yaml

from codegen.spec import Spec, SpecError, load_spec
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


def test_a_missing_producer_and_a_late_one_are_told_once(tmp_path):
    data = yaml.safe_load(LINEAR)
    data["chain"].insert(0, "mish")
    assert [line.split(": ", 1)[1] for line in problems(tmp_path, data)] == ["linear: a chain has exactly one linear or conv2d, and it comes first"]
    del data["chain"][1]
    assert sum("a chain has exactly one linear or conv2d" in line for line in problems(tmp_path, data)) == 1


def spec(tmp_path, text: str) -> Spec:
    path = tmp_path / "layer.yaml"
    path.write_text(text)
    return load_spec(path)


@pytest.mark.parametrize("operator", ["sum", "mean", "min", "max", "logsumexp"])
@pytest.mark.parametrize(("text", "rank"), [(LINEAR, 2), (CONV.replace("  - max_pool2d: {kernel_size: window}\n  - gelu", "  - sum: {dim: 1}\n  - gelu").replace(", window: 2", ""), 4)])
def test_axes_from_the_end_are_those_from_the_start(operator, text, rank, tmp_path):
    text = text.replace("- sum:", f"- {operator}:")
    wanted = spec(tmp_path, text)
    for axis in range(-6, 7):
        made = text.replace("dim: 1", f"dim: {axis}")
        if axis in (1, 1 - rank):
            found = spec(tmp_path, made)
            assert found == wanted and resolved_yaml(found) == resolved_yaml(wanted)
        else:
            (said,) = problems(tmp_path, made)
            assert f"dim: {axis}; channels, dim: 1 (or {1 - rank} of {rank} dimensions)" in said


def test_an_axis_may_be_an_argument(tmp_path):
    text = LINEAR.replace("low: -0.5}", "low: -0.5, axis: -1}").replace("dim: 1", "dim: axis")
    found = spec(tmp_path, text)
    assert found.args[-2] == ("axis", -1) and found.chain[-1].values["dim"] == 1
    again = spec(tmp_path, resolved_yaml(found))
    assert again == found and "dim: axis" in resolved_yaml(found)
