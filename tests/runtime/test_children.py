"""A child module that does more than hold parameters: it takes effect, or the call says what would be lost."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from runtime import CallError

pytestmark = pytest.mark.usefixtures("kept_builds")

CHAIN = [
    {"linear": {"name": "gemm", "in_features": 24, "out_features": 32}}, {"group_norm": {"name": "group_norm", "num_groups": 4}},
    {"hardtanh": {"min_val": -0.7, "max_val": 0.7}},
]  # fmt: skip
NO_BIAS = [
    {"conv2d": {"name": "conv", "in_channels": 3, "out_channels": 8, "kernel_size": 3, "bias": False}},
    {"group_norm": {"name": "norm", "num_groups": 2, "affine": False}},
]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 sums over 24 products and groups of 8 values


@pytest.fixture(params=["one batch", "several batches"])
def package(request, shared):
    return shared(CHAIN, batch=8 if request.param == "one batch" else [8, 16])


@pytest.fixture
def pair(package):
    """The model, and PyTorch's with the same weights."""
    torch.manual_seed(0)
    model = package.ModelNew(*package.get_init_inputs())
    reference = package.Model(*package.get_init_inputs())
    reference.load_state_dict(model.state_dict())
    return model, reference


@pytest.fixture
def x():
    return torch.randn(8, 24)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def refused(model, x) -> str:
    """The sentence with which a call refuses, the same compiled and exported."""
    with pytest.raises(CallError) as caught:
        model(x)
    text = str(caught.value)
    with torch.no_grad(), pytest.raises(CallError) as caught:
        model(x)
    assert str(caught.value) == text
    torch._dynamo.reset()
    with pytest.raises(CallError) as caught:
        torch.compile(model, backend="eager")(x)
    assert str(caught.value) == text
    for call in (lambda: torch.compile(model, backend="eager", fullgraph=True)(x), lambda: torch.export.export(model, (x,), strict=False)):
        torch._dynamo.reset()
        with pytest.raises(Exception) as caught:
            call()
        assert text in str(caught.value).replace("\\'", "'"), str(caught.value)
    return text


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) + 1


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


REFUSALS = {
    "hook": (lambda m: m.gemm.register_forward_hook(lambda *_: None), "gemm: .*the forward hook .*register it on the model itself"),
    "pre-hook": (lambda m: m.gemm.register_forward_pre_hook(lambda *_: None), "gemm: .*the forward pre-hook "),
    "backward hook": (lambda m: m.group_norm.register_full_backward_hook(lambda *_: None), "group_norm: .*the backward hook "),
    "backward pre-hook": (lambda m: m.gemm.register_full_backward_pre_hook(lambda *_: None), "gemm: .*the backward pre-hook "),
    "eps": (lambda m: setattr(m.group_norm, "eps", 1.0), "group_norm: .*eps = 1.0 where 1e-05 was folded into the kernels"),
    "groups": (lambda m: setattr(m, "group_norm", nn.GroupNorm(8, 32)), "group_norm: .*num_groups = 8 where 4 was folded"),
    "adapter": (lambda m: setattr(m, "gemm", Adapter(m.gemm)), "gemm: .*a Adapter in place of the Linear.*merge an adapter"),
    "subclass": (lambda m: setattr(m, "gemm", Doubled(24, 32)), "gemm: .*a Doubled with a forward of its own"),
    "instance": (lambda m: setattr(m.gemm, "forward", lambda x: x), "gemm: .*a forward set on the instance"),
    "nothing": (lambda m: setattr(m, "gemm", None), "gemm: .*found nothing.*put the Linear back"),
    "removed": (lambda m: delattr(m, "gemm"), "gemm: .*found nothing.*put the Linear back"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_a_child_would_do_is_refused(pair, x, kind):
    model, _ = pair
    change, pattern = REFUSALS[kind]
    change(model)
    text = refused(model, x)
    assert re.search(pattern, text), text


def test_a_removed_hook_leaves_nothing(pair, x):
    model, _ = pair
    want = model(x)
    handle = model.gemm.register_forward_hook(lambda *_: None)
    with pytest.raises(CallError):
        model(x)
    handle.remove()
    assert torch.equal(model(x), want)


def test_changed_after_a_capture(pair, x):
    """What a compiler guards brings the sentence too."""
    model, _ = pair
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        compiled(x)
        model.group_norm.eps = 1.0
        with pytest.raises(CallError, match="eps = 1.0"):
            compiled(x)
        model.group_norm.eps = 1e-5
        compiled(x)
        model.gemm = Adapter(model.gemm)
        with pytest.raises(CallError, match="Adapter"):
            compiled(x)


def test_a_child_of_the_same_kind_is_taken(pair, x):
    model, reference = pair
    torch.manual_seed(1)
    for m in pair:
        m.gemm = nn.Linear(24, 32)
    model.gemm.load_state_dict(reference.gemm.state_dict())
    torch.testing.assert_close(model(x), reference(x), **TOLERANCE)


def test_without_parameters_a_child_is_looked_at_as_well(shared):
    """A norm without affine parameters, and a bias where there was none."""
    package = shared(NO_BIAS, batch=2)
    model = package.ModelNew(*package.get_init_inputs())
    (x,) = package.get_inputs()
    model(x)
    model.norm.eps = 0.5
    assert "norm: " in refused(model, x)
    model.norm.eps = 1e-5
    model.conv.bias = nn.Parameter(torch.ones(8))
    assert "a bias, which the kernels were generated without" in refused(model, x)
    model.conv.bias = None
    model.conv.padding_mode = "circular"
    assert "padding_mode = 'circular'" in refused(model, x)


# ---- what computes a parameter takes effect ------------------------------------------------------------------------------


def _old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(module)


COMPUTED = {
    "pruning": (lambda m: prune.ln_structured(m, "weight", 0.5, n=1, dim=0), "weight_orig"),
    "pruned twice": (lambda m: [prune.random_unstructured(m, "bias", 0.3), prune.l1_unstructured(m, "weight", 0.5)], "weight_orig"),
    "weight_norm": (_old_weight_norm, "weight_g"),
    "spectral_norm": (nn.utils.spectral_norm, "weight_orig"),
    "parametrize": (parametrizations.weight_norm, "parametrizations.weight.original0"),
}


def computed(pair, kind):
    model, reference = pair
    change, name = COMPUTED[kind]
    for m in pair:
        torch.manual_seed(3)
        change(m.gemm)
    reference.load_state_dict(model.state_dict())
    for m in pair:
        m.eval()  # spectral_norm iterates in training, in each call
        with torch.no_grad():
            m.gemm.get_parameter(name).mul_(1.7)
    return name


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_computed_weight_takes_effect(pair, x, kind):
    model, reference = pair
    name = computed(pair, kind)
    with torch.no_grad():
        want = reference(x)
        torch.testing.assert_close(model(x), want, **TOLERANCE)
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), want, **TOLERANCE)
        for strict in (True, False):
            torch.testing.assert_close(torch.export.export(model, (x,), strict=strict).module()(x), want, **TOLERANCE)
    for _ in range(3):  # training steps, each with a graph of its own
        for m in pair:
            m.zero_grad()
            m(x).square().sum().backward()
            with torch.no_grad():
                m.gemm.get_parameter(name).sub_(m.gemm.get_parameter(name).grad, alpha=1e-3)
        torch.testing.assert_close(model.gemm.get_parameter(name), reference.gemm.get_parameter(name), rtol=1e-3, atol=1e-4)


def test_spectral_norm_iterates_once_for_each_call(pair, x):
    model, reference = pair
    for m in pair:
        torch.manual_seed(3)
        nn.utils.spectral_norm(m.gemm)
        m.train()
        for _ in range(3):
            m(x)
    torch.testing.assert_close(model.gemm.weight_u, reference.gemm.weight_u)


# ---- the model's own hooks -----------------------------------------------------------------------------------------------


def test_hooks_of_the_model_work_as_torch_says(pair, x):
    seen = []
    for m in pair:
        m.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        m.register_forward_hook(lambda _, __, y: y + 1)
        m.register_full_backward_hook(lambda _, __, grads: seen.append(grads[0].clone()))
        m(x.requires_grad_()).sum().backward()
    model, reference = pair
    torch.testing.assert_close(model(x), reference(x), **TOLERANCE)
    assert len(seen) == 2 and torch.equal(*seen)


def test_hooks_for_all_modules_see_the_model(pair, x):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        pair[0](x)
    finally:
        handle.remove()
    assert seen == [pair[0]]


def test_copies_are_looked_at_too(pair, x):
    model, _ = pair
    other = copy.deepcopy(model)
    other.group_norm.eps = 1.0
    refused(other, x)
    model(x)
    with pytest.raises(CallError, match="eps"):
        copy.deepcopy(other)(x)


def test_parametrize_of_the_norm(pair, x):
    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    for m in pair:
        parametrize.register_parametrization(m.group_norm, "weight", Half())
    torch.testing.assert_close(pair[0](x), pair[1](x), **TOLERANCE)
