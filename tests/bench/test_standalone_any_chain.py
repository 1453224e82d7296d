"""standalone.py of chains beyond one fused plan, run on the CPU: kernels emulated, torch's convolutions in the place of cuDNN's calls."""

import ctypes
import re
import types

import pytest
import torch

from bench.machine import precision_flags
from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec
from codegen.standalone import render_standalone
from codegen.torch_text import module_lines, reference_lines, value_variable
from tests.codegen.emulated import STRICT, compile_text, emulated_text

CHAINS = {
    "modes": """\
inputs: {x: {shape: [8, 6, 10, 10]}, residual: {shape: [16, 1, 1, 1], batched: false}}
chain:
  - avg_pool3d: {kernel_size: 2}
  - conv_transpose3d: {name: conv, in_channels: 8, out_channels: 16, kernel_size: 3, stride: 2, padding: 1, output_padding: 1}
  - batch_norm: {name: bn}
  - add: {from: residual}
  - dropout: {p: 0.3}
  - mul: {name: scale, shape: [1]}
""",
    "products": """\
gemm: library
inputs: {x: {shape: [24]}}
chain:
  - linear: {name: a, in_features: 24, out_features: 16}
  - sigmoid: {name: act}
  - linear: {name: b, in_features: 16, out_features: 16, bias: false}
  - add: {from: act}
  - logsumexp: {dim: 1}
""",
    "names": """\
inputs: {v: {shape: [12]}, y: {shape: [12]}, value_0: {shape: [12]}, v_1: {shape: [12]}, act_kept: {shape: [12]}}
chain:
  - mul: {from: y}
  - sigmoid: {name: act}
  - add: {from: v_1}
  - softmax: {dim: 1}
  - mul: {from: act_kept}
  - mul: {from: value_0}
  - add: {from: act}
""",
    "line": """\
inputs: {signal: {shape: [6, 20]}}
chain:
  - conv1d: {name: conv, in_channels: 6, out_channels: 8, kernel_size: 3, groups: 2}
  - conv_transpose1d: {name: back, in_channels: 8, out_channels: 4, kernel_size: 4, stride: 2, bias: false}
  - layer_norm: {name: norm, normalized_shape: 38}
  - softmax: {dim: 1}
  - flatten
""",
    "excess": """\
input: {shape: [5, 7, 6]}
chain:
  - conv_transpose2d: {name: conv, in_channels: 5, out_channels: 3, kernel_size: 2, output_padding: [1, 0], dilation: 2}
  - relu
""",
}


class Cudnn:
    """cuDNN's two calls by torch's own convolutions; notes the TF32 mode that was asked for."""

    def __init__(self):
        self.tf32 = []

    def cudnn_convolution(self, x, weight, padding, stride, dilation, groups, benchmark, deterministic, tf32):
        self.tf32.append(tf32)
        return torch.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)

    def cudnn_convolution_transpose(self, x, weight, padding, extra, stride, dilation, groups, benchmark, deterministic, tf32):
        assert all(size < step for size, step in zip(extra, stride)), "cuDNN takes no output_padding of a stride or more"
        self.tf32.append(tf32)
        return torch.convolution(x, weight, None, stride, padding, dilation, True, extra, groups)


def standalone(tmp_path, name, precision="fp32"):
    path = tmp_path / f"{name}.yaml"
    path.write_text(f"name: {name}\nbatch: 3\n{CHAINS[name]}")
    spec = load_spec(path, precision)
    package = make_package(spec, ("sm_80",))
    return spec, render_standalone(package, render(package))


def reference(spec):
    """The layer in plain PyTorch."""
    names = [given.name for given in spec.inputs]
    body = "\n".join(f"        {line}" for line in module_lines(spec))
    forward = "\n".join(f"        {line}" for line in reference_lines(spec))
    scope: dict = {}
    text = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\nclass Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    exec(f"{text}{body}\n    def forward(self, {', '.join(names)}):\n{forward}\n        return {value_variable(spec)}\n", scope)
    return scope["Model"]()


def emulated_launch(folder, spec):
    """`_launch` of a standalone file by the emulation of its kernels."""
    library = ctypes.CDLL(str(compile_text(folder, '#include "chains.h"\n' + emulated_text(make_package(spec, ("sm_80",)).plan_for("sm_80")), STRICT)))

    def launch(name, *tensors):
        assert all(tensor.is_contiguous() for tensor in tensors)
        assert getattr(library, name)(*(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), 0, None) == 0, name

    return launch


@pytest.mark.parametrize(
    ("name", "precision"),
    [pytest.param(name, kind, marks=pytest.mark.representative if (name, kind) in (("modes", "fp32"), ("names", "fp32")) else pytest.mark.emulated) for name in CHAINS for kind in ("fp32", "tf32")],
)
def test_it_computes_the_chain_in_both_modes(tmp_path, name, precision):
    spec, text = standalone(tmp_path, name, precision)
    cudnn = Cudnn()
    scope = {"cudnn": types.SimpleNamespace(cudnn_convolution=cudnn.cudnn_convolution, cudnn_convolution_transpose=cudnn.cudnn_convolution_transpose)}
    exec(text.replace("torch.ops.aten.cudnn", "cudnn.cudnn"), scope)
    scope["_launch"] = emulated_launch(tmp_path, spec)
    torch.manual_seed(42)
    ours = scope["ModelNew"]()
    torch.manual_seed(42)
    theirs = reference(spec)
    assert {key: tuple(value.shape) for key, value in ours.state_dict().items()} == {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    inputs = [torch.randn(given.shape) for given in spec.inputs]
    for training in (True, False):
        ours.train(training), theirs.train(training)
        torch.manual_seed(1)
        with torch.no_grad():
            y = ours(*inputs)
        torch.manual_seed(1)
        torch.testing.assert_close(y, theirs(*inputs), rtol=1e-5, atol=1e-5)
    for (key, got), want in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, msg=key)
    assert set(cudnn.tf32) <= {precision == "tf32"}


def test_each_input_is_checked(tmp_path):
    spec, text = standalone(tmp_path, "modes")
    scope: dict = {}
    exec(text, scope)
    x, residual = (torch.randn(given.shape) for given in spec.inputs)
    for inputs, said in (((x[:2], residual), r"x: expected \(3, 8, 6, 10, 10\)"), ((x, residual[:1]), r"residual: expected \(16, 1, 1, 1\) float32, got \(1,")):
        with pytest.raises(ValueError, match=said):
            scope["ModelNew"]()(*inputs)


@pytest.mark.parametrize("name", list(CHAINS))
def test_the_static_checker_finds_no_error(tmp_path, name):
    _, text = standalone(tmp_path, name)
    seen = "\n".join(re.split(r"#|//", line, maxsplit=1)[0] for line in text.splitlines())
    for word in (r"\btry\s*:", r"\bexcept\b", r"\bpass\b", r"\bthreading\b", r"\bmultiprocessing\b"):
        assert not re.search(word, seen), word


@pytest.mark.parametrize("switch", [False, True])
def test_a_product_keeps_its_precision_under_either_switch(tmp_path, switch):
    """Where torch's switch for matrix products says otherwise the product goes through cuDNN, which takes TF32 as an argument."""
    for precision in ("fp32", "tf32"):
        _, text = standalone(tmp_path, "products", precision)
        cudnn = Cudnn()
        scope = {"cudnn": cudnn}
        exec(text.replace("torch.ops.aten.cudnn", "cudnn.cudnn"), scope)
        x, weight, bias = torch.randn(5, 24), torch.randn(16, 24), torch.randn(16)
        with precision_flags("tf32" if switch else "fp32"):
            torch.testing.assert_close(scope["_product"](x, weight, bias), torch.nn.functional.linear(x, weight, bias))
        assert cudnn.tf32 == ([] if switch == (precision == "tf32") else [precision == "tf32"])
