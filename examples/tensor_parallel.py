"""A layer divided among ranks by the groups of its norm: a convolution, GroupNorm and SiLU, which exchange nothing before the result is gathered.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py          over NCCL where there is a GPU for each rank, else over gloo on the CPU
"""

import copy

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import parallelize_module

from fixed_shape_kernels.parallel import ChainParallel, ranks, tp_plan

BATCH, CHANNELS, SIDE, GROUPS = 4, 64, 32, 16
BLOCK = {
    "name": "conv_norm_act",
    "batch": BATCH,
    "input": {"height": SIDE, "width": SIDE, "values": "randn"},
    "chain": [
        {"conv2d": {"name": "conv", "in_channels": CHANNELS, "out_channels": CHANNELS, "kernel_size": 3, "padding": 1}},
        {"group_norm": {"name": "norm", "num_groups": GROUPS}},
        "silu",
    ],
}


class Block(nn.Module):
    """The chain of BLOCK in PyTorch: its parameters have the spec's names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.GroupNorm(GROUPS, CHANNELS), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


class Net(nn.Module):
    """A block between two layers that stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = nn.Conv2d(3, CHANNELS, 3, padding=1), Block(), nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.leave(self.block(self.enter(x))))


def build() -> tuple[nn.Module, torch.Tensor]:
    """The model and one input, with random weights, the same on all ranks."""
    torch.manual_seed(0)
    return Net().eval(), torch.randn(BATCH, 3, SIDE, SIDE)


def main() -> None:
    torch.backends.cudnn.allow_tf32 = False  # the whole model's convolutions are compared in fp32
    with ranks() as mesh, torch.no_grad():
        model, x = build()
        model, x = model.to(mesh.device_type), x.to(mesh.device_type)
        divided = copy.deepcopy(model)
        parallelize_module(divided, mesh, {"block": ChainParallel(BLOCK, output_layouts=Replicate())})
        y, wanted = divided(x), model(x)
        if mesh.get_local_rank() == 0:
            print(tp_plan(BLOCK, mesh.size(), "block"))
            print({name: tuple(value.to_local().shape) for name, value in divided.block.state_dict().items()})
            print(f"{mesh.size()} ranks on {mesh.device_type}; relative difference to the whole model's result: {float((y - wanted).norm() / wanted.norm()):.1e}")


if __name__ == "__main__":
    main()
