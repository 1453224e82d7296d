"""The C functions that emitted kernels are made of: one text serves CUDA and C++.

A function takes floats and returns a float. Bodies use only C that both languages share; where they need different text
(functions of the C library that would stop a compiler from vectorising the loop around them, the hardware's reciprocal on a GPU) each is
given. CUDA has a second text where values are stored in 16 bits, whose rounding hides what a faster one leaves. Stated errors are relative, in units of 2^-24 (half the distance from 1 to the next float), and are checked against
double precision by `tests/codegen/test_functions.py`, as are the rules for NaN, infinities and the derivatives at boundaries.

Polynomial coefficients are minimax fits of the relative error on the stated interval, rounded to float from the lowest degree up, the
rest refitted after each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import indent

LANGUAGES = ("cuda", "cuda16", "cpp")  # the second is CUDA where values are stored in 16 bits
_QUALIFIER = {"cuda": "__device__ __forceinline__", "cuda16": "__device__ __forceinline__", "cpp": "inline"}


@dataclass(frozen=True)
class Function:
    """A pure float function. `cpp` and `cuda16` replace `body` in those languages where they are given.

    Errors that the comment states hold in every language unless it says otherwise; in "cuda16" those of functions that divide are up to 3 units larger.
    """

    name: str
    parameters: tuple[str, ...]
    body: str
    comment: str
    cpp: str | None = None
    cuda16: str | None = None

    def body_in(self, language: str) -> str:
        own = {"cpp": self.cpp, "cuda16": self.cuda16}.get(language)
        return self.body if own is None else own

    def calls(self, language: str) -> tuple[str, ...]:
        """Names of the table's functions that the body calls in `language`, in the order of their first call."""
        return tuple(dict.fromkeys(word for word in re.findall(r"[a-z_][a-z0-9_]*(?=\()", self.body_in(language)) if word in FUNCTIONS))

    def text(self, language: str) -> str:
        """The function's definition in `language` (one of LANGUAGES), comment first, without a trailing newline."""
        body = self.body_in(language)
        signature = ", ".join(f"float {p}" for p in self.parameters)
        head = f"// {self.comment}\n{_QUALIFIER[language]} float {self.name}({signature}) {{\n"
        return head + indent(body.strip("\n"), "  ") + "\n}"


# e^v = 2^n e^r. Adding 1.5 * 2^23 rounds v / ln 2 to an integer, which then stands in the sum's low bits, ready to be shifted into an exponent
# field; ln 2 is taken off in two parts, of which n times the first is exact. e^r = 1 + r + r^2 q(r): q's fit costs 0.06 units.
_REDUCE = """
const float shifted = v * 1.44269504f + 12582912.0f;
const float n = shifted - 12582912.0f;
const float r = (v - n * 0.693359375f) + n * 2.12194440e-4f;  // |r| <= ln 2 / 2
float q = 1.38206338e-3f;
q = q * r + 8.36867373e-3f;
q = q * r + 4.16682661e-2f;
q = q * r + 1.66665211e-1f;
q = q * r + 4.99999940e-1f;
"""

_EXPONENTIAL_CPP = (
    _REDUCE
    + """
const float mantissa = q * (r * r) + r + 1.0f;
unsigned bits, exponent;
memcpy(&bits, &mantissa, sizeof bits);
memcpy(&exponent, &shifted, sizeof exponent);
bits += exponent << 23;  // times 2^n
float power;
memcpy(&power, &bits, sizeof power);
return v < -87.33654f ? 0.0f : (v <= 88.72283f ? power : v + INFINITY);  // v + INFINITY keeps NaN
"""
)

_EXPONENTIAL_MINUS_1_CPP = (
    _REDUCE
    + """
const float rest = q * (r * r) + r;  // e^r - 1
unsigned exponent;
memcpy(&exponent, &shifted, sizeof exponent);
exponent = (exponent << 23) + 0x3F800000u;
float power;  // 2^n
memcpy(&power, &exponent, sizeof power);
return v < -87.0f ? -1.0f : power * rest + (power - 1.0f);
"""
)

# Fewer instructions and registers than log1pf, which takes any v.
_LOGARITHM_1_PLUS = """
const float s = divide(v, v + 2.0f);  // log(1 + v) = 2 artanh(s), s <= 1/3
const float s2 = s * s;
float p = 1.40033767e-1f;  // artanh(s) = s + s^3 p(s^2): the fit costs 0.08 units
p = p * s2 + 1.40015140e-1f;
p = p * s2 + 2.00107187e-1f;
p = p * s2 + 3.33332092e-1f;
return 2.0f * (s + s * s2 * p);
"""

# Near 0 Phi is 1/2 and an odd polynomial (its fit costs 0.04 units of 1 for |v| <= 1.25). Further out, with a = |v| / sqrt 2, the tail beyond |v|
# is e^(-a^2) t p(t) / 2 with t = 1 / (1 + 0.4 a), p fitted to e^(a^2) erfc(a) / t (0.7 units of the tail); small tails stay relatively accurate.
_NORMAL_DISTRIBUTION_CPP = """
const float a = v < 0.0f ? -v : v;
const float s = v * v;
float c = -6.66099277e-6f;
c = c * s + 1.10401219e-4f;
c = c * s - 1.18283462e-3f;
c = c * s + 9.97159630e-3f;
c = c * s - 6.64900169e-2f;
c = c * s + 3.98942262e-1f;
const float near = 0.5f + v * c;
const float t = 1.0f / (1.0f + 0.282842712f * a);
float p = -1.16329007e-1f;
p = p * t + 2.43774593e-1f;
p = p * t + 8.09522532e-3f;
p = p * t + 2.13135287e-1f;
p = p * t + 1.98759094e-1f;
p = p * t + 2.26695895e-1f;
p = p * t + 2.25626826e-1f;
const float tail = 0.5f * (p * t) * exponential(-0.5f * s);
return a < 1.25f ? near : (v < 0.0f ? tail : 1.0f - tail);
"""

_CLAMP = "return v < lo ? lo : (v > hi ? hi : v);"

FUNCTIONS: dict[str, Function] = {
    f.name: f
    for f in (
        Function(
            "exponential", ("v",), "return expf(v);", "e^v, error at most 3 units; results below 2^-126 may be 0.", cpp=_EXPONENTIAL_CPP.replace("\n\n", "\n"),
        ),
        Function(
            "exponential_minus_1", ("v",), "return expm1f(v);", "e^v - 1 for v <= 0, error at most 4 units.",
            cpp=_EXPONENTIAL_MINUS_1_CPP.replace("\n\n", "\n"),
        ),
        Function(
            "logarithm_1_plus", ("v",), _LOGARITHM_1_PLUS, "log(1 + v) for 0 <= v <= 1, error at most 4 units.",
        ),
        Function(
            "divide", ("a", "b"),
            """
const float fast = __fdividef(a, b);  // error at most 3 units
const float rest = fmaf(-b, fast, a);  // exact; NaN where a or b is infinite, and fast is right
return rest == rest ? fmaf(rest, __fdividef(1.0f, b), fast) : fast;
""",
            "a / b for b >= 1, error at most 1.1 units; may be 0 for b > 2^126.", cpp="return a / b;", cuda16="return __fdividef(a, b);",
        ),
        Function("clamp", ("v", "lo", "hi"), _CLAMP, "min(max(v, lo), hi); both comparisons are false for NaN, so NaN goes through."),
        Function("clamp_grad", ("v", "lo", "hi"), "return v >= lo && v <= hi ? 1.0f : 0.0f;", "1 inside the bounds and on them, as PyTorch's clamp."),
        Function("clamp_min", ("v", "lo"), "return v < lo ? lo : v;", "max(v, lo); NaN goes through."),
        Function("clamp_min_grad", ("v", "lo"), "return v >= lo ? 1.0f : 0.0f;", "1 at the bound and above."),
        Function("clamp_max", ("v", "hi"), "return v > hi ? hi : v;", "min(v, hi); NaN goes through."),
        Function("clamp_max_grad", ("v", "hi"), "return v <= hi ? 1.0f : 0.0f;", "1 at the bound and below."),
        Function("minimum", ("v", "p"), "return v < p ? v : (p <= v ? p : v + p);", "The smaller of two values; v + p keeps NaN."),
        Function("minimum_grad", ("v", "p"), "return v < p ? 1.0f : (v == p ? 0.5f : 0.0f);", "1 below p; at ties the gradient is halved, as PyTorch's minimum."),
        Function("maximum", ("v", "p"), "return v > p ? v : (p >= v ? p : v + p);", "The larger of two values; v + p keeps NaN."),
        Function("maximum_grad", ("v", "p"), "return v > p ? 1.0f : (v == p ? 0.5f : 0.0f);", "1 above p; at ties the gradient is halved, as PyTorch's maximum."),
        Function("hardtanh", ("v", "lo", "hi"), _CLAMP, "min(max(v, lo), hi); NaN goes through."),
        Function("hardtanh_grad", ("v", "lo", "hi"), "return v > lo && v < hi ? 1.0f : 0.0f;", "1 strictly inside the bounds, as PyTorch's hardtanh."),
        Function("relu", ("v",), "return v < 0.0f ? 0.0f : v;", "max(v, 0); NaN goes through."),
        Function("relu_grad", ("v",), "return v > 0.0f ? 1.0f : 0.0f;", "0 at 0, as PyTorch's relu."),
        Function("leaky_relu", ("v", "slope"), "return v > 0.0f ? v : v * slope;", "v above 0, slope * v below."),
        Function("leaky_relu_grad", ("v", "slope"), "return v > 0.0f ? 1.0f : slope;", "slope at 0, as PyTorch's leaky_relu."),
        Function(
            "sigmoid", ("v",), "return divide(1.0f, 1.0f + exponential(-v));", "1 / (1 + e^-v), error at most 5 units; results below 2^-126 may be 0.",
        ),
        Function(
            "sigmoid_grad", ("v",),
            """
const float e = exponential(v < 0.0f ? v : -v);
const float s = divide(1.0f, 1.0f + e);
return e * s * s;
""",
            "sigmoid(v) sigmoid(-v) = e / (1 + e)^2 with e = e^-|v|: no cancellation.",
        ),
        Function(
            "hyperbolic_tangent", ("v",), "return tanhf(v);", "tanh(v), error at most 6 units.",
            cpp="""
const float m = exponential_minus_1(v < 0.0f ? 2.0f * v : -2.0f * v);
const float t = m / (m + 2.0f);  // -tanh(|v|)
return v > 0.0f ? -t : t;
""",
        ),
        Function(
            "hyperbolic_tangent_grad", ("v",),
            """
const float e = exponential(v < 0.0f ? 2.0f * v : -2.0f * v);
const float s = divide(1.0f, 1.0f + e);
return 4.0f * e * s * s;
""",
            "1 - tanh(v)^2 = 4 e / (1 + e)^2 with e = e^-2|v|: no cancellation.",
        ),
        Function(
            "silu", ("v",), "return divide(v, 1.0f + exponential(-v));", "v * sigmoid(v), error at most 5 units; results below 2^-119 may be 0.",
        ),
        Function(
            "silu_grad", ("v",),
            """
const float e = exponential(v < 0.0f ? v : -v);
const float large = divide(1.0f, 1.0f + e);
const float small = e * large;
return v < 0.0f ? small * (1.0f + v * large) : large * (1.0f + v * small);
""",
            "s (1 + v (1 - s)), s = sigmoid(v); s and 1 - s are 1 / (1 + e) and e / (1 + e), e = e^-|v|.",
        ),
        Function(
            "mish", ("v",),
            """
const float c = v > 20.0f ? 20.0f : v;
const float e = exponential(c);
const float n = e * (e + 2.0f);
const float q = divide(v < 0.0f ? n : 2.0f, n + 2.0f);
return v < 0.0f ? v * q : v - c * q;
""",
            "v tanh(log(1 + e^v)) with n = e^v (e^v + 2): v n / (n + 2) below 0, where it is small, error at most 8 units; v - 2 v / (n + 2) above, "
            "error at most 4; v itself from 20 on.",
        ),
        Function(
            "mish_grad", ("v",),
            """
const float c = v > 20.0f ? 20.0f : v;
const float e = exponential(c);
const float n = e * (e + 2.0f);
const float w = divide(1.0f, n + 2.0f);
return n * w + c * (4.0f * e * w) * ((1.0f + e) * w);
""",
            "t + v (1 - t^2) sigmoid(v) with t = tanh(log(1 + e^v)) = n / (n + 2): 1 - t^2 = 4 (1 + e^v)^2 / (n + 2)^2; 1 from v = 20 on.",
        ),
        Function(
            "normal_distribution", ("v",), "return 0.5f * (1.0f + erff(v * 0.707106781f));",
            "The normal distribution function, absolute error at most 3 units.", cpp=_NORMAL_DISTRIBUTION_CPP,
        ),
        Function("gelu", ("v",), "return v * normal_distribution(v);", "v times the normal distribution function at v."),
        Function(
            "gelu_grad", ("v",), "return normal_distribution(v) + v * (0.398942280f * exponential(-0.5f * v * v));",
            "Phi(v) + v phi(v), the normal distribution's function and density.",
        ),
        Function(
            "gelu_tanh", ("v",), "return divide(v, 1.0f + exponential(v * (-1.59576912f - 0.0713548163f * v * v)));",
            "gelu by its tanh approximation, v (1 + tanh u) / 2 = v sigmoid(2 u) with u = sqrt(2 / pi) (v + 0.044715 v^3): one exponential.",
        ),
        Function(
            "gelu_tanh_grad", ("v",),
            """
const float u2 = v * (1.59576912f + 0.0713548163f * v * v);
const float e = exponential(u2 < 0.0f ? u2 : -u2);
const float large = divide(1.0f, 1.0f + e);
const float small = e * large;
return (u2 < 0.0f ? small : large) + small * large * v * (1.59576912f + 0.214064449f * v * v);
""",
            "s + v s (1 - s) (2 u)', s = sigmoid(2 u) as in gelu_tanh; s and 1 - s are 1 / (1 + e) and e / (1 + e).",
        ),
        Function("hardswish", ("v",), "return v * (clamp(v + 3.0f, 0.0f, 6.0f) * 0.166666667f);", "v relu6(v + 3) / 6."),
        Function(
            "hardswish_grad", ("v",), "return v <= -3.0f ? 0.0f : (v >= 3.0f ? 1.0f : v * 0.333333333f + 0.5f);",
            "0 up to -3, 1 from 3 on, as PyTorch's hardswish.",
        ),
        Function("hardsigmoid", ("v",), "return clamp(v + 3.0f, 0.0f, 6.0f) * 0.166666667f;", "relu6(v + 3) / 6."),
        Function("hardsigmoid_grad", ("v",), "return v > -3.0f && v < 3.0f ? 0.166666667f : 0.0f;", "1/6 strictly inside (-3, 3)."),
        Function(
            "softplus", ("v", "beta", "threshold"),
            """
const float z = v * beta;
const float log_term = logarithm_1_plus(exponential(z < 0.0f ? z : -z));
return z > threshold ? v : ((z > 0.0f ? z : 0.0f) + log_term) / beta;
""",
            "log(1 + e^(beta v)) / beta, error at most 7 + |beta v| units; v itself above the threshold. log(1 + e^z) = max(z, 0) + log(1 + e^-|z|).",
        ),
        Function(
            "softplus_grad", ("v", "beta", "threshold"), "return v * beta > threshold ? 1.0f : sigmoid(v * beta);",
            "sigmoid(beta v); 1 above the threshold.",
        ),
        Function(
            "elu", ("v", "alpha"), "return v > 0.0f ? v : alpha * exponential_minus_1(v);", "v above 0, alpha (e^v - 1) below.",
        ),
        Function(
            "elu_grad", ("v", "alpha"), "return v > 0.0f ? 1.0f : alpha * exponential(v);", "1 above 0, alpha e^v below and at 0.",
        ),
        Function("relu6", ("v",), "return v < 0.0f ? 0.0f : (v > 6.0f ? 6.0f : v);", "min(max(v, 0), 6); NaN goes through."),
        Function("relu6_grad", ("v",), "return v > 0.0f && v < 6.0f ? 1.0f : 0.0f;", "1 strictly between 0 and 6."),
        Function(
            "selu", ("v",), "return v > 0.0f ? 1.05070099f * v : 1.75809934f * exponential_minus_1(v);", "PyTorch's scale v above 0, scale alpha (e^v - 1) below.",
        ),
        Function("selu_grad", ("v",), "return v > 0.0f ? 1.05070099f : 1.75809934f * exponential(v);", "scale above 0, scale alpha e^v below and at 0."),
        Function("celu", ("v", "alpha"), "return v > 0.0f ? v : alpha * exponential_minus_1(v / alpha);", "v above 0, alpha (e^(v / alpha) - 1) below."),
        Function("celu_grad", ("v", "alpha"), "return v > 0.0f ? 1.0f : exponential(v / alpha);", "1 above 0, e^(v / alpha) below and at 0."),
        Function(
            "softsign", ("v",), "return v / (1.0f + (v < 0.0f ? -v : v));", "v / (1 + |v|), error at most 3 units; NaN for infinities, as PyTorch's.",
        ),
        Function(
            "softsign_grad", ("v",),
            """
const float r = 1.0f / (1.0f + (v < 0.0f ? -v : v));
return r * r;
""",
            "1 / (1 + |v|)^2.",
        ),
        Function(
            "logsigmoid", ("v",),
            """
const float log_term = logarithm_1_plus(exponential(v < 0.0f ? v : -v));
return (v < 0.0f ? v : 0.0f) - log_term;
""",
            "log(1 / (1 + e^-v)) = min(v, 0) - log(1 + e^-|v|), error at most 9 units.",
        ),
        Function("logsigmoid_grad", ("v",), "return sigmoid(-v);", "1 - sigmoid(v)."),
        Function(
            "softshrink", ("v", "lambd"), "return v > lambd ? v - lambd : (v < -lambd ? v + lambd : (v == v ? 0.0f : v));",
            "v less lambd in magnitude, +0 up to there, as PyTorch's in float64; NaN goes through.",
        ),
        Function("softshrink_grad", ("v", "lambd"), "return v >= -lambd && v <= lambd ? 0.0f : 1.0f;", "0 up to lambd in magnitude, 1 beyond."),
    )
}  # fmt: skip


def closure(names: Iterable[str], language: str) -> tuple[Function, ...]:
    """The named functions and all that their text in `language` calls, each after what it calls, without repetition."""
    ordered: dict[str, Function] = {}

    def visit(name: str) -> None:
        if name not in ordered:
            for called in FUNCTIONS[name].calls(language):
                visit(called)
            ordered[name] = FUNCTIONS[name]

    for name in names:
        visit(name)
    return tuple(ordered.values())


def definitions(names: Iterable[str], language: str) -> str:
    """Definitions of the named functions and their callees in `language`, ready to paste at namespace scope."""
    return "\n\n".join(f.text(language) for f in closure(names, language))
