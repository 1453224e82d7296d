"""Models of public libraries, with random weights and at small sizes: chains are found in them, and what is put in place computes the same.

A library that is not installed is skipped by its name; `pip install .[models]` brings them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import fixed_shape_kernels as fsk
from fixed_shape_kernels.models.seen import plain

SUMMED = 3.0  # times PyTorch's own error from float64: each chain has 1.1 times its own at most, and the draws of both differ

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A model of a library, the chains that it has among others, and the modules that no trace goes through."""

    build: Callable[[Any], Built]
    chains: tuple[str, ...]
    untraced: tuple[str, ...] = ()


def convnext(timm: Any) -> Built:
    return timm.create_model("convnext_atto", num_classes=10, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)), (torch.randn(1, 3, 64, 64),)


def vit(timm: Any) -> Built:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10), (torch.randn(2, 3, 32, 32),)


def resnet(torchvision: Any) -> Built:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10), (torch.randn(1, 3, 32, 32),)


def mobilenet(torchvision: Any) -> Built:
    return torchvision.models.mobilenet_v3_small(num_classes=10, width_mult=0.25), (torch.randn(1, 3, 64, 64),)


def swin(torchvision: Any) -> Built:
    model = torchvision.models.SwinTransformer(patch_size=[4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4], num_classes=5)
    return model, (torch.randn(1, 3, 32, 32),)


def vae_decoder(diffusers: Any) -> Built:
    from diffusers.models.autoencoders.vae import Decoder

    blocks = ("UpDecoderBlock2D", "UpDecoderBlock2D")
    return Decoder(in_channels=4, out_channels=3, up_block_types=blocks, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4), (torch.randn(1, 4, 8, 8),)


def resnet_block(diffusers: Any) -> Built:
    from diffusers.models.resnet import ResnetBlock2D

    return ResnetBlock2D(in_channels=8, out_channels=16, temb_channels=12, groups=4), (torch.randn(2, 8, 8, 8), torch.randn(2, 12))


def conditional_unet(diffusers: Any) -> Built:
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (8, 16), "layers_per_block": 1, "sample_size": 8, "cross_attention_dim": 8, "attention_head_dim": 4, "norm_num_groups": 4}
    return diffusers.UNet2DConditionModel(in_channels=4, out_channels=4, **blocks, **sizes), (torch.randn(1, 4, 8, 8), torch.tensor(3), torch.randn(1, 5, 8))


def unet_3d(monai: Any) -> Built:
    from monai.networks.nets import UNet

    return UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1), (torch.randn(1, 1, 16, 16, 16),)


def dynamic_unet_3d(monai: Any) -> Built:
    from monai.networks.nets import DynUNet

    sizes = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 16), "norm_name": "instance"}
    return DynUNet(spatial_dims=3, in_channels=1, out_channels=2, **sizes), (torch.randn(1, 1, 16, 16, 16),)


CASES = {
    "timm": {"convnext": Case(convnext, ("conv2d -> gelu",)), "vit": Case(vit, ("layer_norm -> linear -> gelu",))},
    "torchvision": {
        "resnet": Case(resnet, ("conv2d -> batch_norm -> relu",)), "mobilenet": Case(mobilenet, ("conv2d -> batch_norm -> hardswish",)),
        "swin": Case(swin, ("layer_norm -> linear -> gelu",)),
    },
    "diffusers": {
        "vae_decoder": Case(vae_decoder, ("group_norm -> silu -> conv2d",)), "resnet_block": Case(resnet_block, ("group_norm -> silu -> conv2d",)),
        "conditional_unet": Case(conditional_unet, ("group_norm -> silu -> conv2d",)),
    },
    "monai": {"unet_3d": Case(unet_3d, ("conv3d -> instance_norm",)), "dynamic_unet_3d": Case(dynamic_unet_3d, ("conv3d -> instance_norm -> leaky_relu",))},
}  # fmt: skip
MODELS = [pytest.param(library, name, id=f"{library}-{name}") for library, cases in CASES.items() for name in cases]


def made(library: str, name: str) -> tuple[Case, nn.Module, tuple[torch.Tensor, ...]]:
    case = CASES[library][name]
    torch.manual_seed(0)
    model, arguments = case.build(pytest.importorskip(library, reason=f"{library} is not installed", exc_type=ImportError))
    return case, model.eval(), arguments


@pytest.mark.parametrize(("library", "name"), MODELS)
def test_the_chains_of_a_library_s_model_are_found(library, name):
    case, model, arguments = made(library, name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = fsk.explain(model, *arguments)
    assert all(any(chain in row.chain for row in report.rows if row.status == "found") for chain in case.chains), [row.chain for row in report.rows]
    assert {row.path for row in report.rows if row.status == "not traced"} == set(case.untraced), report.rows
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name"), MODELS)
def test_a_library_s_model_computes_with_kernels_what_it_did(library, name, tmp_path_factory):
    """Every chain that kernels serve is right on the model's own data, and all together are as near float64 as PyTorch."""
    _, model, arguments = made(library, name)
    opt = fsk.optimize(model, *arguments, min_gain=0.0, cache_dir=tmp_path_factory.getbasetemp() / "libraries")
    assert opt.report.replaced and not [row for row in opt.report.rows if row.status in ("wrong", "failed")], opt.report
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        wanted = exact(*(one.double() if one.is_floating_point() else one for one in arguments))
        results = [torch.utils._pytree.tree_leaves(plain(result)) for result in (opt(*arguments), model(*arguments), wanted)]
    for mine, theirs, right in zip(*results, strict=True):
        error, eager = (float((one.double() - right).norm() / right.norm()) for one in (mine, theirs))
        assert error <= SUMMED * max(eager, torch.finfo(theirs.dtype).eps)
    assert not opt.fallbacks
