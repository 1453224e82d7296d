"""Rules of the operators that join axes: norms, softmax, folds, and those that rename axes."""

from __future__ import annotations

import math
from collections.abc import Callable

from codegen.ops.rules import Parameter, Shape, ShapeError, Values, eps, number

Axes = tuple[int, ...]


def axes_of(dims: int | Axes | None, shape: Shape, name: str, what: str = "dim") -> Axes:
    """The axes that `dims` name, counted from the front, ascending; None stands for all. Raises ShapeError.

    A value without axes takes 0 and -1, as torch has it; there is nothing to name, so the result is empty.
    """
    if dims is None:
        return tuple(range(len(shape)))
    dims = (dims,) if isinstance(dims, int) else dims
    found, rank = [], max(1, len(shape))
    for dim in dims:
        if not -rank <= dim < rank:
            held = f"it has {-rank} to {rank - 1}" if shape else "one value has none, and PyTorch takes -1 and 0"
            raise ShapeError(f"{name}'s {what}: {dim} is no axis of {shape}; {held}")
        found.append(dim % rank)
    if len(set(found)) < len(found):
        raise ShapeError(f"{name}'s {what}: {list(dims)} names an axis twice")
    return tuple(sorted(found)) if shape else ()


def fold_shape(name: str) -> Callable[[Values, Shape], Shape]:
    def shape_of(values: Values, shape: Shape) -> Shape:
        joined = axes_of(values["dim"], shape, name)
        return tuple(1 if axis in joined else size for axis, size in enumerate(shape) if axis not in joined or values["keepdim"])

    return shape_of


def fold_call(name: str, values_of: str = "", needs_dim: bool = False) -> Callable[[Values], str]:
    """The call of a fold; `{axes}` in it stands for all axes of the value. With `values_of`, torch's function takes no list of axes, and only with one
    axis gives indices too; one that `needs_dim` has no form for all axes."""

    def call(values: Values) -> str:
        keep = ", keepdim=True" if values["keepdim"] else ""
        if values["dim"] is None and (values_of or not (keep or needs_dim)):
            return f"torch.{name}({{v}})" + (".reshape([1] * {v}.dim())" if keep else "")
        if values["dim"] is None:
            return f"torch.{name}({{v}}, dim={{axes}}{keep})"
        return f"torch.{name}({{v}}, dim={values['dim']}{keep}){values_of}"

    return call


def single_axis(name: str) -> Callable[[Values, Shape], Shape]:
    """Checks that `dim` is an axis of the shape, which it leaves as it is."""

    def shape_of(values: Values, shape: Shape) -> Shape:
        axes_of(values["dim"], shape, name)
        return shape

    return shape_of


def trailing(values: Values, shape: Shape, name: str) -> Shape:
    """The trailing sizes that a layer or RMS norm joins. Raises ShapeError."""
    given = values["normalized_shape"]
    if given is None:
        given = shape[1:]
        if not given:
            raise ShapeError(f"{name} joins the axes behind the first, and {shape} has none")
    if shape[len(shape) - len(given) :] != tuple(given):
        raise ShapeError(f"normalized_shape: {list(given)}; {name} takes trailing sizes of {shape}")
    if len(given) >= len(shape):
        raise ShapeError(f"normalized_shape: {list(given)} are all sizes of {shape}; {name} takes trailing sizes here, without that of the first axis")
    if math.prod(given) == 1 and name == "layer_norm":
        raise ShapeError(f"{name} over one value; its variance is always 0")
    return tuple(given)


def trailing_parameters(values: Values, shape: Shape, name: str) -> tuple[Parameter, ...]:
    own = trailing(values, shape, name)
    if not values["elementwise_affine"]:
        return ()
    weight = Parameter("weight", own, "ones")
    return (weight, Parameter("bias", own, "zeros")) if name == "layer_norm" else (weight,)


def trailing_module(module: str, name: str) -> Callable[[Values, Shape], str]:
    def text(values: Values, shape: Shape) -> str:
        own = trailing(values, shape, name)
        sizes = str(own[0]) if len(own) == 1 else str(own)
        given = "" if values["eps"] is None else eps(values) if name == "layer_norm" else f", eps={number(values['eps'])}"
        return f"nn.{module}({sizes}{given}" + ("" if values["elementwise_affine"] else ", elementwise_affine=False") + ")"

    return text


def batch_norm_shape(values: Values, shape: Shape) -> Shape:
    if not 2 <= len(shape) <= 5:
        raise ShapeError(f"batch_norm takes (batch, channels) and up to three spatial axes, the input here is {shape}")
    if values["num_features"] not in (None, shape[1]):
        raise ShapeError(f"num_features: {values['num_features']}, and {shape[1]} channels come before it")
    if shape[0] * math.prod(shape[2:]) == 1:
        raise ShapeError("batch_norm of one value a channel: its variance is always 0 and PyTorch refuses it in training")
    return shape


def batch_norm_buffers(values: Values, shape: Shape) -> tuple[Parameter, ...]:
    if not values["track_running_stats"]:
        return ()
    return (
        Parameter("running_mean", shape[1:2], "zeros"), Parameter("running_var", shape[1:2], "ones"), Parameter("num_batches_tracked", (), "count"),
    )  # fmt: skip


def batch_norm_module(values: Values, shape: Shape) -> str:
    rank = max(1, len(shape) - 2)
    text = f"nn.BatchNorm{rank}d({shape[1]}{eps(values)}"
    if values["momentum"] != 0.1:
        text += f", momentum={'None' if values['momentum'] is None else number(values['momentum'])}"
    for key in ("affine", "track_running_stats"):
        text += "" if values[key] else f", {key}=False"
    return text + ")"


def flatten_shape(values: Values, shape: Shape) -> Shape:
    ends = tuple(axes_of(values[key], shape, "flatten", key) for key in ("start_dim", "end_dim"))
    if not shape:
        return (1,)
    (first,), (last,) = ends
    if first > last:
        raise ShapeError(f"flatten's start_dim: {values['start_dim']} comes behind its end_dim: {values['end_dim']}")
    return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])


def squeeze_shape(values: Values, shape: Shape) -> Shape:
    joined = axes_of(values["dim"], shape, "squeeze")
    return tuple(size for axis, size in enumerate(shape) if axis not in joined or size != 1)


def squeeze_call(values: Values) -> str:
    return "torch.squeeze({v})" if values["dim"] is None else f"torch.squeeze({{v}}, {values['dim']})"


def unsqueeze_shape(values: Values, shape: Shape) -> Shape:
    (axis,) = axes_of(values["dim"], (*shape, 1), "unsqueeze")
    return (*shape[:axis], 1, *shape[axis:])


def view_shape(values: Values, shape: Shape) -> Shape:
    """The shape of a view: 0 keeps the size in its place, -1 stands for whatever is left, as in `view: {shape: [0, 0, -1]}`."""
    given = list(values["sizes"])
    for axis, size in enumerate(given):
        if size == 0:
            if axis >= len(shape):
                raise ShapeError(f"view's sizes: 0 keeps the size in its place, and {shape} has none in place {axis}")
            given[axis] = shape[axis]
    if given.count(-1) > 1:
        raise ShapeError("view's sizes: -1 may stand once")
    whole, known = math.prod(shape), math.prod(size for size in given if size != -1)
    if -1 in given:
        if known == 0 or whole % known:
            raise ShapeError(f"view's sizes: {list(values['sizes'])} do not divide the {whole} values of {shape}")
        given[given.index(-1)] = whole // known
    if math.prod(given) != whole:
        raise ShapeError(f"view's sizes: {list(values['sizes'])} hold {math.prod(given)} values, and {shape} has {whole}")
    return tuple(given)


def softmax_call(name: str) -> Callable[[Values], str]:
    return lambda values: f"torch.{name}({{v}}, dim={values['dim']})"


def view_text(sizes: tuple[int, ...]) -> str:
    """A view's call; a size that is kept is asked of the value."""
    return "{v}.reshape(" + ", ".join(f"{{v}}.shape[{axis}]" if size == 0 else str(size) for axis, size in enumerate(sizes)) + ")"
