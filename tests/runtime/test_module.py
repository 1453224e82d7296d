"""A generated model as an nn.Module: what it accepts, what it says, and how it is copied."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from runtime import ArgumentError, CallError, GradientError, UnsupportedDeviceError

from .tiny_package import TinyPackage


@pytest.fixture
def model(tiny):
    return tiny.model()


def expected(model, x):
    return (x * model.scale).detach()


def message(error, call) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    return text


# ---- input ---------------------------------------------------------------------------------------------------------


def test_result(model, x):
    assert torch.equal(model(x), expected(model, x))


def test_each_call_returns_memory_of_its_own(model, x):
    with torch.no_grad():
        first, second = model(x), model(x + 1)
    assert torch.equal(first, expected(model, x)) and torch.equal(second, expected(model, x + 1))


def test_wrong_batch(model):
    assert message(CallError, lambda: model(torch.ones(2, 8))) == (
        "x: expected (4, 8) float32 on cpu, got (2, 8); this model was generated for batch 4 from specs/tiny.yaml; "
        "set batch: 2 and run make generate SPEC=specs/tiny.yaml."
    )


@pytest.mark.parametrize("shape", [(4, 7), (8,), (4, 8, 1), (1, 4, 8), (0, 8), ()])
def test_wrong_shape(model, shape):
    text = message(CallError, lambda: model(torch.ones(shape)))
    assert f"expected (4, 8) float32 on cpu, got {shape}; " in text and "make generate" in text


def test_wrong_dtype(model, x):
    text = message(CallError, lambda: model(x.half()))
    assert "got float16; pass x.to(torch.float32), or run make generate SPEC=specs/tiny.yaml PRECISION=fp16" in text


def test_wrong_device(model):
    text = message(CallError, lambda: model(torch.empty(4, 8, device="meta")))
    assert "on cpu, got device meta; move x to cpu" in text


@pytest.mark.parametrize("value", [None, 3, [[1.0] * 8] * 4])
def test_not_a_tensor(model, value):
    assert f"got {type(value).__name__}; pass a torch.Tensor" in message(CallError, lambda: model(value))


def test_sparse_input(model, x):
    assert "pass x.to_dense()" in message(CallError, lambda: model(x.to_sparse()))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
        lambda x: torch.cat([torch.zeros(1), x.flatten()])[1:].view(4, 8),
        lambda x: x[:1].expand(4, 8),
        lambda x: x[:, :1].expand(4, 8),
        lambda x: x.flip(0),
        lambda x: torch._neg_view(x),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: nn.Parameter(x),
        lambda x: x.as_subclass(type("Plain", (torch.Tensor,), {})),
    ],
    ids=["transposed", "strided", "offset", "expanded rows", "expanded columns", "flipped", "negated", "conjugate", "parameter", "subclass"],
)
def test_any_view_of_the_input(model, x, view):
    x = view(x)
    with torch.no_grad():
        assert torch.equal(torch.Tensor(model(x)), expected(model, torch.Tensor(x.resolve_neg().clone())))


def test_awkward_parameters(model, x):
    want = expected(model, x)
    misaligned = torch.cat([torch.zeros(1), model.scale.detach()])[1:]
    strided = torch.stack([model.scale.detach()] * 3, dim=1)[:, 1]
    for value in (misaligned, strided):
        model.scale.data = value
        assert torch.equal(model(x), want)


def test_the_kernel_reads_the_current_value_of_a_parameter(model, x):
    with torch.no_grad():
        model.scale.mul_(2)
        assert torch.equal(model(x), expected(model, x))
        model.scale = nn.Parameter(torch.ones(8))
        assert torch.equal(model(x), x)


# ---- parameters and constructor ------------------------------------------------------------------------------------


def test_another_dtype_is_accepted_by_to_and_refused_by_forward(model, x):
    model.half()
    text = message(CallError, lambda: model(x))
    assert "scale: expected (8,) float32 on cpu, where x is, got (8,) float16 on cpu; " in text
    assert "model.to(torch.float32)" in text and "PRECISION=fp16" in text
    assert torch.equal(model.float()(x), expected(model, x))


def test_another_device_is_accepted_by_to_and_refused_by_forward(model, x):
    model.to("meta")
    text = message(CallError, lambda: model(x))
    assert "got (8,) float32 on meta; it has no values yet: give it some with model.load_state_dict(..., assign=True)" in text
    assert "model.to_empty(device='cpu')" in text


def test_another_shape_or_none_for_a_parameter(model, x):
    model.scale = nn.Parameter(torch.ones(4))
    assert "scale: expected (8,)" in message(CallError, lambda: model(x))
    model.scale = None
    assert "got None" in message(CallError, lambda: model(x))


@pytest.mark.parametrize(
    "args, found",
    [((16, (8,)), "features: expected 8, got 16"), ((8, (4,)), "scale_shape: expected (8,), got (4,)"),
     ((True, (8,)), "got True"), (("8", (8,)), "got '8'"), ((8, 8), "got 8"), ((8, "8"), "got '8'")],
)  # fmt: skip
def test_another_constructor_argument(tiny, args, found):
    text = message(ArgumentError, lambda: tiny.model_class()(*args))
    assert found in text and "specs/tiny.yaml" in text and "make generate SPEC=specs/tiny.yaml" in text


@pytest.mark.parametrize("args", [(8, [8]), (8.0, torch.Size([8]))])
def test_equal_constructor_arguments(tiny, args):
    tiny.model_class()(*args)


def test_a_refused_argument_compiles_nothing(tiny, counting_gxx):
    with pytest.raises(ArgumentError):
        tiny.model_class()(9, (8,))
    assert counting_gxx.compiled == []


def test_nothing_is_built_under_the_meta_device(tiny, x, counting_gxx):
    ModelNew = tiny.model_class()
    with torch.device("meta"):
        model = ModelNew(8, (8,))
    assert counting_gxx.compiled == []
    assert "it has no values yet" in message(CallError, lambda: model(x)) and counting_gxx.compiled == []
    model.to_empty(device="cpu")
    assert counting_gxx.compiled == []
    model.build()
    assert len(counting_gxx.compiled) == 1
    model.load_state_dict({"scale": torch.arange(8.0)})
    assert torch.equal(model(x), expected(model, x))


def test_a_model_from_the_meta_device_builds_at_its_first_call(tiny, x, counting_gxx):
    """As soon as the parameters have values: nothing else says for which devices to build."""
    ModelNew = tiny.model_class()
    with torch.device("meta"):
        model = ModelNew(8, (8,))
    model.load_state_dict({"scale": torch.arange(8.0)}, assign=True)
    assert counting_gxx.compiled == []
    assert torch.equal(model(x), x * torch.arange(8.0))
    model(x)
    assert len(counting_gxx.compiled) == 1


def test_where_nothing_can_be_built_a_late_build_says_why(tiny, x, monkeypatch):
    with torch.device("meta"):
        model = tiny.model_class()(8, (8,))
    model.load_state_dict({"scale": torch.arange(8.0)}, assign=True)
    monkeypatch.setenv("TARGETS", "sm_70")
    assert "sm_70 is no target" in message(UnsupportedDeviceError, lambda: model(x))


# ---- copies --------------------------------------------------------------------------------------------------------


def test_deepcopy_shares_the_kernels_and_not_the_parameters(model, x):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.scale.zero_()
    assert torch.equal(model(x), expected(model, x)) and not other(x).any()
    assert other._loaded is model._loaded


def test_pickle(counting_gxx, model, x):
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), expected(model, x))
    assert len(counting_gxx.compiled) == 1


def test_an_unpickled_model_follows_its_class_to_another_folder(tiny, x, tmp_path):
    model = tiny.model()
    data = pickle.dumps(model)
    tiny.path.rename(tmp_path / "moved")
    TinyPackage(tmp_path / "moved").model_class(type(model).__module__)
    assert torch.equal(pickle.loads(data)(x), expected(model, x))


def test_state_dict_is_the_original_modules(model, x):
    reference = nn.Module()
    reference.scale = nn.Parameter(torch.full((8,), 3.0))
    model.load_state_dict(reference.state_dict(), strict=True)
    reference.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(x), x * 3)
    model.load_state_dict({"scale": torch.full((8,), 5.0)}, strict=True, assign=True)
    assert torch.equal(model(x), x * 5)


def test_functional_call_and_parametrize(model, x):
    other = torch.func.functional_call(model, {"scale": torch.full((8,), 7.0)}, (x,))
    assert torch.equal(other, x * 7)

    class Double(nn.Module):
        def forward(self, scale):
            return 2 * scale

    parametrize.register_parametrization(model, "scale", Double())
    with torch.no_grad():
        assert torch.equal(model(x), x * model.scale)


def test_autocast_changes_nothing(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.float32 and torch.equal(y, expected(model, x))


# ---- gradients -----------------------------------------------------------------------------------------------------


def test_backward_is_refused_for_the_parameters(model, x):
    y = model(x)
    assert y.requires_grad
    text = message(GradientError, lambda: y.sum().backward())
    assert re.search(r"gradients are not generated yet for tiny on cpu; .*torch.no_grad\(\)", text)


def test_backward_is_refused_for_the_input(model, x):
    model.requires_grad_(False)
    assert not model(x).requires_grad
    message(GradientError, lambda: model(x.requires_grad_()).sum().backward())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_no_graph(model, x, mode):
    with mode():
        y = model(x)
    assert y.grad_fn is None and not y.requires_grad


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own forward_ad uses it
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused(model, x, grad):
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        message(GradientError, lambda: model(forward_ad.make_dual(x, x)))
        assert torch.equal(model(x), expected(model, x))


def test_a_function_transform_without_a_rule_is_loud(model, x):
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: model(x).sum())(x)


def test_vmap(model, x):
    xs = torch.stack([x, -x])
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(model)(xs), xs * model.scale)


def test_vmap_over_parameters(model, x):
    """Tensors that a transform wraps are of the plain type, and have no address."""
    scales = torch.stack([model.scale.detach(), -model.scale.detach()])
    with torch.no_grad():
        y = torch.func.vmap(lambda scale: torch.func.functional_call(model, {"scale": scale}, (x,)))(scales)
    assert torch.equal(y, x * scales[:, None])
