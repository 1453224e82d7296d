"""Segments: they hold every operator once and in order, meet in their values, and their groupings count the values of a tensor."""

import math
from dataclasses import replace

import pytest
import torch

from bench.sweep.draw import LARGE
from codegen.ir.chain import chain_of
from codegen.ops import Kind
from codegen.spec import load_spec, shipped
from tests.fused_draw import draw


def specs(folder):
    yield from (load_spec(path) for path in shipped())
    yield from (draw(21, index, LARGE, folder) for index in range(120))


def test_segments_hold_the_chain_and_meet_in_their_values(tmp_path):
    for spec in specs(tmp_path):
        chain = chain_of(spec)
        assert tuple(step for segment in chain.segments for step in segment.steps) == spec.chain
        values = [chain.inputs[0], *(segment.gives for segment in chain.segments)]
        for before, segment in zip(values, chain.segments, strict=False):
            assert segment.reads[0] == before and segment.first == segment.steps[0].index
            assert segment.made.shape == (segment.core.output_shape if segment.core else before.shape)
            assert segment.gives.shape == segment.steps[-1].output_shape
            assert all(step.operator.kind is Kind.ELEMENTWISE for step in (*segment.before, *segment.after))
            assert all(step.input_shape == step.output_shape for step in segment.after[0 if segment.core else 1 :])
        assert chain.result == values[-1] and (chain.result.name, chain.result.storage) == ("y", spec.result)
        assert len({value.name for value in values}) == len(values)


def test_what_is_reused_from_an_earlier_segment_is_read(tmp_path):
    for spec in specs(tmp_path):
        for segment in chain_of(spec).segments:
            places = {spec.chain[step.tap].name for step in segment.steps if step.tap is not None and step.tap < segment.first and not step.taps_itself}
            assert {value.name for value in segment.reads[1:]} == places


def test_a_backward_needs_the_producers_result(tmp_path):
    for spec in specs(tmp_path):
        (saved,) = chain_of(spec).saves
        assert (saved.name, saved.shape, saved.storage) == ("t0", spec.producer.output_shape, spec.precision)


def test_groupings_are_pytorchs(tmp_path):
    """A group's values move together: one changed value changes the normalised values of its own group alone."""
    for index in range(60):
        spec = draw(22, index, LARGE, tmp_path)
        found = chain_of(spec).only(Kind.NORM).grouping
        shape = spec.norm.input_shape
        assert found.size * found.count == math.prod(shape) and found.in_sample and found.contiguous
        assert found.sample_groups(spec.batch) == spec.num_groups and found.size == spec.group_size
        assert sorted((*found.joined, *found.kept)) == list(range(len(shape)))
        assert (found.affine == "channel") == bool(spec.norm.parameters)
        if math.prod(shape) > 1 << 14:
            continue
        x = torch.randn(shape, dtype=torch.float64)
        changed = x.clone()
        changed.view(-1)[-1] += 1.0
        moved = torch.nn.functional.group_norm(x, spec.num_groups) != torch.nn.functional.group_norm(changed, spec.num_groups)
        assert not moved.view(-1)[: -found.size].any()


def test_a_fold_over_channels_is_contiguous_behind_a_linear_alone():
    rows, columns = "specs/gemm_groupnorm_min_biasadd_small.yaml", "specs/conv2d_groupnorm_tanh_hardswish_residualadd_logsumexp_small.yaml"
    for path, contiguous in ((rows, True), (columns, False)):
        fold = chain_of(load_spec(path)).only(Kind.REDUCTION).grouping
        assert fold.joined == (1,) and fold.affine is None and fold.contiguous == contiguous


def test_the_one_segment_of_a_kind_is_asked_for_or_refused():
    chain = chain_of(load_spec("specs/default.yaml"))
    assert chain.only(Kind.PRODUCER).core.operator.name == "linear"
    with pytest.raises(ValueError, match="0 segments are of the kind pooling"):
        chain.only(Kind.POOL)
    twice = replace(chain, segments=(*chain.segments, chain.segments[1]))
    with pytest.raises(ValueError, match="2 segments are of the kind norm"):
        twice.only(Kind.NORM)


@pytest.mark.parametrize("count", [0, 2])
def test_the_norm_of_a_spec_is_asked_for_where_there_is_one(count):
    spec = load_spec("specs/default.yaml")
    linear, norm, *_ = spec.chain
    with pytest.raises(ValueError, match=f"{count} norms are in the chain"):
        _ = replace(spec, chain=(linear, *[norm] * count)).norm
