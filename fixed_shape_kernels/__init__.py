"""The face of the generator of fixed-shape kernels: specs in, packages of sources and their modules out.

    import fixed_shape_kernels as fsk

    fsk.generate("layer.yaml")               # writes generated/layer/ and returns that folder
    print(fsk.explain("layer.yaml"))         # kernels, tiles, memory, the floor, and why
    model = fsk.load("layer.yaml").ModelNew(*fsk.load("layer.yaml").get_init_inputs())

    fast = fsk.optimize(model, example)      # a whole model: kernels where they are right and faster
    print(fast.report)
    torch.compile(model, backend="fixed_shapes")             # the same within torch.compile

The command `fsk` does the same from a shell. `load` and `optimize` need torch, the rest
does not.
"""

from typing import Any

from codegen.plan import Refusal
from codegen.spec import SpecError

from .api import SpecLike, explain, generate, load
from .backend import announce

__version__ = "0.1.0"

__all__ = ["Refusal", "SpecError", "SpecLike", "explain", "generate", "inductor_pass", "load", "load_optimized", "optimize", "save_optimized"]

announce()


def __getattr__(name: str) -> Any:
    """What needs torch, imported where it is asked for."""
    if name in ("inductor_pass", "load_optimized", "optimize", "save_optimized"):
        from .models import inductor_pass, load_optimized, optimize, save_optimized

        return {"inductor_pass": inductor_pass, "load_optimized": load_optimized, "optimize": optimize, "save_optimized": save_optimized}[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
