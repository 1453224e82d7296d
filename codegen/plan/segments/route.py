"""From a segment to its kernels.

map       element-wise operators alone: a thread takes 16 bytes of the result
rows      a group lies in one piece: a team of threads, up to a block, holds it in registers where it fits, else reads it twice
columns   groups lie side by side: threads along them, slices share a group's values
windows   a thread takes a window
split     few large groups, or groups in pieces: blocks leave partial statistics, a second kernel merges them, a third goes over the values again
"""

from __future__ import annotations

from codegen.ir.segment import Segment
from codegen.plan.model import Buffer
from codegen.plan.segments.cpu import Processor
from codegen.plan.segments.kernel import SegmentKernel
from codegen.plan.segments.split import Shared
from codegen.spec import Spec
from codegen.targets import DeviceClass, Target


def plan_segment(spec: Spec, segment: Segment, name: str, target: Target, device: DeviceClass) -> tuple[list[SegmentKernel], list[Buffer]]:
    """The kernels of a segment in order, and the buffers between them; files begin with `name`."""
    if target.language == "cpp":
        return Processor(spec, segment, name, target, device).cpu(), []
    planner = Shared(spec, segment, name, target, device)
    if segment.core is None:
        return [planner.map()], []
    if segment.window is not None:
        return [planner.windows(segment.window)], []
    grouping = segment.grouping
    way = planner.way(grouping)
    if way == "rows":
        return [planner.rows(grouping)], []
    return ([planner.columns(grouping)], []) if way == "columns" else planner.split(grouping)
