"""Chains divided among ranks, on paper: local sizes, which parameter is divided where, what is exchanged, and what is refused."""

import math
from collections import Counter
from pathlib import Path

import numpy
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from codegen.ir.chain import chain_of
from codegen.ir.layout import ShardError, part_of, renamed, straddling
from codegen.ir.sharding import Kernels
from codegen.spec import load_spec
from fixed_shape_kernels.api import read
from tests.tiers import share_of, shares

SPECS = Path(__file__).resolve().parents[2] / "codegen" / "specs"
LEVEL2 = sorted((SPECS / "kernelbench" / "level2").glob("*.yaml"))
LINEAR = {"linear": {"name": "gemm", "in_features": 24, "out_features": 48}}
PLANE = {"input": {"height": 8, "width": 8}}


def layer(*chain, **more):
    """The chain of a small spec, in evaluation or training."""
    training = more.pop("training", False)
    return chain_of(read({"name": "layer", "batch": 4, **more, "chain": list(chain)}), training)


def transposed(groups: int = 1):
    return {"conv_transpose2d": {"name": "conv", "in_channels": 8, "out_channels": 16, "kernel_size": 3, "groups": groups}}


@pytest.mark.parametrize("name", ["default", "gemm_biasadd_hardtanh_mish_groupnorm", "conv2d_groupnorm_scale_maxpool_clamp"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_whole_groups_need_no_communication(name, tp):
    """Problems 30, 94 and 85: one run of kernels with as many groups a rank, every parameter divided along its first dimension, nothing exchanged."""
    spec = load_spec(str(SPECS / f"{name}.yaml"))
    sharding = chain_of(spec).shard(tp, tp - 1)
    assert not sharding.collectives and sharding.output == 1 and set(sharding.parameters.values()) == {0}
    (kernels,) = sharding.kernels
    own = read(kernels.layer("part", "fp32"))
    whole = {step.name: step for step in spec.chain if "num_groups" in step.values}
    assert [step.values["num_groups"] * tp for step in own.chain if step.name in whole] == [step.values["num_groups"] for step in whole.values()]
    assert own.output_shape == part_of(spec.output_shape, 1, tp)


@shares
@pytest.mark.parametrize("tp", [2, 4])
def test_every_layer_of_level_2_is_divided(share, tp):
    """All but those whose producers have too few channels. The kernels are those of every rank, and their specs give the shapes that the sharding says."""
    for path in share_of(share, ("2", "4"), str(tp), LEVEL2):
        spec = load_spec(str(path))
        for split in (None, 1):
            try:
                parts = [chain_of(spec).shard(tp, rank, split) for rank in range(tp)]
            except ShardError as error:
                assert "over" in str(error) and str(tp) in str(error), path
                continue
            assert all(part.kernels == parts[0].kernels for part in parts), path
            for number, kernels in enumerate(parts[0].kernels):
                assert read(kernels.layer(f"part_{number}", spec.precision.name)).output_shape == kernels.shape, path
            assert set(parts[0].parameters) == {key for key, _ in spec.parameters} | {key for key, *_ in spec.buffers}
            held = {key for kernels in parts[0].kernels for key in kernels.parameters}
            merged = {key for part in parts[0].work if not isinstance(part, Kernels) for key in (part.scale, part.bias)}
            assert held | merged >= set(parts[0].parameters), path


@pytest.mark.parametrize(
    ("chain", "more", "split", "parameters", "merges"),
    [
        ([transposed()], PLANE, None, {"conv.weight": 1, "conv.bias": 0}, []),
        ([transposed()], PLANE, 1, {"conv.weight": 0, "conv.bias": 0}, ["product"]),
        ([transposed(4)], PLANE, None, {"conv.weight": 0, "conv.bias": 0}, []),
        ([LINEAR], {}, 1, {"gemm.weight": 1, "gemm.bias": 0}, ["product"]),
        ([{"linear": {"name": "gemm", "in_features": 24, "out_features": 5}}], {}, 1, {"gemm.weight": 1, "gemm.bias": None}, ["product"]),
        ([LINEAR, {"group_norm": {"name": "n", "num_groups": 3}}], {}, None, {"gemm.weight": 0, "gemm.bias": 0, "n.weight": 0, "n.bias": 0}, ["moments"]),
        ([LINEAR, {"layer_norm": {"name": "n"}}], {}, None, {"gemm.weight": 0, "gemm.bias": 0, "n.weight": 0, "n.bias": 0}, ["moments"]),
        ([LINEAR, {"softmax": {"dim": -1}}], {}, None, {"gemm.weight": 0, "gemm.bias": 0}, ["rows"]),
        ([LINEAR, {"logsumexp": {"dim": 1}}], {}, None, {"gemm.weight": 0, "gemm.bias": 0}, ["rows"]),
        ([LINEAR, {"max": {"dim": 1}}], {}, None, {"gemm.weight": 0, "gemm.bias": 0}, ["extremes"]),
        ([LINEAR, {"mean": {"dim": 1}}], {}, None, {"gemm.weight": 0, "gemm.bias": 0}, ["sum"]),
        ([LINEAR, {"batch_norm": {"name": "n", "affine": False}}], {}, None, {"gemm.weight": 0, "gemm.bias": 0, "n.running_mean": 0, "n.running_var": 0, "n.num_batches_tracked": None}, []),
        ([LINEAR, {"add": {"name": "b", "shape": [1]}}], {}, None, {"gemm.weight": 0, "gemm.bias": 0, "b": None}, []),
    ],
)  # fmt: skip
def test_parameters_and_merges_are_those_of_the_rule(chain, more, split, parameters, merges):
    sharding = layer(*chain, **more).shard(2, 0, split)
    assert sharding.parameters == parameters and [one.kind for one in sharding.collectives] == merges


def test_a_straddling_group_costs_two_numbers_a_sample_and_end():
    """Of a group of 48 channels over two ranks each sends mean and M2 of both ends, never activations."""
    (one,) = layer(LINEAR, {"group_norm": {"name": "n", "num_groups": 3}}).shard(2, 0).collectives
    assert one.elements == 4 * 2 * 2 and "moments at n" in layer(LINEAR, {"group_norm": {"name": "n", "num_groups": 3}}).shard(2, 1).text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: layer(LINEAR).shard(5, 0), "gemm: out_features 48 over 5 ranks: 5 does not divide it"),
        (lambda: layer(transposed(4), **PLANE).shard(3, 0), "conv: 4 groups over 3 ranks: each rank must have whole groups"),
        (lambda: layer(LINEAR).shard(5, 0, 1), "x: 24 places of dimension 1 over 5 ranks"),
        (lambda: layer(LINEAR).shard(2, 0, 3), "dimension 3 of x"),
        (lambda: layer(LINEAR).shard(2, 2), "rank 2 of 2: ranks count from 0 to 1"),
        (lambda: layer({"group_norm": {"name": "n", "num_groups": 2}}, "relu", input={"shape": [8]}).shard(2, 0), "nothing of this chain is divided"),
        (lambda: layer(LINEAR, {"dropout": {"p": 0.5}}, training=True).shard(2, 0), "dropout: in training each rank would draw a mask of its own"),
        (
            lambda: layer({"add": {"name": "b", "shape": [24]}}, {"linear": {"name": "gemm", "in_features": 24, "out_features": 24}}, {"mul": {"name": "m", "parameter": "b"}}, input={"shape": [24]}).shard(2, 0),
            "m: takes b divided otherwise than the operator in front",
        ),
    ],
)  # fmt: skip
def test_a_refusal_is_a_sentence(make, said):
    with pytest.raises(ShardError) as raised:
        make()
    assert said in str(raised.value)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5))
def test_parts_of_groups_make_up_the_groups(tp, own, width, inner):
    """The ranks' parts of a group have its values together; all that hold it name the same holders, each by the parts that it sends."""
    channels = tp * own
    assume(channels % width == 0)
    groups = channels // width
    parts = [straddling(1, channels, groups, inner, tp, rank) for rank in range(tp)]
    counted, said = Counter(), {}
    for rank, part in enumerate(parts):
        assert sum(part.widths) == own and len(part.sent) == 2
        first = rank * own // width
        for at, held in enumerate(part.widths):
            counted[first + at] += held
            holders = part.holders[at]
            if holders:
                assert sum(values for *_, values in holders) == width * inner and said.setdefault(first + at, holders) == holders
                assert all(parts[other].widths[parts[other].sent[slot]] * inner == values for other, slot, values in holders)
            else:
                assert held == width
    assert counted == dict.fromkeys(range(groups), width)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_an_axis_under_other_sizes_has_the_same_parts(shape, data):
    """What `renamed` says of two shapes, numpy says of the values."""
    axis = data.draw(st.integers(0, len(shape) - 1))
    tp = data.draw(st.sampled_from([part for part in (2, 3, 4, 6) if shape[axis] % part == 0] or [1]))
    assume(tp > 1)
    ends = sorted(data.draw(st.sets(st.integers(1, len(shape)), max_size=3)) | {len(shape)})
    other = tuple(math.prod(shape[first:last]) for first, last in zip([0, *ends], ends, strict=False))
    found = renamed(tuple(shape), axis, other, tp)
    values = numpy.arange(math.prod(shape))
    parts = [part.ravel() for part in numpy.split(values.reshape(shape), tp, axis)]
    same = [at for at, size in enumerate(other) if size % tp == 0 and all(numpy.array_equal(a, b.ravel()) for a, b in zip(parts, numpy.split(values.reshape(other), tp, at), strict=True))]
    assert (found is None and not same) or found in same
