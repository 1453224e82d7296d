"""The style that divides a chain among ranks, for torch's parallelize_module, and plans in the words of transformers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from codegen.emit import read_spec_or_package
from codegen.ir.chain import chain_of
from codegen.ir.layout import Layout
from codegen.ir.sharding import Sharding
from codegen.ops import Kind
from codegen.spec import Spec
from runtime import GeneratedModule

from ..api import SpecLike, read
from .building import build
from .collectives import ParallelError, Ranks
from .running import Divided, Parallel, layout_of, placement_of, settings, told

COLUMNS, ROWS, WHOLE, GATHER = "local_colwise", "local_rowwise", "replicate", "gather"
_SAME = {"colwise": COLUMNS, "rowwise": ROWS, "colwise_rep": COLUMNS, "rowwise_rep": ROWS}  # words whose difference lies in DTensors around the layer


class ChainParallel(ParallelStyle):
    """The style of a module that is a chain: a package's ModelNew, or any module with the parameters of `spec`.

        parallelize_module(model, mesh, {"block": ChainParallel("block.yaml")})

    `precision` overrides the spec's own. `input_layouts` says how a plain x comes: whole (Replicate()), or in parts of one dimension (Shard(dim)), of which the first producer makes partial products where
    it multiplies along it. Other inputs come whole. `output_layouts` is what forward gives: Replicate() gathers the result, None leaves it as the chain does.
    With `use_local_output` that is a plain tensor, else a DTensor. `plan` is a tp_plan that the division has to agree with: it chooses between columns and rows where
    `input_layouts` is left out, and gathers the result where it says so. `folder` is where sources lie, by default build/parallel.

    Applying it raises ShardError for a chain that cannot be divided so, ParallelError for a module or a plan that is not the chain's, or where a rank cannot build.
    """

    def __init__(
        self, spec: SpecLike | None = None, *, precision: str | None = None, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True,
        plan: Mapping[str, str] | None = None, folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.spec, self.precision = spec, precision
        self.input_layouts, self.output_layouts, self.use_local_output = input_layouts, output_layouts, use_local_output
        self.plan, self.folder = plan, Path(folder or "build/parallel")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Divide `module` in its place: its parameters become DTensors, its forward runs the rank's kernels."""
        spec, ranks = _spec_of(module, self.spec, self.precision), Ranks.of(device_mesh)
        _check_state(module, spec)
        split = _split(self.plan, spec) if self.input_layouts is None else layout_of(self.input_layouts, len(spec.input_shape), "input_layouts")
        sharding = chain_of(spec).shard(ranks.size, ranks.rank, split)
        if self.plan is not None:
            _check_plan(self.plan, tp_plan(spec, ranks.size, split=split), ranks.size)
        output = sharding.output
        if self.output_layouts is None and self.plan is not None and self.plan.get("") == GATHER:
            output = None
        elif self.output_layouts is not None:
            output = layout_of(self.output_layouts, len(sharding.shape), "output_layouts")
            if output not in (None, sharding.output):
                raise ParallelError(f"output_layouts: {spec.name} leaves its result {told(sharding.output)} and can gather it; {self.output_layouts} is neither")
        if sharding.merged and spec.library is not None:
            names = ", ".join(step.name or step.operator.name for step in sharding.merged)
            raise ParallelError(f"library: {spec.library}, and over {ranks.size} ranks torch's operators compute {names}, whose values several ranks hold; allow the library, or divide whole groups")
        pieces = build(spec, sharding, device_mesh, self.folder)
        _distribute(module, sharding, device_mesh, self.src_data_rank)
        children = {path: (type(child), settings(child)) for path, child in module.named_modules() if child is not module}
        module._divided = Divided(spec, sharding, device_mesh, ranks, pieces, output, self.use_local_output, children)
        module.__class__ = type(f"Parallel{type(module).__name__}", (Parallel, type(module)), {"__doc__": Parallel.__doc__})
        return module


def tp_plan(spec: SpecLike | Spec, tp: int, prefix: str = "", split: Layout = None) -> dict[str, str]:
    """The division of a chain in the words of transformers, by path of module or of bare parameter, `prefix` in front (`model.layers.*.block`).

    "local_colwise" and "local_rowwise" divide a weight by what it gives and by what it takes, "replicate" leaves parameters whole, "gather" on the chain itself
    puts its result together. `split` is the dimension along which x comes in parts. Raises ShardError.
    """
    spec = spec if isinstance(spec, Spec) else read(spec)
    sharding = chain_of(spec).shard(tp, 0, split)
    rows = {step.name for step, takes in _producers(spec, sharding) if takes}
    words: dict[str, str] = {}
    for key, layout in sharding.parameters.items():
        path, _, name = key.rpartition(".")
        word = WHOLE if layout is None else ROWS if (path or name) in rows else COLUMNS
        path = path or name
        if words.setdefault(path, word) == WHOLE:
            words[path] = word
    dotted = f"{prefix}." if prefix else ""
    return {f"{dotted}{path}": word for path, word in words.items()} | ({} if sharding.output is None else {prefix: GATHER})


def _producers(spec: Spec, sharding: Sharding) -> list[tuple]:
    """The producers, each with whether its weight is divided along what it takes."""
    found = []
    for step in spec.chain:
        if step.operator.kind is Kind.PRODUCER:
            weight = step.key(step.parameters[0])
            inner = 1 if "output_padding" not in step.values or step.values.get("groups", 1) > 1 else 0
            found.append((step, step.values.get("groups", 1) == 1 and sharding.parameters[weight] == inner))
    return found


def _split(plan: Mapping[str, str] | None, spec: Spec) -> Layout:
    """The dimension along which x comes in parts: that along which the first producer multiplies, where the plan has it by rows."""
    first = next((step for step in spec.chain if step.operator.kind is Kind.PRODUCER), None)
    if plan is None or first is None or _SAME.get(word := plan.get(first.name, ""), word) != ROWS:
        return None
    return 1 if first.operator.rank else len(spec.input_shape) - 1


def _check_plan(plan: Mapping[str, str], own: Mapping[str, str], tp: int) -> None:
    """Refuse a plan that divides the chain otherwise than it can be."""
    wrong = []
    for path, word in plan.items():
        expected = own.get(path)
        if expected is None and path == "":
            expected = ""
        if expected is None:
            near = difflib.get_close_matches(path, own, 1)
            wrong.append(f"{path}: the chain has no such parameters" + (f"; did you mean {near[0]}?" if near else f", but {', '.join(filter(None, own))}"))
        elif path and _SAME.get(word, word) != expected:
            wrong.append(f"{path}: the plan says {word}, and over {tp} ranks it is {expected}")
        elif not path and word != GATHER:
            wrong.append(f"the chain itself: the plan says {word}, and its result can be gathered ({GATHER}) or left in parts")
    if wrong:
        raise ParallelError("; ".join(wrong))


def _spec_of(module: nn.Module, given: SpecLike | None, precision: str | None) -> Spec:
    if given is not None:
        spec = read(given, precision)
    elif isinstance(module, GeneratedModule):
        spec = read_spec_or_package(str(module._package.path / "spec.yaml"))
    else:
        raise ParallelError(f"{type(module).__name__} is no generated module, so the style needs the spec of its chain: ChainParallel('layer.yaml')")
    if len(spec.batches) > 1:
        raise ParallelError(f"{spec.name} is for several batches, and a chain is divided for one; set one batch in the spec")
    return spec


def _check_state(module: nn.Module, spec: Spec) -> None:
    """Refuse a module whose parameters and buffers are not those of the spec."""
    if isinstance(module, Parallel):
        raise ParallelError(f"{spec.name} is divided among ranks already")
    unused = {step.key(entry): entry.shape for step in spec.unused for entry in step.parameters}
    buffers = {key: shape for key, shape, _ in spec.buffers}
    expected = dict(spec.parameters) | unused | buffers
    present = {key: tuple(tensor.shape) for key, tensor in (*module.named_parameters(), *module.named_buffers())}
    wrong = [f"{key} {'is missing' if key not in present else f'has shape {present[key]}'}, expected {tuple(shape)}" for key, shape in expected.items() if present.get(key) != tuple(shape)]
    wrong += [f"{key} is no parameter of the spec" for key in present if key not in expected]
    if wrong:
        raise ParallelError(f"{type(module).__name__} is not what {spec.named or spec.name} describes: {'; '.join(wrong)}")


def _distribute(module: nn.Module, sharding: Sharding, mesh: DeviceMesh, source: int | None) -> None:
    """Make parameters and buffers DTensors, whole ones from rank `source`, or from each rank's own where that is None."""
    for owner_path, owner in module.named_modules():
        for held in (owner._parameters, owner._buffers):
            for name, tensor in list(held.items()):
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                key = f"{owner_path}.{name}" if owner_path else name
                placed = distribute_tensor(tensor.detach(), mesh, [placement_of(sharding.parameters.get(key))], src_data_rank=source)
                held[name] = nn.Parameter(placed, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else placed
