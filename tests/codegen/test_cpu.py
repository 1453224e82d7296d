"""The cpu target's kernels against float64 PyTorch: every operator, pooling variant and precision, awkward sizes and adversarial data."""

from __future__ import annotations

import itertools
import math
import shutil

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from codegen.plan import Library, plan
from codegen.plan.cpu.kernel import PIECE, STACK_VALUES, _count_text
from codegen.render import render_kernel
from codegen.spec import load_spec
from tests import tiers
from tests.codegen.cpu_chains import DTYPES, Chain, build, conv_chain, linear_chain, make_spec, relative_error
from tests.compiler import gxx

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"), pytest.mark.usefixtures("one_thread")]

# fp32: five roundings of normalise and store, each at most 2^-24 and on average a third of it, and the functions' errors: 3e-7 is 5 * 2^-24.
FP32_ERROR = 3e-7
# Half precision: the result is rounded once, as eager's last step is; eager rounds between operators too. Equal roundings may differ by chance.
HALF_SHARE = 1.05
PRECISIONS = ("fp32", "fp16", "bf16")

# Constants are exact in every type: eager rounds some to the storage type and not others, which is no property of the kernels.
ELEMENTWISE = {
    "add_value": {"add": {"value": 0.75}},
    "mul_value": {"mul": {"value": -1.5}},
    "hardtanh": {"hardtanh": {"min_val": -0.75, "max_val": 1.125}},
    "clamp": {"clamp": {"min": -0.25, "max": 0.875}},
    "clamp_min": {"clamp": {"min": -0.25}},
    "clamp_max": {"clamp": {"max": 0.875}},
    "relu": "relu",
    "leaky_relu": {"leaky_relu": {"negative_slope": 0.125}},
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "silu": "silu",
    "mish": "mish",
    "gelu": "gelu",
    "gelu_tanh": {"gelu": {"approximate": "tanh"}},
    "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid",
    "softplus": {"softplus": {"beta": 0.5, "threshold": 2.0}},
    "elu": {"elu": {"alpha": 1.5}},
    "sub_value": {"sub": {"value": 0.75}},
    "div_value": {"div": {"value": -1.5}},
    "relu6": "relu6",
    "selu": "selu",
    "celu": {"celu": {"alpha": 1.5}},
    "softsign": "softsign",
    "logsigmoid": "logsigmoid",
    "softshrink": {"softshrink": {"lambd": 0.375}},
    "minimum_value": {"minimum": {"value": 0.375}},
    "maximum_value": {"maximum": {"value": -0.375}},
}
WIDTHS = (2, 3, 5, 17, 31, 48, 100, 1000)


def check(chain: Chain, source: torch.Tensor, steeper: float = 1.0, chance: float = 1.0) -> None:
    """The precision's promise: error against float64 beside eager's, the same infinities and NaNs, nothing left unwritten.

    `steeper`: by how much the chain magnifies the error of its norm, as a square does by 2. `chance`: by how much roundings of equal size
    to 16 bits may differ where there are few results.
    """
    exact, eager, got = chain.pytorch(source, torch.float64), chain.pytorch(source), chain.kernel(source)
    assert got.shape == exact.shape
    assert torch.equal(got.isnan(), exact.isnan())
    stored = exact.to(chain.dtype)
    assert torch.equal(got[stored.isinf()], stored[stored.isinf()])
    ours, theirs = relative_error(got, exact), relative_error(eager, exact)
    allowed = max(1.1 * theirs, steeper * FP32_ERROR) if chain.dtype is torch.float32 else chance * HALF_SHARE * theirs
    assert ours <= allowed, f"{chain.spec.precision.name}: error {ours:.3g}, eager's {theirs:.3g}"


@tiers.shares
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_before_and_after(tmp_path, name: str, share: str) -> None:
    """Every operator on both sides of the norm, at every precision, each time with another awkward group width."""
    op, start = ELEMENTWISE[name], list(ELEMENTWISE).index(name)
    specs = []
    for i, precision in enumerate(PRECISIONS):
        width = WIDTHS[(start + 3 * i) % len(WIDTHS)]
        specs.append(make_spec(tmp_path, linear_chain([op], [op], 7 * width, 7), 5, precision))
    for chain in build(tmp_path, tiers.share_of(share, ELEMENTWISE, name, specs)):
        check(chain, chain.source(scale=2.0))


@pytest.mark.parametrize("op", [{"hardtanh": {"min_val": -0.8, "max_val": 1.1}}, {"clamp": {"min": -0.3, "max": 0.7}}])
def test_bounds_are_rounded_to_the_storage_type(tmp_path, op: dict) -> None:
    """Values that meet a bound in front of the norm or behind it are PyTorch's bits: it compares with the bound as a number of the type."""
    for chain in build(tmp_path, [make_spec(tmp_path, linear_chain([], [op], 64, 2), 4, precision) for precision in PRECISIONS]):
        source = chain.source()
        eager, got = chain.pytorch(source), chain.kernel(source)
        met = (eager == eager.max()) | (eager == eager.min())
        assert met.float().mean() > 0.1 and torch.equal(got[met], eager[met])


def test_every_operator_is_tested() -> None:
    from codegen.ops import OPERATORS, Kind

    listed = {key for op in ELEMENTWISE.values() for key in ([op] if isinstance(op, str) else op)}
    graphs_alone = {"rsub", "rdiv"}  # no operators of fused kernels: codegen.ir.fused_form refuses them
    assert listed | graphs_alone == {op.name for op in OPERATORS.values() if op.kind is Kind.ELEMENTWISE} and not listed & graphs_alone


def test_learnable_operands(tmp_path) -> None:
    """add and mul with a tensor: a value per channel or one for all, before and after the norm, behind a linear and a convolution."""

    def operands(prefix: str, shape: list[int]) -> list:
        kinds = {"mul": "scale", "add": "bias", "div": "divisor", "sub": "offset"}
        return [{kind: {"name": f"{prefix}_{name}", "shape": shape}} for kind, name in kinds.items()]

    specs = []
    for precision, shape in itertools.product(PRECISIONS, ([12], [1])):
        specs.append(make_spec(tmp_path, linear_chain(operands("before", shape), operands("after", shape), 12, 3), 4, precision))
    for precision, shape in itertools.product(PRECISIONS, ([12, 1, 1], [1], [1, 12, 1, 1])):
        pool = [{"max_pool2d": {"kernel_size": 2}}] if shape == [12, 1, 1] else []
        chain = conv_chain(operands("before", shape), [*operands("after", shape), *pool, {"mul": {"name": "last", "shape": shape}}], 12, 3)
        specs.append(make_spec(tmp_path, chain, 2, precision, (5, 7)))
    for chain in build(tmp_path, specs):
        check(chain, chain.source())


def test_names_that_could_collide(tmp_path) -> None:
    """Attributes named like functions, variables and constants of the emitted source stay apart from them."""
    names = ("mish", "value", "mean", "rstd", "scale", "shift", "target", "channel", "first", "index", "threads", "moments", "load", "ordered")
    chain = conv_chain([*({"add": {"name": n, "shape": [4, 1, 1]}} for n in names), "mish"], [{"max_pool2d": {"kernel_size": 3, "stride": 1}}], 4, 2)
    (built,) = build(tmp_path, [make_spec(tmp_path, chain, 2, "fp16", (4, 4))])
    check(built, built.source())


POOLS = {
    "plain": ({"kernel_size": 2}, (7, 9)),
    "wide": ({"kernel_size": [3, 5], "stride": [3, 2]}, (11, 13)),
    "overlapping": ({"kernel_size": 3, "stride": 2, "padding": 1}, (9, 8)),
    "ceil": ({"kernel_size": 3, "stride": 2, "ceil_mode": True}, (8, 10)),
    "ceil_padded": ({"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True}, (7, 8)),
    "dilated": ({"kernel_size": 3, "stride": 1, "dilation": 2}, (7, 9)),
    "dilated_padded": ({"kernel_size": [2, 3], "stride": [2, 1], "padding": [1, 1], "dilation": [3, 2]}, (9, 9)),
    "sparse": ({"kernel_size": 1, "stride": 3}, (8, 7)),
    "global": ({"kernel_size": [6, 5]}, (6, 5)),
    "one_value": ({"kernel_size": 1}, (1, 2)),
    "one_pixel": ({"kernel_size": 1}, (1, 1)),
}


@tiers.shares
@pytest.mark.parametrize("name", POOLS)
def test_pooling(tmp_path, name: str, share: str) -> None:
    """Every kind of window, with NaN, infinities of both signs and equal values among what is pooled, at every precision."""
    arguments, size = POOLS[name]
    specs = [
        make_spec(tmp_path, conv_chain([], after, 6, 3), 2, precision, size)
        for precision, after in zip(
            PRECISIONS,
            (["tanh", {"max_pool2d": arguments}, "silu"], [{"mul": {"value": -1.0}}, {"max_pool2d": arguments}], [{"max_pool2d": arguments}, "relu"]),
            strict=True,
        )
    ]
    for chain in build(tmp_path, tiers.share_of(share, POOLS, name, specs)):
        source = chain.source()
        check(chain, source)
        source[0, 0, 0, 0] = torch.nan  # poisons its group
        source[1, 5, -1, -1] = torch.inf
        check(chain, source)


def test_pooling_after_pooling(tmp_path) -> None:
    first, second = {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}, {"max_pool2d": {"kernel_size": 2, "padding": 1, "ceil_mode": True}}
    specs = [
        make_spec(tmp_path, conv_chain(["relu"], ["gelu", first, {"mul": {"name": "factor", "shape": [4, 1, 1]}}, second, first, "elu"], 4, 2), 3, p, (17, 14))
        for p in PRECISIONS
    ]
    for chain in build(tmp_path, specs):
        check(chain, chain.source())


def test_nan_and_infinity_made_after_the_norm_are_pooled_as_in_pytorch(tmp_path) -> None:
    """A channel's parameter may be NaN or infinite: windows then hold NaN beside numbers, or nothing but -inf."""
    after = [{"mul": {"name": "m", "shape": [6, 1, 1]}}, {"max_pool2d": {"kernel_size": 2}}]
    (chain,) = build(tmp_path, [make_spec(tmp_path, conv_chain([], after, 6, 2), 2, "fp32", (6, 6))])
    source = chain.source()
    source[:, 3:, 2:4] = 0.0
    chain.module.norm.bias.data[3:] = 0.0
    chain.module.m.data[:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.inf, 0.0])[:, None, None]
    exact, got = chain.pytorch(source, torch.float64), chain.kernel(source)
    assert torch.equal(got.isnan(), exact.isnan()) and torch.equal(got.isinf(), exact.isinf())


def test_sizes_beside_the_limits(tmp_path) -> None:
    """Groups just below, at and above a piece of the statistics, and scratch beyond what a stack may hold."""
    sizes = [(1, 1), (PIECE - 1, 1), (PIECE, 1), (PIECE + 1, 1), (3 * PIECE + 5, 2), (STACK_VALUES + 3, 1)]
    specs = [make_spec(tmp_path, linear_chain(["mish"], ["relu"], groups * max(width, 2), groups), 3, precision)
             for precision, (width, groups) in itertools.product(("fp32", "bf16"), sizes)]  # fmt: skip
    specs.append(make_spec(tmp_path, conv_chain(["tanh"], [{"max_pool2d": {"kernel_size": 3, "stride": 2}}], 4, 2), 1, "fp16", (201, 203)))
    for chain in build(tmp_path, specs):
        check(chain, chain.source())


def test_other_shapes(tmp_path) -> None:
    """Batch 1, no affine parameters, no pooling behind a convolution, tf32 (float here), eps of another size, one position per channel."""
    specs = [
        make_spec(tmp_path, linear_chain([], [], 33, 11), 1),
        make_spec(tmp_path, linear_chain(["relu"], ["mish"], 34, 1, affine=False, eps=0.5), 1, "fp16"),
        make_spec(tmp_path, conv_chain([], ["mish"], 10, 5), 1, "fp32", (13, 11)),
        make_spec(tmp_path, conv_chain(["silu"], [], 10, 2, affine=False), 3, "bf16", (1, 37)),
        make_spec(tmp_path, conv_chain([], ["relu"], 18, 6), 2, "tf32", (1, 1)),
        make_spec(tmp_path, conv_chain([], [{"max_pool2d": {"kernel_size": 2}}], 4, 1, affine=False), 1, "tf32", (31, 5)),
    ]
    for chain in build(tmp_path, specs):
        check(chain, chain.source())


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Chain]:
    """linear -> group_norm -> hardtanh with wide bounds, and the same with mish in front, per precision."""
    folder, specs = tmp_path_factory.mktemp("plain"), {}
    for precision in PRECISIONS:
        specs[precision] = make_spec(folder, linear_chain([], [{"hardtanh": {"min_val": -50.0, "max_val": 50.0}}], 4 * 48, 4), 16, precision)
        specs[f"{precision}_mish"] = make_spec(folder, linear_chain([{"hardtanh": {"min_val": -3.0, "max_val": 3.0}}, "mish"], [], 4 * 31, 4), 16, precision)
    return dict(zip(specs, build(folder, list(specs.values())), strict=True))


@pytest.mark.parametrize(("scale", "offset"), [(1e-2, 1e4), (1.0, 1e6), (1e-3, -300.0), (1e15, 0.0), (1e-15, 0.0), (1e-30, 0.0), (1e18, 1e19)])
def test_large_means_and_extreme_scales(plain, scale: float, offset: float) -> None:
    """The promise of fp32 holds where E[x^2] - E[x]^2 would lose everything: the kernel is exact to FP32_ERROR without leave from eager."""
    chain = plain["fp32"]
    source = chain.source(scale, offset)
    assert relative_error(chain.kernel(source), chain.pytorch(source, torch.float64)) <= FP32_ERROR


@pytest.mark.parametrize(
    ("precision", "scale", "offset"), [("fp16", 0.25, 1000.0), ("bf16", 0.5, 100.0), ("fp16", 5000.0, 0.0), ("bf16", 1e15, 0.0), ("fp16", 1e-5, 0.0)]
)
def test_large_means_and_extreme_scales_in_half_precision(plain, precision: str, scale: float, offset: float) -> None:
    chain = plain[precision]
    check(chain, chain.source(scale, offset))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -3.7, 1e-20, 33333.0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_constant_group_gives_exactly_beta(plain, precision: str, value: float) -> None:
    chain = plain[precision]
    source = torch.full(chain.spec.producer.output_shape, value, dtype=chain.dtype)
    beta = chain.module.norm.bias.detach().expand_as(source)
    assert torch.equal(chain.kernel(source), beta.clamp(-50.0, 50.0))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_value_poisons_its_own_group_only(plain, precision: str, bad: float) -> None:
    chain = plain[precision]
    source = chain.source()
    clean = chain.kernel(source)
    source[3, 50] = bad  # group 1 of sample 3
    got = chain.kernel(source)
    assert got[3, 48:96].isnan().all()
    got[3, 48:96] = clean[3, 48:96]
    assert torch.equal(got, clean)
    # In front of the norm a bound turns an infinity into a number; NaN goes through.
    guarded = plain[f"{precision}_mish"]
    source = guarded.source()
    source[3, 50] = bad
    check(guarded, source)


def test_same_bits_whatever_the_number_of_threads(tmp_path) -> None:
    specs = [
        make_spec(tmp_path, linear_chain(["mish"], ["relu"], 3 * PIECE, 2), 7),
        make_spec(tmp_path, conv_chain(["gelu"], [{"max_pool2d": {"kernel_size": 3, "stride": 2}}], 8, 4), 5, "bf16", (37, 41)),
        make_spec(tmp_path, linear_chain(["mish"], [], STACK_VALUES + 2, 1), 3),
    ]
    for chain in build(tmp_path, specs):
        source = chain.source()
        first = chain.kernel(source, 1)
        for threads in (2, 3, 7):
            assert torch.equal(chain.kernel(source, threads), first)


def test_wrong_number_of_threads_is_refused(plain) -> None:
    chain = plain["fp32"]
    launch = getattr(chain.library, chain.plan.kernels[-1].function(chain.plan.target))
    assert launch(*[None] * len(chain.plan.kernels[-1].arguments), 0, None) < 0


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_conversions_are_exact_for_every_number(tmp_path, precision: str) -> None:
    """All 65536 bit patterns through load and store, and floats at and beside every tie through store, as PyTorch rounds them."""
    import ctypes
    import subprocess

    spec = make_spec(tmp_path, linear_chain([], [], 4, 2), 1, precision)
    planned = plan(spec, "cpu")
    text = render_kernel(planned, planned.kernels[-1]) + (
        'extern "C" void convert(const std::uint16_t* bits, float* wide, const float* v, std::uint16_t* narrow, int n) {\n'
        "  for (int i = 0; i < n; ++i) { wide[i] = chain_cpu::load(bits[i]); narrow[i] = chain_cpu::store(v[i]); }\n}\n"
    )
    (tmp_path / "convert.cpp").write_text(text)
    subprocess.run([gxx(), *planned.target.flags, "-shared", "-fPIC", "-o", "convert.so", "convert.cpp"], cwd=tmp_path, check=True)
    convert = ctypes.CDLL(str(tmp_path / "convert.so")).convert

    dtype = DTYPES[precision]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = every.float()
    step = values.view(torch.int32) + (0x1000 if precision == "fp16" else 0x8000)  # half a step further: a tie
    beside = torch.cat([(step + d).view(torch.float32) for d in (-1, 0, 1)] + [values, torch.logspace(-44, 38, 65536 * 4)])
    bits = every.repeat(len(beside) // len(every))
    wide, narrow = torch.empty_like(beside), torch.empty(len(beside), dtype=dtype)
    convert(*[ctypes.c_void_p(t.data_ptr()) for t in (bits, wide, beside, narrow)], len(beside))
    torch.testing.assert_close(wide, bits.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(narrow, beside.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_plan_is_the_library_then_one_launch(tmp_path) -> None:
    planned = plan(make_spec(tmp_path, conv_chain([], [{"max_pool2d": {"kernel_size": 2}}], 4, 2), 2, "fp32", (6, 6)), "cpu")
    library, launch = planned.steps
    assert isinstance(library, Library) and library.operation == "conv2d" and library.arguments == ("x", "conv.weight", "conv.bias")
    assert library.out == planned.buffers[0].name == launch.kernel.arguments[0] and launch.kernel.arguments[-1] == "y"
    assert planned.buffers[0].shape == (2, 4, 6, 6)


ops = st.lists(st.sampled_from(list(ELEMENTWISE.values())), max_size=3)
pools = st.none() | st.fixed_dictionaries({
    "kernel_size": st.tuples(st.integers(1, 3), st.integers(1, 3)).map(list), "stride": st.tuples(st.integers(1, 3), st.integers(1, 3)).map(list),
    "dilation": st.integers(1, 2), "ceil_mode": st.booleans(),
})  # fmt: skip


@pytest.mark.slow  # a library for each example
@settings(max_examples=20, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data(), before=ops, after=ops, pool=pools, last=ops, groups=st.integers(1, 4), width=st.integers(1, 9), precision=st.sampled_from(PRECISIONS))
def test_random_chains(tmp_path_factory, data, before, after, pool, last, groups, width, precision) -> None:
    folder = tmp_path_factory.mktemp("random")
    size = data.draw(st.tuples(st.integers(5, 12), st.integers(5, 12)))
    tail = [*after, {"max_pool2d": pool}, *last] if pool else after
    (chain,) = build(folder, [make_spec(folder, conv_chain(before, tail, groups * width, groups), 2, precision, size)])
    check(chain, chain.source(2.0))


@pytest.mark.parametrize(("size", "window", "said"), [
    (8, (2, 2, 0, 1), "(8 - 2) / 2 + 1, rounded up"),
    (7, (2, 3, 1, 1), "(7 + 2 * 1 - 2) / 3 + 1, rounded up, without the window that would start in the padding"),
])  # fmt: skip
def test_the_derivation_of_a_pooled_length_gives_it(size, window, said):
    kernel, stride, padding, dilation = window
    count = torch.nn.functional.max_pool2d(torch.zeros(1, 1, size, size), kernel, stride, padding, dilation, ceil_mode=True).shape[-1]
    assert _count_text(count, size, *window, ceil_mode=True) == said
    assert math.ceil(eval(said.split(",")[0])) - ("without" in said) == count


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["gemm_biasadd_hardtanh_mish_groupnorm_small", "conv2d_groupnorm_scale_maxpool_clamp_small"])
def test_shipped_chains_through_the_runtime(on_cpu, name: str, precision: str) -> None:
    """The whole path: spec, package, build, ModelNew beside the reference that is emitted with it, with torch's own product in front."""
    _, module = on_cpu(load_spec(f"specs/{name}.yaml", precision))
    torch.manual_seed(0)
    reference = module.Model(*module.get_init_inputs())
    torch.manual_seed(0)
    model = module.ModelNew(*module.get_init_inputs())
    (x,) = module.get_inputs()
    with torch.no_grad():
        got, eager = model(x), reference.to(x.dtype)(x)
        exact = reference.double()(x.double())
    ours, theirs = relative_error(got, exact), relative_error(eager, exact)
    assert ours <= (max(1.1 * theirs, FP32_ERROR) if precision == "fp32" else HALF_SHARE * theirs)
