"""What a call may be given: the checks of the input and the parameters, and the sentences of their refusals."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .errors import CallError
from .launch import dtype_named
from .manifest import Manifest, TensorSpec

PLAIN = (nn.Parameter, torch.Tensor)  # what kernels can be given as it is
ALIGNMENT = 16  # bytes; the kernels read and write 16 bytes at a time


def not_dense(key: str, tensor: torch.Tensor, is_input: bool = False) -> CallError | None:
    """What is wrong with a tensor that is no dense array in memory, be it the input or the parameter ``key``; None where it is one."""
    if tensor.is_nested:
        found, made = "a nested tensor", "one dense tensor"
    elif tensor.layout is not torch.strided:
        found, made = f"layout {tensor.layout}", f"{key}.to_dense()"
    elif tensor.is_quantized:
        found, made = f"a quantised tensor ({_dtype_text(tensor.dtype)})", f"{key}.dequantize()"
    else:
        return None
    remedy = f"pass {made}" if is_input else f"replace the parameter by nn.Parameter({made})"
    return CallError(f"{key}: expected a dense tensor, got {found}; {remedy}.")


def check_tensor(manifest: Manifest, spec: TensorSpec, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises CallError where ``tensor`` is not what ``spec`` says, on ``device``; fit for tensors that hold no values."""
    wanted = dtype_named(spec.dtype)
    if tuple(tensor.shape) == spec.shape and tensor.dtype is wanted and tensor.device == device:
        return
    if spec is manifest.input:
        raise CallError(wrong_input(manifest, tensor, str(device)))
    if spec in manifest.others:
        raise wrong_other(manifest, spec, tensor, device)
    raise wrong_tensor(manifest, spec.name, tensor, device, spec.shape, wanted)


def is_usable(tensor: torch.Tensor) -> bool:
    """Can kernels read the tensor as it lies?"""
    address = tensor.data_ptr()  # 0: autograd's zeros, which have no memory
    return address != 0 and not address % ALIGNMENT and tensor.is_contiguous() and not tensor.is_neg()


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int] | None:
    """Where the tensors lie; None unless all are plain ones that kernels can read as they are."""
    addresses = []
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not is_usable(tensor):
            return None
        addresses.append(tensor.data_ptr())
    return addresses


def usable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where kernels can read it as it lies, else a dense, aligned copy."""
    if is_usable(tensor):
        return tensor
    return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)


def expected(manifest: Manifest, places: str) -> str:
    """How a refusal of the input begins; ``places`` names the devices that would do."""
    rows = f"up to {manifest.batches[-1]}" if manifest.pad_batch else _listed(manifest.batches, "or")
    with_rows = f" with N {rows}" if _is_range(manifest) else ""
    return f"{manifest.arguments[0]}: expected {_input_shape(manifest)} {manifest.input.dtype} on {places}{with_rows}"


def wrong_input(manifest: Manifest, x: torch.Tensor, places: str) -> str:
    """One sentence: expected, got what differs, and what to do."""
    shape, wanted = tuple(x.shape), manifest.input.shape
    got, remedies = [], []
    other_batch = len(shape) == len(wanted) and shape[1:] == wanted[1:]
    if manifest.sizes and other_batch:
        fits = shape[0] <= manifest.batches[-1] if manifest.pad_batch else shape[0] in manifest.batches
    else:
        fits = shape == wanted
    if not fits:
        got.append(str(shape))
        if other_batch and _is_range(manifest):
            remedy = _other_batch(manifest, shape[0])
            origin = f"this model was generated for batch {_listed(manifest.batches, 'and')} from {manifest.spec}"
        elif other_batch:
            remedy = f"set batch: {shape[0]} and run {manifest.regenerate}"
            origin = f"this model was generated for batch {manifest.batch} from {manifest.spec}"
        else:
            remedy = f"change the sizes there and run {manifest.regenerate}"
            origin = f"this model was generated for inputs of {_input_shape(manifest)} from {manifest.spec}"
        remedies.append(f"{origin}; {remedy}")
    if x.dtype is not dtype_named(manifest.input.dtype):
        got.append(_dtype_text(x.dtype))
        remedies.append(f"pass x.to(torch.{manifest.input.dtype}), or {_other_precision(manifest, x.dtype)}")
    return f"{expected(manifest, places)}, got {' '.join(got)}; {'; '.join(remedies)}."


def argument_name(manifest: Manifest, spec: TensorSpec) -> str:
    """The name of an input in ``forward``."""
    return manifest.arguments[0 if spec is manifest.input else 1 + manifest.others.index(spec)]


def wrong_other(manifest: Manifest, spec: TensorSpec, found: Any, device: torch.device) -> CallError:
    """What is wrong with an input behind the first."""
    wanted = dtype_named(spec.dtype)
    text = f"{argument_name(manifest, spec)}: expected {_text(spec.shape, wanted)} on {device}, where {manifest.arguments[0]} is"
    if not isinstance(found, torch.Tensor):
        return CallError(f"{text}, got {type(found).__name__}; pass a torch.Tensor.")
    text += f", got {_text(found.shape, found.dtype)} on {found.device}"
    if tuple(found.shape) != spec.shape:
        return CallError(f"{text}; change its shape in {manifest.spec} and run {manifest.regenerate}.")
    if found.dtype is not wanted:
        return CallError(f"{text}; convert it with .to({wanted}), or {_other_precision(manifest, found.dtype)}.")
    return CallError(f"{text}; move it there.")


def _other_batch(manifest: Manifest, batch: int) -> str:
    """What can be done about a batch that a package for several has no kernels for."""
    if batch in manifest.batches:  # only a call of an operator by itself comes here
        return f"this operator is the one for batch {manifest.batch}"
    larger = next((listed for listed in manifest.batches if listed > batch), None)
    if batch == 0:
        return "pass at least one sample"
    if larger is None:
        return f"none of them is larger: add {batch} to batch there and run {manifest.regenerate}"
    return (
        f"the next larger is {larger}: pass x padded to it, or add {batch} to batch or set pad_batch: true there and run {manifest.regenerate}"
    )


def _is_range(manifest: Manifest) -> bool:
    return len(manifest.batches) > 1 or manifest.pad_batch


def _input_shape(manifest: Manifest) -> str:
    """The input's shape; N stands for the batch of a package for several."""
    if not _is_range(manifest):
        return str(manifest.input.shape)
    return f"({', '.join(['N', *map(str, manifest.input.shape[1:])])})"


def _listed(batches: tuple[int, ...], word: str) -> str:
    """``1, 8 and 64``."""
    *front, last = map(str, batches)
    return f"{', '.join(front)} {word} {last}" if front else last


def wrong_tensor(manifest: Manifest, key: str, found: Any, device: torch.device, shape: tuple, dtype: torch.dtype) -> CallError:
    """What is wrong with the parameter ``key``."""
    text = f"{key}: expected {_text(shape, dtype)} on {device}, where x is"
    if not isinstance(found, torch.Tensor):
        return CallError(f"{text}, got {found!r}; the generated kernels need every parameter of the original module.")
    text += f", got {_text(found.shape, found.dtype)} on {found.device}"
    if tuple(found.shape) != tuple(shape):
        remedy = f"the shape was fixed by {manifest.spec}; change it there and run {manifest.regenerate}"
    elif found.dtype is not dtype:
        remedy = f"convert the model with model.to({dtype}), or {_other_precision(manifest, found.dtype)}"
    elif found.is_meta:
        remedy = f"it has no values yet: give it some with model.load_state_dict(..., assign=True), or memory with model.to_empty(device={str(device)!r})"
    else:
        remedy = f"move the model with model.to({str(device)!r})"
    return CallError(f"{text}; {remedy}.")


def _other_precision(manifest: Manifest, dtype: torch.dtype) -> str:
    precision = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype)
    if precision is None:
        return "generate with another precision"
    return f"run {manifest.regenerate} PRECISION={precision}"


def _text(shape, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {_dtype_text(dtype)}"


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
