"""GroupNorm and the operators after it it, as kernels behind a GEMM or a convolution: the types at the boundary and the choice among the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.ir.fused_form import FusedSpec
from codegen.plan.model import Buffer, Launch, Refusal
from codegen.plan.norm import flat as norm_flat, pool as norm_pool
from codegen.plan.shared.moments import TileStatistics
from codegen.targets import DeviceClass, Target


@dataclass(frozen=True)
class NormPlan:
    """The launches that follow the producer, the buffers they need and the reasons, one sentence each."""

    steps: tuple[Launch, ...]
    buffers: tuple[Buffer, ...]
    why: tuple[str, ...]


def plan_norm(
    spec: FusedSpec, target: Target, device: DeviceClass, *, source: str, apply_before: bool, producer_bias: str | None, statistics: TileStatistics | None, pitch: int = 0,
) -> NormPlan:  # fmt: skip
    """Kernels from the producer's result to y.

    `source` is the buffer with the producer's result, (batch, channels, spatial...) contiguous in the storage type; "y" means in place.
    `apply_before`: apply the operators between the producer and the norm too, after adding `producer_bias` (a state_dict key), if given, to
    each channel. `statistics`: what the producer left, instead of computing it. `pitch`: values from one sample of `source` to the next, if there are others between them. Parameters must start at multiples of 16 bytes.
    Raises Refusal for a chain that no kernel here covers, ValueError for one with two poolings and for statistics whose tiles do not divide the groups.
    """
    pools = spec.pools
    if len(pools) > 1:
        raise ValueError(f"{len(pools)} max_pool2d operators follow the norm; plan/stages cuts the chain in front of the second")
    if pools and source == "y":
        raise Refusal("a pooled result cannot be written over the producer's; give the producer a buffer of its own")
    if pools:
        steps, buffers, reason = norm_pool.plan_pool(spec, target, device, source, apply_before, producer_bias)
        return NormPlan(steps, buffers, (reason,))
    if statistics is not None:
        group_width = spec.group_size
        if group_width % statistics.tile_n or statistics.tiles * statistics.tile_n != spec.channels * spec.spatial:
            raise ValueError(f"statistics of {statistics.tiles} tiles of {statistics.tile_n} do not divide groups of {group_width}")
        pieces = group_width // statistics.tile_n
        kernel = norm_flat.apply_kernel(spec, source, apply_before, producer_bias, statistics.buffer, pieces)
        return NormPlan((Launch(kernel),), (), (f"the GEMM's statistics of {pieces} tile{'s' if pieces > 1 else ''} of a group are merged, not computed anew",))
    how = norm_flat.residency(spec, norm_flat.access_width(spec), device.sms) if pitch else norm_flat.holder(spec, device.sms)
    if how is not None:
        kernel = norm_flat.resident_kernel(spec, how, source, apply_before, producer_bias, pitch)
        return NormPlan((Launch(kernel),), (), (f"a group's {spec.group_size} values stay in the registers of {how.lanes} threads: one read, one write",))
    if pitch:
        raise Refusal("rows with a pitch of their own are read by kernels that hold a group in registers")
    if norm_flat.split_groups(spec, device.sms):
        steps, buffer = norm_flat.plan_split(spec, device, source, apply_before, producer_bias)
        reason = f"{spec.batch * spec.num_groups} groups of {spec.group_size} values leave SMs idle, so several blocks share a group: statistics first"
        return NormPlan(steps, (buffer,), (reason,))
    kernel = norm_flat.stream_kernel(spec, source, apply_before, producer_bias)
    return NormPlan((Launch(kernel),), (), (f"a group's {spec.group_size} values exceed a block's registers: two reads, the second from the L2 cache",))


def plan_norm_of_product(spec: FusedSpec, target: Target, device: DeviceClass) -> NormPlan:
    """Kernels from the producer's result without its bias, which lies in "t0", to y."""
    return plan_norm(spec, target, device, source="t0", apply_before=True, producer_bias=spec.bias, statistics=None)
