"""Tensor parallelism: a chain divided among ranks by the groups of its norms, through torch.distributed.

    from fixed_shape_kernels.parallel import ChainParallel, ranks

    with ranks() as mesh, torch.no_grad():                       # under torchrun: NCCL on GPUs, gloo on CPUs
        parallelize_module(layer, mesh, ChainParallel(output_layouts=Replicate()))
        y = layer(x)
"""

from codegen.ir.layout import ShardError

from .collectives import ParallelError
from .session import ranks
from .style import ChainParallel, tp_plan

__all__ = ["ChainParallel", "ParallelError", "ShardError", "ranks", "tp_plan"]
