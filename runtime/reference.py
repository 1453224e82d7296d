"""The whole chain by torch's operators, and its gradients by torch's autograd: for packages that have no generated backward.

The forward runs once more in the backward, from the inputs, with the state and the masks that the forward used. It keeps the
package's precision: a producer's derivatives are ``products``' own.
"""

import contextlib

import torch

from .library import call_of
from .manifest import Manifest

_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCPU) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA)
_AUTOGRAD = _AUTOGRAD | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView) | torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)


def forward(manifest: Manifest, operands: list[torch.Tensor], masks: list[torch.Tensor], training: bool) -> torch.Tensor:
    """y from (x, other inputs, parameters, state), with dropout's ``masks`` in the order of the results that name them."""
    reference = manifest.reference
    values = dict(zip([manifest.input.name, *(entry.name for entry in manifest.operands)], operands))
    given = iter(masks)
    for step in reference.training if training and reference.training else reference.steps:
        made = call_of(step.call, step.options, manifest.precision)
        arguments = [None if name is None else values[name] for name in step.args]
        if step.call == "dropout" and step.also:
            arguments.append(next(given))
        result = made(*arguments)
        values[step.out] = result[0] if isinstance(result, tuple) else result
    return values["y"]


def vector_jacobian(manifest: Manifest, grad_y: torch.Tensor, operands: list[torch.Tensor], masks: list[torch.Tensor], training: bool, wanted: list[bool]):
    """The gradients of the operands that are ``wanted``, None for the others. Works inside an operator, where autograd is off."""
    with _recording(), torch.enable_grad(), torch.autocast(grad_y.device.type, enabled=False):
        leaves = [tensor.detach().requires_grad_(asked) for tensor, asked in zip(operands, wanted)]
        y = forward(manifest, leaves, masks, training)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(y, asked, grad_y, allow_unused=True) if y.requires_grad else [None] * len(asked))
    grads = [next(found) if asked_for else None for asked_for in wanted]
    return [
        torch.zeros_like(tensor) if asked_for and grad is None else grad for tensor, grad, asked_for in zip(operands, grads, wanted)
    ]


@contextlib.contextmanager
def _recording():
    """Autograd records inside: the implementation of an operator runs with its keys left out."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded - _AUTOGRAD):
        yield
