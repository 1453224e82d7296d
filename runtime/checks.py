"""What a call may be given: the checks of the input and the parameters, and the sentences of their refusals."""

from typing import Any

import torch

from .errors import CallError
from .launch import dtype_named
from .package import Manifest, TensorSpec

ALIGNMENT = 16  # bytes; the kernels read and write 16 bytes at a time


def check_tensor(manifest: Manifest, spec: TensorSpec, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises CallError where ``tensor`` is not what ``spec`` says, on ``device``; fit for tensors that hold no values."""
    wanted = dtype_named(spec.dtype)
    if tuple(tensor.shape) == spec.shape and tensor.dtype is wanted and tensor.device == device:
        return
    if spec is manifest.input:
        raise CallError(wrong_input(manifest, tensor, str(device)))
    raise wrong_tensor(manifest, spec.name, tensor, device, spec.shape, wanted)


def is_usable(tensor: torch.Tensor) -> bool:
    """Can kernels read the tensor as it lies?"""
    return tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT and not tensor.is_neg()


def usable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where kernels can read it as it lies, else a dense, aligned copy."""
    if is_usable(tensor):
        return tensor
    return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)


def expected(manifest: Manifest, places: str) -> str:
    """How a refusal of the input begins; ``places`` names the devices that would do."""
    return f"x: expected {manifest.input.shape} {manifest.input.dtype} on {places}"


def wrong_input(manifest: Manifest, x: torch.Tensor, places: str) -> str:
    """One sentence: expected, got what differs, and what to do."""
    shape, wanted = tuple(x.shape), manifest.input.shape
    got, remedies = [], []
    if shape != wanted:
        got.append(str(shape))
        if len(shape) == len(wanted) and shape[1:] == wanted[1:]:
            remedy = f"set batch: {shape[0]}"
            origin = f"this model was generated for batch {manifest.batch} from {manifest.spec}"
        else:
            remedy = "change the sizes there"
            origin = f"this model was generated for inputs of {wanted} from {manifest.spec}"
        remedies.append(f"{origin}; {remedy} and run {manifest.regenerate}")
    if x.dtype is not dtype_named(manifest.input.dtype):
        got.append(_dtype_text(x.dtype))
        remedies.append(f"pass x.to(torch.{manifest.input.dtype}), or {_other_precision(manifest, x.dtype)}")
    return f"{expected(manifest, places)}, got {' '.join(got)}; {'; '.join(remedies)}."


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
