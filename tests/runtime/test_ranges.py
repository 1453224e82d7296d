"""Packages for several batches: the size of x is what runs, another batch is refused or padded, and all else is as for one batch."""

import copy
import io
import pickle

import pytest
import torch
from torch._subclasses import FakeTensorMode

from runtime import CallError
from runtime.cache import LIBRARY
from tests import tiers

from .generated_packages import CHAINS, LINEAR, assert_an_exported_program_runs, generate

pytestmark = pytest.mark.usefixtures("kept_builds")

BATCHES = (1, 3, 8)
REDUCED = [LINEAR, {"group_norm": {"name": "norm", "num_groups": 4}}, {"min": {"keepdim": True}}, {"add": {"name": "bias", "shape": [1, 24, 1, 1]}}]


@pytest.fixture(params=CHAINS)
def ranged(request, shared):
    return shared(CHAINS[request.param], batch=list(BATCHES))


@pytest.fixture(params=CHAINS)
def padding(request, shared):
    return shared(CHAINS[request.param], batch=list(BATCHES), pad_batch=True)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def pair(package):
    """The generated model and the reference, with the same weights."""
    models = []
    for made in (package.ModelNew, package.Model):
        torch.manual_seed(0)
        models.append(made())
    return models


def x_of(package, batch):
    torch.manual_seed(batch)
    return package.get_inputs(batch)[0]


def gradients(model, x, grad_y):
    x = x.clone().requires_grad_()
    model.zero_grad()
    model(x).backward(grad_y)
    return [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# ---- listed batches --------------------------------------------------------------------------------------------------


def test_each_size_gives_the_references_values_and_gradients(ranged):
    model, reference = pair(ranged)
    for batch in BATCHES:
        x = x_of(ranged, batch)
        with torch.no_grad():
            want = reference(x)
            assert_same(model(x), want)
        grad_y = torch.randn_like(want)
        assert_same(gradients(model, x, grad_y), gradients(reference, x, grad_y))


def test_each_size_runs_its_own_kernels(ranged, tmp_path):
    """The same bits as from a package for that batch alone."""
    model, _ = pair(ranged)
    chain = CHAINS["conv" if x_of(ranged, 1).dim() == 4 else "linear"]
    for batch in BATCHES:
        alone = generate(tmp_path / f"alone_{batch}", chain, batch=batch).ModelNew()
        alone.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model(x_of(ranged, batch)), alone(x_of(ranged, batch)))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_halves(tmp_path, precision):
    package = generate(tmp_path, CHAINS["linear"], precision, batch=list(BATCHES))
    model, reference = pair(package)
    for batch in BATCHES:
        x = x_of(package, batch)
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x), rtol=2**-6, atol=2**-6)  # a few roundings to 8 bits


def test_a_result_whose_shape_depends_on_the_batch_in_another_place(tmp_path):
    package = generate(tmp_path, REDUCED, batch=list(BATCHES))
    model, reference = pair(package)
    for batch in BATCHES:
        with torch.no_grad():
            assert model(x_of(package, batch)).shape == (1, 24, batch, 1)
            assert_same(model(x_of(package, batch)), reference(x_of(package, batch)))


def test_all_sizes_are_one_library_and_are_built_at_once(tmp_path, counting_gxx, private_cache):
    package = generate(tmp_path / "packages", CHAINS["linear"], batch=list(BATCHES))
    model = package.ModelNew()
    assert len(counting_gxx.compiled) == len(BATCHES) and len(list(private_cache.rglob(LIBRARY))) == 1
    with torch.no_grad():
        for batch in BATCHES:
            model(x_of(package, batch))
    package.ModelNew()
    assert len(counting_gxx.compiled) == len(BATCHES)


def test_the_model_says_what_it_was_made_for(ranged):
    model, _ = pair(ranged)
    assert "batch=[1, 3, 8], built=cpu" in repr(model)
    assert ranged.get_inputs()[0].shape[0] == 8


# ---- unlisted batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "remedy"),
    [
        (2, r"the next larger is 3: pass x padded to it, or add 2 to batch or set pad_batch: true there and run make generate SPEC="),
        (5, r"the next larger is 8: pass x padded to it, or add 5 to batch or set pad_batch: true there and run make generate SPEC="),
        (9, r"none of them is larger: add 9 to batch there and run make generate SPEC="),
        (0, r"pass at least one sample\."),
    ],
)
def test_an_unlisted_batch_is_refused_with_what_can_be_done(ranged, batch, remedy):
    model, _ = pair(ranged)
    x = x_of(ranged, 1).repeat(batch, *[1] * (x_of(ranged, 1).dim() - 1))
    with pytest.raises(CallError, match=rf"with N 1, 3 or 8, got \({batch}, .*generated for batch 1, 3 and 8 from .*spec.yaml; {remedy}"):
        model(x)


def test_what_else_may_be_wrong_is_said_of_listed_batches_too(ranged):
    model, _ = pair(ranged)
    x = x_of(ranged, 3)
    with pytest.raises(CallError, match=r"got float64; pass x\.to\(torch\.float32\)"):
        model(x.double())
    with pytest.raises(CallError, match=r"generated for inputs of \(N, .*change the sizes there"):
        model(x[:, :-1])
    for wrong in (x[0, 0], torch.tensor(1.0), x[None]):
        with pytest.raises(CallError, match=r"generated for inputs of \(N, "):
            model(wrong)
    with pytest.raises(CallError, match="pass a torch.Tensor"):
        model([1.0])
    with pytest.raises(CallError, match=r"this operator is the one for batch 8"):
        model._operators.forward(x, *(parameter.detach() for parameter in model.parameters()))


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [2, 4, 7])
def test_padded_values_and_gradients(padding, batch):
    model, reference = pair(padding)
    x = x_of(padding, batch)
    kept = x.clone()
    with torch.no_grad():
        y, want = model(x), reference(x)
    assert_same(y, want)
    assert y.is_contiguous() and y.shape == want.shape and torch.equal(x, kept)
    assert y.untyped_storage().nbytes() == y.nbytes, "the larger result is not kept"
    grad_y = torch.randn_like(want)
    assert_same(gradients(model, x, grad_y), gradients(reference, x, grad_y))


def test_rows_of_zeros_add_nothing_to_gradients_where_their_groups_are_constant(tmp_path):
    """Without a bias the rows behind x give groups of equal values, whose norm is the steepest there is."""
    linear = {"linear": {**LINEAR["linear"], "bias": False}}
    package = generate(tmp_path, [linear, {"group_norm": {"name": "norm", "num_groups": 4, "eps": 1e-12}}], batch=list(BATCHES), pad_batch=True)
    model, reference = pair(package)
    x = x_of(package, 5)
    grad_y = torch.randn_like(reference(x))
    assert_same(gradients(model, x, grad_y), gradients(reference, x, grad_y))


def test_rows_do_not_depend_on_what_is_behind_them(padding):
    """A padded batch gives the bits that the first rows have in the full batch, whatever the others hold."""
    model, _ = pair(padding)
    full = x_of(padding, 8)
    with torch.no_grad():
        want = model(full)
        for other in (float("nan"), float("inf"), 1e30):
            x = full.clone()
            x[5:] = other
            assert torch.equal(model(x)[:5], want[:5]) and torch.equal(model(x[:5]), want[:5])


def test_nan_stays_in_its_row(padding):
    model, reference = pair(padding)
    x = x_of(padding, 6)
    with torch.no_grad():
        clean = model(x)
        x[2] = float("nan")
        y = model(x)
        poisoned = torch.isnan(reference(x))
    assert torch.equal(torch.isnan(y), poisoned) and torch.isnan(y[2]).any()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], clean[others])


def test_memory_behind_x_is_not_read(padding):
    """x is the front of a larger tensor of NaNs; only copies of its own rows are used."""
    model, _ = pair(padding)
    x = x_of(padding, 5)
    behind = torch.full((8, *x.shape[1:]), float("nan"))
    behind[:5] = x
    with torch.no_grad():
        assert torch.equal(model(behind[:5]), model(x))


def test_any_strides_are_padded(padding):
    model, _ = pair(padding)
    x = x_of(padding, 5)
    strided = torch.stack([x, x], dim=-1)[..., 0]
    with torch.no_grad():
        assert not strided.is_contiguous() and torch.equal(model(strided), model(x))


def test_beyond_the_largest_there_is_nothing_to_pad_to(padding):
    model, _ = pair(padding)
    x = x_of(padding, 9)
    with pytest.raises(CallError, match=r"with N up to 8, got \(9, .*none of them is larger: add 9 to batch there and run make generate"):
        model(x)
    with pytest.raises(CallError, match=r"got float64; pass x\.to"):
        model(x[:5].double())


def test_no_rows_give_no_rows(padding):
    model, _ = pair(padding)
    x = x_of(padding, 1)
    with torch.no_grad():
        assert model(x[:0]).shape == (0, *model(x).shape[1:])


def test_one_size_that_pads(tmp_path):
    package = generate(tmp_path, CHAINS["linear"], batch=4, pad_batch=True)
    model, reference = pair(package)
    for batch in (1, 3, 4):
        with torch.no_grad():
            assert_same(model(x_of(package, batch)), reference(x_of(package, batch)))
    assert "batch=4, pad_batch=True" in repr(model)


# ---- compilers, fake tensors, copies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_for_each_listed_batch(ranged, backend):
    model, _ = pair(ranged)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for batch in (*BATCHES, *BATCHES):
            assert torch.equal(compiled(x_of(ranged, batch)), model(x_of(ranged, batch)))


@pytest.mark.parametrize("dynamic", tiers.quick([None, False, True], None, True))
def test_compile_pads(padding, dynamic):
    model, _ = pair(padding)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for batch in (5, 6, 8, 2, 1):
            assert torch.equal(compiled(x_of(padding, batch)), model(x_of(padding, batch)))


def test_compiled_gradients_of_each_size(padding):
    model, reference = pair(padding)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in (3, 5):
        x = x_of(padding, batch)
        grad_y = torch.randn_like(reference(x))
        assert_same(gradients(compiled, x, grad_y), gradients(reference, x, grad_y))


def test_compile_refuses_an_unlisted_batch(ranged):
    compiled = torch.compile(pair(ranged)[0], fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match=r"generated for batch 1, 3 and 8 from"):
        compiled(x_of(ranged, 2))


def test_fake_tensors_and_the_meta_device(padding):
    model, _ = pair(padding)
    with torch.device("meta"):
        on_meta = padding.ModelNew()
    for batch in (1, 2, 3, 5, 8):
        x = x_of(padding, batch)
        with torch.no_grad():
            want = model(x)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = model(mode.from_tensor(x))
            meta = on_meta(x.to("meta"))
        for y in (fake, meta):
            assert (y.shape, y.dtype, y.stride()) == (want.shape, want.dtype, want.stride())


def test_opcheck_of_every_size(ranged):
    model, _ = pair(ranged)
    parameters = [parameter.detach() for parameter in model._collect(torch.device("cpu"))[0]]
    assert len({size.operators.forward for size in model._sizes}) == len(BATCHES)
    for size in model._sizes:
        torch.library.opcheck(size.operators.forward, (x_of(ranged, size.batch), *parameters))
        torch.library.opcheck(size.operators.forward_saving, (x_of(ranged, size.batch), *parameters))


@pytest.mark.slow
def test_an_exported_program_of_one_size_needs_only_the_import(ranged, tmp_path):
    model, _ = pair(ranged)
    x = x_of(ranged, 3)
    assert_an_exported_program_runs(model, ranged, x, tmp_path)


def test_copies_and_pickles_run_every_size(padding):
    model, _ = pair(padding)
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.load(file)):
        for batch in (1, 3, 5, 8):
            with torch.no_grad():
                assert torch.equal(other(x_of(padding, batch)), model(x_of(padding, batch)))


@pytest.mark.parametrize("batch", [3, 5])
def test_vmap(padding, batch):
    model, _ = pair(padding)
    x = torch.stack([x_of(padding, batch), x_of(padding, batch) + 1])
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(model)(x), torch.stack([model(part) for part in x]))


def test_gradients_by_the_reference(padding):
    model, reference = pair(padding)
    model.differentiate_by_reference()
    for batch in (3, 5):
        x = x_of(padding, batch)
        grad_y = torch.randn_like(reference(x))
        assert_same(gradients(model, x, grad_y), gradients(reference, x, grad_y))
