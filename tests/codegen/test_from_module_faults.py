"""A PyTorch file that is no spec's layer: every reason why is told at its line. And the command, which reads, writes and reports."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from codegen.from_module import command
from codegen.from_module.command import default_name, split_target
from codegen.spec import load_spec
from tests.codegen.module_files import BIAS, CONV, LINEAR, TOP, chain, faults, read, spec_of
from tests.fsk import fsk

# Operators outside the grammar.


def test_a_branch_of_two_values_and_an_unknown_operator_are_both_named(tmp_path):
    text = CONV.replace(
        "x = self.pool(self.gn(self.filter(x)) * self.gain)\n        return x.clamp(self.lowest, self.highest)",
        "first = self.filter(x)\n        x = F.hardswish(torch.tanh(self.gn(first)))\n        x = torch.tanh(first) - x\n"
        "        return torch.cumsum(x, dim=1)",
    )
    found = dict(faults(tmp_path, text))
    assert "takes the value of line" in found["x = torch.tanh(first) - x"]
    assert found["return torch.cumsum(x, dim=1)"].startswith("cumsum is no operator")


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
        ("return [torch.rand(6, 10)]", "return [torch.rand(6, 10), torch.rand(6)]", "def forward(self, x):", "get_inputs gives 2 tensors, and forward takes 1"),
        ("torch.rand(6, 10)", "torch.rand(6, 10, device='no')", "return [torch.rand(6, 10, device='no')]", "get_inputs() failed"),
        ("torch.rand(6, 10)", "torch.rand(6, 10).half()", "def get_inputs():", "float16"),
        ("torch.rand(6, 10)", "torch.rand(6)", "def get_inputs():", "shape (6,)"),
        ("torch.rand(6, 10)", "torch.rand(6, 9)", "return self.act(self.gn(self.fc(x)))", "forward cannot be traced"),
        ("return self", "if x.sum() > 0:\n            return x\n        return self", "if x.sum() > 0:", "course depends on what x holds"),
        ("return self", "for row in x:\n            x = row\n        return self", "for row in x:", "course depends on what x holds"),
        ("self, x)", "self, x, mask)", "", "forward takes mask, and get_inputs gives 1 input"),
        ("return self.act(self.gn(self.fc(x)))", "return self.act(self.gn(self.fc(x))), x", "return self.act(self.gn(self.fc(x))), x", "and nothing else"),
        ("self.gn(self.fc(x))", "self.gn(self.gn(self.fc(x)))", "return self.act(self.gn(self.gn(self.fc(x))))", "self.gn is applied twice"),
        ("nn.GroupNorm(groups, width_out)", "nn.PReLU(width_out)", "return self.act(self.gn(self.fc(x)))", "PReLU (self.gn) is no operator"),
        ("self.fc(x)", "F.linear(x, self.fc.weight)", "return self.act(self.gn(F.linear(x, self.fc.weight)))", "all of those of one module"),
        ("self.act(", "(0.1 * self.act.low / ", "", "forward cannot be traced"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(old, new, line, message, tmp_path):
    text = LINEAR.replace(old, new)
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
    assert spec_of(tmp_path, read(tmp_path, early)).created == ("shift", "proj", "norm")  # random numbers are drawn in the order of creation
    constant = early.replace("torch.randn(shape)", "torch.zeros(shape)")
    assert chain(tmp_path, constant)[1]["add"]["init"] == "zeros"  # draws nothing, and state_dict lists bare parameters first anyway
    norm_first = LINEAR.replace("        self.fc = nn.Linear(width_in, width_out)\n", "").replace(
        "        self.act =", "        self.fc = nn.Linear(width_in, width_out)\n        self.act ="
    )
    assert spec_of(tmp_path, read(tmp_path, norm_first)).created == ("gn", "fc")  # state_dict has that order


def test_what_forward_never_uses_stays_in_state_dict(tmp_path):
    text = BIAS.replace("        self.squash", "        self.dead = nn.Parameter(torch.randn(features, 1))\n        self.spare = nn.Linear(features, 3)\n        self.squash")
    found = read(tmp_path, text)
    spec = spec_of(tmp_path, found)
    assert [(step.operator.name, step.name) for step in spec.unused] == [("parameter", "dead"), ("linear", "spare")]
    assert spec.created == ("proj", "shift", "dead", "spare", "norm") and len(found.notes) == 2
    ((line, message),) = faults(tmp_path, text.replace("nn.Linear(features, 3)", "nn.PReLU(3)"))
    assert line.startswith("self.spare") and "no word for what it holds" in message


def test_an_argument_that_reaches_nothing_is_ignored_with_a_note(tmp_path):
    found = read(tmp_path, LINEAR.replace("low, high):", "low, high, unused):").replace("-2.0, 2.0]", "-2.0, 2.0, 0.75]"))
    assert spec_of(tmp_path, found).ignored == ("unused",) and "reaches no operator" in found.notes[0].message


@pytest.mark.parametrize("fill", ["torch.randn(shape) * 0.02", "torch.arange(16.0)", "torch.empty(shape).normal_(1.0)"])
def test_other_initialisers_are_refused(fill, tmp_path):
    ((line, message),) = faults(tmp_path, BIAS.replace("torch.randn(shape)", fill))
    assert line.startswith("self.shift =") and "it has randn, rand and one number, unscaled" in message


def test_weights_that_the_constructor_changes_are_found_by_the_check(tmp_path):
    text = LINEAR.replace("        self.act =", "        nn.init.constant_(self.gn.weight, 0.5)\n        self.act =")
    ((line, message),) = faults(tmp_path, text)
    assert line.startswith("self.gn =") and message.startswith("gn.weight starts with other values")
    assert read(tmp_path, text, check=False).yaml


def test_what_tracing_does_not_see_is_found_by_the_check(tmp_path):
    hidden = LINEAR.replace("return self.act(", "y = x\n        y += 1\n        return self.act(")  # changes x too, which torch.fx does not record
    assert "differs from the file's" in faults(tmp_path, hidden)[0][1]


def test_several_faults_are_told_at_once_in_the_order_of_lines(tmp_path):
    text = CONV.replace("torch.ones(scale_shape)", "2 * torch.rand(scale_shape)").replace("return x.clamp", "x = x.logit()\n        return x.clamp")
    text = text.replace("return x.clamp(self.lowest, self.highest)", "return torch.cumsum(x.softmax(1), 1)")
    found = read(tmp_path, text)
    assert len(found.faults) == 3 and [f.line for f in found.faults] == sorted(f.line for f in found.faults)


def test_sizes_that_forward_asks_for_are_numbers(tmp_path):
    text = LINEAR.replace("return self.act(", "b, c = x.shape\n        x = x.view(b, c // 2, 2).view(x.size(0), -1)\n        return self.act(")
    assert chain(tmp_path, text)[:2] == [{"view": {"sizes": [0, 5, 2]}}, {"view": {"sizes": [0, -1]}}]
    asked = LINEAR.replace("return self.act(", "assert len(x) == 6 and x.dim() == 2 and x.numel() == 60\n        return self.act(")
    assert [next(iter(entry)) for entry in chain(tmp_path, asked)] == ["linear", "group_norm", "hardtanh"]


def test_faults_of_the_spec_come_with_the_line_of_the_file(tmp_path):
    ((line, message),) = faults(tmp_path, LINEAR.replace("-2.0, 2.0]", "2.0, 2.0 + 1e-12]"), check=False)
    assert line == "return self.act(self.gn(self.fc(x)))" and "must be less than" in message


# The command.


@pytest.fixture
def in_folder(tmp_path, monkeypatch) -> Callable[..., Result]:
    """The command in this process, which imports torch once; its worker is a process all the same."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: fsk("from-module", *arguments)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The command in a process of its own, as a user starts it."""
    words = [sys.executable, "-m", "fixed_shape_kernels", "from-module", *arguments]
    return subprocess.run(words, cwd=folder, env={"PYTHONPATH": str(TOP), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)


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


def test_the_command_replaces_another_spec_only_when_told(tmp_path, in_folder, monkeypatch):
    answers = []
    monkeypatch.setattr(command, "ask", lambda request, ask=command.ask: answers[0] if answers else answers.append(ask(request)) or answers[0])
    (tmp_path / "layer.py").write_text(LINEAR)
    (tmp_path / "layer.yaml").write_text("mine")
    refused = in_folder("layer.py", "--no-check")
    assert refused.exit_code == 1 and "exists and is another spec" in refused.output and (tmp_path / "layer.yaml").read_text() == "mine"
    assert in_folder("layer.py", "--no-check", "--force").exit_code == 0
    assert "(unchanged)" in in_folder("layer.py", "--no-check").output


def test_the_command_reports_faults_and_crashes(tmp_path, in_folder):
    (tmp_path / "bad.py").write_text(LINEAR.replace("self.act(", "torch.cumsum(").replace("(x)))", "(x)), 1)"))
    done = run(tmp_path, "bad.py")
    assert done.returncode == 2 and done.stderr.startswith("bad.py:14: cumsum is no operator of the grammar") and "the grammar has linear," in done.stderr
    assert not list(tmp_path.glob("*.yaml"))
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\n")
    done = in_folder("dies.py")
    assert done.exit_code == 1 and "ended with status 3" in done.output
    assert in_folder("none.py").exit_code == 1


def test_the_help_warns_that_the_file_is_run(tmp_path):
    assert "the file is imported and its Model constructed and run" in " ".join(run(tmp_path, "--help").stdout.split())
