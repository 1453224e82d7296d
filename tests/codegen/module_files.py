"""PyTorch files in the manner of KernelBench's problems, and what turns one into a spec, for the tests of from_module."""

from dataclasses import replace
from pathlib import Path

import yaml

from codegen.from_module.worker import Answer, answer
from codegen.spec import Spec, load_spec

TOP = Path(__file__).parents[2]

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn


"""

# In the manner of KernelBench level 2, problem 30.
LINEAR = HEAD + """\
class Model(nn.Module):
    def __init__(self, width_in, width_out, groups, low, high):
        super().__init__()
        self.fc = nn.Linear(width_in, width_out)
        self.gn = nn.GroupNorm(groups, width_out)
        self.act = nn.Hardtanh(min_val=low, max_val=high)

    def forward(self, x):
        return self.act(self.gn(self.fc(x)))


def get_inputs():
    return [torch.rand(6, 10)]


def get_init_inputs():
    return [10, 12, 3, -2.0, 2.0]
"""

# Problem 94: a parameter between modules, two activations before the norm.
BIAS = HEAD + """\
rows, wide = 5, 16


class Model(nn.Module):
    def __init__(self, features, wide, shape, groups):
        super().__init__()
        self.proj = nn.Linear(features, wide)
        self.shift = nn.Parameter(torch.randn(shape))
        self.squash = nn.Hardtanh()
        self.act = nn.Mish()
        self.norm = nn.GroupNorm(num_groups=groups, num_channels=wide)

    def forward(self, x):
        y = self.proj(x)
        y = y + self.shift
        y = self.act(self.squash(y))
        return self.norm(y)


def get_inputs():
    return [torch.randn(rows, 7)]


def get_init_inputs():
    return [7, wide, (wide,), 4]
"""

# Problem 85: a scale of ones, pooling, bounds kept as attributes.
CONV = HEAD + """\
class Model(nn.Module):
    def __init__(self, c_in, c_out, kernel, groups, scale_shape, window, lowest, highest):
        super().__init__()
        self.filter = nn.Conv2d(c_in, c_out, kernel)
        self.gn = nn.GroupNorm(groups, c_out)
        self.gain = nn.Parameter(torch.ones(scale_shape))
        self.pool = nn.MaxPool2d(kernel_size=window)
        self.lowest, self.highest = lowest, highest

    def forward(self, x):
        x = self.pool(self.gn(self.filter(x)) * self.gain)
        return x.clamp(self.lowest, self.highest)


def get_inputs():
    return [torch.rand(2, 3, 11, 13)]


def get_init_inputs():
    return [3, 8, 3, 4, (8, 1, 1), 2, 0.0, 1.0]
"""

# Problem 88: swish spelt out, twice, around a product.
SWISH = HEAD + """\
class Model(nn.Module):
    def __init__(self, a, b, groups, factor_shape):
        super().__init__()
        self.fc = nn.Linear(a, b)
        self.gn = nn.GroupNorm(groups, b)
        self.factor = nn.Parameter(torch.randn(factor_shape))

    def forward(self, x):
        x = self.gn(self.fc(x))
        x = x * torch.sigmoid(x)
        x = self.factor * x
        return x.sigmoid() * x


def get_inputs():
    return [torch.rand(4, 6)]


def get_init_inputs():
    return [6, 8, 2, (8,)]
"""

# Problem 37: swish and a bias before the norm.
SWISH_BIAS = HEAD + """\
class Model(nn.Module):
    def __init__(self, a, b, groups, offset_shape):
        super().__init__()
        self.product = nn.Linear(a, b, bias=False)
        self.offset = nn.Parameter(torch.rand(offset_shape))
        self.gn = nn.GroupNorm(groups, b, eps=1e-3)

    def forward(self, x):
        x = self.product(x)
        x = torch.sigmoid(x) * x
        x += self.offset
        return self.gn(x)


def get_inputs():
    return [torch.rand(9, 6)]


def get_init_inputs():
    return [6, 8, 2, (8,)]
"""

# Problem 21: two parameters on a convolution, in the order of use.
CONV_SCALE = HEAD + """\
class Model(nn.Module):
    def __init__(self, c_in, c_out, kernel, groups, offset_shape, scale_shape):
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride=(2, 1), padding="valid")
        self.offset = nn.Parameter(torch.randn(offset_shape))
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.gn = nn.GroupNorm(groups, c_out, affine=False)

    def forward(self, x):
        return self.gn(torch.sigmoid((self.conv(x) + self.offset) * self.scale))


def get_inputs():
    return [torch.rand(2, 3, 9, 9)]


def get_init_inputs():
    return [3, 6, 3, 2, (6, 1, 1), (6, 1, 1)]
"""


def read(folder: Path, text: str, check: bool = True, name: str = "layer", precision: str | None = None) -> Answer:
    path = folder / "problem.py"
    path.write_text(text)
    return answer(str(path), "Model", name, precision, check)


def spec_of(folder: Path, found: Answer, name: str = "layer") -> Spec:
    assert not found.faults, found.faults
    path = folder / f"{name}.yaml"
    path.write_text(found.yaml)
    return load_spec(path)


def chain(folder: Path, text: str) -> list:
    """The chain of the spec that `text` becomes, as plain data."""
    return yaml.safe_load(read(folder, text).yaml)["chain"]


def faults(folder: Path, text: str, check: bool = True) -> list[tuple[str, str]]:
    """(the source line, what is wrong with it) of each fault."""
    found = read(folder, text, check)
    assert found.faults and not found.yaml
    lines = ["", *text.splitlines()]
    return [(lines[fault.line].strip(), fault.message) for fault in found.faults]


def comparable(spec: Spec) -> Spec:
    """A spec without what its PyTorch text does not hold: its path, and the names of operators without parameters."""
    unnamed = lambda step: replace(step, name=step.name if step.parameters else None, values={k: v for k, v in step.values.items() if k != "from"})  # noqa: E731
    return replace(spec, path="", chain=tuple(map(unnamed, spec.chain)))
