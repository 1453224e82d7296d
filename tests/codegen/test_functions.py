"""The C functions against double precision: the errors their comments state, NaN and infinities, and derivatives as PyTorch's.

Both texts are compiled with g++ and run over arrays: the C++ text as the cpu target compiles it, the CUDA text with the GPU's own words
defined away (there its library functions are the C library's, and its fast division one that is off by as much as NVIDIA states), which checks what is
written here and not what NVIDIA wrote.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bench.subject import exact_gelu
from codegen.ops import OPERATORS, Kind
from codegen.ops.functions import FUNCTIONS, LANGUAGES, closure, definitions
from codegen.targets import TARGETS
from tests.compiler import gxx

UNIT = 2.0**-24
FAST_DIVISION = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ static inline
// Off by one float up or down, by the bits of its operands; 0 for b > 2^126.
static inline float __fdividef(float a, float b) {
  if (fabsf(b) > 0x1p126f) return a * 0.0f;
  unsigned x, y;
  memcpy(&x, &a, 4);
  memcpy(&y, &b, 4);
  const unsigned mixed = (x * 2654435761u ^ y * 2246822519u) >> 28;
  const float q = a / b;
  if (q == 0.0f || !std::isfinite(q)) return q;
  return mixed < 5 ? nextafterf(q, INFINITY) : mixed < 10 ? nextafterf(q, -INFINITY) : q;
}
"""
TINY = 2.0**-126  # results below may be flushed to 0

pytestmark = [pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"), pytest.mark.usefixtures("one_thread")]


@dataclass(frozen=True)
class Case:
    """One function: PyTorch's meaning, the constants it is called with, and the error allowed.

    `units`: relative error in 2^-24. `absolute` is allowed on top, for results that PyTorch too knows only absolutely. `floor` is the
    magnitude below which only an error of `units` relative to it is asked for. `domain` bounds v.
    """

    reference: Callable[[torch.Tensor], torch.Tensor]
    constants: tuple[float, ...] = ()
    units: float = 0.0
    absolute: float = 0.0
    floor: float = TINY
    domain: tuple[float, float] = (-np.inf, np.inf)


def f32(value: float) -> float:
    """The float nearest to `value`, as a constexpr of the emitted code holds it."""
    return float(np.float32(value))


FAST = 3  # units more where a division is the fast one
SLOPE, ALPHA, BETA = f32(0.01), f32(1.3), f32(0.5)  # beta v is then exact

# mish, silu, gelu and hardswish multiply by v a factor that may be flushed to 0 below 2^-126: |v| <= 128 there, hence their floor 2^-119.
FORWARD: dict[str, Case] = {
    "exponential": Case(torch.exp, units=3),
    "exponential_minus_1": Case(torch.expm1, units=4, domain=(-np.inf, 0.0)),
    "logarithm_1_plus": Case(torch.log1p, units=4, domain=(0.0, 1.0)),
    "clamp": Case(lambda v: v.clamp(-1.5, 2.5), (-1.5, 2.5)),
    "clamp_min": Case(lambda v: v.clamp(min=-1.5), (-1.5,)),
    "clamp_max": Case(lambda v: v.clamp(max=2.5), (2.5,)),
    "hardtanh": Case(lambda v: F.hardtanh(v, -1.5, 2.5), (-1.5, 2.5)),
    "relu": Case(F.relu),
    "leaky_relu": Case(lambda v: F.leaky_relu(v, SLOPE), (SLOPE,), units=1),
    "sigmoid": Case(torch.sigmoid, units=5),
    "hyperbolic_tangent": Case(torch.tanh, units=6),
    "silu": Case(F.silu, units=5, floor=2.0**-119),
    "mish": Case(F.mish, units=8, floor=2.0**-119),
    "normal_distribution": Case(torch.special.ndtr, absolute=3 * UNIT),
    "gelu": Case(exact_gelu, units=8, absolute=4 * UNIT, floor=2.0**-119),
    "gelu_tanh": Case(lambda v: exact_gelu(v, "tanh"), units=8, absolute=4 * UNIT, floor=2.0**-119),
    "hardswish": Case(F.hardswish, units=4, absolute=2 * UNIT),
    "hardsigmoid": Case(F.hardsigmoid, units=2, absolute=UNIT),
    "softplus": Case(lambda v: F.softplus(v, BETA, 20.0), (BETA, 20.0), units=6, floor=2 * TINY),
    "elu": Case(lambda v: F.elu(v, ALPHA), (ALPHA,), units=6),
    "relu6": Case(F.relu6),
    "selu": Case(F.selu, units=7),
    "celu": Case(lambda v: F.celu(v, ALPHA), (ALPHA,), units=8),
    "softsign": Case(F.softsign, units=3),
    "logsigmoid": Case(F.logsigmoid, units=8, floor=2 * TINY),
    "softshrink": Case(lambda v: F.softshrink(v, 1.5), (1.5,), units=1),
    "minimum": Case(lambda v: torch.minimum(v, torch.full_like(v, -1.5)), (-1.5,)),
    "maximum": Case(lambda v: torch.maximum(v, torch.full_like(v, 2.5)), (2.5,)),
}  # fmt: skip
GRADIENTS = [name for name in FUNCTIONS if name.endswith("_grad")]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Every function in every language as `<language>_<name>(v, out, count, constants...)`."""
    parts = [FAST_DIVISION]
    for language in LANGUAGES:
        parts.append(f"namespace {language} {{\n{definitions(FUNCTIONS, language)}\n}}\n")
        for name, function in FUNCTIONS.items():
            first, *constants = function.parameters
            signature = "".join(f", float {c}" for c in constants)
            arguments = ", ".join([f"{first}[i]", *constants]) if name != "divide" else "a[i], b"
            parts.append(
                f'extern "C" void {language}_{name}(const float* {first}, float* out, int count{signature}) {{\n'
                f"  for (int i = 0; i < count; ++i) out[i] = {language}::{name}({arguments});\n}}\n"
            )
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions.cpp").write_text("".join(parts))
    command = [gxx(), *TARGETS["cpu"].flags, "-Wno-unused-function", "-shared", "-fPIC", "-o", "functions.so", "functions.cpp"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "warning" not in result.stderr, result.stderr
    return ctypes.CDLL(str(folder / "functions.so"))


def call(library: ctypes.CDLL, language: str, name: str, v: np.ndarray, constants: tuple[float, ...] = ()) -> torch.Tensor:
    v = np.ascontiguousarray(v, dtype=np.float32)
    out = np.empty_like(v)
    pointer = ctypes.POINTER(ctypes.c_float)
    getattr(library, f"{language}_{name}")(v.ctypes.data_as(pointer), out.ctypes.data_as(pointer), v.size, *map(ctypes.c_float, constants))
    return torch.from_numpy(out)


def dense() -> np.ndarray:
    """Every magnitude a float can have, closely spaced where functions bend, and the points next to every boundary used here."""
    generator = np.random.default_rng(0)
    magnitudes = np.exp2(generator.uniform(-126, 127.9, 100_000))
    middle = np.concatenate([generator.uniform(-s, s, 100_000) for s in (1.0, 6.0, 25.0, 110.0)])
    edges = np.array([0.0, 1.0, 1.5, 2.5, 3.0, 6.0, 20.0, 20.0 / BETA, 44.0, 87.0, 87.33654, 88.37626, 88.72283, 103.9, 3.4e38], dtype=np.float32)
    near = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    v = np.concatenate([magnitudes, -magnitudes, middle, near, -near]).astype(np.float32)
    return v[np.isfinite(v)]


SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-40, -1e-40] + [0.5] * 32, dtype=np.float32)


@pytest.mark.parametrize("language", LANGUAGES)
def test_softshrink_leaves_zeros_of_one_sign(library: ctypes.CDLL, language: str) -> None:
    """A number over them is then one infinity; PyTorch's float32 keeps the sign or not, as its vectors end."""
    y = call(library, language, "softshrink", np.array([-0.3, 0.3, 0.0, -0.0] * 9, dtype=np.float32), (1.5,))
    assert not bool(torch.signbit(y).any()) and not bool(y.any())


@pytest.mark.parametrize("language", ["cuda", "cpp"])
def test_mish_above_0_errs_by_what_it_takes_off(library: ctypes.CDLL, language: str) -> None:
    v = dense()
    v = v[v > 0]
    expected = F.mish(torch.from_numpy(v).double())
    error = (call(library, language, "mish", v).double() - expected).abs() / expected.clamp(min=TINY)
    assert float(error.max()) <= 4 * UNIT
    assert float(error[torch.from_numpy(v) > 1].square().mean().sqrt()) <= 0.5 * UNIT


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", FORWARD)
def test_forward_error(library: ctypes.CDLL, language: str, name: str) -> None:
    case, v = FORWARD[name], dense()
    v = v[(v >= case.domain[0]) & (v <= case.domain[1])]
    expected = case.reference(torch.from_numpy(v).double())
    got = call(library, language, name, v, case.constants).double()
    finite = expected.abs() < 3.4028234e38  # a result beyond float's range is infinite
    assert torch.equal(got[~finite].float(), expected[~finite].float())
    units = case.units + (FAST if language == "cuda16" and {"divide"} & {f.name for f in closure([name], language)} else 0)
    allowed = units * UNIT * expected.abs().clamp(min=case.floor) + case.absolute
    if case.units:
        allowed = torch.where(expected.abs() < case.floor, case.floor + case.absolute, allowed)
    excess = (got - expected).abs()[finite] - allowed[finite]
    worst = int(excess.argmax())
    error = ((got - expected).abs() / expected.abs().clamp(min=case.floor))[finite][worst] / UNIT
    assert excess[worst] <= 0, f"{name}({v[finite.numpy()][worst]!r}) = {got[finite][worst]!r}, {float(error):.2f} units off"


def torch_reference(name: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], tuple[float, ...]]:
    case = FORWARD[name]
    return case.reference, case.constants


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", [n for n in FORWARD if n not in ("exponential_minus_1", "logarithm_1_plus")])
def test_special_values_as_pytorch(library: ctypes.CDLL, language: str, name: str) -> None:
    """NaN, infinities and extremes. PyTorch's float64 is asked: its float32 gelu(inf) is NaN on a CPU and inf on a GPU."""
    reference, constants = torch_reference(name)
    expected = reference(torch.from_numpy(SPECIAL).double()).float()
    torch.testing.assert_close(call(library, language, name, SPECIAL, constants), expected, rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_as_autograd(library: ctypes.CDLL, language: str, name: str) -> None:
    """The derivative is autograd's in float64, boundary rules included: `dense` holds every bound itself and both its neighbours."""
    reference, constants = torch_reference(name.removesuffix("_grad"))
    v = dense()
    v = v[np.abs(v) < 1e18]  # squares of larger v overflow, in PyTorch's float32 too
    bounds = [c for c in constants if c in (-1.5, 2.5)]
    v = np.concatenate([v, np.array([0.0, 3.0, -3.0, *bounds], dtype=np.float32)])
    x = torch.from_numpy(v).double().requires_grad_()
    reference(x).sum().backward()
    got = call(library, language, name, v, constants).double()
    # Derivatives of v f(v) hold a term v f'(v), at most 1.1 in magnitude here, whose f' carries the error of e^-x: (3 + |x|) units for
    # x = v^2 / 2 where that matters (|v| < 6).
    torch.testing.assert_close(got, x.grad, rtol=12 * UNIT, atol=16 * UNIT)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient_of_nan(library: ctypes.CDLL, language: str, name: str) -> None:
    """Where PyTorch's derivative at NaN is NaN, so is ours: a poisoned activation must not come back as a sound gradient."""
    reference, constants = torch_reference(name.removesuffix("_grad"))
    x = torch.full((32,), torch.nan, requires_grad=True)
    reference(x).sum().backward()
    got = call(library, language, name, np.full(32, np.nan), constants)
    assert torch.equal(got.isnan(), x.grad.isnan()), (got[0], x.grad[0])


@pytest.mark.parametrize("by", [1.0, 3.0, f32(1.1), 1e30])
@pytest.mark.parametrize(("language", "units"), [("cuda", 1.1), ("cuda16", 3), ("cpp", 1)])
def test_divide(library: ctypes.CDLL, language: str, units: float, by: float) -> None:
    v = dense()
    got = call(library, language, "divide", v, (by,)).double()
    torch.testing.assert_close(got, torch.from_numpy(v).double() / f32(by), rtol=units * UNIT, atol=TINY)


@pytest.mark.parametrize("language", LANGUAGES)
def test_divide_by_and_of_infinities(library: ctypes.CDLL, language: str) -> None:
    v = np.array([np.inf, -np.inf, np.nan, 0.0, -2.0], dtype=np.float32)
    for by in (1.0, np.inf, np.nan):
        assert torch.equal(call(library, language, "divide", v, (by,)).isnan(), (torch.from_numpy(v) / by).isnan())
        torch.testing.assert_close(call(library, language, "divide", v, (by,)), torch.from_numpy(v) / by, equal_nan=True)


def test_every_operator_has_function_and_derivative() -> None:
    """An element-wise row names a function of this table that has a derivative beside it and a case above."""
    for operator in OPERATORS.values():
        if operator.kind is not Kind.ELEMENTWISE or operator.expression is not None:
            continue
        for approximate in ("none", "tanh"):
            for lo, hi in ((-1.0, 1.0), (None, 1.0), (-1.0, None)):
                name = operator.function({"approximate": approximate, "min": lo, "max": hi})
                assert name in FUNCTIONS and f"{name}_grad" in FUNCTIONS and name in FORWARD


def test_definitions_come_after_what_they_call() -> None:
    for language in LANGUAGES:
        for name in FUNCTIONS:
            seen: set[str] = set()
            for function in closure([name], language):
                assert set(function.calls(language)) <= seen
                seen.add(function.name)


def test_nothing_is_defined_that_is_not_called() -> None:
    for language in LANGUAGES:
        for name in FUNCTIONS:
            called = {callee for function in closure([name], language) for callee in function.calls(language)}
            assert {function.name for function in closure([name], language)} == called | {name}


@pytest.mark.parametrize("name", ["exponential", "mish", "sigmoid", "silu", "hyperbolic_tangent", "gelu", "gelu_tanh", "softplus", "elu", "hardswish", "clamp"])
def test_loops_vectorise(tmp_path, name: str) -> None:
    """The compiler turns a loop around the function into vector code with the cpu target's flags."""
    constants = ", 1.0f" * (len(FUNCTIONS[name].parameters) - 1)
    (tmp_path / "loop.cpp").write_text(
        f"#include <cmath>\n#include <cstring>\n{definitions([name], 'cpp')}\n"
        f"void loop(const float* __restrict x, float* __restrict y) {{\n  for (int i = 0; i < 1024; ++i) y[i] = {name}(x[i]{constants});\n}}\n"
    )
    command = [gxx(), *TARGETS["cpu"].flags, "-fopt-info-vec-optimized", "-c", "loop.cpp", "-o", "loop.o"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "loop vectorized" in result.stderr, result.stderr
