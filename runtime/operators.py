"""The operators of a generated package in torch's dispatcher: what lets compilers, exporters and autograd see a model.

A package has a namespace, named by it and by a digest of its content (``layer_3f2a...``), which holds

    forward          (x, parameters...) -> y
    forward_saving   (x, parameters...) -> (y, saved...), where a gradient will be asked for
    backward         (grad_y, saved..., parameters behind the producer...) -> their gradients, where it was emitted
    produce          (x, weight, bias) -> saved, where a backward computes it again
    derive           (grad_saved, x, weight, wanted) -> (grad_x, grad_weight, grad_bias), there too; empty if not wanted
    forward_training (x, operands...) -> (y, further results...), where training computes something else than evaluation
    vector_jacobian  (grad_y, x, operands..., masks..., training, wanted) -> gradients, where torch's autograd gives them; empty if not wanted

Operands are the inputs behind x, the parameters and the state, in this order.
Each has an overload for each batch of the package. As the content names them, a package that is generated again, or another of
the same name, changes nothing for models and captured programs of this one. Definitions last as long as the process.
"""

import re
import threading

import torch

from . import gradients, reference
from .checks import argument_name, check_tensor, not_dense, usable
from .errors import CallError, UnsupportedDeviceError
from .flops import register_formulas
from .launch import Program, dtype_named
from .load import Loaded, backward_for, describe_targets, load, load_backward
from .manifest import TensorSpec, gradient_of
from .package import Package
from .products import Producer

TAGS = (torch.Tag.pt2_compliant_tag,)
DEVICE_KEYS = ("CPU", "CUDA")
FOREIGN_KEYS = ("MkldnnCPU", *(f"{kind}{device}" for kind in ("Sparse", "SparseCsr", "NestedTensor", "Quantized") for device in DEVICE_KEYS))

_registered: dict[tuple[str, str], "Operators"] = {}  # by namespace and overload
_namespaces: dict[tuple[str, str], str] = {}  # by name and content of a package
_lock = threading.RLock()


class Operators:
    """The operators of one package, or of one size of a package for several batches, and the programs that they run by device.

    ``whole`` is the package in either case.
    """

    def __init__(self, package: Package, namespace: str, overload: str):
        self.package = package
        self.namespace = namespace
        self.overload = overload
        self.programs: dict[torch.device, Program] = {}
        self.training: dict[torch.device, Program] = {}
        self._backwards: dict[torch.device, object] = {}
        self._library = torch.library.Library(self.namespace, "FRAGMENT")
        manifest = package.manifest
        backward = next(iter(manifest.backward.values()), None)  # all have the same arguments
        self.chain_parameters = () if backward is None else backward.gradients[1:]
        self._saved = () if backward is None else backward.saved
        self._places = max(1, len(self._saved))  # of the results that a saving forward gives beside y
        schema = _schema([manifest.input, *manifest.operands])
        self.forward = self._define("forward", f"{schema} -> Tensor", self._run, self._fake)
        given = ", ".join(["Tensor"] * (1 + self._places))
        self.forward_saving = self._define("forward_saving", f"{schema} -> ({given})", self._run_saving, self._fake_saving)
        self.backward = None
        self.parts_of_training: list[str] = []
        self.parts_of_backward: list[str] = []
        if backward is not None:
            self.parts_of_backward.append("backward")
            given = [TensorSpec(gradient_of("y"), (), ""), *backward.saved, *self.chain_parameters]
            made = ", ".join("Tensor" for _ in backward.gradients)
            self.backward = self._define("backward", f"{_schema(given)} -> ({made})", self._run_backward, self._fake_backward)
        self._recomputing = next((entry for entry in manifest.backward.values() if entry.recomputes), None)
        if self._recomputing is not None:
            self.parts_of_backward += ["produce", "derive"]
            schema = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
            self.produce = self._define("produce", schema, self._run_produce, self._fake_produce)
            schema = "(Tensor grad_saved, Tensor x, Tensor weight, bool[] wanted) -> (Tensor, Tensor, Tensor)"
            self.derive = self._define("derive", schema, self._run_derive, self._fake_derive)
        if manifest.reference is not None:
            self._define_reference(schema)
        for key in FOREIGN_KEYS:
            for name in ("forward", "forward_saving"):
                self._library.impl(f"{name}.{overload}", self._refuse, key)
        gradients.register(self, self._library)
        register_formulas(namespace, manifest, ["forward", "forward_saving", *self.parts_of_training, *self.parts_of_backward])

    def _define_reference(self, schema: str) -> None:
        """The operators of a package whose gradients torch's autograd gives."""
        manifest = self.package.manifest
        results = manifest.reference.results
        if manifest.reference.training:
            made = ", ".join("Tensor" for _ in ("y", *results))
            given = f"{schema} -> ({made})" if results else f"{schema} -> Tensor"
            self.forward_training = self._define("forward_training", given, self._run_training, self._fake_training)
            self.parts_of_training.append("forward_training")
        given = _schema([TensorSpec(gradient_of("y"), (), ""), manifest.input, *manifest.operands]).removesuffix(")")
        made = ", ".join("Tensor" for _ in (manifest.input, *manifest.operands))
        self.vector_jacobian = self._define(
            "vector_jacobian", f"{given}, Tensor[] masks, bool training, bool[] wanted) -> ({made})", self._run_vector_jacobian, self._fake_vector_jacobian
        )
        self.parts_of_backward.append("vector_jacobian")

    @property
    def whole(self) -> Package:
        return getattr(self.package, "whole", self.package)

    def learn(self, loaded: Loaded) -> None:
        """Run these programs from now on."""
        batch = self.package.manifest.batch
        self.programs.update((device, program) for (of, device), program in loaded.programs.items() if of == batch)
        self.training.update((device, program) for (of, device), program in loaded.training.items() if of == batch)

    def build_backward(self) -> None:
        """Have what gradients need on the devices of the programs, instead of at the first forward that asks for them."""
        for device in self.programs:
            self._backward_on(device)

    def name(self, operator: str) -> str:
        """``namespace::operator.overload``."""
        return f"{self.namespace}::{operator}.{self.overload}"

    def _define(self, name: str, schema: str, run, fake) -> torch._ops.OpOverload:
        self._library.define(f"{name}.{self.overload}{schema}", tags=TAGS)
        for key in DEVICE_KEYS:
            self._library.impl(f"{name}.{self.overload}", run, key)
        torch.library.register_fake(self.name(name), fake, lib=self._library)
        return getattr(getattr(getattr(torch.ops, self.namespace), name), self.overload)

    def _refuse(self, x, *parameters):
        """The implementation for tensors that are no dense arrays in memory."""
        self._check_dense(x, parameters)
        raise CallError(f"{self.package.manifest.name} takes dense tensors in memory, as x and as parameters, and was given another kind.")

    # ---- what the operators do ---------------------------------------------------------------------------------------

    def _run(self, x, *parameters):
        return self._launch(x, parameters, False)

    def _run_saving(self, x, *parameters):
        self._backward_on(x.device)  # what cannot be built is found out before the work is done
        return self._launch(x, parameters, True)

    def _launch(self, x, parameters, saving: bool):
        self._check(x, parameters)
        program = self._program_on(x.device)
        found = program(usable(x), [usable(parameter) for parameter in parameters], saving=saving)
        return self._filled(found[0], found[1:]) if saving else found

    def _run_training(self, x, *operands):
        self._check(x, operands)
        self._program_on(x.device)
        return _one_or_all(self.training[x.device](usable(x), [usable(tensor) for tensor in operands]))

    def _run_vector_jacobian(self, grad_y, *tensors_and_more):
        *tensors, masks, training, wanted = tensors_and_more
        grads = reference.vector_jacobian(self.package.manifest, grad_y, tensors, masks, training, wanted)
        return _one_or_all(tuple(grad_y.new_empty(0) if grad is None else grad.contiguous() for grad in grads))

    def _fake_training(self, x, *operands):
        y = self._fake(x, *operands)
        shapes = {f"state:{entry.name}": entry for entry in self.package.manifest.state}
        made = [y]
        for name, step in ((name, step) for step in self.package.manifest.reference.training for name in step.also):
            entry = shapes.get(name)
            made.append(x.new_empty(entry.shape) if entry else x.new_empty(step.options["sizes"], dtype=torch.bool))
        return _one_or_all(tuple(made))

    def _fake_vector_jacobian(self, grad_y, *tensors_and_more):
        *tensors, _, _, wanted = tensors_and_more
        return _one_or_all(tuple(tensor.new_empty(tensor.shape if asked else 0) for tensor, asked in zip(tensors, wanted)))

    def _run_backward(self, grad_y, *tensors):
        self._check_backward(grad_y, tensors)
        run, (saved, parameters) = self._backward_on(tensors[0].device), self._parted([usable(tensor) for tensor in tensors])
        return _one_or_all(run(usable(grad_y), saved, parameters))

    def _parted(self, tensors) -> tuple[list, list]:
        """What a forward saved, and the parameters."""
        return tensors[: len(self._saved)], tensors[len(self._saved) :]

    def _run_produce(self, x, weight, bias):
        operands = [tensor if tensor is None else usable(tensor) for tensor in (x, weight, bias)]
        return self._producer.produce(*operands, deterministic=True)

    def _run_derive(self, grad_saved, x, weight, wanted):
        operands = [usable(tensor) for tensor in (grad_saved, x, weight)]
        made = self._producer.derive(*operands, wanted)
        return tuple(grad_saved.new_empty(0) if tensor is None else tensor for tensor in made)

    @property
    def _producer(self) -> Producer:
        step = self._recomputing.producer
        return Producer(step.call, step.options, self.package.manifest.precision)

    def _fake(self, x, *parameters):
        self._check_dense(x, parameters)
        self._check(x, parameters)
        output = self.package.manifest.output
        return torch.empty(output.shape, dtype=dtype_named(output.dtype), device=x.device)

    def _fake_saving(self, x, *parameters):
        y = self._fake(x, *parameters)
        backward = backward_for(self.package.manifest, x.device)
        kept = () if backward is None or backward.recomputes else backward.saved
        return self._filled(y, [y.new_empty(entry.shape, dtype=dtype_named(entry.dtype)) for entry in kept])

    def _filled(self, y, saved) -> tuple:
        """The results of a saving forward: empty tensors stand where it saves nothing."""
        return (y, *saved, *(y.new_empty(0) for _ in range(self._places - len(saved))))

    def _fake_backward(self, grad_y, *tensors):
        self._check_backward(grad_y, tensors)
        saved, parameters = self._parted(tensors)
        return _one_or_all(tuple(tensor.new_empty(tensor.shape) for tensor in (saved[0], *parameters)))

    def _fake_produce(self, x, weight, bias):
        return x.new_empty(self._saved[0].shape)

    def _fake_derive(self, grad_saved, x, weight, wanted):
        shapes = (x.shape, weight.shape, grad_saved.shape[1:2])
        return tuple(grad_saved.new_empty(shape if asked else 0) for shape, asked in zip(shapes, wanted))

    def _check_dense(self, x, operands) -> None:
        manifest = self.package.manifest
        inputs = (manifest.input, *manifest.others)
        for spec, tensor in zip((manifest.input, *manifest.operands), (x, *operands)):
            is_input = spec in inputs
            fault = not_dense(argument_name(manifest, spec) if is_input else spec.name, tensor, is_input)
            if fault is not None:
                raise fault

    def _check(self, x, parameters) -> None:
        manifest = self.package.manifest
        for spec, tensor in zip((manifest.input, *manifest.operands), (x, *parameters)):
            check_tensor(manifest, spec, tensor, x.device)

    def _check_backward(self, grad_y, tensors) -> None:
        manifest = self.package.manifest
        specs = (manifest.output, *self._saved, *self.chain_parameters)
        for spec, tensor in zip(specs, (grad_y, *tensors)):
            check_tensor(manifest, spec, tensor, tensors[0].device)

    # ---- what they run -----------------------------------------------------------------------------------------------

    def _program_on(self, device: torch.device) -> Program:
        """The program for ``device``. Where no model was constructed in this process, as when it only loads an exported
        program, what a constructor would build is built now."""
        program = self.programs.get(device)
        if program is None:
            with _lock:
                if not self.programs:
                    self.learn(load(self.whole))
            program = self.programs.get(device)
        if program is None:
            raise UnsupportedDeviceError(
                f"x is on {device}, and {self.package.manifest.name} has no build for it; emitted: "
                f"{describe_targets(self.package)}; construct the model where the device is visible, or let TARGETS name a "
                "target that runs on it."
            )
        return program

    def _backward_on(self, device: torch.device):
        """The emitted backward for ``device``, built at first use; None where none was emitted."""
        if device not in self._backwards:
            self._backwards[device] = load_backward(self.package, device)
        return self._backwards[device]


def operators_for(package: Package) -> Operators:
    """The operators of a package for one batch, or of one size of a package for several, defined at the first call."""
    whole = getattr(package, "whole", package)
    overload = f"batch_{package.manifest.batch}"
    with _lock:
        namespace = _namespace(whole)
        found = _registered.get((namespace, overload))
        if found is None:
            found = _registered[namespace, overload] = Operators(package, namespace, overload)
        found.package = package  # of the same content; its folder may lie elsewhere now
        return found


def _namespace(package: Package) -> str:
    """The namespace of a package: its name and its content."""
    key = package.manifest.name, package.content
    if key not in _namespaces:
        stem = namespace = f"{key[0]}_{key[1][:16]}"
        number = 1
        while torch._C._dispatch_has_kernel(f"{namespace}::forward.batch_{package.sizes[0].manifest.batch}"):
            number += 1  # another copy of this runtime, as each wheel has one, defined the same package
            namespace = f"{stem}_{number}"
        _namespaces[key] = namespace
    return _namespaces[key]


def _one_or_all(tensors: tuple) -> torch.Tensor | tuple:
    """What an operator with that many results returns."""
    return tensors[0] if len(tensors) == 1 else tensors


def _schema(tensors: list[TensorSpec]) -> str:
    """The arguments. A prefix keeps names apart from the schema language's words, a number from each other."""
    names = [re.sub(r"\W", "_", tensor.name) for tensor in tensors]
    names = [f"{name}_{i}" if names.index(name) < i else name for i, name in enumerate(names)]
    return f"({', '.join('Tensor ' + (name if i == 0 else 'p_' + name) for i, name in enumerate(names))})"
