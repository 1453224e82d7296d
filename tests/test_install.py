"""`pip install .` in an empty environment: command and package work there on a spec of one's own."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
PACKAGES = ("bench", "codegen", "fixed_shape_kernels", "runtime")
LAYER = """\
name: my_layer
batch: 4
args: {features: 32}
chain:
  - linear: {name: gemm, in_features: 16, out_features: features}
  - group_norm: {name: norm, num_groups: 4}
  - silu
"""
RUN = """
import torch
from generated.my_layer import Model, ModelNew, get_init_inputs, get_inputs
reference, (x,) = Model(*get_init_inputs()), get_inputs()
model = ModelNew(*get_init_inputs())
model.load_state_dict(reference.state_dict())
with torch.no_grad():
    torch.testing.assert_close(model(x), reference(x), rtol=1e-5, atol=1e-6)
model(x).sum().backward()
"""
LOAD = """
import sys, yaml, torch, fixed_shape_kernels as fsk
spec = yaml.safe_load(open("layer.yaml")) | {"name": "other_layer", "batch": 2}
module = fsk.load(spec)
assert module.ModelNew(*module.get_init_inputs())(module.get_inputs()[0]).shape == (2, 32)
for name in ("fixed_shape_kernels", "codegen", "runtime", "bench"):
    assert sys.modules[name].__file__.startswith(sys.prefix), name
"""
HELP = """
from click.testing import CliRunner
from fixed_shape_kernels.cli import COMMANDS, main
for name in COMMANDS:
    done = CliRunner().invoke(main, [name, "--help"])
    assert done.exit_code == 0, (name, done.output)
"""


class Installed:
    """An environment of its own with this project, and the libraries of the Python that runs the tests behind it."""

    def __init__(self, folder: Path) -> None:
        self.here, self.environment = folder / "here", folder / "environment"
        self.here.mkdir()
        sources = folder / "sources"  # building writes into the tree
        for name in PACKAGES:
            shutil.copytree(TOP / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(TOP / name, sources)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self.environment], check=True)
        (self.site,) = self.environment.glob("lib/python*/site-packages")
        libraries = [path for path in sys.path if path.endswith("-packages")]
        (self.site / "libraries.pth").write_text("\n".join(libraries))
        isolation = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.environment / "bin" / "python",
            "install",
            "--quiet",
            "--no-deps",
            *isolation,
        ]
        self.do(*pip, sources, cwd=folder)
        shutil.rmtree(sources)

    def do(self, *command, cwd: Path | None = None, code: int = 0) -> str:
        """What the command printed, run with this project's command first on PATH and its sources on no path."""
        path = os.pathsep.join([str(self.environment / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {
            **os.environ,
            "PATH": path,
            "CODEGEN_CACHE": str(self.here.parent / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
            "TARGETS": "",
        }
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd or self.here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    made = Installed(tmp_path_factory.mktemp("installed"))
    (made.here / "layer.yaml").write_text(LAYER)
    return made


@pytest.mark.slow
def test_what_is_installed_is_the_four_packages_with_their_data(installed):
    for name in PACKAGES:
        expected = {
            path.relative_to(TOP)
            for path in (TOP / name).rglob("*")
            if path.is_file()
            and path.suffix not in (".pyc", ".md")
            and "results" not in path.relative_to(TOP).parts
            and not path.name.startswith(".")
        }
        found = {
            path.relative_to(installed.site)
            for path in (installed.site / name).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }
        assert found == expected


@pytest.mark.slow
def test_a_spec_of_ones_own_is_generated_and_runs(installed):
    printed = installed.do("fsk", "generate", "layer.yaml")
    assert printed.startswith("generated/my_layer: ") and sorted(p.name for p in installed.here.iterdir()) == [
        "generated",
        "layer.yaml",
    ]
    installed.do("python", "-c", RUN)
    assert "linear -> group_norm -> silu" in installed.do("fsk", "explain", "layer.yaml")
    assert "shipped: specs/" in installed.do("fsk", "generate", code=2)
    installed.do("fsk", "generate", "specs/default.yaml", "--target", "cpu")


@pytest.mark.slow
def test_a_spec_is_loaded_from_python(installed):
    installed.do("python", "-c", LOAD)


@pytest.mark.slow
def test_modules_of_the_users_with_our_names_do_not_disturb_a_command_and_its_children(installed):
    here = installed.here.parent / "other"
    for name in ("bench", "runtime", "codegen"):
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(f"raise RuntimeError('the {name} of the user')\n")
    command = "fsk sweep --count 1 --small --device cpu --family benchmark --work work"
    printed = installed.do(*command.split(), cwd=here)
    assert "1 of 1 right" in printed and list((here / "results").rglob("*"))


@pytest.mark.slow
def test_every_command_has_what_it_needs(installed):
    installed.do("python", "-c", HELP)
    assert "all promises kept" in installed.do("fsk", "verify", "layer.yaml", "--device", "cpu", "--repeats", "1")
    assert "interval" in installed.do("fsk", "demo", "layer.yaml", "--seconds", "0.5")
    assert ".whl" in installed.do("fsk", "package", "layer.yaml", "--target", "cpu")
    written = {path.relative_to(installed.here).parts[0] for path in installed.here.rglob("*")}
    assert written <= {"layer.yaml", "generated", "build", "dist"}, "nothing is written elsewhere in the folder"
