"""A PyTorch file becomes the spec of the same layer, or every reason why it cannot is told at its line."""

import os
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from bench.harness import reference_source
from codegen.from_module.worker import answer, import_file
from codegen.ops import OPERATORS, Kind
from codegen.spec import load_spec, shipped
from tests.codegen.level2_small import small
from tests.codegen.module_files import BIAS, CONV, CONV_SCALE, LINEAR, SWISH, SWISH_BIAS, TOP, chain, comparable, faults, read, spec_of


@pytest.mark.parametrize("path", [pytest.param(path, marks=[] if path.endswith("_small.yaml") else pytest.mark.slow) for path in shipped()])
def test_shipped_specs_come_back_from_their_own_reference(path, tmp_path):
    """At small sizes, for their references are run."""
    spec = small(path, tmp_path)
    found = spec_of(tmp_path, read(tmp_path, reference_source(spec), name=spec.name))
    if spec.name == "matmul_groupnorm_leakyrelu_sum":  # its input_size and hidden_size are one number, which the reference repeats
        found, spec = (replace(each, chain=tuple(replace(step, sources={}) for step in each.chain)) for each in (found, spec))
    assert comparable(found) == comparable(spec)


def test_a_generated_package_is_read_as_it_is(tmp_path):
    spec = load_spec("specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml")
    found = answer(str(TOP / "generated" / "exemplars" / spec.name / "model.py"), "Model", spec.name, None, check=True)
    assert comparable(spec_of(tmp_path, found)) == comparable(spec)


def test_a_file_that_is_changed_within_a_second_is_read_anew_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "problem.py"
    for value in (1, 2):
        path.write_text(f"value = {value}\n")
        os.utime(path, (1e9, 1e9))
        assert import_file(str(path)).value == value
    assert [entry.name for entry in tmp_path.iterdir()] == ["problem.py"]


def sample(argument) -> object:
    """A value that is not the argument's default."""
    if isinstance(argument.type, tuple):
        return next(word for word in argument.type if word != argument.default)
    return {"number": 1.25, "bound": 0.5, "shape": [4], "flag": not argument.default}[argument.type]


@pytest.mark.parametrize("name", [n for n, op in OPERATORS.items() if op.kind is Kind.ELEMENTWISE])
def test_every_element_wise_operator_comes_back(name, tmp_path):
    wanted = [a for a in OPERATORS[name].arguments if a.name not in ("shape", "init", "from", "view", "parameter", "detach")]
    values = {argument.name: sample(argument) for argument in wanted}
    for low in {"min", "min_val"} & set(values):
        values[low] = -0.5
    data = {"name": "layer", "batch": 3, "chain": [{"linear": {"name": "fc", "in_features": 5, "out_features": 4}}, {name: values} if values else name]}
    data["chain"].append({"group_norm": {"name": "gn", "num_groups": 2}})
    path = tmp_path / "wanted.yaml"
    path.write_text(yaml.safe_dump(data))
    spec = load_spec(path)
    assert comparable(spec_of(tmp_path, read(tmp_path, reference_source(spec)))) == comparable(spec)


@pytest.mark.parametrize("init", ["randn", "rand", "ones", "zeros"])
@pytest.mark.parametrize("size", [1, 2, 40])
def test_initialisers_are_told_apart_whatever_the_values(init, size, tmp_path):
    text = BIAS.replace("torch.randn(shape)", f"torch.{init}({size if size == 1 else 'shape'})").replace("wide = 5, 16", f"wide = 5, {4 * size}")
    text = text.replace("(wide,), 4", "1.0, 2") if size == 1 else text.replace("(wide,), 4", "(wide,), 2")
    text = text.replace("nn.Hardtanh()", "nn.Hardtanh(-1.0, shape)") if size == 1 else text
    assert chain(tmp_path, text)[1]["add"]["init"] == init


def test_the_problem_in_the_manner_of_30(tmp_path):
    assert read(tmp_path, LINEAR).yaml == """\
# From problem.py: linear -> group_norm -> hardtanh
name: layer
batch: 6
args:
  width_in: 10
  width_out: 12
  groups: 3
  low: -2.0
  high: 2.0
chain:
  - linear:     {name: fc, in_features: width_in, out_features: width_out}
  - group_norm: {name: gn, num_groups: groups}
  - hardtanh:   {name: act, min_val: low, max_val: high}
"""


def test_the_problem_in_the_manner_of_94(tmp_path):
    data = yaml.safe_load(read(tmp_path, BIAS, precision="bf16").yaml)
    assert (data["precision"], data["input"], data["args"]) == ("bf16", {"values": "randn"}, {"features": 7, "wide": 16, "shape": [16], "groups": 4})
    assert data["chain"] == [
        {"linear": {"name": "proj", "in_features": "features", "out_features": "wide"}},
        {"add": {"name": "shift", "shape": "shape", "init": "randn"}},
        {"hardtanh": {"name": "squash"}}, {"mish": {"name": "act"}}, {"group_norm": {"name": "norm", "num_groups": "groups"}},
    ]  # fmt: skip


def test_the_problem_in_the_manner_of_85(tmp_path):
    data = yaml.safe_load(read(tmp_path, CONV).yaml)
    assert data["input"] == {"height": 11, "width": 13}
    assert data["chain"] == [
        {"conv2d": {"name": "filter", "in_channels": "c_in", "out_channels": "c_out", "kernel_size": "kernel"}},
        {"group_norm": {"name": "gn", "num_groups": "groups"}}, {"mul": {"name": "gain", "shape": "scale_shape", "init": "ones"}},
        {"max_pool2d": {"name": "pool", "kernel_size": "window"}}, {"clamp": {"min": "lowest", "max": "highest"}},
    ]  # fmt: skip


def test_the_problems_in_the_manner_of_88_37_and_21(tmp_path):
    assert [next(iter(e)) if isinstance(e, dict) else e for e in chain(tmp_path, SWISH)] == ["linear", "group_norm", "silu", "mul", "silu"]
    product, swish, offset, norm = chain(tmp_path, SWISH_BIAS)
    assert (product["linear"]["bias"], swish, offset["add"]["init"], norm["group_norm"]["eps"]) == (False, "silu", "rand", 1e-3)
    conv, offset, scale, gate, norm = chain(tmp_path, CONV_SCALE)
    assert (conv["conv2d"]["stride"], offset["add"]["shape"], scale["mul"]["shape"], gate) == ([2, 1], "offset_shape", "scale_shape", "sigmoid")
    assert norm["group_norm"]["affine"] is False


# What follows takes the place of the activation behind the norm: the PyTorch text and the chain's entry.
SPELLINGS = [
    ("F.relu(x)", "relu"), ("torch.relu(x)", "relu"), ("x.relu()", "relu"), ("F.relu(x, inplace=True)", "relu"), ("nn.ReLU()(x)", "relu"),
    ("F.relu6(x)", "relu6"), ("nn.ReLU6()(x)", "relu6"), ("nn.SELU()(x)", "selu"), ("torch.celu(x, 1.5)", {"celu": {"alpha": 1.5}}), ("F.softsign(x)", "softsign"),
    ("nn.LogSigmoid()(x)", "logsigmoid"), ("F.logsigmoid(x)", "logsigmoid"),
    ("nn.Softshrink(0.25)(x)", {"softshrink": {"lambd": 0.25}}),
    ("torch.clamp(x, -1, 2)", {"clamp": {"min": -1, "max": 2}}), ("torch.clamp(input=x, max=0.5)", {"clamp": {"max": 0.5}}),
    ("x.clamp(min=0.25)", {"clamp": {"min": 0.25}}), ("x.clamp_max(2)", {"clamp": {"max": 2}}), ("torch.clip(x, -1, 2)", {"clamp": {"min": -1, "max": 2}}),
    ("F.hardtanh(x, -0.5, 0.5)", {"hardtanh": {"min_val": -0.5, "max_val": 0.5}}), ("F.leaky_relu(x, 0.2)", {"leaky_relu": {"negative_slope": 0.2}}),
    ("F.leaky_relu(x)", "leaky_relu"), ("nn.LeakyReLU(0.2)(x)", {"leaky_relu": {"negative_slope": 0.2}}), ("F.elu(x, alpha=0.5)", {"elu": {"alpha": 0.5}}),
    ("nn.ELU()(x)", "elu"), ("F.softplus(x, 2, 10)", {"softplus": {"beta": 2, "threshold": 10}}), ("nn.Softplus(beta=2)(x)", {"softplus": {"beta": 2}}),
    ("F.gelu(x)", "gelu"), ("F.gelu(x, approximate='tanh')", {"gelu": {"approximate": "tanh"}}), ("nn.GELU('tanh')(x)", {"gelu": {"approximate": "tanh"}}),
    ("F.silu(x)", "silu"), ("nn.SiLU()(x)", "silu"), ("nn.Sigmoid()(x) * x", "silu"),
    ("x.mul(F.sigmoid(x))", "silu"), ("torch.mul(torch.sigmoid(x), x)", "silu"),
    ("nn.Hardswish()(x)", "hardswish"), ("F.hardsigmoid(x)", "hardsigmoid"), ("nn.Tanh()(x)", "tanh"), ("x.tanh()", "tanh"), ("F.mish(x)", "mish"),
    ("torch.special.expit(x)", "sigmoid"), ("x * 0.5", {"mul": {"value": 0.5}}), ("3 * x", {"mul": {"value": 3}}), ("x / 4", {"div": {"value": 4}}), ("torch.div(x, 3)", {"div": {"value": 3}}),
    ("x + 1.5", {"add": {"value": 1.5}}), ("torch.add(x, 2)", {"add": {"value": 2}}), ("x - 1.5", {"sub": {"value": 1.5}}), ("-x", {"mul": {"value": -1.0}}),
]  # fmt: skip


@pytest.mark.parametrize(("spelling", "entry"), SPELLINGS, ids=[spelling for spelling, _ in SPELLINGS])
def test_spellings(spelling, entry, tmp_path):
    text = SWISH.replace("return x.sigmoid() * x", f"return {spelling}")
    if spelling.startswith("nn."):  # a module has to be an attribute of Model to be seen
        module, call = spelling.split(")(x)")
        text = SWISH.replace("return x.sigmoid() * x", f"return self.last(x){call}")
        text = text.replace("    def forward", f"        self.last = {module})\n\n    def forward")
        if isinstance(entry, dict):
            entry = {key: {"name": "last"} | values for key, values in entry.items()}
        elif not call:
            entry = {entry: {"name": "last"}}
    assert chain(tmp_path, text)[-1] == entry


@pytest.mark.parametrize("pool", ["F.max_pool2d(x, 2)", "F.max_pool2d(x, (2, 2), stride=2)", "torch.max_pool2d(x, 2)", "nn.MaxPool2d(2, stride=2)(x)"])
def test_pooling_strides_equal_to_the_window_are_left_out(pool, tmp_path):
    text = CONV.replace("x = self.pool(self.gn(self.filter(x)) * self.gain)", "x = self.gn(self.filter(x)) * self.gain\n        x = " + pool)
    text = text.replace("kernel_size=window", "2, stride=2")
    text = text.replace("x = " + pool, "x = self.pool(x)") if "nn." in pool else text
    assert chain(tmp_path, text)[3]["max_pool2d"]["kernel_size"] == "window" and "stride" not in chain(tmp_path, text)[3]["max_pool2d"]


def test_values_that_are_computed_from_arguments_are_written_out(tmp_path):
    text = LINEAR.replace("nn.GroupNorm(groups, width_out)", "nn.GroupNorm(groups * 2, width_out)").replace("max_val=high", "max_val=high + groups")
    assert spec_of(tmp_path, read(tmp_path, text)).ignored == ("groups", "high")
    text = LINEAR.replace("nn.Linear(width_in, width_out)", "nn.Linear(width_in, width_out, bias=width_out > 4)")
    text = text.replace("min_val=low", "min_val=low, inplace=True")
    assert chain(tmp_path, text)[0]["linear"] == {"name": "fc", "in_features": "width_in", "out_features": "width_out"}


def test_an_argument_that_is_left_at_its_default_is_one_of_the_specs_defaults(tmp_path):
    text = LINEAR.replace("high):", "high, eps=1e-3, dim=1, mode='fast'):").replace("groups, width_out)", "groups, width_out, eps)")
    found = read(tmp_path, text)
    data = yaml.safe_load(found.yaml)
    assert data["defaults"] == {"eps": 1e-3} and data["chain"][1]["group_norm"]["eps"] == "eps" and "eps" not in data["args"]
    (note,) = found.notes
    assert note.message.startswith("dim = 1: this default reaches no operator")
    assert spec_of(tmp_path, found).defaults == ("eps",)


def test_flags_refer_to_their_argument(tmp_path):
    text = LINEAR.replace("low, high)", "low, high, offset)").replace("nn.Linear(width_in, width_out)", "nn.Linear(width_in, width_out, bias=offset)")
    assert chain(tmp_path, text.replace("-2.0, 2.0]", "-2.0, 2.0, False]"))[0]["linear"]["bias"] == "offset"


def test_what_does_nothing_is_left_out_with_a_note(tmp_path):
    text = LINEAR.replace("self.act(self.gn", "self.act(self.skip(self.drop(F.dropout(self.gn").replace("(x)))", "(x)), 0.5, training=False))))")
    text = text.replace("    def forward", "        self.skip = nn.Identity()\n        self.drop = nn.Dropout(0.0)\n\n    def forward")
    found = read(tmp_path, text)
    assert [next(iter(e)) for e in yaml.safe_load(found.yaml)["chain"]] == ["linear", "group_norm", "hardtanh"]
    assert len(found.notes) == 3 and all("left out" in note.message for note in found.notes)
    assert {"dropout": {"name": "drop", "p": 0.1}} in chain(tmp_path, text.replace("nn.Dropout(0.0)", "nn.Dropout(0.1)"))
    ((line, message),) = faults(tmp_path, text.replace("nn.Dropout(0.0)", "nn.AlphaDropout(0.1)"))
    assert line.startswith("return self.act(self.skip") and "draws random numbers" in message


def test_an_activation_may_serve_twice_and_may_sit_in_a_sequential(tmp_path):
    text = LINEAR.replace("self.act(self.gn(self.fc(x)))", "self.tail(self.act(self.gn(self.act(self.fc(x)))))")
    text = text.replace("    def forward", "        self.tail = nn.Sequential(nn.Tanh(), nn.ReLU())\n\n    def forward")
    assert [next(iter(e)) if isinstance(e, dict) else e for e in chain(tmp_path, text)] == ["linear", "hardtanh", "group_norm", "hardtanh", "tanh", "relu"]


def test_in_place_methods_as_statements(tmp_path):
    text = LINEAR.replace("return self.act(self.gn(self.fc(x)))", "x = self.gn(self.fc(x))\n        x.relu_()\n        y = self.act(x)\n        return y")
    assert [next(iter(e)) if isinstance(e, dict) else e for e in chain(tmp_path, text)] == ["linear", "group_norm", "relu", "hardtanh"]


def test_a_norm_s_function_with_a_module_s_parameters_is_that_norm(tmp_path):
    """With those of two modules, or with the bias in the place of the weight, it is none."""
    called = "self.act(F.group_norm(self.fc(x), self.gn.num_groups, self.gn.weight, self.gn.bias, self.gn.eps))"
    text = LINEAR.replace("self.act(self.gn(self.fc(x)))", called)
    assert chain(tmp_path, text) == chain(tmp_path, LINEAR)
    for wrong in ("self.gn.weight, self.fc.bias", "self.gn.bias, self.gn.weight"):
        (fault,) = [said for _, said in faults(tmp_path, text.replace("self.gn.weight, self.gn.bias", wrong)) if "of one module" in said]
        assert "group_norm with tensors of its own" in fault


def test_the_generators_state_is_left_alone(tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    read(tmp_path, BIAS)
    assert torch.equal(torch.rand(3), expected)


SUMS = [
    ("x = self.act(self.gn(self.fc(x)))\n        return x + x", ["linear", "group_norm", "hardtanh", {"add": {"from": "act"}}]),
    ("x = torch.relu(self.gn(self.fc(x)))\n        x += x\n        return self.act(x)", [..., ..., {"relu": {"name": "relu"}}, {"add": {"from": "relu"}}, ...]),
    ("first = self.fc(x)\n        return first + self.act(self.gn(first))", [..., ..., ..., {"add": {"from": "fc"}}]),
    ("first = self.gn(self.fc(x))\n        return torch.mul(self.act(first), first)", [..., ..., ..., {"mul": {"from": "gn"}}]),
    ("x = self.fc(x)\n        x = x + torch.tanh(x)\n        return self.act(self.gn(x))", [..., {"tanh"}, {"add": {"from": "fc"}}, ..., ...]),
    ("x = self.gn(self.fc(x))\n        y = x\n        x = torch.relu_(x)\n        return self.act(x + y)", [..., ..., ..., {"add": {"from": "relu"}}, ...]),
]


@pytest.mark.parametrize(("body", "wanted"), SUMS, ids=range(len(SUMS)))
def test_earlier_results_that_are_taken_once_more(body, wanted, tmp_path):
    found = chain(tmp_path, LINEAR.replace("return self.act(self.gn(self.fc(x)))", body))
    for entry, want in zip(found, wanted, strict=True):
        assert want is ... or entry == want or (not isinstance(want, dict) and next(iter(entry if isinstance(entry, dict) else [entry])) in want)


def test_a_forward_without_gradients_says_that_they_were_not_compared(tmp_path):
    for (body, _), word in ((SUMS[0], "results, gradients and state equal"), (SUMS[1], "results and state (not gradients: forward overwrites")):
        assert word in read(tmp_path, LINEAR.replace("return self.act(self.gn(self.fc(x)))", body)).checked


def test_what_no_operator_gives_cannot_be_taken_once_more(tmp_path):
    text = LINEAR.replace("[10, 12", "[12, 12").replace("(6, 10)", "(6, 12)")
    assert chain(tmp_path, text.replace("return self.act(", "return x - self.act("))[-1] == {"rsub": {"from": "x"}}
    ((line, message),) = faults(tmp_path, text.replace("return self.act(", "return torch.relu(x) + self.act("))
    assert line.startswith("return torch.relu(x) +") and "neither of them" in message or "takes x itself once more" in message


REDUCTIONS = [
    ("torch.min(x, dim=1, keepdim=True)[0]", {"min": {"keepdim": True}}), ("torch.max(x, 1).values", "max"), ("x.min(1, True)[0]", {"min": {"keepdim": True}}),
    ("x.mean(-1)", {"mean": {"dim": -1}}), ("torch.sum(x, axis=1, keepdims=True)", {"sum": {"keepdim": True}}), ("torch.min(x, -1)[0]", {"min": {"dim": -1}}), ("x.sum(1)", "sum"), ("torch.sum(x, dim=[1])", "sum"),
    ("torch.sum(x)", {"sum": {"dim": None}}), ("x.amax((0, 1))", {"amax": {"dim": [0, 1]}}), ("x.mean(0)", {"mean": {"dim": 0}}), ("F.softmax(x, -1)", {"softmax": {"dim": -1}}),
    ("torch.min(x, torch.tensor(0.5))", {"minimum": {"value": 0.5}}), ("torch.maximum(x, self.factor)", {"maximum": {"parameter": "factor"}}),
    ("x.unsqueeze(1).squeeze(1) - x.detach()", {"sub": {"from": "factor", "detach": True}}), ("1 - x", {"rsub": {"value": 1.0}}), ("self.factor.view(1, -1) / x", {"rdiv": {"parameter": "factor", "view": [1, -1]}}),
    ("torch.mean(x, dim=1, keepdim=True)", {"mean": {"keepdim": True}}), ("torch.logsumexp(x, 1)", "logsumexp"), ("x.logsumexp(dim=1)", "logsumexp"),
]


@pytest.mark.parametrize(("spelling", "entry"), REDUCTIONS, ids=[spelling for spelling, _ in REDUCTIONS])
def test_reductions(spelling, entry, tmp_path):
    found = chain(tmp_path, SWISH.replace("return x.sigmoid() * x", f"x = {spelling}\n        return torch.tanh(x)"))
    assert found[-2:] == [entry, "tanh"]


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("return torch.min(x, 1)", "gives indices beside values"),
        ("return torch.tanh(torch.min(x, 1)[1])", "getitem is no operator"),
        ("return torch.mean(x, dim=2)", "forward cannot be traced"),
        ("return F.softmax(x)", "softmax without dim"),
    ],
)
def test_reductions_that_no_chain_has(last, message, tmp_path):
    found = faults(tmp_path, SWISH.replace("return x.sigmoid() * x", last))
    assert any(message in said for _, said in found), found


def test_the_problem_in_the_manner_of_75(tmp_path):
    text = SWISH.replace("self.factor * x\n        return x.sigmoid() * x", "torch.min(x, dim=1, keepdim=True)[0]\n        return x + self.factor")
    found = spec_of(tmp_path, read(tmp_path, text.replace("(8,)]", "(1, 8, 1, 1)]")))
    assert found.output_shape == (1, 8, 4, 1) and found.chain[-1].sources == {"shape": "factor_shape"}


def test_average_pooling(tmp_path):
    text = CONV.replace("nn.MaxPool2d(kernel_size=window)", "nn.AvgPool2d(window, padding=1, count_include_pad=False)")
    assert chain(tmp_path, text)[3]["avg_pool2d"] == {"name": "pool", "kernel_size": "window", "padding": 1, "count_include_pad": False}
    text = text.replace("self.pool(self.gn(self.filter(x)) * self.gain)", "F.avg_pool2d(self.gn(self.filter(x)) * self.gain, 2, divisor_override=3)")
    assert chain(tmp_path, text)[3]["avg_pool2d"] == {"kernel_size": "window", "divisor_override": 3}


FOLDED = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, padding, axes):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=padding)
        self.axes = axes

    def forward(self, x):
        v = self.conv(x)
        least = v.{fold}
        return least * torch.tanh(least)


def get_inputs():
    return [torch.rand(2, 2, 6, 7)]


def get_init_inputs():
    return [(0, 1), (-1, -2)]
"""


@pytest.mark.parametrize("fold", ["min(dim=1, keepdim=True)[0]", "max()", "amin(self.axes)", "logsumexp(self.axes)", "sum(dim=self.axes, keepdim=True)"])
def test_results_taken_twice_and_lists_with_zeros_and_negative_axes_are_read_back(fold, tmp_path):
    """A result is named after its operator, which may be a word that no input may have."""
    spec = spec_of(tmp_path, read(tmp_path, FOLDED.format(fold=fold)))
    assert spec.chain[0].values["padding"] == (0, 1) and spec.chain[-1].tap == 1 and spec.chain[1].name == fold.split("(")[0]
