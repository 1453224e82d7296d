"""The second kernel of the one-pass convolution as data: it normalises what the first one kept. Template: conv_sm80/finish.cu.j2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen.ir.apply import Constant, applies
from codegen.ir.fused_form import FusedSpec
from codegen.numerics import FP32
from codegen.plan.conv_sm80.geometry import Geometry
from codegen.plan.shared.values import (
    NormKernel, channel_mode, finish_function, norm_constants, share_constants, shares, unique_operands,
)  # fmt: skip
from codegen.plan.shared.windows import Windows, ceil_div
from codegen.targets import DeviceClass

KEPT, STATISTICS = "kept", "part_statistics"  # buffers: a value of each window before the norm, and moments (float4) by sample, channel and part
FINISH_THREADS, FINISH_LANE_THREADS = 256, 128
FINISH_ACCESSES, FINISH_SETS = 4, 8  # of a lane, at most, where lanes share a group
FINISH_BLOCKS = 4  # of an SM: where a block for each group makes fewer than half as many, several share one


@dataclass(frozen=True, kw_only=True)
class FinishKernel(NormKernel):
    """What templates/conv_sm80/finish.cu.j2 reads: the norm of the values that were kept. `slices` blocks share a group, or `lanes` threads of a block
    each take one: `ragged` where the last access of some lies beyond it, `partial_block` where the last block has lanes without one."""

    slices: int = 1
    lanes: int = 0
    ragged: bool = False
    partial_block: bool = False

    @property
    def reads_single_values(self) -> bool:
        """Is a parameter taken one value at a time?"""
        return bool(self.operands) and (self.width == 1 or any(self.channel_mode != "vector" or not operand.per_channel for operand in self.operands))

    def device_parameters(self, c_type: str) -> list[str]:
        """Parameters of the CUDA kernel: the input is fp32 whatever the storage type."""
        listed = (f"const {c_type}* __restrict__ {operand.pointer}" for operand in self.operands)
        return ["const float* __restrict__ kept", "const float4* __restrict__ statistics", *listed, f"{self.result.c_type}* __restrict__ output"]


@dataclass(frozen=True)
class FinishLayout:
    """Who normalises a group of kept values: `lanes` threads of a block, or `slices` blocks of `share` values each. `width` values an access."""

    width: int
    lanes: int
    slices: int
    share: int
    threads: int
    blocks: int
    kept_values: int


def finish_layout(spec: FusedSpec, device: DeviceClass, g: Geometry, windows: Windows) -> FinishLayout:
    """The layout for the values that a convolution cut as `g` keeps."""
    plane = math.prod(windows.output)
    size = spec.group_channels * plane
    width = math.gcd(4, size)
    groups, sets = spec.batch * spec.num_groups, spec.group_channels * g.sample_parts
    lanes = _lanes(size // width, sets)
    slices, share, threads = 1, size, FINISH_LANE_THREADS if lanes else FINISH_THREADS
    if not lanes:
        # A block merges all moments of its group, so one more of them is worth a round of values at least for each that a thread merges.
        round_values = threads * width
        most = size // (round_values * max(4, ceil_div(sets, threads)))
        slices, share = shares(size, round_values, min(most, FINISH_BLOCKS * device.sms // groups))
    blocks = ceil_div(groups, threads // lanes) if lanes else groups * slices
    return FinishLayout(width, lanes, slices, share, threads, blocks, spec.batch * spec.channels * plane)


def finish_kernel(spec: FusedSpec, g: Geometry, windows: Windows, at: FinishLayout) -> FinishKernel:
    """The kernel that normalises what the convolution kept."""
    finish = finish_function(spec, spec.after_norm, "finish_value", "The norm and the operators after it, for a kept value.")
    plane = math.prod(windows.output)
    size, width, groups, sets = spec.group_channels * plane, at.width, spec.batch * spec.num_groups, spec.group_channels * g.sample_parts
    lanes, slices, share, threads, blocks = at.lanes, at.slices, at.share, at.threads, at.blocks
    partial = lanes > 0 and blocks * (threads // lanes) != groups
    rounds = ceil_div(size // width, lanes) if lanes else 0
    items = applies(spec, spec.after_norm)
    if lanes:
        layout = (
            Constant("kLanes", str(lanes), "threads of a group"),
            Constant("kThreads", str(threads), "threads of a block"),
            Constant("kGroupsPerBlock", str(threads // lanes), "kThreads / kLanes"),
            Constant("kRounds", str(rounds), "accesses of a thread: kPooledSize / kVector / kLanes" + (", rounded up" if rounds * lanes * width != size else "")),
            *((Constant("kGroups", str(groups), f"{spec.batch} samples x kNumGroups"),) if partial else ()),
            Constant("kBlocks", str(blocks), f"{spec.batch} samples x kNumGroups / kGroupsPerBlock" + (", rounded up" if partial else "")),
        )  # fmt: skip
    else:
        layout = (
            Constant("kThreads", str(threads), "threads of a block" + ("" if slices > 1 else ", which takes a group")),
            Constant("kWarps", str(threads // 32), "kThreads / 32"),
            *(share_constants(slices, share) if slices > 1 else ()),
            Constant("kBlocks", str(blocks), f"{spec.batch} samples x kNumGroups" + (" x kSlices" if slices > 1 else "")),
        )  # fmt: skip
    ragged = lanes > 0 and rounds * lanes * width != size
    constants = (
        Constant("kNumGroups", str(spec.num_groups), "groups of a sample"),
        Constant("kGroupChannels", str(spec.group_channels), f"{spec.channels} channels / kNumGroups"),
        Constant("kGroupSize", str(spec.group_size), "values of a group before pooling: kGroupChannels x {} x {}".format(*spec.norm.input_shape[2:])),
        Constant("kSets", str(sets), f"moments of a group: kGroupChannels x {g.sample_parts} parts of a sample"),
        Constant("kPooledPlane", str(plane), "values of a channel of y"),
        Constant("kPooledSize", "kGroupChannels * kPooledPlane", "values of a group in y"),
        Constant("kVector", str(width), "values of one access"),
        *layout,
        *norm_constants(spec, items),
    )  # fmt: skip
    return FinishKernel(
        name="conv_finish", template="conv_sm80/finish.cu.j2", entry="conv_finish", arguments=(KEPT, STATISTICS, *(o.key for o in finish.operands), "y"),
        constants=constants, summary=f"merges a group's statistics, normalises its {size} kept values and applies the operators after the norm",
        max_registers=64, threads=threads, blocks=blocks, slices=slices, lanes=lanes, partial_block=partial, ragged=ragged, input="kept", output="output",
        operands=unique_operands(finish), applied=items, prepare=None, finish=finish, width=width, io_widths=(width,),
        channel_mode=channel_mode(plane, width), groups=groups, min_blocks=1, storage=spec.precision, source=FP32, result=spec.result,
    )  # fmt: skip


def _lanes(accesses: int, sets: int) -> int:
    """Threads that share a group of so many accesses and moments: a few of each for a thread; 0 where a block takes it."""
    wanted = max(ceil_div(accesses, FINISH_ACCESSES), ceil_div(sets, FINISH_SETS))
    return 1 << (wanted - 1).bit_length() if wanted <= 32 else 0
