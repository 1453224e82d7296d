"""The C functions that emitted kernels are made of: one text serves CUDA and C++.

A function takes floats and returns a float. Bodies use only C that both languages share; where the two need different text
(an exponential that vectorises on a CPU, the hardware's reciprocal on a GPU) both are given. The stated errors are relative,
in units of 2^-24, and were bounded against double precision by `tests/test_functions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import indent

LANGUAGES = ("cuda", "cpp")
_QUALIFIER = {"cuda": "__device__ __forceinline__", "cpp": "static inline"}


@dataclass(frozen=True)
class Function:
    """A pure float function. `cpp` replaces `body` in C++ where it is given; `uses` names the functions called."""

    name: str
    parameters: tuple[str, ...]
    body: str
    comment: str
    uses: tuple[str, ...] = ()
    cpp: str | None = None

    def text(self, language: str) -> str:
        """The function's definition in `language` ("cuda" or "cpp"), comment first, without a trailing newline."""
        body = self.cpp if language == "cpp" and self.cpp is not None else self.body
        signature = ", ".join(f"float {p}" for p in self.parameters)
        head = f"// {self.comment}\n{_QUALIFIER[language]} float {self.name}({signature}) {{\n"
        return head + indent(body.strip("\n"), "  ") + "\n}"


# exp by 2^n * p(r), |r| <= ln2 / 2: Cephes' degree-5 polynomial; branch-free, so that a compiler can vectorise the loop around it.
_EXP_CPP = """
float n = rintf(v * 1.44269504f);
n = n < -126.0f ? -126.0f : (n > 127.0f ? 127.0f : n);
const float r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
float p = 1.9875691500e-4f;
p = p * r + 1.3981999507e-3f;
p = p * r + 8.3334519073e-3f;
p = p * r + 4.1665795894e-2f;
p = p * r + 1.6666665459e-1f;
p = p * r + 5.0000001201e-1f;
p = p * r * r + r + 1.0f;
const int bits = ((n == n ? (int)n : 0) + 127) << 23;
float scale;
memcpy(&scale, &bits, sizeof scale);
const float inside = p * scale;
return v > 88.72283f ? INFINITY : (v < -87.33654f ? 0.0f : inside);
"""

FUNCTIONS: dict[str, Function] = {
    f.name: f
    for f in (
        Function("exponential", ("v",), "return expf(v);", "e^v, error at most 3 units; results below 2^-126 may be 0.", cpp=_EXP_CPP),
        Function(
            "divide", ("a", "b"), "return __fdividef(a, b);",
            "a / b for 1 <= |b| < 2^126: the hardware's reciprocal, error at most 2 units.", cpp="return a / b;",
        ),
        Function(
            "clamp", ("v", "lo", "hi"), "return v < lo ? lo : (v > hi ? hi : v);",
            "min(max(v, lo), hi); both comparisons are false for NaN, so NaN passes through.",
        ),
        Function("clamp_grad", ("v", "lo", "hi"), "return v >= lo && v <= hi ? 1.0f : 0.0f;", "1 inside the bounds and on them, as PyTorch's clamp."),
        Function("clamp_min", ("v", "lo"), "return v < lo ? lo : v;", "max(v, lo); NaN passes through."),
        Function("clamp_min_grad", ("v", "lo"), "return v >= lo ? 1.0f : 0.0f;", "1 at the bound and above."),
        Function("clamp_max", ("v", "hi"), "return v > hi ? hi : v;", "min(v, hi); NaN passes through."),
        Function("clamp_max_grad", ("v", "hi"), "return v <= hi ? 1.0f : 0.0f;", "1 at the bound and below."),
        Function("hardtanh", ("v", "lo", "hi"), "return v < lo ? lo : (v > hi ? hi : v);", "min(max(v, lo), hi); NaN passes through."),
        Function("hardtanh_grad", ("v", "lo", "hi"), "return v > lo && v < hi ? 1.0f : 0.0f;", "1 strictly inside the bounds, as PyTorch's hardtanh."),
        Function("relu", ("v",), "return v < 0.0f ? 0.0f : v;", "max(v, 0); NaN passes through."),
        Function("relu_grad", ("v",), "return v > 0.0f ? 1.0f : 0.0f;", "0 at 0, as PyTorch's relu."),
        Function("leaky_relu", ("v", "slope"), "return v > 0.0f ? v : v * slope;", "v above 0, slope * v below."),
        Function("leaky_relu_grad", ("v", "slope"), "return v > 0.0f ? 1.0f : slope;", "slope at 0, as PyTorch's leaky_relu."),
        Function(
            "sigmoid", ("v",), "return 1.0f / (1.0f + exponential(-v));", "1 / (1 + e^-v); e^-v may be infinite, the result is then 0.",
            uses=("exponential",),
        ),
        Function("sigmoid_grad", ("v",), "const float s = sigmoid(v);\nreturn s * (1.0f - s);", "s (1 - s).", uses=("sigmoid",)),
        Function(
            "hyperbolic_tangent", ("v",), "return tanhf(v);", "tanh(v).",
            cpp="""
const float a = v < 0.0f ? -v : v;
const float e = exponential(-2.0f * a);
const float large = (1.0f - e) / (1.0f + e);
const float s = v * v;
float p = -5.70498872745e-3f;
p = p * s + 2.06390887954e-2f;
p = p * s - 5.37397155531e-2f;
p = p * s + 1.33314422036e-1f;
p = p * s - 3.33332819422e-1f;
const float small = v + v * s * p;
return a < 0.625f ? small : (v < 0.0f ? -large : (v > 0.0f ? large : v));
""",
            uses=("exponential",),
        ),
        Function(
            "hyperbolic_tangent_grad", ("v",), "const float t = hyperbolic_tangent(v);\nreturn 1.0f - t * t;", "1 - tanh(v)^2.",
            uses=("hyperbolic_tangent",),
        ),
        Function("silu", ("v",), "return v / (1.0f + exponential(-v));", "v * sigmoid(v).", uses=("exponential",)),
        Function(
            "silu_grad", ("v",), "const float s = sigmoid(v);\nreturn s * (1.0f + v * (1.0f - s));", "s (1 + v (1 - s)), s = sigmoid(v).",
            uses=("sigmoid",),
        ),
        Function(
            "mish", ("v",),
            """
const float e = exponential(v > 20.0f ? 20.0f : v);
const float n = e * (e + 2.0f);
return v * divide(n, n + 2.0f);
""",
            "v * tanh(log(1 + e^v)) = v n / (n + 2) with n = e^v (e^v + 2): one exponential; from v = 20 on, n / (n + 2) rounds to 1.",
            uses=("exponential", "divide"),
        ),
        Function(
            "mish_grad", ("v",),
            """
const float e = exponential(v > 20.0f ? 20.0f : v);
const float n = e * (e + 2.0f);
const float t = divide(n, n + 2.0f);
return t + v * (1.0f - t * t) * divide(e, 1.0f + e);
""",
            "t + v (1 - t^2) sigmoid(v), t = tanh(log(1 + e^v)).", uses=("exponential", "divide"),
        ),
        Function("gelu", ("v",), "return 0.5f * v * (1.0f + erff(v * 0.707106781f));", "v times the normal distribution function at v."),
        Function(
            "gelu_grad", ("v",),
            "return 0.5f * (1.0f + erff(v * 0.707106781f)) + v * 0.398942280f * exponential(-0.5f * v * v);",
            "Phi(v) + v phi(v).", uses=("exponential",),
        ),
        Function(
            "gelu_tanh", ("v",), "return 0.5f * v * (1.0f + hyperbolic_tangent(0.797884561f * (v + 0.044715f * v * v * v)));",
            "gelu by its tanh approximation.", uses=("hyperbolic_tangent",),
        ),
        Function(
            "gelu_tanh_grad", ("v",),
            """
const float t = hyperbolic_tangent(0.797884561f * (v + 0.044715f * v * v * v));
return 0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * 0.797884561f * (1.0f + 0.134145f * v * v);
""",
            "Derivative of gelu_tanh.", uses=("hyperbolic_tangent",),
        ),
        Function("hardswish", ("v",), "return v * clamp(v + 3.0f, 0.0f, 6.0f) * 0.166666667f;", "v relu6(v + 3) / 6.", uses=("clamp",)),
        Function(
            "hardswish_grad", ("v",), "return v <= -3.0f ? 0.0f : (v < 3.0f ? v * 0.333333333f + 0.5f : 1.0f);",
            "0 up to -3, 1 from 3 on, as PyTorch's hardswish.",
        ),
        Function("hardsigmoid", ("v",), "return clamp(v + 3.0f, 0.0f, 6.0f) * 0.166666667f;", "relu6(v + 3) / 6.", uses=("clamp",)),
        Function("hardsigmoid_grad", ("v",), "return v > -3.0f && v < 3.0f ? 0.166666667f : 0.0f;", "1/6 strictly inside (-3, 3)."),
        Function(
            "softplus", ("v", "beta", "threshold"), "return v * beta > threshold ? v : log1pf(exponential(v * beta)) / beta;",
            "log(1 + e^(beta v)) / beta; v itself above the threshold.", uses=("exponential",),
        ),
        Function(
            "softplus_grad", ("v", "beta", "threshold"), "return v * beta > threshold ? 1.0f : sigmoid(v * beta);",
            "sigmoid(beta v); 1 above the threshold.", uses=("sigmoid",),
        ),
        Function("elu", ("v", "alpha"), "return v > 0.0f ? v : alpha * expm1f(v);", "v above 0, alpha (e^v - 1) below."),
        Function(
            "elu_grad", ("v", "alpha"), "return v > 0.0f ? 1.0f : alpha * exponential(v);", "1 above 0, alpha e^v below.", uses=("exponential",),
        ),
    )
}


def closure(names: Iterable[str]) -> tuple[Function, ...]:
    """The named functions and all that they use, each after what it calls, without repetition."""
    ordered: dict[str, Function] = {}

    def visit(name: str) -> None:
        if name not in ordered:
            for used in FUNCTIONS[name].uses:
                visit(used)
            ordered[name] = FUNCTIONS[name]

    for name in names:
        visit(name)
    return tuple(ordered.values())


def definitions(names: Iterable[str], language: str) -> str:
    """Definitions of the named functions and their callees in `language`, ready to paste at namespace scope."""
    return "\n\n".join(f.text(language) for f in closure(names))
