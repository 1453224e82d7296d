"""Networks to measure whole models on: the blocks of well-known families written out, with random weights, small for a CPU and as large as in use for a GPU.

Each builder gives (model in evaluation, the arguments of one call). Nothing but torch is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


class ResnetBlock(nn.Module):
    """The block of diffusion models: group norm, silu and a convolution, twice, with an embedding of time added between where one is given."""

    def __init__(self, inputs: int, outputs: int, groups: int, embedding: int | None = None) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inputs, eps=1e-6), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = None if embedding is None else nn.Linear(embedding, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outputs, eps=1e-6), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor, embedding: torch.Tensor | None = None) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None:
            h = h + self.time(F.silu(embedding))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class SpatialAttention(nn.Module):
    """Attention of one head among the pixels of a feature map, beside a shortcut."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(groups, channels, eps=1e-6), nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        h = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(h).unsqueeze(1).chunk(3, dim=-1)
        h = self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + h.transpose(1, 2).reshape(batch, channels, height, width)


class Decoder(nn.Module):
    """The decoder of an autoencoder of images: latents to pixels, `widths` from the deepest level up, each but the last followed by an upsampling."""

    def __init__(self, widths: tuple[int, ...], blocks: int, groups: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        self.middle = nn.Sequential(ResnetBlock(widths[0], widths[0], groups), SpatialAttention(widths[0], groups), ResnetBlock(widths[0], widths[0], groups))
        self.levels, self.ups = nn.ModuleList(), nn.ModuleList()
        for number, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            self.levels.append(nn.Sequential(ResnetBlock(before, width, groups), *(ResnetBlock(width, width, groups) for _ in range(blocks - 1))))
            self.ups.append(nn.Conv2d(width, width, 3, padding=1) if number < len(widths) - 1 else nn.Identity())
        self.norm, self.leave = nn.GroupNorm(groups, widths[-1], eps=1e-6), nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        h = self.middle(self.enter(z))
        for number, (level, up) in enumerate(zip(self.levels, self.ups, strict=True)):
            h = level(h)
            if number < len(self.levels) - 1:
                h = up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.leave(F.silu(self.norm(h)))


def _stage(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Twice a convolution, an instance norm and a leaky relu."""
    parts: list[nn.Module] = []
    for before, step in ((inputs, stride), (outputs, 1)):
        parts += [nn.Conv3d(before, outputs, 3, stride=step, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01)]
    return nn.Sequential(*parts)


class VolumeUNet(nn.Module):
    """A U-Net of volumes for segmentation: stages of convolutions down, transposed convolutions up, each beside what it had on the way down."""

    def __init__(self, channels: int, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(_stage(before, width, 1 if not number else 2) for number, (before, width) in enumerate(zip((channels, *widths), widths, strict=False)))
        upwards = list(zip(reversed(widths), list(reversed(widths))[1:], strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(below, width, 2, stride=2) for below, width in upwards)
        self.stages = nn.ModuleList(_stage(2 * width, width) for _, width in upwards)
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
        for up, stage, beside in zip(self.up, self.stages, reversed(kept[:-1]), strict=True):
            x = stage(torch.cat((up(x), beside), 1))
        return self.head(x)


class ChannelsNorm(nn.LayerNorm):
    """A layer norm over the channels of a feature map."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """A depthwise convolution, a layer norm and two linear layers over the channels, scaled, beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(channels, channels, 7, padding=3, groups=channels), nn.LayerNorm(channels, eps=1e-6)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.down(F.gelu(self.up(h))) * self.gamma
        return x + h.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """A classifier of images: stages of such blocks, with strided convolutions between them."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=4), ChannelsNorm(widths[0], eps=1e-6)]
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if number:
                parts += [ChannelsNorm(widths[number - 1], eps=1e-6), nn.Conv2d(widths[number - 1], width, 2, stride=2)]
            parts += [ConvNextBlock(width) for _ in range(depth)]
        self.body = nn.Sequential(*parts)
        self.norm, self.head = nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x).mean((2, 3))))


class Attention(nn.Module):
    """Attention of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width))


class TransformerBlock(nn.Module):
    """Attention and two linear layers, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """A classifier of images cut into patches of 16 x 16."""

    def __init__(self, size: int, width: int, heads: int, depth: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        self.places = nn.Parameter(torch.randn(1, (size // 16) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def perceptron(width: int, depth: int, classes: int) -> nn.Module:
    """Linear layers with gelu, and a softmax."""
    parts = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts, nn.Linear(width, classes), nn.Softmax(1))


@dataclass(frozen=True)
class Network:
    """A network at two sizes: each a function that gives the model and its arguments."""

    small: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    large: Callable[[], tuple[nn.Module, tuple[Any, ...]]]

    def build(self, large: bool, seed: int = 0) -> Built:
        """The model with random weights, in evaluation, and its arguments."""
        torch.manual_seed(seed)
        model, arguments = (self.large if large else self.small)()
        return model.eval(), arguments


NETWORKS = {
    "resnet_block": Network(
        lambda: (ResnetBlock(16, 32, 4, 24), (torch.randn(2, 16, 8, 8), torch.randn(2, 24))),
        lambda: (ResnetBlock(320, 640, 32, 1280), (torch.randn(4, 320, 64, 64), torch.randn(4, 1280))),
    ),
    "image_decoder": Network(
        lambda: (Decoder((16, 16, 8), 1, 4), (torch.randn(1, 4, 8, 8),)),
        lambda: (Decoder((512, 512, 256, 128), 3, 32), (torch.randn(1, 4, 64, 64),)),
    ),
    "volume_unet": Network(
        lambda: (VolumeUNet(1, 3, (4, 8, 16)), (torch.randn(1, 1, 16, 16, 16),)),
        lambda: (VolumeUNet(1, 3, (32, 64, 128, 256, 320)), (torch.randn(1, 1, 96, 96, 96),)),
    ),
    "convnext": Network(
        lambda: (ConvNext((8, 16), (1, 2), 10), (torch.randn(2, 3, 32, 32),)),
        lambda: (ConvNext((96, 192, 384, 768), (3, 3, 9, 3), 1000), (torch.randn(32, 3, 224, 224),)),
    ),
    "vision_transformer": Network(
        lambda: (VisionTransformer(32, 24, 3, 2, 10), (torch.randn(2, 3, 32, 32),)),
        lambda: (VisionTransformer(224, 768, 12, 12, 1000), (torch.randn(32, 3, 224, 224),)),
    ),
    "perceptron": Network(
        lambda: (perceptron(32, 2, 10), (torch.randn(8, 32),)),
        lambda: (perceptron(4096, 4, 1024), (torch.randn(1024, 4096),)),
    ),
}  # fmt: skip
