"""What regions are called with and give while their model runs on the example, and whether their graphs give the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from .regions import CONSTANTS, Region, kept_state


@dataclass(frozen=True)
class Seen:
    """What a region was called with in a run of the model: its tensors, the state of the random generators, and what it gave."""

    arguments: list[torch.Tensor]
    randomness: dict[torch.device, torch.Tensor]
    result: Any


def arguments_of(model: nn.Module, example: tuple[Any, ...], regions: Iterable[Region]) -> dict[Region, Seen]:
    """What each region is called with and gives while the model runs on the example, by region."""
    found: dict[Region, Seen] = {}
    cloned = lambda value: value.clone() if isinstance(value, torch.Tensor) else value  # noqa: E731

    def watch(region: Region) -> list[RemovableHandle]:
        signature = inspect.signature(region.module.forward)

        def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = signature.bind(*args, **kwargs).arguments
            arguments = [given[name].clone() for name in region.tensors]
            found[region] = Seen(arguments, {device: _generator(device).get_state() for device in {torch.device("cpu"), *(one.device for one in arguments)}}, None)

        def gave(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            found[region] = replace(found[region], result=tree_map(cloned, plain(result)))

        return [region.module.register_forward_pre_hook(called, with_kwargs=True), region.module.register_forward_hook(gave, prepend=True)]  # behind the module's other hooks, and before them

    handles = [handle for region in regions for handle in watch(region)]
    try:
        with torch.no_grad(), kept_state(model), torch.random.fork_rng():
            model(*example)
    finally:
        for handle in handles:
            handle.remove()
    return found


def traced_otherwise(result: Any, seen: Seen) -> str:
    """How the result of a region's graph differs from what the module itself gave in the same place; empty where it does not.

    Two runs of the same operators may differ by the order of their sums, so half of the digits are compared.
    """
    mine, theirs = tree_leaves(plain(result)), tree_leaves(seen.result)
    if len(mine) != len(theirs):
        return f"the trace gives {len(mine)} values, the module {len(theirs)}"
    for one, other in zip(mine, theirs, strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if type(one) is not type(other) or (isinstance(one, CONSTANTS) and one != other):
                return f"the trace gives {one!r:.40}, the module {other!r:.40}"
        elif one.shape != other.shape or one.dtype is not other.dtype:
            return f"the trace gives {tuple(one.shape)} {one.dtype}, the module {tuple(other.shape)} {other.dtype}"
        elif not one.is_floating_point():
            if not torch.equal(one, other):
                return "the trace gives other values than the module"
        elif not torch.equal(one.isfinite(), other.isfinite()):
            return "the trace gives other values than the module"
        else:
            wanted = other.double().nan_to_num(0.0, 0.0, 0.0)
            error, size = float((one.double().nan_to_num(0.0, 0.0, 0.0) - wanted).norm()), float(wanted.norm())
            if error > size * torch.finfo(one.dtype).eps ** 0.5:
                return f"the trace gives other values than the module: relative error {error / size if size else float('inf'):.1e}"
    return ""


def plain(result: Any) -> Any:
    """A result whose records are dictionaries, as torch's trees know those."""
    if is_dataclass(result) and not isinstance(result, type):
        return {name.name: plain(getattr(result, name.name)) for name in fields(result)}
    if isinstance(result, Mapping):
        return {key: plain(value) for key, value in result.items()}
    return type(result)(map(plain, result)) if type(result) in (tuple, list) else result


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else torch.default_generator


@contextmanager
def same_randomness(seen: Seen) -> Iterator[None]:
    """Draw in the block what was drawn behind the region's call; the generators are as before at its end."""
    before = {device: _generator(device).get_state() for device in seen.randomness}
    try:
        for device, state in seen.randomness.items():
            _generator(device).set_state(state)
        yield
    finally:
        for device, state in before.items():
            _generator(device).set_state(state)
