"""An optimised model as a wheel: its kernels run where there is no compiler, and what cannot be packed is said."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import fixed_shape_kernels as fsk
from fixed_shape_kernels.cli import main

TOP = Path(__file__).parents[2]
LOADS = """
import torch
from torch import nn
import net_kernels

torch.manual_seed(0)
model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5), nn.Softmax(1)).eval(), torch.randn(2, 3, 8, 8)
fast = net_kernels.load(model)
with torch.no_grad():
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
assert not fast.fallbacks and len(fast.report.replaced) == 2
try:
    net_kernels.load(nn.Sequential(nn.Linear(4, 4)).eval())
except ValueError as error:
    print(error)
"""


def packed(model: nn.Module, x: torch.Tensor, folder: Path, **options) -> object:
    """The end of `fsk package` of the model optimised and saved into `folder`."""
    fsk.save_optimized(fsk.optimize(model, x, cache_dir=folder.parent / "packages", **options), folder)
    return CliRunner().invoke(main, ["package", str(folder), "--out", str(folder.parent / "dist")])


@pytest.mark.slow
def test_an_installed_wheel_needs_no_compiler(tmp_path):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5), nn.Softmax(1)).eval(), torch.randn(2, 3, 8, 8)
    done = packed(model, x, tmp_path / "net_kernels", min_gain=0.0)
    assert done.exit_code == 0, done.output
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.name == "net_kernels-0.1.0+cpu-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        told = archive.read("net_kernels-0.1.0+cpu.dist-info/METADATA").decode()
    assert sum(name.endswith("/cpu.so") for name in names) == 2 and not any(name.endswith((".cpp", ".cu", ".h")) or "_runtime" in name for name in names)
    assert "Requires-Dist: fixed-shape-kernels\n" in told and f"Requires-Dist: torch=={torch.__version__.partition('+')[0]}\n" in told
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    subprocess.run([sys.executable, "-m", "pip", "--python", bare / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    (site,) = bare.glob("lib/python*/site-packages")
    (site / "product.pth").write_text("\n".join([str(TOP), *(path for path in sys.path if path.endswith("-packages"))]))
    environment = {"PATH": str(bare / "empty"), "HOME": str(bare / "no-home"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([bare / "bin" / "python", "-c", LOADS], env=environment, cwd=bare, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "was saved for another model" in done.stdout


@pytest.mark.parametrize(("name", "gain", "said"), [("my-model", 0.0, "my-model is none of Python's"), ("torch", 0.0, "torch is none"), ("net", 1e9, "holds no kernels")])
def test_what_cannot_be_packed_is_said(name, gain, said, tmp_path):
    done = packed(nn.Sequential(nn.Linear(8, 4), nn.Tanh()).eval(), torch.randn(2, 8), tmp_path / name, min_gain=gain)
    assert done.exit_code and said in str(done.output) + str(done.exception), done.output
    assert not os.path.exists(tmp_path / "dist")
