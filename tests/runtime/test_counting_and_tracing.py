"""What counts a model's FLOPs, what traces it symbolically, and tensors that are no dense arrays."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

from runtime import CallError
from runtime.flops import flops_of_a_sample
from tests import tiers

from .generated_packages import CHAINS

pytestmark = pytest.mark.usefixtures("kept_builds")

GROUPED = [
    {"conv2d": {"name": "conv", "in_channels": 4, "out_channels": 8, "kernel_size": [3, 2], "stride": 2, "padding": 1, "bias": False}},
    {"group_norm": {"name": "norm", "num_groups": 2}}, "relu",
]  # fmt: skip
ALL = {**CHAINS, "strided": GROUPED}
WITH_BATCHES = {"one": 6, "several": [3, 6]}


@pytest.fixture(params=ALL)
def package(request, shared):
    return shared(ALL[request.param])


@pytest.fixture
def model(package):
    return package.ModelNew(*package.get_init_inputs())


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


# ---- FLOPs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batches", "chain"), tiers.quick(itertools.product(WITH_BATCHES, ALL), ("one", "linear"), ("several", "conv"), ("one", "strided")))
def test_a_model_counts_as_its_reference_does(shared, chain, batches):
    package = shared(ALL[chain], batch=WITH_BATCHES[batches])
    model, reference = package.ModelNew(*package.get_init_inputs()), package.Model(*package.get_init_inputs())
    (x,) = package.get_inputs()
    for rows in (x, x[:3]) if batches == "several" else (x,):
        with torch.no_grad():
            assert flops(lambda: model(rows)) == flops(lambda: reference(rows)) > 0
        assert flops(lambda: model(rows).sum().backward()) == flops(lambda: reference(rows).sum().backward())
        asked = rows.clone().requires_grad_()
        assert flops(lambda: model(asked).sum().backward()) == flops(lambda: reference(asked).sum().backward())


def test_every_operator_has_a_formula(shared):
    """Also those that only CUDA runs: a producer computed again counts once, each derivative as much as the forward."""
    package = shared(ALL["strided"], targets=("cpu", "sm_80"))
    operators = package.ModelNew(*package.get_init_inputs())._operators
    cuda = next(entry for entry in operators.package.manifest.backward.values() if entry.recomputes)
    each = 6 * flops_of_a_sample(operators.package.manifest)
    counted = torch.utils.flop_counter.flop_registry
    shapes = {"x": operators.package.manifest.input.shape, "saved": cuda.saved[0].shape}
    of = lambda name: counted[getattr(getattr(torch.ops, operators.namespace), name)]  # noqa: E731
    x, saved = torch.empty(shapes["x"], device="meta"), torch.empty(shapes["saved"], device="meta")
    weight = torch.empty(8, 4, 3, 2, device="meta")
    assert each == 2 * saved.numel() * weight[0].numel()
    assert of("produce")(x, weight, None) == of("forward")(x, weight) == of("forward_saving")(x, weight) == each
    assert [of("derive")(saved, x, weight, wanted) for wanted in ([True, True, False], [False, True, True], [False] * 3)] == [2 * each, each, 0]
    assert of("backward")(saved, saved) == 0


# ---- symbolic traces -----------------------------------------------------------------------------------------------------


def test_a_symbolic_trace_calls_the_operator(package, model):
    (x,) = package.get_inputs()
    around = nn.Sequential(model, nn.ReLU())
    traced = torch.fx.symbolic_trace(around)
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [model._operators.forward]
    with torch.no_grad():
        assert torch.equal(traced(x), around(x))
    traced(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_symbolic_trace_of_a_pruned_model_leaves_the_model_alone(shared):
    package = shared(CHAINS["linear"])
    model = package.ModelNew(*package.get_init_inputs())
    prune.l1_unstructured(model.gemm, "weight", 0.5)
    (x,) = package.get_inputs()
    traced = torch.fx.symbolic_trace(nn.Sequential(model))
    assert isinstance(model.gemm.weight, torch.Tensor)
    with torch.no_grad():
        model.gemm.weight_orig.mul_(3)
        assert torch.equal(traced(x), model(x))


def test_a_symbolic_trace_of_several_batches_is_refused(shared):
    package = shared(CHAINS["linear"], batch=[3, 6])
    model = package.ModelNew(*package.get_init_inputs())
    with pytest.raises(CallError, match="chooses its kernels by the batch of x, which a symbolic trace does not know"):
        torch.fx.symbolic_trace(nn.Sequential(model))


# ---- dense tensors -------------------------------------------------------------------------------------------------------

KINDS = {
    "CSR": (lambda t: t.to_sparse_csr(), r"layout torch.sparse_csr; .*\.to_dense\(\)"),
    "COO": (lambda t: t.to_sparse(), r"layout torch.sparse_coo; .*\.to_dense\(\)"),
    "mkldnn": (lambda t: t.to_mkldnn(), r"layout torch._mkldnn; .*\.to_dense\(\)"),
    "nested": (lambda t: torch.nested.nested_tensor(list(t)), "a nested tensor; .*one dense tensor"),
    "quantised": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), r"a quantised tensor \(qint8\); .*\.dequantize\(\)"),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", ["x", "gemm.weight"])
@pytest.mark.parametrize("batch", [6, [3, 6]])
def test_other_than_dense_is_refused(shared, kind, which, batch):
    package = shared(CHAINS["linear"], batch=batch)
    model = package.ModelNew(*package.get_init_inputs())
    (x,) = package.get_inputs()
    make, pattern = KINDS[kind]
    if which == "x":
        x = make(x)
    else:
        model.gemm.weight = nn.Parameter(make(model.gemm.weight.detach()), requires_grad=False)
    pattern = f"{which}.*expected .*, got {pattern}"
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(CallError, match=pattern):
            model(x)
    with pytest.raises(Exception, match=pattern):
        torch.compile(model, backend="eager")(x)


@pytest.mark.parametrize("which", ["x", "gemm.weight"])
def test_zeros_without_memory_are_zeros(shared, which):
    package = shared(CHAINS["linear"])
    model = package.ModelNew(*package.get_init_inputs())
    (x,) = package.get_inputs()
    if which == "x":
        zeros, x = torch.zeros_like(x), torch._efficientzerotensor(x.shape)
        want = model(zeros)
    else:
        with torch.no_grad():
            want = copy.deepcopy(model)
            want.gemm.weight.zero_()
            want = want(x)
        model.gemm.weight = nn.Parameter(torch._efficientzerotensor(model.gemm.weight.shape), requires_grad=False)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            assert torch.equal(model(x), want)


class Wrapped(torch.Tensor):
    """A tensor that knows no operator, as those of quantisation libraries know few."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def __init__(self, tensor):
        self.inner = tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"{func} is not known")


def test_a_subclass_that_does_not_know_the_operator(shared):
    package = shared(CHAINS["linear"])
    model = package.ModelNew(*package.get_init_inputs())
    (x,) = package.get_inputs()
    model.gemm.weight = nn.Parameter(Wrapped(model.gemm.weight.detach()), requires_grad=False)
    with torch.no_grad(), pytest.raises(CallError, match="gemm.weight is a Wrapped, which does not know the operator .*pass a plain dense tensor"):
        model(x)
