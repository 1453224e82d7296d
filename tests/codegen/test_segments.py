"""Segments: they hold every operator once and in order, meet in their values, and their groupings count the values of a tensor."""

import math
from dataclasses import replace

import pytest
import torch

from bench.sweep.draw import LARGE
from codegen.ir.chain import chain_of
from codegen.ir.fused_form import FusedSpec, fused
from codegen.ops import Kind
from codegen.spec import load_spec, shipped
from tests.codegen.segment_draw import random_spec
from tests.fused_draw import draw


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """(spec, its chain in evaluation or in training), of what ships and of random specs."""
    folder = tmp_path_factory.mktemp("specs")
    specs = [load_spec(path) for path in shipped()]
    specs += [draw(21, index, LARGE, folder) for index in range(120)]
    specs += [random_spec(folder, seed) for seed in range(120)]
    return [(spec, chain_of(spec, training)) for spec in specs for training in (False, True)]


def test_segments_hold_the_chain_and_meet_in_their_values(chains):
    for spec, chain in chains:
        assert tuple(step for segment in chain.segments for step in segment.steps) == spec.chain
        values = [chain.inputs[0], *(segment.gives for segment in chain.segments)]
        for before, segment in zip(values, chain.segments, strict=False):
            assert segment.reads[0] == before and segment.first == segment.steps[0].index and segment.last == segment.steps[-1].index + 1
            assert segment.gives.shape == segment.steps[-1].output_shape
        assert chain.result == values[-1] and (chain.result.name, chain.result.shape) == ("y", spec.output_shape)
        assert len({value.name for value in values}) == len(values)


def test_a_segment_has_one_core_and_grows_in_its_first_step_alone(chains):
    cores = {Kind.PRODUCER, Kind.SOFTMAX, Kind.POOL, Kind.REDUCTION}
    for _, chain in chains:
        for segment in chain.segments:
            around = (*segment.before, *segment.after)
            assert not any(step.operator.kind in cores for step in around)
            assert all(step.input_shape == step.output_shape for step in around if step.operator.kind is Kind.ELEMENTWISE and step.index > segment.first)
            assert len(segment.steps) == 1 or not segment.alone


def test_what_is_reused_from_elsewhere_is_read(chains):
    """Beside the value in front, a segment reads the results of earlier segments and the inputs that its steps take, and nothing else."""
    for spec, chain in chains:
        for segment in chain.segments:
            taken = {step.tap for step in segment.steps if step.tap is not None and step.tap < segment.first}
            shapes = {spec.chain[tap].output_shape for tap in taken} | {given.shape for given in spec.inputs for step in segment.steps if step.reads == given.name}
            assert {value.shape for value in segment.reads[1:]} <= shapes <= {value.shape for value in segment.reads}
            known = {value.name for value in (*chain.inputs, *(other.gives for other in chain.segments if other.last <= segment.first))}
            assert {value.name for value in segment.reads} <= known


def test_a_backward_needs_what_producers_made(chains):
    for spec, chain in chains:
        made = [(step.output_shape, spec.precision) for step in spec.chain if step.operator.kind is Kind.PRODUCER]
        assert [(saved.shape, saved.storage) for saved in chain.saves] == made


def test_groupings_are_pytorchs(tmp_path):
    """A group's values move together: one changed value changes the normalised values of its own group alone."""
    for index in range(60):
        spec = draw(22, index, LARGE, tmp_path)
        (found,) = (segment.grouping for segment in chain_of(spec).segments if segment.kind is Kind.NORM)
        shape = spec.norm.input_shape
        assert found.joined * found.groups == math.prod(shape) and found.groups == spec.batch * spec.num_groups and found.joined == spec.group_size
        if math.prod(shape) > 1 << 14:
            continue
        x = torch.randn(shape, dtype=torch.float64)
        changed = x.clone()
        changed.view(-1)[-1] += 1.0
        moved = torch.nn.functional.group_norm(x, spec.num_groups) != torch.nn.functional.group_norm(changed, spec.num_groups)
        assert not moved.view(-1)[: -found.joined].any()


@pytest.mark.parametrize(("places", "reason"), [((0, 1, 1), "group_norm is a second norm"), ((1, 0), "it starts with group_norm"), ((0, 1, 0), "linear follows")])
def test_only_a_chain_of_the_form_is_seen_as_a_fused_one(places, reason):
    spec = load_spec("specs/default.yaml")
    other = replace(spec, chain=tuple(spec.chain[place] for place in places))
    assert fused(spec).norm is spec.chain[1] and fused(other) is None
    with pytest.raises(ValueError, match=f"the chain has not the form of fused plans: {reason}"):
        FusedSpec.of(other)
    with pytest.raises(ValueError, match=reason):
        replace(FusedSpec.of(spec), chain=other.chain)


def test_a_product_without_a_norm_is_a_beginning_of_the_form():
    """Kernels that need no norm read it as a fused chain; as a whole chain it is planned in parts."""
    spec = load_spec("specs/default.yaml")
    product = replace(spec, chain=(spec.chain[0], replace(spec.chain[2], index=1)))
    form = FusedSpec.of(product)
    assert fused(product) is None and not form.has_norm and form.before_norm == product.chain[1:] and form.after_norm == () == form.affine
