"""What a file does beside its forward, in gradients, hooks and modes, is kept by the spec or refused at its line; and one fault is told once."""

import pytest

from tests.codegen.module_files import BIAS, LINEAR, faults, read

CALL = "return self.act(self.gn(self.fc(x)))"
AFTER = "        self.act ="


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        (CALL, "x = self.fc(x)\n        with torch.no_grad():\n            x = self.gn(x)\n        return self.act(x)", "x = self.gn(x)", "without gradients"),
        (CALL, "x = self.fc(x)\n        with torch.inference_mode():\n            x = self.gn(x)\n        return self.act(x)", "x = self.gn(x)", "without gradients"),
        ("    def forward", "    @torch.no_grad()\n    def forward", CALL, "without gradients"),
        (CALL, "with torch.autocast('cpu', torch.bfloat16):\n            x = self.fc(x)\n        return self.act(self.gn(x))", "x = self.fc(x)", "autocast"),
        (AFTER, "        self.gn.requires_grad_(False)\n" + AFTER, "self.gn =", "gn.weight does not require gradients"),
        (AFTER, "        self.gn.bias.requires_grad = False\n" + AFTER, "self.gn =", "gn.bias does not require gradients"),
        (AFTER, "        self.fc.register_forward_hook(lambda m, i, o: None)\n" + AFTER, "self.fc =", "self.fc has hooks"),
        (AFTER, "        self.gn.register_full_backward_hook(lambda m, i, o: None)\n" + AFTER, "self.gn =", "self.gn has hooks"),
        (AFTER, "        self.fc.weight.register_hook(lambda g: 2 * g)\n" + AFTER, "self.fc =", "fc.weight has hooks of its own"),
        (AFTER, "        self.register_forward_pre_hook(lambda m, i: None)\n" + AFTER, "def __init__", "Model has hooks"),
        (AFTER, "        self.eval()\n" + AFTER, "def __init__", "eval mode"),
        (AFTER, "        self.fc.forward = lambda x: 2 * x\n" + AFTER, CALL, "a forward of its own"),
        (CALL, "return self.act(self.gn(self.fc(x)).detach())", "return", "detach cuts off the gradient"),
        (CALL, "return self.act(self.gn(self.fc(x))).detach()", "return", "detach cuts off the gradient"),
    ],
)  # fmt: skip
def test_what_the_generated_layer_would_not_do_is_refused_at_its_line(old, new, line, said, tmp_path):
    for check in (True, False):
        found = faults(tmp_path, LINEAR.replace(old, new), check)
        assert any(said in message and where.startswith(line) for where, message in found), found


HIDDEN = """\
class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        return v.clone()

    @staticmethod
    def backward(ctx, g):
        return g / 2


class Model"""


def test_a_gradient_that_tracing_does_not_see_is_found_by_the_check(tmp_path):
    text = LINEAR.replace("class Model", HIDDEN, 1).replace(CALL, "return self.act(self.gn(self.fc(x) if isinstance(x, torch.fx.Proxy) else Halved.apply(self.fc(x))))")
    ((_, said),) = faults(tmp_path, text)
    assert said.startswith("the gradient of ") and "differs from the file's" in said
    text = LINEAR.replace(CALL, "y = self.fc(x)\n        y = y if isinstance(x, torch.fx.Proxy) else y.detach()\n        return self.act(self.gn(y))")
    ((_, said),) = faults(tmp_path, text)
    assert said.startswith("the gradient of x: the file's Model gives none")


@pytest.mark.parametrize("mine", ["torch.clamp(v, -2.0, 2.0)", "torch.minimum(torch.maximum(v, torch.tensor(-2.0)), torch.tensor(2.0))"])
def test_a_gradient_that_differs_on_a_bound_alone_is_found(mine, tmp_path):
    """hardtanh's gradient is 0 on its bounds, clamp's is 1, and that of minimum 1/2."""
    text = LINEAR.replace(CALL, f"v = self.gn(self.fc(x))\n        return self.act(v) if isinstance(x, torch.fx.Proxy) else {mine}")
    ((_, said),) = faults(tmp_path, text)
    assert "the gradient of" in said and "where the norm gives" in said


def test_a_mode_that_forward_asks_for_is_found(tmp_path):
    text = LINEAR.replace(CALL, "v = self.act(self.gn(self.fc(x)))\n        return v if self.training else 2 * v")
    ((_, said),) = faults(tmp_path, text)
    assert "in eval mode" in said


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("y = torch.add(y, self.shift, alpha=2)", "alpha"),
        ("y = torch.cummax(y, 1)[0]", "cummax is no operator"),
        ("w = self.shift * 2\n        y = y + w", "parameters or constants alone"),
        ("y = y + self.shift / y.shape[1]", "parameters or constants alone"),
    ],
)
def test_what_follows_from_a_fault_is_none_of_its_own(line, told, tmp_path):
    found = faults(tmp_path, BIAS.replace("y = y + self.shift", line))
    assert len(found) == 1 and told in found[0][1], found


def test_sound_files_stay_sound(tmp_path):
    assert read(tmp_path, LINEAR).yaml and read(tmp_path, BIAS).yaml
