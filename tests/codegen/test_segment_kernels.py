"""Segments: how chains are cut, and their kernels on the cpu target against PyTorch in float64."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codegen.ir.chain import chain_of
from codegen.ir.grouping import Grouping
from codegen.plan import plan
from codegen.plan.model import Library
from codegen.plan.segments.program import run_of
from codegen.plan.stages.kernel import element_offset
from tests import tiers
from tests.codegen.segment_chains import SegmentChain, build_segments, error_of, same_places, segment_spec
from tests.codegen.segment_draw import hard_data, random_spec
from tests.compile_matrix import faults

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


PRECISIONS = ("fp32", "bf16", "fp16")


def scaled(name: str, *shape: int) -> dict:
    return {"mul": {"name": name, "shape": list(shape)}}


def shifted(name: str, *shape: int) -> dict:
    return {"add": {"name": name, "shape": list(shape)}}


# (shape, chain, further inputs): every kind of kernel, of core and of access.
CASES = {
    "broadcasts": ((4, 8, 6, 10), [scaled("a", 8, 1, 1), "gelu", shifted("b", 10), {"sub": {"from": "r"}}], {"r": [6, 1]}),
    "odd": ((3, 7, 5), ["silu", {"div": {"name": "d", "shape": [1]}}, {"mul": {"value": 0.5}}], None),
    "grows": ((2, 6, 1), [shifted("grow", 6, 9), "relu", {"softmax": {"dim": 2}}], None),
    "layer_norm": ((4, 8, 6, 10), [{"layer_norm": {"name": "ln", "normalized_shape": [10]}}, "silu"], None),
    "residual": ((4, 8, 6, 10), [{"group_norm": {"name": "gn", "num_groups": 2}}, {"mul": {"from": "u"}}], None),
    "instance_norm": ((4, 8, 6, 10), [{"instance_norm": {"name": "inn", "affine": True}}, "tanh"], None),
    "rms_norm": ((3, 5, 700), [{"rms_norm": {"name": "rn", "normalized_shape": [700], "eps": 1e-5}}], None),
    "batch_norm": ((4, 8, 6, 10), ["sigmoid", {"batch_norm": {"name": "bn"}}, "relu"], None),
    "cumulative": ((40, 24), [{"batch_norm": {"name": "bn", "momentum": None}}, "relu"], None),
    "one_channel": ((40, 1), ["tanh", {"batch_norm": {"name": "bn", "affine": False}}], None),
    "untracked": ((40, 6, 3), [{"batch_norm": {"name": "bn", "track_running_stats": False}}], None),
    "channels": ((2, 60, 7, 5), [{"softmax": {"dim": 1}}], None),
    "log_rows": ((2, 6, 7, 5), [{"log_softmax": {"dim": -1}}, shifted("b", 7, 1)], None),
    "one_value": ((2, 1, 7, 5), [{"softmax": {"dim": 1}}, {"max": {"dim": 1}}], None),
    "one_row": ((1, 3001), ["tanh", {"logsumexp": {"dim": 1}}], None),
    "extremes": ((2, 6, 7, 5), ["relu", {"min": {"dim": 1, "keepdim": True}}, shifted("b", 7, 1), {"amax": {"dim": [2, 3]}}], None),
    "pieces": ((2, 6, 7, 5), [{"mean": {"dim": [0, 2, 3], "keepdim": True}}], None),
    "whole": ((2, 6, 7, 5), [{"sum": {"dim": [0, 1, 2, 3], "keepdim": True}}, "relu"], None),
    "twice": ((2, 6, 7, 5), [{"logsumexp": {"dim": 1}}, {"logsumexp": {"dim": 1}}], None),
    "max_pool3d": ((2, 6, 8, 9, 7), [{"max_pool3d": {"kernel_size": 3, "stride": 2, "padding": 1}}, "gelu"], None),
    "avg_pool3d": ((2, 6, 8, 9, 7), ["relu", {"avg_pool3d": {"kernel_size": [2, 3, 2], "padding": [1, 1, 0], "count_include_pad": False, "ceil_mode": True}}], None),
    "pool1d": (
        (2, 6, 19), [{"avg_pool1d": {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}}, {"max_pool1d": {"kernel_size": 2, "dilation": 2, "stride": 1}}],
        None,
    ),
    "neighbours": ((2, 6, 4, 6, 8), ["relu", {"max_pool3d": {"kernel_size": 2, "ceil_mode": True}}, shifted("b", 6, 1, 1, 1), "gelu"], None),
    "averages": ((3, 4, 9, 16), [{"avg_pool2d": {"kernel_size": [3, 2]}}, "tanh"], None),
    "one_access": ((2, 6, 5, 8), [{"max_pool2d": {"kernel_size": [2, 4], "padding": [1, 0]}}], None),
    "global": ((2, 6, 8, 9), [{"avg_pool2d": {"kernel_size": [8, 9]}}, {"flatten": {}}, shifted("b", 6)], None),
    "global_max": ((2, 6, 8, 9), ["gelu", {"max_pool2d": {"kernel_size": [8, 9]}}, {"squeeze": {"dim": [2, 3]}}, "tanh"], None),
    "adaptive": ((2, 6, 8, 8), ["gelu", {"adaptive_avg_pool2d": {"output_size": [2, 4]}}, {"flatten": {"start_dim": 2}}, {"softmax": {"dim": -1}}], None),
    "taps": ((2, 6, 8, 8), [{"tanh": {"name": "t"}}, {"softmax": {"dim": 1}}, {"add": {"from": "t"}}, {"mul": {"name": "m", "shape": [1]}}, {"mul": {"from": "m"}}], None),
    "few_rows": ((3, 40000), ["tanh", {"layer_norm": {"name": "ln"}}, "relu"], None),
    "wide_rows": ((70, 33001), [{"softmax": {"dim": 1}}], None),
    "few_columns": ((3000, 8), [{"batch_norm": {"name": "bn"}}, "relu"], None),
    "deep_columns": ((2, 2000, 8, 4), [{"log_softmax": {"dim": 1}}], None),
    "planes": ((4, 16, 30, 30), ["gelu", {"batch_norm": {"name": "bn"}}, scaled("m", 16, 1, 1)], None),
}  # fmt: skip


def specs_of(folder, precision: str, names: Iterable[str] = CASES) -> list:
    return [segment_spec(folder, shape, chain, precision, inputs) for shape, chain, inputs in (CASES[name] for name in names)]


def check(chain: SegmentChain, precision: str, chance: float = 1.1) -> None:
    """At most `chance` times PyTorch's own error, or 3e-7 in fp32 and half a unit of 16-bit types, which few elements may all have; NaN and infinities where
    PyTorch has them, in float64 or at its own precision, which does not reach as far."""
    floor = 3e-7 if precision == "fp32" else 2.0 ** -(chain.spec.precision.mantissa_bits + 1)
    for training in (False, True) if chain.spec.has_modes else (False,):
        first, *others = chain.sources()
        for name, x in hard_data(first):
            sources = [x, *others]
            exact, got = chain.pytorch(sources, torch.float64, training), chain.kernels(sources, training)
            eager = chain.pytorch(sources, None, training)
            for key in got.keys() & exact.keys():
                what = f"{[step.operator.name for step in chain.spec.chain]} {chain.spec.input_shape} {name} {key} {'training' if training else ''}"
                exact_places, eager_places = same_places(got[key], exact[key]), same_places(got[key], eager[key])
                assert exact_places or eager_places, what
                if exact_places and same_places(eager[key], exact[key]):
                    limit, error = max(chance * error_of(eager[key], exact[key]), floor), error_of(got[key], exact[key])
                else:
                    limit, error = 2 * floor, error_of(got[key], (exact if exact_places else eager)[key].double())
                assert error <= limit, (what, error, limit)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_groupings_are_the_same_values(sizes: list[int], data: st.DataObject) -> None:
    """A grouping joins what the axes join, group by group in the order of the kept axes."""
    joined = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
    grouping = Grouping.of(tuple(sizes), joined)
    kept = [axis for axis in range(len(sizes)) if axis not in joined and sizes[axis] > 1]
    runs = [axis for axis in range(len(sizes)) if sizes[axis] > 1]
    pieces = sum(1 for at, axis in enumerate(runs) if axis in joined and (at == 0 or runs[at - 1] not in joined))
    if grouping is None:
        assert pieces > 2 or (pieces == 2 and kept and len(kept) >= 2)
        return
    values = torch.arange(math.prod(sizes)).reshape(sizes)
    assert grouping.groups * grouping.joined == values.numel()
    assert torch.equal(values.sum(sorted(joined)).reshape(-1), values.reshape(grouping.shape).sum((1, 3)).reshape(-1))


@given(st.lists(st.sampled_from((1, 2, 3, 4, 8)), min_size=1, max_size=5), st.data())
def test_runs_are_read_in_one_way(whole: list[int], data: st.DataObject) -> None:
    """Along a run, a broadcast tensor's places are neighbours or the same one."""
    own = [data.draw(st.sampled_from((1, size))) for size in whole][data.draw(st.integers(0, len(whole) - 1)) :]
    length, mode = run_of(tuple(own), tuple(whole))
    place = eval(f"lambda index: {element_offset(tuple(own), tuple(whole)).replace('/', '//')}")
    for index in range(math.prod(whole)):
        first = index // length * length
        assert place(index) == place(first) + (index - first if mode == "vector" else 0)


def cut(tmp_path, chain: list, shape=(2, 6, 8, 8), training: bool = False) -> list[str]:
    segments = chain_of(segment_spec(tmp_path, shape, chain), training).segments
    named = [(" ".join(step.operator.name for step in segment.steps), segment.alone) for segment in segments]
    return [f"({names})" if alone else names for names, alone in named]


def test_chains_are_cut_at_cores_growth_and_reuse(tmp_path) -> None:
    assert cut(tmp_path, ["relu", {"softmax": {"dim": 1}}, "tanh", {"sum": {"dim": 1}}, "gelu"]) == ["relu softmax tanh", "sum gelu"]
    assert cut(tmp_path, ["relu", shifted("grow", 5, 1, 1, 1, 1), "tanh", {"amax": {"dim": 0}}]) == ["relu", "add tanh amax"]
    kept = [{"tanh": {"name": "t"}}, "gelu", {"add": {"from": "t"}}]
    assert cut(tmp_path, kept) == ["tanh gelu add"]
    assert cut(tmp_path, [{"tanh": {"name": "t"}}, {"softmax": {"dim": 1}}, {"add": {"from": "t"}}]) == ["tanh", "softmax add"]
    assert cut(tmp_path, [*kept, {"softmax": {"dim": 1}}, {"sum": {"dim": 1, "keepdim": True}}, {"mul": {"from": "t"}}]) == [
        "tanh",
        "gelu add softmax",
        "sum",
        "mul",
    ]
    assert cut(tmp_path, ["gelu", {"max_pool2d": {"kernel_size": 3, "stride": 1}}]) == ["gelu", "max_pool2d"]
    assert cut(tmp_path, ["gelu", {"max_pool2d": {"kernel_size": 2}}]) == ["gelu max_pool2d"]
    assert cut(tmp_path, [{"sum": {"dim": [0, 2]}}, "relu"]) == ["(sum)", "relu"]
    assert cut(tmp_path, [{"adaptive_avg_pool2d": {"output_size": 3}}, "relu"]) == ["(adaptive_avg_pool2d)", "relu"]
    assert cut(tmp_path, [{"flatten": {}}, {"unsqueeze": {"dim": 1}}]) == ["(flatten)", "(unsqueeze)"]


def test_dropout_and_running_statistics_are_mapped_in_evaluation(tmp_path) -> None:
    chain = ["relu", {"batch_norm": {"name": "bn"}}, {"dropout": {"p": 0.5}}, "gelu", {"softmax": {"dim": 1}}]
    assert cut(tmp_path, chain) == ["relu batch_norm dropout gelu softmax"]
    assert cut(tmp_path, chain, training=True) == ["relu batch_norm", "(dropout)", "gelu softmax"]


def test_what_is_left_to_the_library_is_named(tmp_path) -> None:
    spec = segment_spec(
        tmp_path, (2, 6, 8, 8), [{"conv_transpose2d": {"name": "c", "in_channels": 6, "out_channels": 4, "kernel_size": 2, "groups": 2}}, "relu", {"mean": {"dim": [0, 2]}}]
    )
    for target in ("cpu", "sm_80"):
        made = plan(spec, target)
        assert [step.operation for step in made.steps if isinstance(step, Library)] == ["conv_transpose2d", "mean"]
        assert "library steps: conv_transpose2d, mean" in made.why and "segments: relu" in made.why


@needs_gxx
@pytest.mark.parametrize(("precision", "share"), tiers.quick(
    (("fp32", "all"), ("bf16", "some"), ("bf16", "all"), ("fp16", "some"), ("fp16", "all")), ("fp32", "all"), ("bf16", "some"), ("fp16", "some"),
))  # fmt: skip
def test_every_kind_against_float64(tmp_path, precision: str, share: str) -> None:
    """In `make test` all kinds in fp32 and a fifth in each type of 16 bits, whose loads are wider."""
    names = tiers.share_of(share, PRECISIONS, precision, list(CASES))
    for chain in build_segments(tmp_path, specs_of(tmp_path, precision, names)):
        check(chain, precision)


@needs_gxx
@pytest.mark.parametrize("seed", [0, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_chains_against_float64(tmp_path, seed: int) -> None:
    for chain in build_segments(tmp_path, [random_spec(tmp_path, seed + number) for number in range(25)]):
        check(chain, "fp32", chance=2.0)  # where values cancel, both errors are drawn by chance


@needs_gxx
def test_threads_do_not_change_bits(tmp_path) -> None:
    for chain in build_segments(tmp_path, specs_of(tmp_path, "fp32")):
        for training in (False, True):
            sources = chain.sources(3.0, 1.0)
            one, three = chain.kernels(sources, training, threads=1), chain.kernels(sources, training, threads=3)
            assert all(torch.equal(one[key], three[key]) for key in one if training or key == "y")


def check_constant_groups(chains: list[SegmentChain]) -> None:
    """Groups of equal values give exactly beta, and a large mean leaves a small spread what it is."""
    for chain in chains:
        for value in (0.1, -1e4, 3e-30, 1e30):
            sources = [torch.full(given.shape, value, device=chain.device) for given in chain.spec.inputs]
            beta = chain.pytorch([torch.zeros(given.shape, device=chain.device) for given in chain.spec.inputs], torch.float64, training=True)["y"]
            assert torch.equal(chain.kernels(sources, training=True)["y"].double(), beta), (chain.spec.chain[-1].operator.name, value)
        (source,) = chain.sources(1.0, 3000.0)
        exact = chain.pytorch([source], torch.float64, training=True)["y"]
        assert error_of(chain.kernels([source], training=True)["y"], exact) <= max(
            3e-7, 1.1 * error_of(chain.pytorch([source], None, training=True)["y"], exact)
        )


def norms(folder) -> list:
    norm = {"name": "norm"}
    shapes = [
        ((6, 8, 5, 7), {"group_norm": norm | {"num_groups": 2}}),
        ((5, 1021), {"layer_norm": norm}),
        ((6, 8, 13), {"instance_norm": norm | {"affine": True}}),
    ]
    shapes += [((2, 30000), {"layer_norm": norm}), ((60, 33000), {"layer_norm": norm}), ((4, 5, 9, 9), {"batch_norm": norm}), ((33, 20), {"batch_norm": norm})]
    return [segment_spec(folder, shape, [norm]) for shape, norm in shapes]


@needs_gxx
def test_constant_groups_give_beta(tmp_path) -> None:
    check_constant_groups(build_segments(tmp_path, norms(tmp_path)))


@pytest.mark.nvcc
@needs_nvcc
def test_every_kind_compiles_for_a_gpu(tmp_path) -> None:
    """Once each: no warnings, spills or local memory. Shapes as large as layers have them."""
    large = [
        ((64, 256, 28, 28), CASES["planes"][1][:1] + [shifted("b", 256, 1, 1), {"add": {"from": "r"}}], {"r": [256, 1, 1]}),
        ((2048, 4096), ["silu", {"layer_norm": {"name": "ln"}}], None), ((32, 256, 64, 64), ["silu", {"group_norm": {"name": "gn", "num_groups": 32}}, "tanh"], None),
        ((1024, 65536), [{"softmax": {"dim": 1}}], None), ((32, 256, 64, 64), [{"softmax": {"dim": 1}}], None), ((16, 3000, 32, 32), [{"logsumexp": {"dim": 1}}], None),
        ((100000, 4), [{"softmax": {"dim": 1}}], None), ((100000, 2, 16), ["gelu", {"log_softmax": {"dim": 1}}], None), ((5000, 37), [{"layer_norm": {"name": "n"}}], None),
        ((64, 128, 64, 64), [{"batch_norm": {"name": "bn"}}, "relu"], None), ((262144, 256), [{"amax": {"dim": 0}}], None),
        ((16, 64, 32, 56, 56), [{"max_pool3d": {"kernel_size": 3, "stride": 2, "padding": 1}}], None), ((64, 128, 56, 56), ["relu", {"avg_pool2d": {"kernel_size": 2}}], None),
    ]  # fmt: skip
    found = []
    for precision, kept in (("fp32", large), ("bf16", large[1:5])):
        for shape, chain, inputs in kept:
            made = plan(segment_spec(tmp_path, shape, chain, precision, inputs), "sm_80", "h200")
            found += [fault for kernel in made.kernels for fault in faults(made, kernel, tmp_path)]
    assert found == []


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_rms_norm_without_eps_has_the_one_that_torch_takes(precision, dtype, tmp_path):
    """Torch computes it in float32 at 16 bits too, with that type's epsilon."""
    x = torch.full((1, 8), 2.0**-14, dtype=dtype)
    y = torch.nn.functional.rms_norm(x, (8,)).double()
    assert ((x.double() / y).square() - x.double().square()).mean().item() == pytest.approx(2.0**-23, rel=0.02)
    spec = segment_spec(tmp_path, (3, 8), [{"rms_norm": {"name": "norm"}}], precision)
    (launch,) = plan(spec, "cpu").steps
    assert [constant.text for constant in launch.kernel.constants if constant.name == "kEps"] == ["1.1920929e-7f"]
