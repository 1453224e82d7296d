"""``GeneratedModule``: the base of every emitted ``ModelNew``."""

from typing import Any, Sequence

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.fx import Proxy

from .arguments import check_init_args
from .checks import ALIGNMENT, PLAIN, addresses_of, expected, usable, wrong_input, wrong_tensor
from .errors import CallError, PackageError, PreparationError, UnsupportedDeviceError
from .gradients import ByReference, refuse_tangents
from .inputs import Size, bound, sizes_of
from .launch import dtype_named
from .load import Loaded, describe_targets, load
from .original import reference_for_gradients
from .owners import ParameterOwners, refuse, refuse_sharded
from .package import Package
from .prepared import PreparedWeights, is_written_unseen, key_of

_DEFINED = ("_operators", "_sizes", "_size_of_shape", "_pads", "_parameter_table", "_owners", "_state_owners")  # by GeneratedModule._define
_strided = torch.strided
_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state


class GeneratedModule(ParameterOwners):
    """A module whose forward runs the kernels of a generated package, of a package for several batches those of the size of x.

    ``package`` is the generated folder; ``init_args`` are the constructor's arguments, which must be those that were
    folded into the kernels (ArgumentError otherwise). Constructing builds and loads the kernels for the visible GPUs,
    or for the CPU where none is visible, or what TARGETS names; under the meta device it builds nothing, and
    ``build()`` does it later. The subclass creates the parameters that the manifest lists.
    """

    _origin: "tuple[Package, type | None] | None" = None  # of a package's ModelNew and what is derived from it: its PACKAGE and its Model

    def __init_subclass__(cls, **kwargs: Any):
        """Importing a package defines its operators, which a captured program needs before any model is constructed.

        The class keeps the package and the ``Model`` that its module has now: another import may put others in their place.
        """
        super().__init_subclass__(**kwargs)
        beside = getattr(vars(cls).get("__init__"), "__globals__", {})
        package, reference = beside.get("PACKAGE"), beside.get("Model")
        if cls._origin is None and isinstance(package, Package):
            cls._origin = package, reference if isinstance(reference, type) and issubclass(reference, nn.Module) else None
            try:
                sizes_of(package)
            except PackageError:
                pass  # the constructor says so

    def __init__(self, package: Package, **init_args: Any):
        super().__init__()
        manifest = package.manifest
        check_init_args(manifest, init_args)
        self._package = package
        self._define(package)
        self._loaded = Loaded()
        self._prepared = PreparedWeights()
        self._by_reference = False
        self._dtype = dtype_named(manifest.input.dtype)
        self._names = tuple(entry.name for entry in manifest.parameters)
        self._several = bool(manifest.others)
        self._trainable = bool(manifest.reference and manifest.reference.training)  # training computes something else than evaluation
        if torch.get_default_device().type != "meta":
            self.build()

    def _define(self, package: Package) -> None:
        """The sizes of the package, in ascending order, and their operators. ``_operators`` are those of the only one, or of the largest."""
        self._sizes = sizes_of(package)
        self._size_of_shape = {size.shape: size for size in self._sizes}
        self._operators = self._sizes[-1].operators
        self._pads = package.manifest.pad_batch
        self._define_owners(package)

    def build(self, backward: bool = False) -> None:
        """Builds and loads the kernels that the devices visible now need; the constructor has done so already,
        unless it ran under the meta device. With ``backward`` also those of gradients, which else the first forward that asks for
        gradients builds."""
        self._loaded = load(self._package)
        for size in self._sizes:
            size.operators.learn(self._loaded)
            if backward:
                size.operators.build_backward()

    def differentiate_by_reference(self, asked: bool = True) -> "GeneratedModule":
        """Gradients by PyTorch's autograd of the package's ``Model`` from now on, on every device; returns the model.

        The backward then computes the reference's forward again, by PyTorch's own operators and in their precision. It is for
        targets without a generated backward, and nothing falls back to it unasked. Eager only: compilers see the operator.
        """
        if asked:
            reference_for_gradients(type(self), self._package)
        self._by_reference = asked
        return self

    def prepare(self) -> "GeneratedModule":
        """Prepares the weights as they are now, on the device where they are, and waits until that is done; returns the model.

        A forward does so by itself where it notices a change. This is for what it cannot notice (docs/runtime.md), for the time before a
        CUDA graph is captured, and for choosing when it happens. Nothing is done where the device's target multiplies with the
        parameters as they are. Raises PreparationError for a package that was generated without prepared weights, for parameters whose
        changes cannot be noticed, and during a capture.
        """
        manifest = self._package.manifest
        if not manifest.prepack:
            raise PreparationError(f"{manifest.name} was generated without prepared weights; run {manifest.regenerate} PREPACK=1, or set prepack: true in {manifest.spec}.")
        if _watched():
            raise PreparationError("prepare() launches kernels, and a mode, a transform or a trace is active; call it outside.")
        if not self._loaded.programs:
            self.build()
        device = next(self.parameters()).device
        if device not in self._loaded.devices:
            raise PreparationError(
                f"the parameters are on {device}, and {manifest.name} has no build for it here (built: {', '.join(self._loaded.built) or 'nothing'}); "
                "move the model first, or call build() where the device is visible."
            )
        preparations = {entry.home: entry for (_, where), entry in self._loaded.preparations.items() if where == device}
        for preparation in preparations.values():
            parameters, _ = self._collect(device, direct=True)  # kernels read them as they lie
            tensors = [usable(parameter) for parameter in parameters]
            key = key_of(preparation.reads, parameters, tensors)
            if key is None or is_written_unseen(self):
                names = ", ".join(self._names[index] for index in preparation.reads)
                raise PreparationError(
                    f"{names}: what is prepared has to be a dense nn.Parameter of the module itself, no inference tensor and not sharded, so "
                    "that changes can be noticed; as it is, each call prepares for itself."
                )
            self._prepared.renew(preparation, parameters, tensors, key, asked=True)
        return self

    @property
    def prepared_bytes(self) -> int:
        """Bytes of prepared weights that the model holds now, on all devices."""
        return self._prepared.nbytes

    def forward(self, x: torch.Tensor, *others: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """The chain of the spec applied to ``x`` and the layer's other inputs, on the device and the current stream of ``x``.

        Any strides are accepted (other than contiguous ones cost a copy). Raises CallError for a wrong shape, dtype or
        device of ``x`` or a parameter, UnsupportedDeviceError where nothing was built for the device.

        Of a package for several batches the kernels for that of ``x`` run. Where the package pads, another batch is copied into one of
        the next larger size with rows of zeros, and the result is a copy of the first rows.
        """
        if others or named or self._several:
            others = bound(self._package.manifest, others, named)
        if _is_compiling():
            return self._captured(x, others)
        plain = type(x) in PLAIN
        try:
            size = self._size_of_shape.get(x.shape) if plain else None
        except RuntimeError:  # a nested tensor
            size = None
        if size is None or x.dtype is not self._dtype or x.layout is not _strided:
            if isinstance(x, Proxy):
                return self._symbolic(x, others)
            size = self._admit(x)
            if x.shape != size.shape:
                return self.forward(*size.padded(x, others))[: x.shape[0]].clone()
        operators = size.operators
        device, loaded = x.device, self._loaded
        program = loaded.programs.get((size.batch, device))
        if program is None and plain and not self._is_meta(device):
            if loaded.programs:
                raise self._no_program(x)
            return self._build_late(x, others)
        direct = plain and program is not None and not (_dispatch_modes() or _function_modes() or _transforms()) and _tracing() is None
        operands, addresses = self._operands(size, others, device, direct)
        if forward_ad._current_level >= 0:
            refuse_tangents(self._package.manifest.name, [x, *operands])
        if self._trainable and self._trains():
            return self._keep_state(self._through_operator(operators.forward_training, x, operands))
        if not direct or (addresses is None and not all(type(operand) in PLAIN for operand in operands)):
            return self._through_operator(operators.forward, x, operands)
        if _grad_enabled() and (x.requires_grad or any(operand.requires_grad for operand in operands)):
            if self._by_reference:
                reference = reference_for_gradients(type(self), self._package)
                return ByReference.apply(reference, self._names, operators.forward, x, *operands)
            return operators.forward(x, *operands)
        address = x.data_ptr()
        if not address or address % ALIGNMENT or not x.is_contiguous() or x.is_neg():
            self._refuse_not_dense(self._package.manifest.arguments[0], x, True)
            x = usable(x)
            address = x.data_ptr()
        tensors = operands
        if addresses is None:
            tensors = [usable(operand) for operand in operands]
            addresses = [tensor.data_ptr() for tensor in tensors]
        if loaded.preparations:
            preparation = loaded.preparations.get((size.batch, device))
            own = slice(len(others), len(others) + len(self._names))  # the parameters
            buffers = None if preparation is None else self._prepared.use(self, preparation, operands[own], tensors[own])
            if buffers is not None:
                return preparation.run(x, tensors, buffers)
        return program(x, tensors, [address, *addresses])

    def _operands(self, size: Size, others: tuple, device: torch.device, direct: bool) -> tuple[list[torch.Tensor], list[int] | None]:
        """What operators take behind x, each checked: the other inputs, the parameters, the state; for a ``direct`` launch also the addresses,
        None in place of these unless all are plain tensors that kernels can read as they lie."""
        parameters, addresses = self._collect(device, direct)
        if not (others or self._state_owners):
            return parameters, addresses
        size.check_others(others, device)
        state = self._collect_state(device)
        front, back = (addresses_of(others), addresses_of(state)) if addresses is not None else (None, None)
        together = None if front is None or back is None else [*front, *addresses, *back]
        return [*others, *parameters, *state], together

    def _through_operator(self, operator: OpOverload, x: torch.Tensor, operands: list[torch.Tensor]):
        """What a subclass, a mode or a trace has to see, or what asks about shapes alone."""
        names = (entry.name for entry in self._package.manifest.operands)
        special = [(name, operand) for name, operand in zip(names, operands) if type(operand) not in PLAIN]
        refuse_sharded(special)
        wrappers = [(name, tensor) for name, tensor in (("x", x), *special) if not isinstance(tensor, FakeTensor) and _dispatches(tensor)]
        if not wrappers:
            return operator(x, *operands)
        try:
            return operator(x, *operands)
        except (CallError, torch.OutOfMemoryError):  # told by their own sentences
            raise
        except (NotImplementedError, RuntimeError, TypeError, AttributeError, AssertionError) as error:  # whatever a subclass raises for what it lacks
            name, tensor = wrappers[0]
            raise CallError(
                f"{name} is a {type(tensor).__name__}, which does not know the operator {operator.name()} "
                f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); pass a plain dense tensor in its place."
            ) from error

    def _symbolic(self, x: Proxy, others: Sequence[Any] = ()) -> Proxy:
        """The call of the operator that a symbolic trace writes down."""
        manifest = self._package.manifest
        if self._trainable and self.training:
            raise CallError(f"{manifest.name} computes something else in training, which a symbolic trace does not follow; call eval() before tracing.")
        if len(self._sizes) > 1 or self._pads:
            raise CallError(
                f"{manifest.name} chooses its kernels by the batch of x, which a symbolic trace does not know: trace with torch.export, "
                f"make the model a leaf of the tracer (is_leaf_module), or set one batch in {manifest.spec} and run {manifest.regenerate}."
            )
        refuse(self)
        before = [(owner.__dict__, dict(owner.__dict__)) for owner in self.modules() if owner is not self and owner._forward_pre_hooks]
        try:
            return self._operators.forward(x, *others, *self._gather(), *self._gather_state())
        finally:
            for state, values in before:  # what the hooks set are the trace's own
                state.clear()
                state.update(values)

    def _build_late(self, x: torch.Tensor, others: tuple) -> torch.Tensor:
        """The forward of a model that was constructed under the meta device and has its parameters now."""
        for path, entries, *_ in self._owners:
            for name, shape, dtype in entries:
                parameter = self.get_submodule(".".join(path))._parameters.get(name)
                if parameter is not None and parameter.is_meta:
                    raise wrong_tensor(self._package.manifest, ".".join((*path, name)), parameter, x.device, shape, dtype)
        self.build()
        return self.forward(x, *others)

    def _captured(self, x: torch.Tensor, others: tuple) -> torch.Tensor:
        """The forward by statements that a compiler can follow. What fits no size is refused by an operator."""
        self._refuse_fault()
        chosen, inputs = self._sizes[-1], (x, *others)
        if len(self._sizes) > 1 or self._pads:
            rows = x.shape[0]
            for size in self._sizes:
                if rows == size.batch or (self._pads and rows < size.batch):
                    chosen = size
                    inputs = inputs if rows == size.batch else size.padded(x, others)
                    break
        operators, operands = chosen.operators, (*inputs, *self._gather(), *self._gather_state())
        y = self._keep_state(operators.forward_training(*operands)) if self._trainable and self._trains() else operators.forward(*operands)
        return y if inputs[0] is x else y[: x.shape[0]].clone()

    def _apply(self, fn, recurse: bool = True):
        """What moves or converts the parameters writes to them in ways that PyTorch does not count."""
        super()._apply(fn, recurse)
        self._prepared.expire({parameter.device for parameter in self.parameters()})
        return self

    def extra_repr(self) -> str:
        manifest = self._package.manifest
        batch = manifest.batch if len(self._sizes) == 1 else list(manifest.batches)
        pads = ", pad_batch=True" if self._pads else ""
        return f"{manifest.name}, {manifest.precision}, batch={batch}{pads}, built={', '.join(self._loaded.built)}"

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in _DEFINED:  # definitions in the dispatcher cannot leave the process, and the rest follows from the class
            del state[name]
        state["_meaning"] = self._package.meaning
        return state

    def __setstate__(self, state):
        """Unpickling constructs: what the pickle could not carry is loaded again from the class's own package."""
        state = dict(state)
        meaning = state.pop("_meaning", None)
        super().__setstate__(state)
        if self._origin is not None:
            self._package = self._origin[0]  # the folder may lie elsewhere on this machine
        manifest = self._package.manifest
        if meaning not in (None, self._package.meaning):
            raise PackageError(
                f"the pickled model is of another {manifest.name} than {self._package.path}, which was generated from another spec: unpickle it "
                "where its own package is imported, or construct this one and load the other's state_dict."
            )
        self._define(self._package)
        if not self._loaded.programs and torch.get_default_device().type != "meta":
            self.build()

    def _is_meta(self, device: torch.device) -> bool:
        """Is this a question about shapes, asked of a model that is on the meta device as a whole?"""
        return device.type == "meta" and all(parameter.device == device for parameter in self.parameters())

    def _admit(self, x: Any) -> Size:
        """The size that is to compute ``x``: that of its shape, or where the package pads the next larger one. Raises what is wrong with ``x``."""
        manifest = self._package.manifest
        wanted = expected(manifest, self._places())
        if not isinstance(x, torch.Tensor):
            raise CallError(f"{wanted}, got {type(x).__name__}; pass a torch.Tensor.")
        self._refuse_not_dense(self._package.manifest.arguments[0], x, True)
        fitting = (size for size in self._sizes if x.shape == size.shape)
        if self._pads:
            fitting = (size for size in self._sizes if x.dim() and x.shape[1:] == size.shape[1:] and x.shape[0] <= size.batch)
        size = next(fitting, None)
        if size is None or x.dtype is not self._dtype:
            raise CallError(wrong_input(manifest, x, self._places()))
        return size

    def _places(self) -> str:
        kinds = dict.fromkeys(device.type for device in self._loaded.devices)
        return " or ".join(kinds) or "a device that was built for"

    def _no_program(self, x: torch.Tensor) -> Exception:
        manifest, device = self._package.manifest, x.device
        if device.type not in ("cpu", "cuda"):
            return CallError(f"{expected(manifest, self._places())}, got device {device}; move x to {self._places()}.")
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


def _dispatches(tensor: torch.Tensor) -> bool:
    """Does the tensor's class run operators itself?"""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _watched() -> bool:
    """Does a mode, a transform or a trace want to see what torch is asked to do?"""
    return bool(_dispatch_modes() or _function_modes() or _transforms() or _tracing() is not None)
