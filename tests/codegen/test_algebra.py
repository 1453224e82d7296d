"""Algebra: chains that meet a pass's conditions give what they give as written, those that just miss them are left alone, and gradients stay."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from codegen.algebra import PASSES, rewrite
from codegen.package import make_package
from codegen.plan import Library, plan
from codegen.render import render
from codegen.spec import Spec, load_spec
from codegen.spec.writer import resolved_yaml
from codegen.standalone import render_standalone
from tests.codegen.algebra_draw import DRAWS, MISSES
from tests.codegen.segment_chains import SegmentChain, build_segments, error_of, same_places, segment_spec
from tests.fsk import fsk, words

NAMES = [row.name for row in PASSES]
EXACT = ("identity", "merge")  # where NaN and infinities stay in their places
LEAST = 3e-7  # the error that fp32 promises at least
FEW = 2.0**-20  # sixteen roundings in a row
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def drawn(folder: Path, name: str, count: int, precision: str = "fp32", seed: int = 0) -> list[Spec]:
    """Chains that meet a pass's conditions; their producers are the library's."""
    random = Random(f"{name} {seed}")
    specs = [segment_spec(folder, *DRAWS[name](random), precision) for _ in range(count)]
    return [replace(spec, gemm="library") for spec in specs]


def check(chain: SegmentChain, sources: list[torch.Tensor], training: bool = False) -> tuple[float, float]:
    """The errors of the result and of PyTorch's. A small chain's is that of a few roundings, which happen to agree or not: it may have FEW of them."""
    exact, eager = (chain.pytorch(sources, dtype, training)["y"] for dtype in (torch.float64, None))
    got = chain.kernels(sources, training)["y"]
    assert got.shape == exact.shape and not got[exact.isfinite()].isnan().any()
    ours, theirs = error_of(got, exact), error_of(eager, exact)
    assert ours <= max(4.0 * theirs, FEW), chain.spec.chain
    return ours, theirs


def hold_promise(errors: list[tuple[float, float]]) -> None:
    """Over all chains together the error keeps fp32's promise."""
    ours, theirs = (sum(error[which] ** 2 for error in errors) ** 0.5 / len(errors) ** 0.5 for which in (0, 1))
    assert ours <= max(1.1 * theirs, LEAST), (ours, theirs)


def test_every_pass_is_tested():
    assert NAMES == [*EXACT, "row_sum", "pooled_rows", "summed_input", "pooled_taps"] and set(DRAWS) == set(MISSES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_that_meets_the_conditions_is_rewritten(tmp_path, name):
    for spec in drawn(tmp_path, name, 60):
        assert name in rewrite(spec).names, spec.chain
        made = plan(spec, "cpu")
        assert name in made.algebra and any(f"algebra, {name}: " in reason for reason in made.why)
        bare = plan(replace(spec, algebra=False), "cpu")
        assert not bare.algebra and not any("algebra" in reason for reason in bare.why)
        assert [step.output_shape for step in rewrite(spec).spec.chain][-1] == spec.output_shape


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_that_just_misses_them_is_not(tmp_path, name):
    for shape, chain in MISSES[name]:
        found = rewrite(segment_spec(tmp_path, shape, chain))
        assert name not in found.names, chain


@needs_gxx
@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_the_chain_as_written(tmp_path, name):
    errors = []
    for chain in build_segments(tmp_path, drawn(tmp_path, name, 12, seed=1), "cpu"):
        errors += [check(chain, chain.sources(scale, offset)) for scale, offset in ((1.0, 0.0), (3.0, 10.0))]
        if chain.plan.training:
            check(chain, chain.sources(), training=True)
    hold_promise(errors)


@needs_gxx
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", EXACT)
def test_nan_and_infinities_stay_in_their_places(tmp_path, name, precision):
    hard = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-30])
    for number, chain in enumerate(build_segments(tmp_path, drawn(tmp_path, name, 12, precision, seed=2), "cpu")):
        generator = torch.Generator().manual_seed(number)
        (x,) = chain.sources()
        places = torch.rand(x.shape, generator=generator) < 0.15
        x[places] = hard[torch.randint(len(hard), x.shape, generator=generator)][places].to(x.dtype)
        got, written = chain.kernels([x])["y"], chain.pytorch([x])["y"]
        assert same_places(got, written), chain.spec.chain
        assert error_of(got, written.double()) <= {"fp32": 1e-6, "fp16": 2e-3, "bf16": 2e-2}[precision]


@needs_gxx
@pytest.mark.parametrize("target", ["cpu", pytest.param("sm_80", marks=pytest.mark.emulated)])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_sums_over_features_are_not_rounded_to_16_bits(tmp_path, precision, target):
    """Column sums and what stands between them and the result stay float32, so that the error is that of the result's own rounding."""
    errors = []
    for chain in build_segments(tmp_path, drawn(tmp_path, "row_sum", 12, precision, seed=7), target):
        assert "row_sum" in chain.plan.algebra and {buffer.dtype for buffer in chain.plan.buffers if "derived" in buffer.name} == {"float32"}
        sources = chain.sources()
        exact = chain.pytorch(sources, torch.float64)["y"]
        errors.append(error_of(chain.kernels(sources)["y"], exact) - 1.05 * error_of(chain.pytorch(sources)["y"], exact))
    assert max(errors) <= 2.0 ** -{"fp16": 11, "bf16": 8}[precision] and sum(errors) <= 0.0


@needs_gxx
@pytest.mark.representative
def test_the_kernels_for_sm_80_give_the_same(tmp_path):
    specs = [spec for name in NAMES for spec in drawn(tmp_path, name, 2, seed=3)]
    chains = build_segments(tmp_path, specs, "sm_80")
    assert {"derived/taps.cu.j2", "derived/ranges.cu.j2"} <= {kernel.template for chain in chains for kernel in chain.plan.kernels}
    for chain in chains:
        check(chain, chain.sources())


@needs_gxx
@pytest.mark.emulated
@pytest.mark.parametrize("name", NAMES)
def test_more_kernels_for_sm_80_give_the_same(tmp_path, name):
    for chain in build_segments(tmp_path, drawn(tmp_path, name, 12, seed=4), "sm_80"):
        check(chain, chain.sources())


@needs_gxx
@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_state_are_those_of_the_chain_as_written(tmp_path, on_cpu, name):
    """The backward is the same code for both, so that not a bit differs; the constructors draw the same weights."""
    for number, spec in enumerate(drawn(tmp_path, name, 2, seed=5)):
        found = []
        for algebra in (True, False):
            _, module = on_cpu(replace(spec, name=f"{spec.name}_{number}_{'on' if algebra else 'off'}", algebra=algebra))
            torch.manual_seed(0)
            model = module.ModelNew(*module.get_init_inputs())
            x = torch.randn(spec.input_shape, requires_grad=True)
            y = model(x)
            y.backward(torch.ones_like(y))
            found.append({"x": x.grad, **{key: p.grad for key, p in model.named_parameters()}, **dict(model.state_dict())})
        assert list(found[0]) == list(found[1])
        for key, value in found[0].items():
            assert value is not None and torch.equal(value, found[1][key]), key


_GN = {"group_norm": {"name": "norm", "num_groups": 4}}
_POOLS = [{"max_pool2d": {"kernel_size": 2}}, {"max_pool2d": {"kernel_size": 2}}]
_LINEAR = {"linear": {"name": "fc", "in_features": 12, "out_features": 16}}
_CONV = {"conv2d": {"name": "conv", "in_channels": 4, "out_channels": 8, "kernel_size": 3, "padding": 1}}
FUSED = {
    "bounds": ([5, 12], [_LINEAR, "relu", "relu6", "relu", _GN, "relu", "relu"]),
    "poolings": ([2, 4, 16, 16], [_CONV, _GN, *_POOLS, "tanh"]),
    "stages": ([2, 4, 16, 16], [_CONV, _GN, "silu", *_POOLS, {"avg_pool2d": {"kernel_size": 2}}, {"mul": {"name": "scale", "shape": [8, 1, 1]}}, "relu", "relu"]),
}


@needs_gxx
@pytest.mark.parametrize("case", FUSED)
def test_gradients_of_a_fused_chain_come_from_what_the_rewritten_forward_keeps(tmp_path, on_cpu, case):
    """A norm's chain has a backward of its own, which takes the producer's result."""
    shape, chain = FUSED[case]
    spec = segment_spec(tmp_path, shape, chain)
    assert rewrite(spec).applied
    package, module = on_cpu(replace(spec, name=f"fused_{case}"))
    assert package.backward_plans
    torch.manual_seed(0)
    ours = module.ModelNew(*module.get_init_inputs())
    theirs = module.Model(*module.get_init_inputs())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(spec.input_shape)
    grads = []
    for model in (ours, theirs):
        given = x.clone().requires_grad_()
        model(given).square().sum().backward()
        grads.append([given.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["pooled_rows", "summed_input", "pooled_taps"])
def test_folded_weights_stay_in_float32(tmp_path, name):
    """At tf32 the product with them is float32's, at 16 bits there is none and the plan says why."""
    for spec in drawn(tmp_path, name, 8, seed=6):
        single = plan(spec.with_precision("tf32"), "cpu")
        products = [step for step in single.steps if isinstance(step, Library) and step.operation != "view"]
        assert products and all(step.options["precision"] == "fp32" for step in products)
        half = plan(spec.with_precision("bf16"), "cpu")
        assert name not in half.algebra and any(f"algebra, not {name}: " in reason for reason in half.why)


def test_beside_another_product_in_tf32_nothing_is_folded(tmp_path):
    chain = [{"linear": {"name": "fc", "in_features": 8, "out_features": 12}}, {"unsqueeze": {"dim": 1}}, {"avg_pool1d": {"kernel_size": 3}}, {"linear": {"name": "end", "in_features": 4, "out_features": 4}}]
    spec = segment_spec(tmp_path, [4, 8], chain)
    assert rewrite(spec).names == ("pooled_rows",) and not rewrite(spec.with_precision("tf32")).names


def test_training_keeps_what_batch_statistics_need(tmp_path):
    chain = [{"conv2d": {"name": "conv", "in_channels": 3, "out_channels": 4, "kernel_size": 3}}, {"batch_norm": {"name": "bn"}}, {"avg_pool2d": {"kernel_size": 3}}]
    spec = segment_spec(tmp_path, [2, 3, 11, 11], chain)
    assert rewrite(spec).names == ("pooled_taps",) and not rewrite(spec, training=True).names
    made = plan(spec, "cpu")
    assert any("derived:" in name for step in made.steps for name in step.arguments) and not any("derived:" in name for step in made.training for name in step.arguments)


def test_algebra_is_a_key_of_the_spec_and_an_option(tmp_path):
    data = {"name": "pooled", "batch": 4, "algebra": False, "chain": DRAWS["row_sum"](Random(1))[1]}
    path = tmp_path / "pooled.yaml"
    path.write_text(json.dumps(data))
    spec = load_spec(path)
    assert not spec.algebra and not spec.algebra_asked and "algebra: false" in resolved_yaml(spec)
    del data["algebra"]
    path.write_text(json.dumps(data))
    assert load_spec(path).algebra and "algebra" not in resolved_yaml(load_spec(path))
    asked = load_spec(path, algebra=False)
    assert asked.algebra_asked and make_package(asked, ("cpu",)).regenerate.endswith(" ALGEBRA=0")
    assert "algebra, row_sum" in words("explain", path, "--target", "cpu") and "algebra" not in words("explain", path, "--target", "cpu", "--no-algebra")
    manifest = json.loads(render(make_package(load_spec(path), ("cpu",)))["manifest.json"])
    assert manifest["plan"]["cpu"]["algebra"] == ["row_sum"]
    out = tmp_path / "out"
    assert fsk("generate", path, "--no-algebra", "--target", "cpu", "--out", out).exit_code == 0
    again = fsk("generate", out / "pooled" / "spec.yaml", "--target", "cpu", "--out", tmp_path / "again")
    assert again.exit_code == 0
    for file in (out / "pooled").iterdir():
        assert (tmp_path / "again" / "pooled" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("target", ["cpu", "sm_80"])
def test_a_backward_keeps_its_files_apart_from_a_rewritten_forward(tmp_path, target):
    """Behind merged poolings the backward goes through both, and what it computes again is the chain as written."""
    spec = segment_spec(tmp_path, *FUSED["poolings"])
    package = make_package(spec, (target,))
    (forward,), (backward,) = package.plans, package.backward_plans
    assert forward.algebra == ("merge",)
    assert not {kernel.file(forward.target) for kernel in forward.kernels} & {kernel.file(backward.target) for kernel in backward.kernels}
    as_written = make_package(replace(spec, algebra=False), (target,)).backward_plans[0]
    assert [f"written_{kernel.name}" for kernel in as_written.kernels] == [kernel.name for kernel in backward.kernels]


@pytest.mark.parametrize("name", ["row_sum", "pooled_rows", "summed_input", "pooled_taps"])
def test_standalone_derives_what_the_chain_reads(tmp_path, name):
    """Its text is Python whatever the keys are called, and at tf32 products with derived tensors are float32's."""
    for spec in drawn(tmp_path, name, 3, seed=8):
        for precision in ("fp32", "tf32"):
            package = make_package(spec.with_precision(precision), ("sm_80",))
            text = render_standalone(package, render(package))
            compile(text, "standalone.py", "exec")
            assert "derived_" in text and "True)" not in "".join(line for line in text.splitlines() if "aten.cudnn" in line and "derived" in line)
            assert precision == "fp32" or " _product(derived" not in text


def test_derived_tensors_have_names_of_their_own(tmp_path):
    bare = {"linear": {"name": "weight", "in_features": 8, "out_features": 6, "bias": False, "init": "randn"}}
    spec = segment_spec(tmp_path, [4, 8], [bare, {"sum": {"dim": 1, "keepdim": True}}, {"add": {"name": "weight_sum", "shape": [1]}}])
    (tensor,) = rewrite(spec).derived
    assert tensor.key == "weight.sum_" and len(render(make_package(spec, ("cpu",)))) > 4


def test_what_is_derived_at_each_call_is_not_prepared(tmp_path):
    chain = [{"linear": {"name": "fc", "in_features": 1024, "out_features": 2048}}, {"unsqueeze": {"dim": 1}}, {"avg_pool1d": {"kernel_size": 2}}, {"squeeze": {"dim": 1}}, "relu"]
    spec = replace(segment_spec(tmp_path, [512, 1024], chain), prepack=True)
    assert plan(replace(spec, algebra=False), "sm_90a").prepared
    made = plan(spec, "sm_90a")
    assert "pooled_rows" in made.algebra and not made.prepared


MASKED = {
    "identity": ([6, 12], [_LINEAR, "sigmoid", "relu", {"dropout": {"p": 0.3}}, "tanh"]),
    "two masks": ([6, 12], [{"dropout": {"p": 0.5}}, _LINEAR, "relu", "relu", {"dropout": {"p": 0.3}}]),
    "row_sum": ([6, 12], [_LINEAR, {"sum": {"dim": 1, "keepdim": True}}, {"dropout": {"p": 0.3}}]),
    "poolings": ([2, 4, 16, 16], [_CONV, *_POOLS, {"dropout": {"p": 0.3}}]),
    "state": ([6, 12], [_LINEAR, {"batch_norm": {"name": "bn"}}, "sigmoid", "relu", {"dropout": {"p": 0.3}}]),
}


@needs_gxx
@pytest.mark.parametrize("case", MASKED)
def test_training_keeps_masks_and_statistics_under_the_names_of_the_chain_as_written(tmp_path, on_cpu, case):
    """The backward is that of the chain as written: it finds what a rewritten forward drew, whose steps have other places."""
    spec = segment_spec(tmp_path, *MASKED[case])
    assert rewrite(spec, True).applied
    _, module = on_cpu(replace(spec, name=f"masked_{case.replace(' ', '_')}"))
    torch.manual_seed(0)
    ours, theirs = module.ModelNew(*module.get_init_inputs()).train(), module.Model(*module.get_init_inputs()).train()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(spec.input_shape)
    found = []
    for model in (ours, theirs):
        given = x.clone().requires_grad_()
        torch.manual_seed(7)
        y = model(given)
        y.square().sum().backward()
        found.append([y.detach(), given.grad, *(p.grad for p in model.parameters()), *model.buffers()])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
