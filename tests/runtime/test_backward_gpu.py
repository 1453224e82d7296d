"""Gradients on CUDA against float64 autograd: the emitted kernel for every operator and shape of pooling, whole models, and the shipped systems."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from codegen import index
from codegen.folder import write_if_different
from codegen.package import make_package
from codegen.render import render
from codegen.spec import load_spec
from runtime import GradientError
from tests.codegen.backward_chains import check
from tests.codegen.backward_cuda import build_on_gpu
from tests.codegen.cpu_chains import conv_chain, linear_chain, make_spec
from tests.codegen.test_cpu import ELEMENTWISE, POOLS, PRECISIONS

from .generated_packages import generate, import_from
from .test_gradients import error, gradients, saved_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")]  # torch's own modules

FACTOR = 1.5  # of eager's error: sums over a group are in fp32, as they are in eager
FLIPS = 16  # values so near to a kink, or to their rival in a window, that their last bit decides on which side they fall
LARGE = 1 << 20  # values of a gradient of which a few flips touch only a small share

LINEAR = [
    {"linear": {"name": "gemm", "in_features": 64, "out_features": 96}}, {"add": {"name": "bias", "shape": [96]}}, "mish",
    {"group_norm": {"name": "norm", "num_groups": 4}}, "silu", {"mul": {"name": "scale", "shape": [96]}},
]  # fmt: skip
CONV = [
    {"conv2d": {"name": "conv", "in_channels": 4, "out_channels": 8, "kernel_size": 3, "stride": [2, 1], "padding": 1, "groups": 2}}, "tanh",
    {"group_norm": {"name": "norm", "num_groups": 2}}, {"mul": {"name": "scale", "shape": [8, 1, 1], "init": "rand"}},
    {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}, "sigmoid",
]  # fmt: skip
SYSTEMS = {
    "gemm_groupnorm_hardtanh_small": "sm_80", "gemm_biasadd_hardtanh_mish_groupnorm_small": "sm_80", "conv2d_groupnorm_scale_maxpool_clamp_small": "sm_80",
    "gemm_groupnorm_hardtanh": "", "gemm_groupnorm_hardtanh_bf16": "", "gemm_biasadd_hardtanh_mish_groupnorm": "",
    "conv2d_groupnorm_scale_maxpool_clamp": "", "conv2d_groupnorm_scale_maxpool_clamp_fp16": "sm_80",
}  # fmt: skip


# ---- the emitted kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_operator(tmp_path, name):
    """On both sides of the norm at every precision, and around a pooling."""
    op = ELEMENTWISE[name]
    specs = [make_spec(tmp_path, linear_chain([op], [op], 7 * width, 7), 5, precision) for precision, width in zip(PRECISIONS, (17, 5, 48))]
    specs.append(make_spec(tmp_path, conv_chain([op], [op, {"max_pool2d": {"kernel_size": 2}}, op], 6, 3), 3, "fp32", (6, 7)))
    for backward in build_on_gpu(tmp_path, specs):
        check(backward, backward.chain.source(scale=2.0), FACTOR)


@pytest.mark.parametrize("name", POOLS)
def test_every_kind_of_window(tmp_path, name):
    arguments, size = POOLS[name]
    bounded = [{"hardtanh": {"min_val": -0.25, "max_val": 0.25}}, {"max_pool2d": arguments}, {"mul": {"value": 1.5}}]
    specs = [make_spec(tmp_path, conv_chain([], [{"max_pool2d": arguments}], 6, 3), 2, "fp32", size)]
    specs.append(make_spec(tmp_path, conv_chain([], bounded, 6, 3), 2, "bf16", size))
    for backward in build_on_gpu(tmp_path, specs):
        check(backward, backward.chain.source(), FACTOR)


def operands(prefix, shape):
    return [{"mul": {"name": f"{prefix}_scale", "shape": shape}}, {"add": {"name": f"{prefix}_bias", "shape": shape}}]


@pytest.mark.parametrize("pooled", [False, True])
def test_every_kind_of_team(tmp_path, pooled):
    """Groups of a warp and of a block, channels of a warp and of a block, learnable operands everywhere, slabs of several samples."""
    specs = []
    pool = [{"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}, *operands("last", [1])] if pooled else []
    for channels, groups, size in ((6, 3, (9, 11)), (20, 2, (12, 11)), (4, 2, (25, 26))):
        chain = conv_chain([*operands("before", [channels, 1, 1]), "silu"], [*operands("after", [channels, 1, 1]), *pool], channels, groups)
        specs.append(make_spec(tmp_path, chain, 300, "fp32", size))
    for channels, groups, batch in () if pooled else ((256, 8, 3), (600, 2, 3), (8192, 512, 100), (2048, 4, 700)):
        chain = linear_chain([*operands("before", [channels]), "silu"], operands("after", [1]), channels, groups)
        specs.append(make_spec(tmp_path, chain, batch, "fp32"))
    for backward in build_on_gpu(tmp_path, specs):
        source = backward.chain.source(offset=3.0)
        check(backward, source, 4.0 if pooled else FACTOR)  # a window's two largest values may be as near as their rounding errors
        grad_y = torch.randn(backward.chain.spec.output_shape)
        first, again = backward.kernel(source, grad_y), backward.kernel(source, grad_y)
        assert all(torch.equal(first[name], again[name]) for name in first)


# ---- whole models ---------------------------------------------------------------------------------------------------


@pytest.fixture
def switches():
    """`set(matmul, convolutions)`: may the process use TF32? Both are put back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    def switch(matmul, convolutions):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolutions

    yield switch
    switch(*before)
    torch._dynamo.reset()


def pair(module):
    """(model, reference with the same parameters, x, gradient of y)."""
    torch.manual_seed(0)
    model, reference = module.ModelNew(*module.get_init_inputs()).cuda(), module.Model(*module.get_init_inputs()).cuda()
    x = module.get_inputs()[0].cuda()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(("gemm.", "conv.")):
                parameter.add_(torch.randn_like(parameter) * 0.25)
    reference.to(x.dtype).load_state_dict(model.state_dict())
    return model, reference, x, torch.randn(model._package.manifest.output.shape, device="cuda").to(x.dtype)


def compare(module, switch, flips=0):
    """Ours, whatever the process allows, against float64 and eager at what the precision promises; the same bits twice."""
    model, reference, x, grad_y = pair(module)
    tf32 = model._package.manifest.precision == "tf32"
    switch(tf32, tf32)
    eager = gradients(reference, x, grad_y)[1]
    switch(False, False)
    exact = gradients(reference, x, grad_y, torch.float64)[1]
    # One flip moves or drops one value of the gradient behind the producer; three quarters of them may be 0 (outside of bounds).
    flipped = (2 * flips / (grad_y.numel() / 4)) ** 0.5
    for allowed in (False, True):
        switch(allowed, allowed)
        got, again = gradients(model, x, grad_y)[1], gradients(model, x, grad_y)[1]
        for name in exact:
            assert torch.equal(got[name], again[name]), f"{name}: two runs differ"
            assert got[name].dtype is x.dtype and got[name].shape == exact[name].shape
            measures = [(error, FACTOR, flipped)]
            if flips and exact[name].numel() > LARGE:  # here cuDNN sums in an order of its own where TF32 is allowed elsewhere; TF32 would be off by 100
                measures.append((bulk_error, 4.0, 0.0))
            for measure, factor, more in measures:
                ours, theirs = measure(got[name], exact[name]), measure(eager[name], exact[name])
                limit = factor * theirs + max(1e-6, torch.finfo(x.dtype).eps / 4) + more
                assert ours <= limit, f"{name}, TF32 {allowed=}: {measure.__name__} {ours:.3g}, eager's {theirs:.3g}, allowed {limit:.3g}"


def bulk_error(got, exact):
    """The error of the best 98 % of the values: what a few flips leave alone."""
    difference = (got.double() - exact).abs().flatten()
    bound = difference.kthvalue(int(0.98 * difference.numel())).values
    return float(difference[difference <= bound].norm() / exact.norm())


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("chain", [LINEAR, CONV], ids=["linear", "conv"])
def test_models(tmp_path, monkeypatch, switches, chain, precision):
    monkeypatch.setenv("TARGETS", "sm_80")
    half = {"gemm": "library"} if chain is LINEAR and precision in ("fp16", "bf16") else {}
    compare(generate(tmp_path / "packages", chain, precision, 12, (16, 15), targets=("sm_80",), **half), switches)


def shipped(folder: Path, name: str) -> ModuleType:
    """The shipped package of that name, generated into `folder`."""
    specs = (load_spec(path, precision) for path, precision in index.entries(Path(__file__).parents[2] / "generated"))
    write_if_different(folder / name, render(make_package(next(spec for spec in specs if spec.package == name))))
    return import_from(folder / name, f"shipped_{name}")


@pytest.mark.parametrize("name", SYSTEMS)
def test_systems(tmp_path, monkeypatch, switches, name):
    """At their own shapes, on the target that the loader prefers; the small ones and one of fp16 on sm_80."""
    monkeypatch.setenv("TARGETS", SYSTEMS[name])
    compare(shipped(tmp_path, name), switches, FLIPS)


@pytest.fixture
def model_and_x(tmp_path, monkeypatch):
    monkeypatch.setenv("TARGETS", "sm_80")
    module = shipped(tmp_path, "conv2d_groupnorm_scale_maxpool_clamp_small")
    model, reference, x, grad_y = pair(module)
    yield model, x, grad_y
    torch._dynamo.reset()


def test_what_is_saved_and_what_is_refused(model_and_x):
    """x and the parameters, nothing of a group's size; nothing without gradients; no second derivatives."""
    model, x, grad_y = model_and_x
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert saved_shapes(lambda: model(x))[1] == []
    y, shapes = saved_shapes(lambda: model(x))
    assert shapes == sorted([(0,), tuple(x.shape), *(tuple(p.shape) for p in model.parameters())])
    x.requires_grad_()
    (first,) = torch.autograd.grad(model(x), x, grad_y, create_graph=True)
    with pytest.raises(GradientError, match="second derivatives are not generated"):
        first.sum().backward()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_steps(model_and_x, backend):
    """Three steps of SGD, compiled and not."""
    model, x, grad_y = model_and_x
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    finals = []
    for call in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            (call(x) * grad_y).mean().backward()
            optimizer.step()
        finals.append([parameter.detach().clone() for parameter in model.parameters()])
    for plain, compiled, before in zip(*finals, start.values()):
        torch.testing.assert_close(compiled, plain)
        assert not torch.equal(plain, before)


def test_side_stream_and_autocast(model_and_x):
    """The backward runs on the forward's stream, and autocast changes nothing."""
    model, x, grad_y = model_and_x
    want = gradients(model, x, grad_y)[1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.autocast("cuda", dtype=torch.bfloat16):
        torch.cuda._sleep(10_000_000)
        got = gradients(model, x * 1, grad_y)[1]
    stream.synchronize()
    assert all(torch.equal(got[name], want[name]) for name in want)
