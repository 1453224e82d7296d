"""The recipes of docs/architecture.md, followed in a copy of the packages: what each adds works, and it touches no more files than it says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
COPIED = ("codegen", "runtime", "bench", "fixed_shape_kernels")

FORWARD_AND_BACKWARD = """
import itertools

import fixed_shape_kernels as fsk
import torch

NUMBERS = itertools.count()

def check(chain, batch=6):
    '''Compare a chain's result and gradients with PyTorch's own in float64, from random weights and inputs; return its package's module.'''
    spec = {"name": f"toy_{next(NUMBERS)}", "batch": batch, "input": {"values": "randn"}, "chain": chain}
    module = fsk.load(spec, targets="cpu")
    torch.manual_seed(3)
    model, exact = module.ModelNew(*module.get_init_inputs()), module.Model(*module.get_init_inputs()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    exact.load_state_dict({key: value.double() for key, value in model.state_dict().items()})
    (x,) = module.get_inputs()
    x = torch.cat([x[:-1], 30 * x[-1:]]).requires_grad_()
    wide = x.detach().double().requires_grad_()
    made, wanted = model(x), exact(wide)
    towards = torch.randn_like(made)
    (made * towards).sum().backward()
    (wanted * towards.double()).sum().backward()
    pairs = [(made, wanted), (x.grad, wide.grad), *zip((p.grad for p in model.parameters()), (p.grad for p in exact.parameters()))]
    for ours, theirs in pairs:
        assert torch.isfinite(theirs).all() and theirs.abs().max() > 0
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
    return module

LINEAR = {"linear": {"name": "fc", "in_features": 24, "out_features": 16}}
NORM = {"group_norm": {"name": "norm", "num_groups": 4}}
"""


class House:
    """A copy of the packages in a folder, which a recipe changes: `touched` are the files it adds or adds to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.touched: set[str] = set()
        left_out = shutil.ignore_patterns("__pycache__", "results", "*.pyc")
        for name in COPIED:
            shutil.copytree(TOP / name, folder / name, ignore=left_out)

    def insert(self, file: str, behind: str, text: str) -> None:
        """Add `text` to a file behind the one place that reads `behind`."""
        path = self.folder / file
        before = path.read_text(encoding="utf-8")
        assert before.count(behind) == 1, f"{file} has {behind!r} {before.count(behind)} times; the recipe needs it once"
        path.write_text(before.replace(behind, behind + text), encoding="utf-8")
        self.touched.add(file)

    def create(self, file: str, text: str) -> None:
        """Add a file that there is not."""
        path = self.folder / file
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self.touched.add(file)

    def run(self, code: str) -> str:
        """What a Python that imports the copy prints when it runs `code` in an empty folder."""
        work = self.folder / "work"
        work.mkdir()
        environment = {
            **os.environ, "PYTHONPATH": str(self.folder), "CODEGEN_CACHE": str(self.folder / "cache"), "TARGETS": "cpu", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], cwd=work, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def house(tmp_path) -> House:
    return House(tmp_path / "house")


def test_an_element_wise_operator_is_a_row_a_function_with_its_derivative_and_torchs_call(house):
    house.insert("codegen/ops/table.py", """        _elementwise("relu", "max(v, 0)", "F.relu({v})", monotone=True),\n""", """
        _elementwise("scaled_square", "scale v^2", "torch.square({v}) * {scale}", (Argument("scale", "number", 1.0),)),
""")  # fmt: skip
    house.insert("codegen/ops/functions.py", """        Function("logsigmoid_grad", ("v",), "return sigmoid(-v);", "1 - sigmoid(v)."),\n""", """
        Function("scaled_square", ("v", "scale"), "return scale * (v * v);", "scale v^2."),
        Function("scaled_square_grad", ("v", "scale"), "return 2.0f * scale * v;", "2 scale v."),
""")  # fmt: skip
    house.insert("runtime/library.py", """    "relu": _unary(torch.relu),\n""", """
    "scaled_square": lambda options: lambda v: torch.square(v) * options["scale"],
""")  # fmt: skip
    assert len(house.touched) <= 3
    house.run(FORWARD_AND_BACKWARD + """
toy = {"scaled_square": {"scale": -0.75}}
check([LINEAR, NORM, toy])            # in the fused kernel
check([LINEAR, toy, NORM, "sigmoid"])
check([LINEAR, toy])                  # in a segment's kernel
""")  # fmt: skip


def test_a_producer_through_the_library_is_a_row_and_torchs_call(house):
    house.insert("codegen/ops/table.py", """        _convolution(1),\n""", """
        Operator(
            "scaled_linear", Kind.PRODUCER, "scale x W^T",
            (Argument("in_features", "size"), Argument("out_features", "size"), Argument("scale", "number", 1.0)), takes_name=True, requires_name=True,
            shape=lambda v, shape: (*shape[:-1], v["out_features"]), takes="in_features", gives="out_features",
            parameters=lambda v, shape: (Parameter("", (v["out_features"], v["in_features"]), "randn"),),
            call=lambda v: f"{v['scale']} * F.linear({{v}}, {{p}})",
        ),
""")  # fmt: skip
    house.insert("runtime/library.py", """    "linear": _producer("linear"),\n""", """
    "scaled_linear": lambda options, precision: lambda x, weight, bias: options["scale"] * Producer("linear", {}, precision)(x, weight, bias),
""")  # fmt: skip
    assert len(house.touched) <= 3
    house.run(FORWARD_AND_BACKWARD + """
from codegen.package import make_package
from codegen.spec.writer import resolved
from codegen.standalone import render_standalone
from codegen.render import render

toy = {"scaled_linear": {"name": "toy", "in_features": 24, "out_features": 16, "scale": 0.375}}
check([toy, NORM, "relu"])
check([toy])
second = {"scaled_linear": {"name": "second", "in_features": 16, "out_features": 8}}
check([LINEAR, NORM, "relu", second, "tanh"])  # behind a fused plan

spec = fsk.api.read({"name": "toy", "batch": 6, "chain": [toy, NORM]})
assert spec.input_shape == (6, 24) and fsk.api.read(resolved(spec)).chain == spec.chain
package = make_package(spec, ("sm_80",))  # on a GPU the step is the library's, too, and the norm a kernel of ours
assert "scaled_linear" in render(package)["manifest.json"]
try:
    render_standalone(package, render(package))
except fsk.Refusal as refusal:
    assert "scaled_linear" in str(refusal)
else:
    raise AssertionError("standalone.py computes a producer that it has no text for")
""")  # fmt: skip


def test_a_route_is_a_folder_of_planners_one_of_templates_and_a_row(house):
    house.create("codegen/plan/toy/__init__.py", '"""The planner of the toy family."""\n')
    house.create("codegen/plan/toy/route.py", '''"""The toy route of the cpu target: its kernel's text has a template of its own."""

from dataclasses import replace

from codegen.plan.cpu import route as cpu
from codegen.plan.model import Launch
from codegen.plan.route import Choice, Offer, Route


def offers(request):
    return (Offer(Choice("toy"), -1.0),)


def plan(request, offer):
    made = cpu.plan(request, offer)
    steps = tuple(replace(step, kernel=replace(step.kernel, template="toy/chain.cpp.j2")) if isinstance(step, Launch) else step for step in made.steps)
    return replace(made, steps=steps)


TOY = Route("toy", "the toy kernel", frozenset({"cpu"}), frozenset({"linear"}), offers, plan)
''')  # fmt: skip
    house.create("codegen/templates/toy/chain.cpp.j2", '// Of the toy family.\n{% include "cpu/chain.cpp.j2" %}\n')
    house.insert("codegen/plan/table.py", "from codegen.plan.library.route import LIBRARY\n", "from codegen.plan.toy.route import TOY\n")
    house.insert("codegen/plan/table.py", "ROUTES = (", "TOY, ")
    families = {file for file in house.touched if "/toy/" in file}
    assert house.touched - families == {"codegen/plan/table.py"}
    house.run(FORWARD_AND_BACKWARD + """
from pathlib import Path

from codegen.spec import load_spec
from codegen.plan.planner import choices
from codegen.targets import DEVICES

module = check([LINEAR, "sigmoid", NORM, "relu"])
folder = Path(module.__file__).parent
assert "// Of the toy family." in (folder / "cpu.cpp").read_text()
assert "the toy kernel: " in fsk.explain(folder / "spec.yaml", targets="cpu")
assert ("cpu", "toy") in [(target, choice.route) for target, choice in choices(load_spec(folder / "spec.yaml"), DEVICES["host"])]
conv = {"conv2d": {"name": "conv", "in_channels": 3, "out_channels": 8, "kernel_size": 3}}
spec = {"name": "conv", "batch": 2, "input": {"height": 9, "width": 9}, "chain": [conv, NORM, "relu"]}
assert "Of the toy family" not in (fsk.generate(spec, targets="cpu") / "cpu.cpp").read_text()  # the route does not serve it
""")  # fmt: skip


def test_a_target_is_a_row_of_the_generator_and_one_of_the_runtime_beside_its_routes(house):
    house.insert("codegen/targets.py", "TARGETS: dict[str, Target] = {\n    t.name: t\n    for t in (\n", """
        Target("sm_100a", "sm100a", "cuda", "sm_100a", (10, 0), 227 * 1024, 255, "toy", CUDA_FLAGS, "a toy", "sm_80"),
""")  # fmt: skip
    house.insert("codegen/targets.py", "DEVICES: dict[str, DeviceClass] = {\n    d.name: d\n    for d in (\n", """
        DeviceClass("toy", ("sm_100a", "sm_80"), 148, 80.0, 1100.0, 2200.0, 8000.0, 126.0, 0.6, 0.8, 227 * 1024, 3.0, 1.4, "a toy"),
""")  # fmt: skip
    house.insert("runtime/manifest.py", "TARGETS: dict[str, tuple[str | None, tuple[int, int] | None]] = {", '"sm_100a": ("sm_100a", (10, 0)), ')
    assert len(house.touched) <= 2
    house.insert("codegen/plan/table.py", "from codegen.plan.library.route import LIBRARY\n", "from dataclasses import replace\n")
    house.insert("codegen/plan/table.py", "ROUTES = (", """replace(LIBRARY, name="toy", targets=frozenset({"sm_100a"})), """)
    house.run(FORWARD_AND_BACKWARD + """
from bench.records import loaders_choice
from codegen.package import make_package
from codegen.render import render
from codegen.standalone import render_standalone
from codegen.targets import TARGETS, cuda_targets, preference
from runtime import doctor
from runtime.load import best_target
from runtime.package import Package

conv = {"conv2d": {"name": "conv", "in_channels": 3, "out_channels": 8, "kernel_size": 3}}
data = {"name": "toy", "batch": 2, "gemm": "generated", "input": {"height": 9, "width": 9}, "chain": [conv, NORM, "relu"]}
spec, folder = fsk.api.read(data), fsk.generate(data, targets=("cpu", "sm_80", "sm_100a"))
package = Package(folder)
assert [best_target(package, at).name for at in ((8, 6), (9, 0), (10, 0), (12, 0))] == ["sm_80", "sm_80", "sm_100a", "sm_80"]
assert preference()[0] == "sm_100a" and preference()[-1] == "cpu" and "sm_100a" in cuda_targets()
assert [finding.what for finding in doctor.examine() if finding.what.startswith("target")] == [f"target {name}" for name in TARGETS]
made = make_package(spec, ("sm_80", "sm_100a"))
text = render_standalone(made, render(made))
assert text.index("sm100a") < text.index("sm80") and "def _sm_100a(" in text
records = [{"spec": "s", "precision": "fp32", "weights": "w", "target": name} for name in ("sm_80", "sm_100a", "cpu")]
assert [record["target"] for record in loaders_choice(records)] == ["sm_100a"]
""")  # fmt: skip
