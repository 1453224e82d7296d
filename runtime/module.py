"""``GeneratedModule``: the base of every emitted ``ModelNew``."""

import sys
from typing import Any, Sequence

import torch
from torch import nn
from torch.autograd import forward_ad

from .errors import ArgumentError, CallError, GradientError, UnsupportedDeviceError
from .launch import dtype_named
from .load import Loaded, describe_targets, load
from .package import Manifest, Package, TensorSpec

ALIGNMENT = 16  # bytes; the kernels read and write 16 bytes at a time

_PLAIN = (torch.Tensor, nn.Parameter)


class GeneratedModule(nn.Module):
    """A module whose forward runs the kernels of a generated package.

    ``package`` is the generated folder; ``init_args`` are the constructor's arguments, which must be those that were
    folded into the kernels (ArgumentError otherwise). Constructing builds and loads the kernels for the visible GPUs,
    or for the CPU where none is visible, or what TARGETS names; under the meta device it builds nothing, and
    ``build()`` does it later. The subclass creates the parameters that the manifest lists.
    """

    def __init__(self, package: Package, **init_args: Any):
        super().__init__()
        manifest = package.manifest
        _check_init_args(manifest, init_args)
        self._package = package
        self._loaded = Loaded()
        self._shape = torch.Size(manifest.input.shape)
        self._dtype = dtype_named(manifest.input.dtype)
        self._parameter_table = tuple(
            (*_split(entry.name), torch.Size(entry.shape), dtype_named(entry.dtype)) for entry in manifest.parameters
        )
        if torch.get_default_device().type != "meta":
            self.build()

    def build(self) -> None:
        """Builds and loads the kernels that the devices visible now need; the constructor has done so already,
        unless it ran under the meta device."""
        self._loaded = load(self._package)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The chain of the spec applied to ``x``, on the device and the current stream of ``x``.

        Any strides are accepted (other than contiguous ones cost a copy). Raises CallError for a wrong shape, dtype or
        device of ``x`` or a parameter, UnsupportedDeviceError where nothing was built for the device.
        """
        if type(x) not in _PLAIN or x.shape != self._shape or x.dtype is not self._dtype or x.layout is not torch.strided:
            self._refuse(x)
        device = x.device
        program = self._loaded.programs.get(device)
        if program is None:
            raise self._no_program(x)
        parameters = self._collect(device)
        if forward_ad._current_level >= 0:
            _refuse_tangents(self._package.manifest.name, [x, *parameters])
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters)):
            return _GradientNotGenerated.apply(program, self._package.manifest.name, x, *parameters)
        return program(_usable(x), [p if _is_usable(p) else _usable(p) for p in parameters])

    def extra_repr(self) -> str:
        manifest = self._package.manifest
        return f"{manifest.name}, {manifest.precision}, batch={manifest.batch}, built={', '.join(self._loaded.built)}"

    def __setstate__(self, state):
        """Unpickling constructs: what the pickle could not carry is loaded again from the class's own package."""
        super().__setstate__(state)
        own = getattr(sys.modules.get(type(self).__module__), "PACKAGE", None)
        if isinstance(own, Package):
            self._package = own  # the folder may lie elsewhere on this machine
        if not self._loaded.programs and torch.get_default_device().type != "meta":
            self.build()

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _collect(self, device: torch.device) -> list[torch.Tensor]:
        """The parameters in the manifest's order, each checked."""
        collected = []
        for path, name, shape, dtype in self._parameter_table:
            module = self
            for part in path:
                module = module._modules[part]
            parameter = module._parameters.get(name)
            if parameter is None:
                parameter = getattr(module, name, None)  # a parametrization computes it
            if (
                not isinstance(parameter, torch.Tensor)
                or parameter.shape != shape
                or parameter.dtype is not dtype
                or parameter.device != device
            ):
                raise self._wrong_parameter(".".join((*path, name)), parameter, device, shape, dtype)
            collected.append(parameter)
        return collected

    def _refuse(self, x: Any) -> None:
        """Raises what is wrong with ``x``; returns where it is only a subclass over plain memory."""
        manifest, expected = self._package.manifest, _expected(self._package.manifest, self._places())
        if not isinstance(x, torch.Tensor):
            raise CallError(f"{expected}, got {type(x).__name__}; pass a torch.Tensor.")
        if x.layout is not torch.strided:
            raise CallError(f"{expected}, got layout {x.layout}; pass x.to_dense().")
        if x.shape != self._shape or x.dtype is not self._dtype:
            raise CallError(_wrong_input(manifest, x, self._places()))
        if type(x).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            raise CallError(
                f"{expected}, got a {type(x).__name__}, whose memory the kernels cannot read; pass a plain torch.Tensor."
            )

    def _places(self) -> str:
        kinds = dict.fromkeys(device.type for device in self._loaded.programs)
        return " or ".join(kinds) or "a device that was built for"

    def _no_program(self, x: torch.Tensor) -> Exception:
        manifest, device = self._package.manifest, x.device
        if device.type not in ("cpu", "cuda"):
            return CallError(f"{_expected(manifest, self._places())}, got device {device}; move x to {self._places()}.")
        built = ", ".join(self._loaded.built) or "nothing"
        if device.type == "cpu":
            remedy = "move x and the model to the GPU, or set TARGETS=cpu before the model is constructed"
        else:
            major, minor = torch.cuda.get_device_capability(device)
            remedy = (
                f"{device} has compute capability {major}.{minor}; construct the model, or call build(), where the GPU is "
                f"visible, and let TARGETS name a target that runs on it"
            )
        return UnsupportedDeviceError(
            f"x is on {device}, and {manifest.name} has no build for it: built here: {built}; "
            f"emitted: {describe_targets(self._package)}; {remedy}."
        )

    def _wrong_parameter(self, key, found, device, shape, dtype) -> CallError:
        text = f"{key}: expected {_text(shape, dtype)} on {device}, where x is"
        if not isinstance(found, torch.Tensor):
            return CallError(f"{text}, got {found!r}; the generated kernels need every parameter of the original module.")
        text += f", got {_text(found.shape, found.dtype)} on {found.device}"
        if found.shape != shape:
            manifest = self._package.manifest
            remedy = f"the shape was fixed by {manifest.spec}; change it there and run {manifest.regenerate}"
        elif found.dtype is not dtype:
            remedy = f"convert the model with model.to({dtype}), or {_other_precision(self._package.manifest, found.dtype)}"
        else:
            remedy = f"move the model with model.to({str(device)!r})"
        return CallError(f"{text}; {remedy}.")


class _GradientNotGenerated(torch.autograd.Function):
    """Runs a program under autograd. Its backward is an error: losing a gradient must never go unnoticed."""

    @staticmethod
    def forward(ctx, program, name, x, *parameters):
        ctx.name = name
        return program(_usable(x), [_usable(parameter) for parameter in parameters])

    @staticmethod
    def backward(ctx, *gradients):
        raise GradientError(
            f"gradients are not generated yet for {ctx.name}; call the model under torch.no_grad() or "
            "torch.inference_mode(), and train with the reference module."
        )


def _refuse_tangents(name: str, tensors: list[torch.Tensor]) -> None:
    """Forward-mode derivatives go on under no_grad, so they need a refusal of their own."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise GradientError(f"forward-mode derivatives are not generated for {name}; use the reference module for them.")


def _is_usable(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT and not tensor.is_neg()


def _usable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where kernels can read it as it lies, else a dense, aligned copy."""
    if _is_usable(tensor):
        return tensor
    return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)


def _split(key: str) -> tuple[tuple[str, ...], str]:
    *path, name = key.split(".")
    return tuple(path), name


def _check_init_args(manifest: Manifest, given: dict[str, Any]) -> None:
    folded = dict(manifest.init_args)
    for name in given:
        if name not in folded:
            raise ArgumentError(f"{name}: {manifest.name} takes no such argument; it takes {', '.join(folded) or 'none'}.")
    for name, value in folded.items():
        if name not in given:
            raise ArgumentError(f"{name}: expected {value!r}, got nothing; pass every argument of the original module.")
        if not _same(given[name], value):
            raise ArgumentError(
                f"{name}: expected {value!r}, got {given[name]!r}; {manifest.name} was generated for {name} = {value!r} "
                f"from {manifest.spec}; set {name} there and run {manifest.regenerate}."
            )


def _same(given: Any, folded: Any) -> bool:
    if isinstance(folded, tuple):
        return (
            isinstance(given, Sequence)
            and not isinstance(given, str)
            and len(given) == len(folded)
            and all(map(_same, given, folded))
        )
    if isinstance(given, bool) != isinstance(folded, bool):
        return False
    try:
        return bool(given == folded)
    except (RuntimeError, ValueError, TypeError):
        return False


def _expected(manifest: Manifest, places: str) -> str:
    return f"x: expected {_describe(manifest.input)} on {places}"


def _wrong_input(manifest: Manifest, x: torch.Tensor, places: str) -> str:
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
    return f"{_expected(manifest, places)}, got {' '.join(got)}; {'; '.join(remedies)}."


def _other_precision(manifest: Manifest, dtype: torch.dtype) -> str:
    precision = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype)
    if precision is None:
        return "generate with another precision"
    return f"run {manifest.regenerate} PRECISION={precision}"


def _describe(spec: TensorSpec) -> str:
    return f"{spec.shape} {spec.dtype}"


def _text(shape, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {_dtype_text(dtype)}"


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
