"""Merges of what several ranks hold of one group, row or product: always in the order of the ranks, in float32, statistics in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from codegen.ir.layout import GroupParts, Layout
from codegen.ir.sharding import Together
from codegen.ops.axes import axes_of, trailing

from .collectives import Ranks

Moments = tuple[torch.Tensor, torch.Tensor]  # mean, and M2 (the sum of squared distances from it) or the variance


def laid_out(value: torch.Tensor, held: Layout, wanted: Layout, ranks: Ranks, what: str) -> torch.Tensor:
    """A value that ranks hold in one layout, in another one."""
    if held == wanted:
        return value
    if held is not None:
        value = ranks.gathered(value, what).movedim(0, held).flatten(held, held + 1)
    return value if wanted is None else value.chunk(ranks.size, wanted)[ranks.rank]


def merged(part: Together, value: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, ranks: Ranks) -> torch.Tensor:
    """The local result of a merge from the local value, in the value's type."""
    what = f"{part.step.name or part.step.operator.name} ({part.merge.kind})"
    return _MERGES[part.merge.kind](part, value, scale, bias, ranks, what).to(value.dtype)


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' parts, in their order."""
    total = parts[0].float()
    for other in parts[1:]:
        total = total + other
    return total


def _product(part: Together, value: torch.Tensor, scale: None, bias: torch.Tensor | None, ranks: Ranks, what: str) -> torch.Tensor:
    """Partial products added before the bias: each rank adds up its own channels, where they are as many on each."""
    axis = part.merge.axis
    if part.merge.scatter is None:
        total = added(ranks.gathered(value, what))
    else:
        total = added(ranks.exchanged(value.unflatten(axis, (ranks.size, -1)).movedim(axis, 0), what))
    return total if bias is None else total + bias.float().reshape(-1, *[1] * (total.dim() - axis - 1))


def _extremes(part: Together, value: torch.Tensor, scale: None, bias: None, ranks: Ranks, what: str) -> torch.Tensor:
    found = ranks.gathered(value, what)
    return found.amin(0) if part.step.operator.name in ("min", "amin") else found.amax(0)


def _sum(part: Together, value: torch.Tensor, scale: None, bias: None, ranks: Ranks, what: str) -> torch.Tensor:
    step = part.step
    joined = axes_of(step.values["dim"], step.input_shape, step.operator.name)
    total = added(ranks.gathered(value.float().sum(joined, keepdim=step.values["keepdim"]), what))
    count = 1
    for axis in joined if step.operator.name == "mean" else ():
        count *= step.input_shape[axis]
    return total / count


def _rows(part: Together, value: torch.Tensor, scale: None, bias: None, ranks: Ranks, what: str) -> torch.Tensor:
    """Softmax, its logarithm or logsumexp: each rank's maximum and its sum of exponentials, as (maximum, sum) in one exchange."""
    step, value = part.step, value.float()
    joined = axes_of(step.values["dim"], step.input_shape, step.operator.name)
    own = value.amax(joined, keepdim=True)
    pairs = ranks.gathered(torch.stack((own, (value - _finite(own)).exp().sum(joined, keepdim=True))), what)
    largest = pairs[:, 0].amax(0)
    total = added([torch.where(most == -torch.inf, 0.0, total * (_finite(most) - _finite(largest)).exp()) for most, total in pairs])
    if step.operator.name == "logsumexp":
        result = total.log() + _finite(largest)
        return result if step.values["keepdim"] else result.reshape(part.shape)
    total = torch.where(largest == torch.inf, torch.nan, total)  # as torch has it: infinity less infinity
    return value - largest - total.log() if step.operator.name == "log_softmax" else (value - largest).exp() / total


def _finite(most: torch.Tensor) -> torch.Tensor:
    """What is subtracted before exponentials: a maximum, and 0 for an infinite one."""
    return torch.where(most.isinf(), 0.0, most)


def _moments(part: Together, value: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, ranks: Ranks, what: str) -> torch.Tensor:
    """A norm whose groups several ranks hold.

    Values are shifted by one of their rank's part of the group, in float32, so that a constant group gives exactly the bias; mean and M2 of the parts are merged
    by Chan's formula in float64.
    """
    groups, step = part.merge.groups, part.step
    flat = value.float().reshape(groups.outer, -1, groups.inner)
    blocks = [block.reshape(groups.outer, count, -1) for block, (_, count) in zip(flat.split([width * count for width, count in _runs(groups)], 1), _runs(groups), strict=True)]
    about_zero = step.operator.name == "rms_norm"
    shifts = [torch.zeros_like(block[..., :1]) if about_zero else block[..., :1] for block in blocks]
    blocks = [block - shift for block, shift in zip(blocks, shifts, strict=True)]
    means = [block.mean(-1, keepdim=True) for block in blocks]
    m2 = torch.cat([(block - mean).square().sum(-1) for block, mean in zip(blocks, means, strict=True)], 1).double()
    shift = torch.cat(shifts, 1).squeeze(-1).double()
    mean, variance = _over_ranks(groups, (shift + torch.cat(means, 1).squeeze(-1), m2), ranks, what)
    eps = step.values["eps"] if step.values["eps"] is not None else 2.0**-23  # float32's epsilon, as torch's rms_norm has it
    rate = (variance + (mean.square() if about_zero else 0.0) + eps).rsqrt().float().unsqueeze(-1)
    rest = (torch.zeros_like(mean) if about_zero else mean - shift).float().unsqueeze(-1)
    results, at = [], 0
    for block in blocks:
        own = slice(at, at := at + block.shape[1])
        results.append(((block - rest[:, own]) * rate[:, own]).reshape(groups.outer, -1, groups.inner))
    result = torch.cat(results, 1).reshape(value.shape)
    return _affine(part, result, scale, bias)


def _runs(groups: GroupParts) -> list[tuple[int, int]]:
    """The widths of parts that follow one another, each with how many there are."""
    return [(width, len(list(same))) for width, same in itertools.groupby(groups.widths)]


def _over_ranks(groups: GroupParts, own: Moments, ranks: Ranks, what: str) -> Moments:
    """Mean and variance of each part's whole group, (outer, parts)."""
    sent = ranks.gathered(torch.stack([torch.stack([moment[:, at] for at in groups.sent], 1) for moment in own]), what)
    means, variances = [], []
    for at, holders in enumerate(groups.holders):
        mean, m2, count = own[0][:, at], own[1][:, at], groups.widths[at] * groups.inner
        if holders:
            (first, place, count), *others = holders
            mean, m2 = sent[first, 0, :, place], sent[first, 1, :, place]
            for rank, place, more in others:
                apart = sent[rank, 0, :, place] - mean
                mean = mean + apart * (more / (count + more))
                m2 = m2 + sent[rank, 1, :, place] + apart.square() * (count * more / (count + more))
                count += more
        means.append(mean)
        variances.append(m2 / count)
    return torch.stack(means, 1), torch.stack(variances, 1)


def _affine(part: Together, result: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    step = part.step
    if step.operator.name in ("layer_norm", "rms_norm"):
        behind = result.dim() - len(trailing(step.values, step.input_shape, step.operator.name))
        shape = (1,) * behind + (() if scale is None else tuple(scale.shape))
    else:
        shape = (1, -1, *[1] * (result.dim() - 2))
    result = result if scale is None else result * scale.float().reshape(shape)
    return result if bias is None else result + bias.float().reshape(shape)


_MERGES = {"product": _product, "extremes": _extremes, "sum": _sum, "rows": _rows, "moments": _moments}
