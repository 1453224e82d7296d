"""The safe part of YAML: what is read is read as every version of YAML reads it, and what costs much or hides something is refused at once."""

import time

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from codegen.spec.yaml_reader import MAX_BYTES, MAX_DEPTH, YamlError, parse, read

SECONDS = 5  # of a machine under load; 16 000 brackets took 40 s where depth had no limit


def refusal(text: str) -> str:
    with pytest.raises(YamlError) as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize("piece", ["[", "{", "- ", "? ", "[\n", "{a: ", "[[], ", "- - ", "a: [{"])
@pytest.mark.parametrize("repeats", [16000, 40])
def test_deep_nesting_is_refused_before_it_costs_anything(piece, repeats):
    start = time.perf_counter()
    said = refusal(piece * repeats)
    assert time.perf_counter() - start < SECONDS and (f"nested more than {MAX_DEPTH} levels" in said or "not valid YAML" in said)


def test_the_deepest_text_that_is_read():
    assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert "levels deep" in refusal("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


@pytest.mark.parametrize("text", ["[" + "*a, " * 16000, "[" + "&a x, " * 9000, "[" + "!x y, " * 9000, "a: [" + "1, " * 20000 + "]", "".join(f"k{i}: 1\n" for i in range(8000))])
def test_no_file_of_the_size_allowed_takes_long(text, tmp_path):
    (tmp_path / "spec.yaml").write_text(text[:MAX_BYTES])
    start = time.perf_counter()
    try:
        read(tmp_path / "spec.yaml")
    except YamlError as error:
        assert error.problems
    assert time.perf_counter() - start < SECONDS
    (tmp_path / "spec.yaml").write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(YamlError, match=f"at most {MAX_BYTES}"):
        read(tmp_path / "spec.yaml")


@pytest.mark.parametrize("text", ["010", "-010", "00", "08", "007.5", "0o10", "0O7", "0x1F", "0b11", "1_000", "1_0.5", ".1_5", "1e1_0", "1:30", "190:20:30", "-1:30.5"])
def test_numbers_of_several_readings_are_refused_where_they_stand(text):
    said = refusal(f"a: 1\nb: [{text}]")
    assert said.startswith(f"{text}: has ") and said.endswith("; write the number in plain decimal digits")
    assert parse(f'a: "{text}"').plain() == {"a": text}  # quoted, it is text in every version


@settings(max_examples=600, deadline=None)
@example("1:2").via("in sixties")
@example("0e1").via("no leading zero")
@given(st.text(alphabet="0123456789+-._:eExXoObB", min_size=1, max_size=7))
def test_a_plain_scalar_that_is_read_as_a_number_is_that_number_in_yaml_1_1_too(text):
    """Or it is text there, as 1e5 is, which YAML 1.2 and everybody else take for a number."""
    try:
        value = parse(f"a: {text}").plain()["a"]
    except YamlError:
        return
    theirs = yaml.safe_load(f"a: {text}")["a"]
    if isinstance(value, (int, float)):
        assert theirs == text or (theirs == value and type(theirs) is type(value)), (text, value, theirs)
    else:
        assert not isinstance(theirs, (int, float)), (text, value, theirs)


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.integers(-(2**31), 2**31), st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_as_python_writes_them_come_back(number):
    value = parse(f"a: {number!r}").plain()["a"]
    assert value == number and type(value) is type(number)
