"""Planning: which kernels compute a spec on a target, with every derived number. Pure functions, no GPU, no torch."""

from codegen.plan.model import Buffer, Floor, Kernel, Launch, Library, Plan, Refusal
from codegen.plan.planner import plan

__all__ = ["Buffer", "Floor", "Kernel", "Launch", "Library", "Plan", "Refusal", "plan"]
