"""The one-way order of imports, read off the syntax trees: no circle, no import inside a function, no family that imports another.

Exceptions stand here by name, each with its reason.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[1]
PARTS = ("codegen", "runtime", "bench", "fixed_shape_kernels")

# Modules of codegen from the ground up: each imports from its own layer and those before it. The longest prefix counts.
LAYERS = (
    ("numerics", "targets", "source_text", "comments"),
    ("ops",),
    ("spec",),
    ("ir",),
    ("algebra",),
    ("plan.model", "plan.floor", "plan.route"),
    ("plan.shared",),
    ("plan.gemm", "plan.gemm_sm90a", "plan.conv_direct", "plan.conv_gemm", "plan.conv_product_sm90a", "plan.conv_sm80", "plan.conv_sm90a", "plan.norm", "plan.product_norm", "plan.stages", "plan.cpu",
     "plan.library"),
    ("plan",),
    ("plan.backward",),
    ("report",),
    ("manifest",),
    ("torch_text", "index", "constants", "package", "folder"),
    ("render",),
    ("standalone",),
    ("emit",),
    ("from_module", "checked_in"),
)
FAMILIES = 7  # the layer whose members import one another only where FAMILY_IMPORTS says so

# A family that takes something from another one.
FAMILY_IMPORTS = {
    ("gemm", "norm"): "a norm whose groups do not fit into a tile is left to the norm's kernels",
    ("gemm_sm90a", "norm"): "a norm whose groups do not match the tiles is left to the norm's kernels",
    ("conv_gemm", "norm"): "its norm is left to the norm's kernels",
    ("product_norm", "norm"): "the norm's kernels follow a product",
    ("product_norm", "conv_direct"): "a product that a norm follows",
    ("product_norm", "conv_product_sm90a"): "a product that a norm follows",
    ("library", "norm"): "its norm is left to the norm's kernels",
    ("conv_gemm", "gemm"): "the same tiles and pipeline multiply windows and filters",
    ("stages", "gemm"): "a fold becomes the end of the GEMM in front",
    ("stages", "norm"): "a fold becomes the end of the norm kernel in front",
}

# Imports inside a function: what is not there on every machine, or costs seconds that most runs need not spend.
LATE = {
    ("runtime/load.py", "build"): "a wheel carries no builder",
    ("runtime/toolchain.py", "ninja"): "the Python package is one of three places to find ninja in",
    ("runtime/allocation.py", "torch._C._dynamo"): "no public part of torch: missing in some releases",
    ("fixed_shape_kernels/__init__.py", "models"): "whole models need torch, and specs do not",
    ("fixed_shape_kernels/api.py", "models"): "whole models need torch, and specs do not",
    ("fixed_shape_kernels/packing.py", "models.wheel"): "whole models need torch, and specs do not",
    ("bench/peers.py", "torch._inductor"): "for peers of torch.compile alone",
    ("bench/peers.py", "bench.triton_gemm"): "Triton is not on every machine",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the parts by its dotted name."""
    found = {}
    for path in (path for part in PARTS for path in sorted((TOP / part).rglob("*.py"))):
        names = path.relative_to(TOP).with_suffix("").parts
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def base(name: str, node: ast.ImportFrom) -> str:
    """The dotted name that an import starts from."""
    if not node.level:
        return node.module or ""
    package = name.split(".") if modules()[name].name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


@cache
def imported(name: str) -> frozenset[str]:
    """The modules of the parts that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = base(name, node)
            found |= {f"{start}.{alias.name}" if f"{start}.{alias.name}" in modules() else start for alias in node.names}
    return frozenset(found & set(modules()) - {name})


def layer(name: str) -> int:
    """The place of a module of codegen in LAYERS."""
    places = {prefix: at for at, prefixes in enumerate(LAYERS) for prefix in prefixes}
    parts = name.split(".")[1:]
    return next(places[prefix] for length in range(len(parts), 0, -1) if (prefix := ".".join(parts[:length])) in places)


def family(name: str) -> str:
    return name.split(".")[2]


def circle(graph: dict[str, frozenset[str]]) -> list[str]:
    """The modules of a circle, each importing the next; empty where there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next(filter(None, (walk(name, []) for name in sorted(graph))), [])


def test_no_module_imports_itself_through_others():
    assert not circle({name: imported(name) for name in modules()})


def test_a_circle_is_found():
    graph = {"a": frozenset("b"), "b": frozenset("cd"), "c": frozenset("b"), "d": frozenset()}
    assert circle(graph) == ["b", "c"]


def test_the_generator_and_the_runtime_do_not_know_each_other():
    others = {"runtime": ("codegen", "bench", "fixed_shape_kernels"), "codegen": ("runtime", "bench", "fixed_shape_kernels")}
    for name in modules():
        part = name.split(".")[0]
        assert not [other for other in imported(name) if other.split(".")[0] in others.get(part, ())], name


def late_imports(name: str) -> set[str]:
    """What a module imports inside a function."""
    functions = [node for node in ast.walk(tree(name)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    inside = [node for function in functions for node in ast.walk(function) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in inside}


def test_imports_stand_at_the_head_of_their_file():
    found = {(modules()[name].relative_to(TOP).as_posix(), what) for name in modules() for what in late_imports(name)}
    assert found == set(LATE), "an import inside a function hides what a module needs; exceptions stand in LATE, each with its reason"


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("codegen.")])
def test_the_generators_modules_import_downwards(name):
    above = [other for other in imported(name) if other != "codegen" and other.startswith("codegen.") and layer(other) > layer(name)]
    assert not above, f"{name} is below {', '.join(above)}"


def test_families_of_kernels_share_through_shared_alone():
    names = [name for name in modules() if name.startswith("codegen.plan.") and layer(name) == FAMILIES]
    found = {(family(name), family(other)) for name in names for other in imported(name) if layer(other) == FAMILIES and family(other) != family(name)}
    assert found == set(FAMILY_IMPORTS), "what two families need lies in plan/shared; exceptions stand in FAMILY_IMPORTS, each with its reason"
