"""Networks of known families with random weights, and what generated kernels take over of each.

    python examples/known_networks.py                      the names
    python examples/known_networks.py convnext             on the CPU, small
    python examples/known_networks.py convnext cuda        on a GPU, at its usual size
"""

import sys
from typing import Any

import torch
from torch import nn

import fixed_shape_kernels as fsk
from fixed_shape_kernels.models.networks import NETWORKS

NAMES = tuple(NETWORKS)


def build(name: str = "perceptron", large: bool = False) -> tuple[nn.Module, tuple[Any, ...]]:
    """A network and its arguments."""
    return NETWORKS[name].build(large)


def main(name: str = "", device: str = "cpu") -> None:
    if name not in NAMES:
        sys.exit(f"name one of {', '.join(NAMES)}")
    model, arguments = build(name, large=device == "cuda")
    model, arguments = model.to(device), tuple(given.to(device) for given in arguments)
    fast = fsk.optimize(model, *arguments)
    print(fast.report)
    with torch.no_grad():
        y, wanted = fast(*arguments), model(*arguments)
    print(f"relative difference to the model's own result: {float((y - wanted).norm() / wanted.norm()):.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
