"""Operators that join or rename axes: for every row, axis and rank the emitted Model runs, gives the predicted shape, and computes what torch does."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bench.harness import reference_source
from codegen.ops import OPERATORS, Kind
from codegen.package import make_package
from codegen.render import render
from codegen.spec import Spec, SpecError, load_spec

SIZES = (3, 2, 4, 2)
RANKS = range(5)
FOLDS = [name for name, row in OPERATORS.items() if row.kind is Kind.REDUCTION]
SOFTMAXES = [name for name, row in OPERATORS.items() if row.kind is Kind.SOFTMAX]
NORMS = [name for name, row in OPERATORS.items() if row.kind is Kind.NORM]


def spec_of(folder: Path, operator: str, rank: int, values: dict[str, Any]) -> Spec:
    """The operator behind a value of so many axes; one without axes is a sum of all."""
    path = folder / "layer.yaml"
    head = ["relu"] if rank else [{"sum": {"dim": None}}]
    shape = {"shape": list(SIZES[:rank]) or [3], "batched": False}
    path.write_text(json.dumps({"name": "layer", "batch": 1, "inputs": {"x": shape}, "chain": [*head, {operator: values}]}))
    return load_spec(path)


def model(spec: Spec) -> nn.Module:
    """The emitted reference, made anew."""
    names: dict[str, Any] = {}
    exec(reference_source(spec), names)  # noqa: S102
    return names["Model"]()


def computed(spec: Spec) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """(Model, the operator's value, its result by Model in training, where torch refuses more)."""
    x = torch.randn(spec.input_shape, generator=torch.Generator().manual_seed(1)) + 0.5
    made = model(spec)
    value = torch.relu(x) if spec.chain[0].operator.name == "relu" else torch.sum(x)
    return made, value, made(x)


def dims_of(rank: int) -> Iterator[Any]:
    """Null, every axis from both ends and one beyond each, and lists."""
    yield None
    yield from range(-rank - 1, rank + 1)
    yield from ([0], [-1], [0, -1], [1, 0], [-1, 1], [1, 1], list(range(rank)) or [0])


def by_torch(name: str, v: torch.Tensor, dim: Any, keepdim: bool) -> torch.Tensor:
    """Torch's own result, without the text that the generator writes. Raises what torch does."""
    if isinstance(dim, list) and name in ("min", "max"):
        raise TypeError("torch takes one axis or all")
    axes = tuple(range(v.dim())) if dim is None else dim
    extreme = {"min": torch.amin, "max": torch.amax}.get(name)
    return (extreme or getattr(torch, name))(v, axes, keepdim=keepdim)


def agrees(folder: Path, operator: str, rank: int, values: dict[str, Any], expected: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Compare with torch, which refuses what the generator does; was it computed?"""
    try:
        expected(torch.ones(SIZES[:rank]))
    except (IndexError, RuntimeError, TypeError):
        with pytest.raises(SpecError):
            spec_of(folder, operator, rank, values)
        return False
    spec = spec_of(folder, operator, rank, values)
    _, value, found = computed(spec)
    assert isinstance(found, torch.Tensor) and tuple(found.shape) == spec.output_shape, (operator, rank, values)
    torch.testing.assert_close(found, expected(value))
    return True


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("operator", FOLDS)
def test_every_fold_over_any_axes_is_torchs(tmp_path, operator, rank):
    made = [
        agrees(tmp_path, operator, rank, {"dim": dim, "keepdim": keepdim}, lambda v: by_torch(operator, v, dim, keepdim))
        for dim in dims_of(rank)
        for keepdim in (False, True)
    ]
    assert sum(made) >= 2 * (1 + 2 * max(1, rank)) and not all(made)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("operator", SOFTMAXES)
def test_every_softmax_along_any_axis_is_torchs(tmp_path, operator, rank):
    made = [agrees(tmp_path, operator, rank, {"dim": dim}, lambda v: getattr(torch, operator)(v, dim)) for dim in range(-rank - 1, rank + 1)]
    assert sum(made) == 2 * max(1, rank)


@pytest.mark.parametrize("rank", RANKS)
def test_every_operator_that_renames_axes_is_torchs(tmp_path, rank):
    ends = range(-rank - 1, rank + 1)
    made = [agrees(tmp_path, "flatten", rank, {"start_dim": start, "end_dim": end}, lambda v: torch.flatten(v, start, end)) for start in ends for end in ends]
    made += [agrees(tmp_path, "unsqueeze", rank, {"dim": dim}, lambda v: torch.unsqueeze(v, dim)) for dim in range(-rank - 2, rank + 2)]
    made += [agrees(tmp_path, "squeeze", rank, {"dim": dim}, lambda v: torch.squeeze(v) if dim is None else torch.squeeze(v, dim)) for dim in dims_of(rank)]
    assert sum(made) > 3 + 4 * rank and not all(made)


def norm_by_torch(operator: str, values: dict[str, Any], v: torch.Tensor) -> torch.Tensor:
    if operator == "group_norm":
        return F.group_norm(v, values["num_groups"])
    if operator in ("layer_norm", "rms_norm"):
        sizes = values.get("normalized_shape", list(v.shape[1:]))
        return getattr(F, operator)(v, [sizes] if isinstance(sizes, int) else sizes)
    return F.instance_norm(v) if operator == "instance_norm" else F.batch_norm(v, None, None, training=True)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("operator", NORMS)
def test_every_norm_of_any_rank_is_torchs_or_refused(tmp_path, operator, rank):
    """What the generator accepts torch does in training, too; it refuses some that torch takes, as those that join samples."""
    sizes = list(SIZES[:rank])
    tails = [{}, *({"normalized_shape": sizes[start:]} for start in range(rank)), {"normalized_shape": 2}, {"normalized_shape": [5]}]
    cases = tails if operator in ("layer_norm", "rms_norm") else [{"num_groups": groups} for groups in (1, 2, 3)] if operator == "group_norm" else [{}]
    made = 0
    for values in cases:
        try:
            spec = spec_of(tmp_path, operator, rank, {"name": "norm", **values})
        except SpecError:
            continue
        _, value, found = computed(spec)
        assert tuple(found.shape) == spec.output_shape == tuple(sizes), (values, rank)
        torch.testing.assert_close(found, norm_by_torch(operator, values, value))
        made += 1
    assert made >= (rank > (2 if operator == "instance_norm" else 1))
    assert rank > 1 or not made


@pytest.mark.parametrize(("batch", "said"), [(1, "PyTorch refuses it for a batch of one"), (3, "the result does not depend on the values")])
def test_a_group_of_one_value_is_refused_for_the_reason_that_holds(tmp_path, batch, said):
    """Torch counts the values of all samples together."""
    path = tmp_path / "layer.yaml"
    path.write_text(json.dumps({"name": "layer", "batch": batch, "input": {"shape": [4]}, "chain": [{"group_norm": {"name": "norm", "num_groups": 4}}]}))
    with pytest.raises(SpecError, match=said):
        load_spec(path)
    x = torch.randn(batch, 4)
    if batch == 1:
        with pytest.raises(ValueError, match="more than 1 value"):
            F.group_norm(x, 4)
    else:
        assert F.group_norm(x, 4).count_nonzero() == 0


@pytest.mark.parametrize(
    ("operator", "values", "rank", "said"),
    [
        ("sum", {"dim": 1}, 0, r"sum's dim: 1 is no axis of \(\); one value has none, and PyTorch takes -1 and 0"),
        ("sum", {"dim": 2}, 2, r"sum's dim: 2 is no axis of \(3, 2\); it has -2 to 1"),
        ("rms_norm", {"name": "norm"}, 1, r"rms_norm joins the axes behind the first, and \(3,\) has none"),
        ("layer_norm", {"name": "norm", "normalized_shape": [3, 2]}, 2, r"normalized_shape: \[3, 2\] are all sizes of \(3, 2\); layer_norm takes trailing"),
        ("layer_norm", {"name": "norm", "normalized_shape": [3]}, 2, r"normalized_shape: \[3\]; layer_norm takes trailing sizes of \(3, 2\)"),
    ],
)
def test_what_is_no_axis_is_said(tmp_path, operator, values, rank, said):
    with pytest.raises(SpecError, match=said):
        spec_of(tmp_path, operator, rank, values)


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_a_value_without_axes_is_planned_whatever_axis_is_named(tmp_path, target):
    for operator in (*FOLDS, *SOFTMAXES):
        for dim in (0, -1):
            assert render(make_package(spec_of(tmp_path, operator, 0, {"dim": dim}), (target,)))


def test_no_input_hides_a_name_that_a_fold_over_all_axes_reads(tmp_path):
    """What Python or torch offers by a bare name may be the name of an input, unless it is refused."""
    path = tmp_path / "layer.yaml"
    words = ["range", "len", "max", "sum", "dim", "axes", "v", "p"]
    chain = [{"add": {"from": word}} for word in words]
    for operator in FOLDS:
        chain += [{operator: {"dim": None, "keepdim": True}}, {"add": {"from": words[0]}}]
    inputs = {name: {"shape": [4, 2]} for name in ("x", *words)}
    path.write_text(json.dumps({"name": "layer", "batch": 3, "inputs": inputs, "chain": [*chain, *({operator: {"dim": None}} for operator in FOLDS)]}))
    spec = load_spec(path)
    given = [torch.rand(one.shape) for one in spec.inputs]
    assert model(spec)(*given).shape == ()


@pytest.mark.parametrize("operator", [row for row in OPERATORS.values() if row.call is not None], ids=lambda row: row.name)
def test_the_call_of_every_operator_reads_torch_alone(operator):
    """An input may have any other name, as a variable of forward."""
    required = {"size": 2, "single": (2,), "pair": (2, 2), "triple": (2, 2, 2), "axis": 0, "view": (0, -1)}
    values = {row.name: row.default if isinstance(row.default, (int, float, str, tuple)) else required.get(row.type) for row in operator.arguments}
    variants = [values]
    if "dim" in values:
        variants += [{**values, "dim": dim, "keepdim": keepdim} for dim in (None, 0, (0, 1)) for keepdim in (False, True)]
    if operator.name == "clamp":
        variants = [{"min": 0.0, "max": None}]
    if "value" in values:
        variants += [{**values, "value": 2.0}]
    for given in variants:
        text = operator.call(given).format(v="v", p="p", axes=(0, 1))
        assert {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)} <= {"torch", "F", "v", "p", "self"}, text


def test_only_rows_of_transposed_convolutions_say_so():
    for name, row in OPERATORS.items():
        made = row.rank and row.kind is Kind.PRODUCER and getattr(nn, f"Conv{'Transpose' if 'transpose' in name else ''}{row.rank}d")
        assert row.transposed == bool(made and issubclass(made, nn.modules.conv._ConvTransposeNd))
