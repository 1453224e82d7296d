"""layer_norm and instance_norm, which are group_norms of their own names, and norms without parameters: kernels against PyTorch, specs, round trips."""

from __future__ import annotations

import shutil

import pytest
import torch

from bench.harness import reference_source
from codegen.ir.fused_form import departure
from codegen.plan import Refusal, plan
from codegen.render import render_kernel
from codegen.spec import SpecError
from tests.codegen.chains_emulated import build_emulated
from tests.codegen.cpu_chains import build, make_spec
from tests.codegen.module_files import CONV, LINEAR, chain, comparable, faults, read, spec_of
from tests.codegen.test_cpu import PRECISIONS, check

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
POOL = {"max_pool2d": {"kernel_size": 2}}
LINEARS = {
    "layer": {"layer_norm": {"name": "norm"}},
    "layer_eps": {"layer_norm": {"name": "norm", "normalized_shape": 48, "eps": 0.25}},
    "layer_plain": {"layer_norm": {"name": "norm", "normalized_shape": [48], "elementwise_affine": False}},
    "group_plain": {"group_norm": {"name": "norm", "num_groups": 1, "affine": False}},
}
CONVS = {
    "layer_plain": {"layer_norm": {"name": "norm", "normalized_shape": [6, 8, 9], "elementwise_affine": False}},
    "instance": {"instance_norm": {"name": "norm", "affine": True}},
    "instance_plain": {"instance_norm": {"name": "norm", "num_features": 6, "eps": 0.5}},
}


def linear(norm: dict, bias: bool = True) -> list:
    return [{"linear": {"name": "gemm", "in_features": 1, "out_features": 48, "bias": bias}}, "relu", norm, "silu"]


def conv(norm: dict, tail: list, bias: bool = True) -> list:
    return [{"conv2d": {"name": "conv", "in_channels": 1, "out_channels": 6, "kernel_size": 1, "bias": bias}}, norm, "tanh", *tail]


@needs_gxx
def test_norms_on_the_cpu(tmp_path) -> None:
    specs = [make_spec(tmp_path, linear(norm), 5, precision) for norm in LINEARS.values() for precision in PRECISIONS]
    specs += [make_spec(tmp_path, conv(norm, tail), 3, precision, (8, 9)) for norm in CONVS.values() for precision, tail in zip(PRECISIONS, ([], [POOL], [POOL]), strict=True)]
    for built in build(tmp_path, specs):
        check(built, built.source())


@pytest.mark.representative
@needs_gxx
def test_norms_by_the_kernels_of_sm_80_in_an_emulation(tmp_path) -> None:
    specs = [make_spec(tmp_path, linear(norm, False), 5, precision) for norm in LINEARS.values() for precision in ("fp16", "bf16")]
    specs += [make_spec(tmp_path, conv(norm, tail, False), 3, "fp32", (8, 9)) for norm in CONVS.values() for tail in ([], [POOL], [{"mean": {}}])]
    for built in build_emulated(tmp_path, specs):
        check(built, built.source(), steeper=4.0)


@pytest.mark.emulated
@needs_gxx
def test_groups_whose_squares_exceed_fp32_in_every_norm_kernel(tmp_path) -> None:
    """Whole samples, and one value, are so large; the samples between them are not. The cpu target's sums are double."""
    group = lambda groups: {"group_norm": {"name": "norm", "num_groups": groups}}  # noqa: E731
    wide = lambda channels, groups: [{"linear": {"name": "gemm", "in_features": 1, "out_features": channels, "bias": False}}, group(groups), "tanh"]  # noqa: E731
    overlapping = {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}}
    cases = [
        (wide(48, 6), 6, None, "warp"), (wide(8192, 1), 4, None, "block"), (wide(40000, 1), 150, None, "stream"), (wide(131074, 2), 4, None, "apply"),
        (conv(group(3), [POOL], False), 6, (8, 9), "pool"), (conv(group(3), ["silu", overlapping], False), 6, (30, 31), "pool_stream"),
        (conv(group(1), ["silu", overlapping], False), 4, (150, 151), "statistics"),
    ]  # fmt: skip
    specs = [make_spec(tmp_path, steps, batch, precision, size) for steps, batch, size, _ in cases for precision in (("fp32", "bf16") if size else ("bf16",))]
    met = set()
    for built in build_emulated(tmp_path, specs):
        met |= {kernel.template.removeprefix("norm/group_norm_").removesuffix(".cu.j2") for kernel in built.plan.kernels}
        source = built.source()
        source[0] *= 1e36
        source[2].view(-1)[3] = 1e38
        source[3] = 5e36 + source[3].float() * 1e35  # their sum alone exceeds it
        y, exact = built.kernel(source), built.pytorch(source, torch.float64)
        assert torch.isfinite(y).all()
        for sample in range(len(y)):
            error = float((y[sample].double() - exact[sample]).norm() / exact[sample].norm())
            assert error <= (5e-3 if built.dtype is torch.bfloat16 else 1e-6), (built.spec.precision.name, sorted(met), sample, error)
    assert {kind for *_, kind in cases} <= met


@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90a"])
def test_sources_name_the_norm_that_the_spec_names(tmp_path, target: str) -> None:
    chain = [{"linear": {"name": "gemm", "in_features": 1024, "out_features": 1024}}, {"layer_norm": {"name": "norm"}}, "silu"]
    try:
        planned = plan(make_spec(tmp_path, chain, 4096), target)
    except Refusal as error:
        assert target == "sm_90a" and str(error)
        return
    text = "".join(render_kernel(planned, kernel) for kernel in planned.kernels)
    assert "layer_norm(" in text and "group_norm's" not in text


@pytest.mark.parametrize("norm", [*LINEARS.values(), *CONVS.values()], ids=[*LINEARS, *(f"conv_{name}" for name in CONVS)])
def test_norms_come_back_from_their_reference(tmp_path, norm: dict) -> None:
    spec = make_spec(tmp_path, linear(norm) if norm in LINEARS.values() else conv(norm, [POOL]), 3, "fp32", None if norm in LINEARS.values() else (8, 9))
    found = spec_of(tmp_path, read(tmp_path, reference_source(spec), name=spec.name))
    bare = lambda given: [(s.operator.name, {k: v for k, v in s.values.items() if k not in ("normalized_shape", "num_features")}) for s in comparable(given).chain]  # noqa: E731
    assert bare(found) == bare(spec) and found.parameters == spec.parameters


SPELLINGS = [
    ("nn.LayerNorm(width_out)", {"layer_norm": {"name": "gn", "normalized_shape": "width_out"}}),
    ("nn.LayerNorm((width_out,), eps=0.5, elementwise_affine=False)", {"layer_norm": {"name": "gn", "normalized_shape": "width_out", "eps": 0.5, "elementwise_affine": False}}),
]


@pytest.mark.parametrize(("module", "entry"), SPELLINGS, ids=["plain", "tuple"])
def test_modules(tmp_path, module: str, entry: dict) -> None:
    text = LINEAR.replace("nn.GroupNorm(groups, width_out)", module).replace("groups, low", "low").replace("10, 12, 3,", "10, 12,")
    assert chain(tmp_path, text)[1] == entry


def test_instance_norm_and_functions(tmp_path) -> None:
    text = CONV.replace("nn.GroupNorm(groups, c_out)", "nn.InstanceNorm2d(c_out, affine=True)").replace("kernel, groups, ", "kernel, ").replace("[3, 8, 3, 4,", "[3, 8, 3,")
    assert chain(tmp_path, text)[1] == {"instance_norm": {"name": "gn", "num_features": "c_out", "affine": True}}
    plain = text.replace("self.gn(self.filter(x))", "F.instance_norm(self.filter(x), eps=0.5)").replace("        self.gn = nn.InstanceNorm2d(c_out, affine=True)\n", "")
    assert chain(tmp_path, plain)[1] == {"instance_norm": {"name": "instance_norm", "eps": 0.5}}
    ((line, message),) = faults(tmp_path, text.replace("affine=True", "track_running_stats=True"))
    assert "running statistics" in message


@pytest.mark.parametrize(
    ("norm", "size", "message"),
    [
        ({"layer_norm": {"name": "norm", "normalized_shape": 47}}, None, r"layer_norm takes trailing sizes of \(3, 48\)"),
        ({"layer_norm": {"name": "norm", "normalized_shape": "wide"}}, None, "neither a value nor an entry of args"),
        ({"layer_norm": {}}, None, "layer_norm needs one"),
        ({"instance_norm": {"name": "norm"}}, None, r"instance_norm takes \(batch, channels\) and one to three spatial axes"),
        ({"instance_norm": {"name": "norm", "num_features": 5}}, (8, 9), "6 channels come before it"),
        ({"instance_norm": {"name": "norm"}}, (1, 1), "instance_norm over one value"),
    ],
)
def test_what_no_norm_takes(tmp_path, norm: dict, size: tuple[int, int] | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(tmp_path, linear(norm) if size is None else conv(norm, []), 3, "fp32", size)


@needs_gxx
def test_a_scale_for_each_element_of_a_plane_is_computed_in_parts(tmp_path) -> None:
    spec = make_spec(tmp_path, conv({"layer_norm": {"name": "norm"}}, []), 3, "fp32", (8, 9))
    assert departure(spec.chain) is not None and spec.parameters[-1][1] == (6, 8, 9)
    assert any(line.startswith("parts, ") and departure(spec.chain) in line for line in plan(spec, "cpu").why)
