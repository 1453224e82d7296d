"""Autograd for the operators of a package.

Behind the producer the derivatives are the package's own: ``backward`` is an emitted kernel that recomputes what it needs
from the result of the producer, which the forward saved or, on CUDA, torch computes again. The producer's derivatives are
torch's matrix products and convolutions. Only what a requested gradient needs is saved.
"""

import contextlib

import torch
from torch import nn
from torch.autograd import forward_ad

from .errors import GradientError
from .launch import dtype_named
from .load import backward_for
from .manifest import Backward, LibraryStep, Manifest


def register(operators, library: torch.library.Library) -> None:
    """Makes the operators of one package differentiable; ``library`` holds their definitions."""
    manifest = operators.package.manifest
    if manifest.reference is not None:
        _register_reference(operators, library)
        return

    def forward(x, *parameters):
        """Above the kernels: chooses the variant that saves where a gradient will be asked for."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *parameters)):
            return operators.forward_saving(x, *parameters)[0]
        with torch._C._AutoDispatchBelowAutograd():
            return operators.forward(x, *parameters)

    def save(ctx, inputs, output):
        backward = backward_for(manifest, inputs[0].device)
        ctx.set_materialize_grads(False)
        ctx.device = inputs[0].device
        ctx.mark_non_differentiable(*output[1:])
        if backward is not None:
            needed = _needed(manifest, backward, ctx.needs_input_grad)
            ctx.save_for_backward(*(tensor if keep else None for tensor, keep in zip(inputs, needed)), *output[1:])

    def backward(ctx, grad_y, *grad_saved):
        if backward_for(manifest, ctx.device) is None:
            raise GradientError(
                f"gradients are not generated yet for {manifest.name} on {ctx.device.type}; call the model under torch.no_grad() "
                "or torch.inference_mode(), train with the reference module, or ask for its gradients with model.differentiate_by_reference()."
            )
        if grad_y is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        with _without_autocast(ctx.device.type):
            return _final(manifest.name, _backward(operators, backward_for(manifest, ctx.device), saved, grad_y, ctx.needs_input_grad), grad_y, *saved)

    def backward_twice(ctx, *_):
        raise _no_second(manifest.name)

    library.impl(f"forward.{operators.overload}", forward, "Autograd")
    torch.library.register_autograd(operators.name("forward_saving"), backward, setup_context=save, lib=library)
    for name in operators.parts_of_backward:
        torch.library.register_autograd(operators.name(name), backward_twice, lib=library)


def _register_reference(operators, library: torch.library.Library) -> None:
    """The same by torch's autograd over the manifest's reference: all operands are saved, and dropout's masks."""
    manifest = operators.package.manifest
    results = manifest.reference.results

    def saving(training: bool):
        def save(ctx, inputs, output):
            further = output[1:] if results and training else ()
            ctx.training = training
            ctx.mark_non_differentiable(*further)
            needed = inputs[: len(inputs) - len(manifest.state)] if training else inputs  # training writes to its state, and y is not of it
            ctx.save_for_backward(*needed, *(tensor for name, tensor in zip(results, further) if name.startswith("mask:")))

        return save

    def backward(ctx, grad_y, *_):
        asked = ctx.needs_input_grad
        count = len(asked) - (len(manifest.state) if ctx.training else 0)
        saved = ctx.saved_tensors  # once: each reading unpacks them, and a checkpoint allows one
        operands, masks = saved[:count], saved[count:]
        unread = manifest.state[len(manifest.state) - len(asked) + count :]
        operands = (*operands, *(grad_y.new_zeros(entry.shape, dtype=dtype_named(entry.dtype)) for entry in unread))
        made = operators.vector_jacobian(grad_y, *operands, list(masks), ctx.training, list(asked))
        made = made if isinstance(made, tuple) else (made,)
        return tuple(grad if needed else None for grad, needed in zip(made, asked))

    def backward_twice(ctx, *_):
        raise _no_second(manifest.name)

    torch.library.register_autograd(operators.name("forward"), backward, setup_context=saving(False), lib=library)
    if manifest.reference.training:
        torch.library.register_autograd(operators.name("forward_training"), backward, setup_context=saving(True), lib=library)
    torch.library.register_autograd(operators.name("vector_jacobian"), backward_twice, lib=library)


class ByReference(torch.autograd.Function):
    """``apply(reference, names, run, x, *parameters)``: y by ``run``, its gradients by PyTorch's autograd of ``reference``.

    The reference's forward is computed again in the backward, from x and the parameters alone. ``names`` are the parameters' keys.
    """

    @staticmethod
    def forward(ctx, reference: nn.Module, names: tuple[str, ...], run, x, *parameters):
        ctx.reference, ctx.names = reference, names
        ctx.save_for_backward(x, *parameters)
        return run(x, *parameters)

    @staticmethod
    def backward(ctx, grad_y):
        asked = ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors
        x, *parameters = (tensor.detach().requires_grad_(needed) for tensor, needed in zip(saved, asked))
        with torch.enable_grad(), _without_autocast(x.device.type):
            y = torch.func.functional_call(ctx.reference, dict(zip(ctx.names, parameters)), (x,))
        wanted = [tensor for tensor in (x, *parameters) if tensor.requires_grad]
        found = iter(_final(type(ctx.reference).__module__.removesuffix(".model"), torch.autograd.grad(y, wanted, grad_y.detach()), grad_y, *saved))
        return (None, None, None, *(next(found) if needed else None for needed in asked))


def _final(package: str, grads: tuple, *reads) -> tuple:
    """Gradients, None among them, that depend on the tensors among ``reads`` and have no derivatives: under create_graph, asking for such raises."""
    if not torch.is_grad_enabled():
        return grads
    some = [grad for grad in grads if grad is not None]
    asking = torch.zeros((), requires_grad=True)  # whatever a gradient is multiplied or added with, a derivative of it is asked for then
    made = iter(_Final.apply(package, len(some), *some, asking, *(tensor for tensor in reads if tensor is not None)))
    return tuple(None if grad is None else next(made) for grad in grads)


class _Final(torch.autograd.Function):
    """``apply(package, count, *tensors)``: the first ``count`` tensors, gradients that depend on all the others and have no derivatives themselves."""

    @staticmethod
    def forward(ctx, package: str, count: int, *tensors):
        ctx.package = package
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise _no_second(ctx.package)


def _no_second(name: str) -> GradientError:
    return GradientError(
        f"second derivatives are not generated for {name}; take first derivatives without create_graph, or use the reference module."
    )


def refuse_tangents(name: str, tensors: list[torch.Tensor]) -> None:
    """Forward-mode derivatives go on under no_grad, so they need a refusal of their own."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise GradientError(f"forward-mode derivatives are not generated for {name}; use the reference module for them.")


def _needed(manifest: Manifest, backward: Backward, asked: tuple[bool, ...]) -> list[bool]:
    """Which of (x, parameters...) the gradients that are ``asked`` for depend on."""
    names = [manifest.input.name, *(parameter.name for parameter in manifest.parameters)]
    if backward.recomputes:
        return [True] * len(names)
    wanted = dict(zip(names, asked))
    x, weight, _ = backward.producer.args
    behind = {entry.name for entry in backward.gradients[1:]}
    return [name in behind or (name == x and wanted[weight]) or (name == weight and wanted[x]) for name in names]


def _backward(operators, backward: Backward, saved_tensors, grad_y, asked: tuple[bool, ...]) -> tuple:
    """The gradients of (x, parameters...), None where none is asked for."""
    manifest = operators.package.manifest
    names = [manifest.input.name, *(parameter.name for parameter in manifest.parameters)]
    inputs, saved = saved_tensors[: len(names)], saved_tensors[len(names) :]
    tensors, wanted = dict(zip(names, inputs)), dict(zip(names, asked))
    behind = [entry.name for entry in backward.gradients[1:]]
    step = backward.producer
    operands = [None if name is None else tensors[name] for name in step.args]
    if backward.recomputes:
        saved = (operators.produce(*operands),)
    made = operators.backward(grad_y, *saved, *(tensors[name] for name in behind))
    grad_product, *grads = made if behind else (made,)
    found = dict(zip(behind, grads))
    mask = [name is not None and wanted[name] for name in step.args]
    if backward.recomputes:
        derived = operators.derive(grad_product, *operands[:2], mask) if any(mask) else (None,) * 3
    else:
        shapes = [manifest.input.shape, *(next(p.shape for p in manifest.parameters if p.name == name) if name else None for name in step.args[1:])]
        derived = {"linear": _linear, "conv2d": _conv2d}[step.call](step, grad_product, operands, shapes, mask)
    found.update((name, grad) for name, grad in zip(step.args, derived) if name is not None)
    return tuple(found[name] if wanted[name] else None for name in names)


def _linear(step: LibraryStep, grad, operands, shapes, mask) -> tuple:
    x, weight, _ = operands
    return (
        grad @ weight if mask[0] else None,
        grad.t() @ x if mask[1] else None,
        grad.sum(0) if mask[2] else None,
    )


def _conv2d(step: LibraryStep, grad, operands, shapes, mask) -> tuple:
    """An operand that no wanted gradient depends on was not saved; its shape is all that the call needs."""
    x, weight, _ = (grad.new_empty(shape) if tensor is None and shape else tensor for tensor, shape in zip(operands, shapes))
    options = step.options
    return torch.ops.aten.convolution_backward(
        grad, x, weight, shapes[2], options["stride"], options["padding"], options["dilation"], False, [0, 0], options["groups"], mask
    )  # fmt: skip


def _without_autocast(kind: str):
    """Autocast would change the type of the products; the package's precision decides."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
