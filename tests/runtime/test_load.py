"""Which targets are built for which machine."""

import pytest

from codegen import targets
from runtime import UnsupportedDeviceError, manifest
from runtime.load import best_target, choose_targets

A100, GA102, H100, B200, T4 = (8, 0), (8, 6), (9, 0), (10, 0), (7, 5)


@pytest.fixture
def package(tiny):
    """A package with cpu, sm_80 and sm_90a."""

    def add(data):
        data["targets"]["sm_90a"] = {**data["targets"]["sm_80"], "arch": "sm_90a", "min_capability": [9, 0]}

    return tiny.edit(add)


def names(pairs):
    return [(target.name, capability) for target, capability in pairs]


@pytest.mark.parametrize(
    "capabilities, requested, chosen",
    [
        ([], "", [("cpu", None)]),
        ([A100], "", [("sm_80", A100)]),
        ([H100], "", [("sm_90a", H100)]),
        ([H100, H100], "", [("sm_90a", H100)]),
        ([GA102, H100], "", [("sm_80", GA102), ("sm_90a", H100)]),
        ([B200], "", [("sm_80", B200)]),
        ([T4, A100], "", [("sm_80", A100)]),
        ([H100], "sm_80", [("sm_80", H100)]),
        ([H100], "cpu, sm_80 sm_90a", [("sm_90a", H100), ("sm_80", H100), ("cpu", None)]),
        ([A100], "sm_90a", [("sm_90a", None)]),
        ([], "sm_80", [("sm_80", None)]),
        ([T4], "cpu", [("cpu", None)]),
    ],
)
def test_choice(package, capabilities, requested, chosen):
    assert names(choose_targets(package, capabilities, requested)) == chosen


def test_no_target_for_the_gpu_is_said_not_hidden(package):
    with pytest.raises(UnsupportedDeviceError, match=r"compute capability 7.5.*emitted: cpu, sm_80 .*8.0 or later.*TARGETS=cpu"):
        choose_targets(package, [T4], "")


def test_a_target_that_was_not_emitted(package):
    with pytest.raises(UnsupportedDeviceError, match="TARGETS is 'sm_100a'.*generated for cpu, sm_80, sm_90a"):
        choose_targets(package, [], "sm_100a")


def test_a_name_that_is_no_target_is_refused_beside_one_that_is(package):
    with pytest.raises(UnsupportedDeviceError, match="TARGETS is 'cpu foo'.*generated for cpu, sm_80, sm_90a; name one of these; foo is no target, there are cpu, sm_80, sm_90a"):
        choose_targets(package, [], "cpu foo")


def test_a_target_that_another_package_has_is_left_out_beside_one_that_this_has(tiny):
    assert names(choose_targets(tiny.package, [], "sm_80 sm_90a")) == [("sm_80", None)]


def test_the_targets_are_those_of_the_generator():
    rows = {t.name: (t.arch, t.min_capability) if t.language == "cuda" else (None, None) for t in targets.TARGETS.values()}
    assert list(manifest.TARGETS.items()) == list(rows.items())


def test_a_package_for_the_cpu_alone_runs_there_whatever_is_visible(tiny):
    package = tiny.edit(lambda data: data["targets"].pop("sm_80"))
    assert names(choose_targets(package, [H100], "")) == [("cpu", None)]
    assert best_target(package, H100) is None


def test_the_best_of_the_requested_targets_runs_on_the_device(package):
    assert best_target(package, H100).name == "sm_90a"
    assert best_target(package, A100).name == "sm_80"
