"""A PyTorch file becomes the spec of the same layer, or every reason why it cannot is told at its line."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from bench.kernelbench import reference_source
from codegen.from_module.command import default_name, split_target
from codegen.from_module.worker import answer
from codegen.ops import OPERATORS, Kind
from codegen.spec import load_spec, shipped
from tests.codegen.module_files import BIAS, CONV, CONV_SCALE, LINEAR, SWISH, SWISH_BIAS, TOP, chain, comparable, faults, read, spec_of


@pytest.mark.parametrize("path", shipped())
def test_shipped_specs_come_back_from_their_own_reference(path, tmp_path):
    spec = load_spec(path)
    found = spec_of(tmp_path, read(tmp_path, reference_source(spec), name=spec.name))
    if spec.name == "matmul_groupnorm_leakyrelu_sum":  # its input_size and hidden_size are one number, which the reference repeats
        found, spec = (replace(each, chain=tuple(replace(step, sources={}) for step in each.chain)) for each in (found, spec))
    assert comparable(found) == comparable(spec)


def test_a_generated_package_is_read_as_it_is(tmp_path):
    spec = load_spec("specs/conv2d_groupnorm_scale_maxpool_clamp_small.yaml")
    found = answer(str(TOP / "generated" / spec.name / "model.py"), "Model", spec.name, None, check=True)
    assert comparable(spec_of(tmp_path, found)) == comparable(spec)


def sample(argument) -> object:
    """A value that is not the argument's default."""
    if isinstance(argument.type, tuple):
        return next(word for word in argument.type if word != argument.default)
    return {"number": 1.25, "bound": 0.5, "shape": [4], "flag": not argument.default}[argument.type]


@pytest.mark.parametrize("name", [n for n, op in OPERATORS.items() if op.kind is Kind.ELEMENTWISE])
def test_every_element_wise_operator_comes_back(name, tmp_path):
    wanted = [a for a in OPERATORS[name].arguments if a.name not in ("shape", "init", "from")]
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
    found = faults(tmp_path, text)
    assert [message.split(":")[0] for _, message in found] == ["groups = 3", "high = 2.0"]
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
    ((line, message),) = faults(tmp_path, text.replace("nn.Dropout(0.0)", "nn.Dropout(0.1)"))
    assert line.startswith("return self.act(self.skip") and "draws random numbers" in message


def test_an_activation_may_serve_twice_and_may_sit_in_a_sequential(tmp_path):
    text = LINEAR.replace("self.act(self.gn(self.fc(x)))", "self.tail(self.act(self.gn(self.act(self.fc(x)))))")
    text = text.replace("    def forward", "        self.tail = nn.Sequential(nn.Tanh(), nn.ReLU())\n\n    def forward")
    assert [next(iter(e)) if isinstance(e, dict) else e for e in chain(tmp_path, text)] == ["linear", "hardtanh", "group_norm", "hardtanh", "tanh", "relu"]


def test_in_place_methods_as_statements(tmp_path):
    text = LINEAR.replace("return self.act(self.gn(self.fc(x)))", "x = self.gn(self.fc(x))\n        x.relu_()\n        y = self.act(x)\n        return y")
    assert [next(iter(e)) if isinstance(e, dict) else e for e in chain(tmp_path, text)] == ["linear", "group_norm", "relu", "hardtanh"]


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


def test_what_no_operator_gives_cannot_be_taken_once_more(tmp_path):
    text = LINEAR.replace("[10, 12", "[12, 12").replace("(6, 10)", "(6, 12)")
    ((line, message),) = faults(tmp_path, text.replace("return self.act(", "return x + self.act("))
    assert line.startswith("return x +") and "takes x itself once more" in message
    text = LINEAR.replace("return self.act(self.gn(self.fc(x)))", "y = self.fc(x)\n        return y + self.act(self.gn(torch.relu(y)))")
    ((line, message),) = faults(tmp_path, text)
    assert line.startswith("return y +") and "can take the norm's input or what follows" in message


REDUCTIONS = [
    ("torch.min(x, dim=1, keepdim=True)[0]", {"min": {"keepdim": True}}), ("torch.max(x, 1).values", "max"), ("x.min(1, True)[0]", {"min": {"keepdim": True}}),
    ("torch.amin(x, dim=1)", "min"), ("x.amax((1,), keepdim=True)", {"max": {"keepdim": True}}), ("x.sum(1)", "sum"), ("torch.sum(x, dim=[1])", "sum"),
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
        ("return torch.sum(x)", "sum over everything"),
        ("return torch.sum(x, dim=(0, 1))", "sum over dim (0, 1)"),
        ("return torch.mean(x, dim=0)", "expected an integer from 1"),
        ("return torch.logsumexp(x, 1).relu().sum(0)", "reduction on line"),
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


# Operators outside the grammar.


def test_a_difference_of_two_results_and_a_softmax_are_both_named(tmp_path):
    text = CONV.replace(
        "x = self.pool(self.gn(self.filter(x)) * self.gain)\n        return x.clamp(self.lowest, self.highest)",
        "first = self.filter(x)\n        x = F.hardswish(torch.tanh(self.gn(first)))\n        x = first - x\n"
        "        return torch.softmax(x, dim=1)",
    )
    found = dict(faults(tmp_path, text))
    assert "takes the value of line" in found["x = first - x"]
    assert found["return torch.softmax(x, dim=1)"].startswith("softmax is no operator")
    assert "never uses" in found["self.gain = nn.Parameter(torch.ones(scale_shape))"]


# Files that cannot be used.


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("super().__init__()", "super().__init__(", "super().__init__(", "not valid Python"),
        ("import torch\n", "import torch\nimport no_such_module\n", "import no_such_module", "ModuleNotFoundError"),
        ("class Model", "class Net", "", "no nn.Module named Model; it has Net: name one as FILE.py:Net"),
        ("def get_inputs", "def inputs", "", "no function get_inputs()"),
        ("[10, 12, 3, -2.0, 2.0]", "[10, 12, 3]", "def __init__(self, width_in, width_out, groups, low, high):", "get_init_inputs gives 3 values"),
        ("[10, 12, 3, -2.0, 2.0]", "[10, 12, 5, -2.0, 2.0]", "self.gn = nn.GroupNorm(groups, width_out)", "failed: ValueError"),
        ("[10, 12, 3, -2.0, 2.0]", "[10, 12, 3, None, 'a']", "def __init__(self, width_in, width_out, groups, low, high):", "high = 'a'"),
        ("return [torch.rand(6, 10)]", "return [torch.rand(6, 10), torch.rand(6)]", "def get_inputs():", "get_inputs gives 2 values"),
        ("torch.rand(6, 10)", "torch.rand(6, 10, device='no')", "return [torch.rand(6, 10, device='no')]", "get_inputs() failed"),
        ("torch.rand(6, 10)", "torch.rand(6, 10).half()", "def get_inputs():", "float16"),
        ("torch.rand(6, 10)", "torch.rand(6, 10, 2)", "def get_inputs():", "shape (6, 10, 2)"),
        ("torch.rand(6, 10)", "torch.rand(6, 9)", "return self.act(self.gn(self.fc(x)))", "get_inputs gives x of (6, 9); the chain takes (6, 10)"),
        ("return self", "if x.sum() > 0:\n            return x\n        return self", "if x.sum() > 0:", "course depends on what x holds"),
        ("return self", "for row in x:\n            x = row\n        return self", "for row in x:", "course depends on what x holds"),
        ("self, x)", "self, x, mask)", "", "forward takes mask beside x"),
        ("return self.act(self.gn(self.fc(x)))", "return self.act(self.gn(self.fc(x))), x", "return self.act(self.gn(self.fc(x))), x", "and nothing else"),
        ("self.gn(self.fc(x))", "self.fc(x)", "self.gn = nn.GroupNorm(groups, width_out)", "self.gn holds parameters or buffers that forward never uses"),
        ("self.gn(self.fc(x))", "self.gn(self.gn(self.fc(x)))", "return self.act(self.gn(self.gn(self.fc(x))))", "self.gn is applied twice"),
        ("nn.GroupNorm(groups, width_out)", "nn.BatchNorm1d(width_out)", "return self.act(self.gn(self.fc(x)))", "BatchNorm1d (self.gn) is no operator"),
        ("self.fc(x)", "F.linear(x, self.fc.weight, self.fc.bias)", "return self.act(self.gn(F.linear(x, self.fc.weight, self.fc.bias)))", "nn.Linear"),
        ("low, high):", "low, high, unused=0.5):", "def __init__(self, width_in, width_out, groups, low, high, unused=0.5):", "reaches no operator"),
        ("self.act(", "(1 / ", "return (1 / self.gn(self.fc(x)))", "a number divided by the chain's value"),
        ("self.act(", "(0.1 * self.act.low / ", "", "forward cannot be traced"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(old, new, line, message, tmp_path):
    text = LINEAR.replace(old, new)
    if "unused" in new:
        text = text.replace("-2.0, 2.0]", "-2.0, 2.0, 0.75]")
    found = faults(tmp_path, text)
    assert any(message in said and (not line or where == line) for where, said in found), found


def test_missing_parts_are_told_together(tmp_path):
    assert [message.split(";")[0] for _, message in faults(tmp_path, "import torch\n")] == [
        "the file defines no function get_init_inputs(), which returns the list of Model's arguments",
        "the file defines no function get_inputs(), which returns a list with x",
        "the file defines no nn.Module named Model",
    ]


def test_parameters_out_of_order(tmp_path):
    early = BIAS.replace("        self.shift = nn.Parameter(torch.randn(shape))\n", "").replace(
        "        self.proj =", "        self.shift = nn.Parameter(torch.randn(shape))\n        self.proj ="
    )
    ((line, message),) = faults(tmp_path, early)
    assert line == "self.shift = nn.Parameter(torch.randn(shape))" and "self.shift is created before self.proj (line 13), but used after it" in message
    assert "draws random numbers in the order of creation" in message
    constant = early.replace("torch.randn(shape)", "torch.zeros(shape)")
    assert chain(tmp_path, constant)[1]["add"]["init"] == "zeros"  # draws nothing, and state_dict lists bare parameters first anyway
    norm_first = LINEAR.replace("        self.fc = nn.Linear(width_in, width_out)\n", "").replace(
        "        self.act =", "        self.fc = nn.Linear(width_in, width_out)\n        self.act ="
    )
    ((line, message),) = faults(tmp_path, norm_first)
    assert line.startswith("self.gn =") and "state_dict" in message


@pytest.mark.parametrize("fill", ["torch.randn(shape) * 0.02", "torch.full(shape, 0.5)", "torch.empty(shape).normal_(1.0)"])
def test_other_initialisers_are_refused(fill, tmp_path):
    ((line, message),) = faults(tmp_path, BIAS.replace("torch.randn(shape)", fill))
    assert line.startswith("self.shift =") and "it has randn, rand, ones and zeros, unscaled" in message


def test_weights_that_the_constructor_changes_are_found_by_the_check(tmp_path):
    text = LINEAR.replace("        self.act =", "        nn.init.constant_(self.gn.weight, 0.5)\n        self.act =")
    ((line, message),) = faults(tmp_path, text)
    assert line.startswith("self.gn =") and message.startswith("gn.weight starts with other values")
    assert read(tmp_path, text, check=False).yaml


def test_what_tracing_does_not_see_is_found_by_the_check(tmp_path):
    hidden = LINEAR.replace("return self.act(", "y = x\n        y += 1\n        return self.act(")  # changes x too, which torch.fx does not record
    assert "differs from the file's" in faults(tmp_path, hidden)[0][1]


def test_several_faults_are_told_at_once_in_the_order_of_lines(tmp_path):
    text = CONV.replace("torch.ones(scale_shape)", "torch.full(scale_shape, 3.0)")
    text = text.replace("return x.clamp(self.lowest, self.highest)", "return torch.cumsum(x.softmax(1), 1)")
    found = read(tmp_path, text.replace("torch.rand(2, 3, 11, 13)", "torch.rand(2, 3, 11, 13, dtype=torch.float64)"))
    assert len(found.faults) == 4 and [f.line for f in found.faults] == sorted(f.line for f in found.faults)


def test_sizes_that_forward_asks_for_are_told_once(tmp_path):
    text = LINEAR.replace("return self.act(", "half = x.shape[1] // 2\n        x = x.view(-1, half)\n        return self.act(")
    assert [line for line, _ in faults(tmp_path, text)] == ["half = x.shape[1] // 2", "x = x.view(-1, half)"]
    ((line, _), (again, _)) = faults(tmp_path, LINEAR.replace("return self.act(", "assert x.shape[1] == 10\n        return self.act("))
    assert line == again == "assert x.shape[1] == 10"


def test_faults_of_the_spec_come_with_the_line_of_the_file(tmp_path):
    text = LINEAR.replace("self.act(self.gn(self.fc(x)))", "self.act(self.fc(x))").replace("        self.gn = nn.GroupNorm(groups, width_out)\n", "")
    ((line, message),) = faults(tmp_path, text.replace("groups, low", "low").replace("12, 3,", "12,"))
    assert line == "return self.act(self.fc(x))" and "has no group_norm" in message


# The command.


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "codegen.from_module", *arguments]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(TOP), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)


def test_names_and_targets():
    names = {"30_Gemm_GroupNorm.py": "gemm_groupnorm", "7.py": "layer", "class.py": "layer_class"}
    assert {file: default_name(Path(file)) for file in names} == names
    assert split_target("a/b.py:Net") == (Path("a/b.py"), "Net") and split_target("a/b.py") == (Path("a/b.py"), "Model")


def test_the_command_writes_a_spec_and_its_package(tmp_path):
    (tmp_path / "12_My Layer.py").write_text(LINEAR.replace("class Model", "class Net").replace("import torch\n", "import torch\nprint('noise')\n", 1))
    done = run(tmp_path, "12_My Layer.py:Net", "--out", "specs", "--precision", "bf16", "--generate")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("specs/my_layer.yaml: linear -> group_norm -> hardtanh, x (6, 10) -> y (6, 12)") and "noise" not in done.stdout
    assert load_spec(tmp_path / "specs" / "my_layer.yaml").precision.name == "bf16"
    assert (tmp_path / "generated" / "my_layer_bf16" / "manifest.json").is_file()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("__")] == []  # importing leaves nothing behind


def test_the_command_replaces_another_spec_only_when_told(tmp_path):
    (tmp_path / "layer.py").write_text(LINEAR)
    (tmp_path / "layer.yaml").write_text("mine")
    refused = run(tmp_path, "layer.py", "--no-check")
    assert refused.returncode == 1 and "exists and is another spec" in refused.stderr and (tmp_path / "layer.yaml").read_text() == "mine"
    assert run(tmp_path, "layer.py", "--no-check", "--force").returncode == 0
    assert "(unchanged)" in run(tmp_path, "layer.py", "--no-check").stdout


def test_the_command_reports_faults_and_crashes(tmp_path):
    (tmp_path / "bad.py").write_text(LINEAR.replace("self.act(", "torch.cumsum(").replace("(x)))", "(x)), 1)"))
    done = run(tmp_path, "bad.py")
    assert done.returncode == 2 and done.stderr.startswith("bad.py:14: cumsum is no operator of the grammar") and "the grammar has linear," in done.stderr
    assert not list(tmp_path.glob("*.yaml"))
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    done = run(tmp_path, "dies.py")
    assert done.returncode == 1 and "ended with status 3" in done.stderr
    assert run(tmp_path, "none.py").returncode == 1


def test_the_help_warns_that_the_file_is_run(tmp_path):
    assert "the file is imported and its Model constructed and run" in " ".join(run(tmp_path, "--help").stdout.split())
