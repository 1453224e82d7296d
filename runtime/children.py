"""Child modules of a generated model. Nobody calls them: the kernels read the parameters that they hold.

So what else a child would do has to take effect or be refused. Forward pre-hooks that compute a parameter (pruning, the older
weight_norm and spectral_norm) are run; any other hook, class, forward or number than the constructor's is refused with a sentence.
"""

from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Callable

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .errors import CallError

COMPUTING = (BasePruningMethod, WeightNorm, SpectralNorm)  # pre-hooks that set a parameter of the child from others, and read no input

# What the forward of a class reads besides parameters. Sizes are not among them: the shapes of the parameters tell those.
_READ = {
    nn.Linear: (),
    nn.Conv2d: ("stride", "padding", "dilation", "groups", "padding_mode", "_reversed_padding_repeated_twice"),
    nn.GroupNorm: ("num_groups", "eps"),
}
_STEPS = ("forward", "_conv_forward", "__call__", "_call_impl")  # methods that compute the result


@dataclass(frozen=True)
class Child:
    """A module inside a model as the constructor makes it.

    ``path`` leads to it; ``kind`` is its class; ``pick`` takes what its forward reads out of its ``__dict__``, ``values`` are those of
    construction (both None where it reads parameters alone); ``absent`` are the parameters that it has no value for.
    """

    path: tuple[str, ...]
    kind: type
    names: tuple[str, ...]
    pick: Callable[[dict], Any] | None
    values: Any
    absent: tuple[str, ...]

    @property
    def compared(self) -> tuple[type, Callable[[dict], Any] | None, Any]:
        """The class, and the ``pick`` and ``values`` that a call compares: these, with parameters that have to stay absent among them."""
        if not self.absent:
            return self.kind, self.pick, self.values
        pick, absent = self.pick or _nothing, self.absent

        def together(state: dict) -> tuple:
            return pick(state), [name for name in absent if state["_parameters"].get(name) is not None]

        return self.kind, together, (self.values, [])

    @property
    def numbers(self) -> tuple[tuple[str, Any], ...]:
        """The names of what its forward reads besides parameters, each with its value."""
        return tuple(zip(self.names, self.values if len(self.names) > 1 else (self.values,)))


def _nothing(state: dict) -> None:
    """The ``pick`` of a child whose forward reads parameters alone."""


def children_of(reference: nn.Module) -> tuple[Child, ...]:
    """The children of a model whose constructor makes those of ``reference``, which nothing has changed yet."""
    found = []
    for key, module in reference.named_modules():
        if not key:
            continue
        kind, state = type(module), module.__dict__
        names = _READ.get(kind)
        if names is None:
            names = tuple(name for name in getattr(kind, "__constants__", ()) if name in state)
        pick = itemgetter(*names) if names else None
        absent = tuple(name for name, value in module._parameters.items() if value is None)
        found.append(Child(tuple(key.split(".")), kind, names, pick, None if pick is None else pick(state), absent))
    return tuple(found)


def check_child(child: Child, owner: Any, model: str, regenerate: str) -> None:
    """Raises CallError where ``owner``, found in the place of ``child``, does what kernels do not, or computes a parameter otherwise
    than by a pre-hook that is run."""
    fault = _fault(child, owner, regenerate)
    if fault is not None:
        found, remedy = fault
        raise CallError(f"{'.'.join(child.path)}: {model} reads its parameters and never calls it, and found {found}, which would be lost; {remedy}.")


def run_pre_hooks(owner: nn.Module) -> None:
    """Has the pre-hooks of ``owner`` compute the parameters that they are for, as a call of it would."""
    for hook in owner._forward_pre_hooks.values():
        hook(owner, ())


def _fault(child: Child, owner: Any, regenerate: str) -> tuple[str, str] | None:
    """What was found and the way out; None where there is nothing to object to."""
    if not isinstance(owner, nn.Module):
        return "nothing" if owner is None else repr(owner), f"put the {child.kind.__name__} back that the constructor made"
    kind, expected = type(owner), child.kind
    if not issubclass(kind, expected):
        return (
            f"a {kind.__name__} in place of the {expected.__name__}",
            f"keep a plain {expected.__name__} there: merge an adapter into its weight, or register what changes the weight with "
            "torch.nn.utils.parametrize; otherwise use the reference module Model",
        )
    for step in _STEPS:
        if getattr(kind, step, None) is not getattr(expected, step, None):
            return f"a {kind.__name__} with a {step} of its own", _PLAIN.format(expected.__name__)
        if step in owner.__dict__:
            return f"a {step} set on the instance", f"remove it (del module.{step}), or use the reference module Model"
    for name, wanted in child.numbers:
        value = getattr(owner, name, None)
        if value != wanted:
            return f"{name} = {value!r} where {wanted!r} was folded into the kernels", f"set it back, or set {name} in the spec and run {regenerate}"
    for name in child.absent:
        if getattr(owner, name, None) is not None:
            return f"a {name}, which the kernels were generated without", f"set it to None, or add it to the spec and run {regenerate}"
    for attribute, what in _HOOKS.items():
        for hook in getattr(owner, attribute).values():
            if attribute == "_forward_pre_hooks" and isinstance(hook, COMPUTING):
                continue
            return (
                f"{what} {_name_of(hook)}",
                "remove it, register it on the model itself, or register what changes a parameter with torch.nn.utils.parametrize; "
                "otherwise use the reference module Model",
            )
    return None


_PLAIN = "keep a plain {} there, or use the reference module Model"
_HOOKS = {
    "_forward_pre_hooks": "the forward pre-hook",
    "_forward_hooks": "the forward hook",
    "_backward_pre_hooks": "the backward pre-hook",
    "_backward_hooks": "the backward hook",
}


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)
