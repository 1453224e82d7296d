"""A decoder of images, whose chains generated kernels take over: run it, or give it to `fsk optimize examples/vae_decoder.py:build`.

    python examples/vae_decoder.py            on the CPU, small
    python examples/vae_decoder.py cuda       on a GPU, at the sizes that decoders of 512 x 512 images have
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import fixed_shape_kernels as fsk


class Residual(nn.Module):
    """norm -> silu -> conv, twice, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.shortcut(x) + h


class Decoder(nn.Module):
    """Latents to images: residual blocks, each followed by an upsampling."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(Residual(a, b) for a, b in zip(widths, widths[1:]))
        self.norm, self.leave = nn.GroupNorm(8, widths[-1]), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        h = self.enter(z)
        for block in self.blocks:
            h = F.interpolate(block(h), scale_factor=2.0, mode="nearest")
        return torch.tanh(self.leave(F.silu(self.norm(h))))


def build(large: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """The model and one input, with random weights."""
    torch.manual_seed(0)
    return (Decoder((512, 512, 256, 128)).eval(), torch.randn(1, 4, 64, 64)) if large else (Decoder((32, 32, 16)).eval(), torch.randn(1, 4, 16, 16))


def main(device: str = "cpu") -> None:
    model, z = build(large=device == "cuda")
    model, z = model.to(device), z.to(device)
    fast = fsk.optimize(model, z)
    print(fast.report)
    with torch.no_grad():
        y, wanted = fast(z), model(z)
    print(f"relative difference to the model's own result: {float((y - wanted).norm() / wanted.norm()):.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
