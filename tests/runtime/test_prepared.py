"""Prepared weights on the cpu target, by a package whose prepared buffer is all that its forward reads: a stale one shows in the result."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from runtime import CallError, GradientError, LaunchError, PackageError, PreparationError, prepared
from runtime.load import Loaded

from .prepared_package import write_prepared_package
from .weight_writes import NOTICED, UNNOTICED, add_in_place, swap_the_parameter, write_to_data


@pytest.fixture
def package(tmp_path):
    return write_prepared_package(tmp_path / "prepared")


@pytest.fixture
def model(package):
    return package.model()


@pytest.fixture
def current(model, x):
    """Asserts that the model's results are those of its weights, and says how often the weights have been prepared."""

    def check(changed=model):
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(changed(x), 2 * x * changed.scale)
        return changed._prepared.count

    return check


def test_prepared_once_for_the_same_weights(model, current, x):
    assert model.prepared_bytes == 0
    assert current() == 1 and model.prepared_bytes == 32
    with torch.inference_mode():
        assert torch.equal(model(x), 2 * x * model.scale)
    assert current() == 1
    assert model.prepare() is model and current() == 2


@pytest.mark.parametrize("write", NOTICED, ids=lambda write: write.__name__)
def test_noticed(model, current, write):
    assert current() == 1
    write(model)
    assert current() == 2, "prepared again once"


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_an_optimizer_step_is_noticed(model, current, kind, options):
    """A fused step is not counted by PyTorch."""
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    model.scale.grad = torch.ones(8)
    assert current() == 1
    for step in range(2):
        optimizer.step()
        assert current() == 2 + step


def test_another_models_step_renews_nothing(model, current):
    current()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert current() == 1


@pytest.mark.parametrize("write", UNNOTICED, ids=lambda write: write.__name__)
def test_what_pytorch_does_not_count_is_made_current_by_prepare(model, current, x, write):
    current()
    before = 2 * x * model.scale.detach()
    write(model)
    with torch.no_grad():
        assert torch.equal(model(x), before), "noticed after all: say so in docs/runtime.md"
    model.prepare()
    assert current() == 2


def test_renewed_in_the_same_memory(model, current):
    """A captured graph goes on reading it."""
    current()
    (held,) = model._prepared._held.values()
    address = held.buffers[0].data_ptr()
    for change in (add_in_place, swap_the_parameter, nn.Module.float):
        change(model)
        current()
    assert held.buffers[0].data_ptr() == address and model._prepared.count == 4


def test_weights_beside_other_inputs_and_state_are_kept_and_renewed(tmp_path, x):
    """The positions of the parameters are counted among the parameters."""
    model, other = write_prepared_package(tmp_path / "beside", beside=True).model(), torch.randn(4)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x, other), 2 * x * model.scale)
        assert model._prepared.count == 1
        add_in_place(model)
        assert torch.equal(model(x, other=other), 2 * x * model.scale) and model._prepared.count == 2
    assert model.prepare()._prepared.count == 3
    model.scale = nn.Parameter(model.scale.detach().to_sparse())
    with pytest.raises(CallError, match="scale: expected a dense tensor"):
        model.prepare()


# ---- calls that prepare for themselves -----------------------------------------------------------------------------------


def test_parameters_that_ask_for_gradients_under_grad_mode(model, x):
    assert torch.equal(model(x), 2 * x * model.scale)
    write_to_data(model)
    y = model(x)
    assert torch.equal(y, 2 * x * model.scale) and model._prepared.count == 0
    with pytest.raises(GradientError):
        y.sum().backward()


def test_frozen_parameters_under_grad_mode_are_prepared(model, x):
    model.requires_grad_(False)
    assert torch.equal(model(x), 2 * x * model.scale) and model._prepared.count == 1
    assert torch.equal(model(x.clone().requires_grad_()), 2 * x * model.scale) and model._prepared.count == 1


def test_parameters_made_in_inference_mode(model, x):
    with torch.inference_mode():
        model.scale = nn.Parameter(torch.full((8,), 3.0), requires_grad=False)
        assert torch.equal(model(x), 6 * x)
        model.scale.add_(1)
        assert torch.equal(model(x), 8 * x)
    assert model._prepared.count == 0
    with pytest.raises(PreparationError, match="scale: .*no inference tensor.*each call prepares for itself"):
        model.prepare()


def test_a_parametrization(model, current, x):
    current()

    class Square(nn.Module):
        def forward(self, value):
            return value * value

    parametrize.register_parametrization(model, "scale", Square())
    with torch.no_grad():
        assert torch.equal(model(x), 2 * x * model.scale)
        model.parametrizations.scale.original.data.add_(1)
        assert torch.equal(model(x), 2 * x * model.scale)
    assert model._prepared.count == 1
    with pytest.raises(PreparationError, match="a dense nn.Parameter of the module itself"):
        model.prepare()


def test_functional_call(model, current, x):
    current()
    with torch.no_grad():
        given = torch.full((8,), 3.0)
        for factor in (6, 8):
            assert torch.equal(torch.func.functional_call(model, {"scale": given}, (x,)), factor * x)
            given.data.add_(1)
    assert current() == 1, "plain tensors are not kept"
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(model, {"scale": nn.Parameter(given)}, (x,)), 10 * x)
    current()


def test_weights_that_are_not_dense(model, x):
    model.scale.data = torch.arange(16.0)[::2]
    with torch.no_grad():
        assert torch.equal(model(x), 2 * x * model.scale)
    assert model._prepared.count == 0


def test_compilers_and_fake_tensors_prepare_for_themselves(model, current, x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    current()
    write_to_data(model)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), 2 * x * model.scale)
        exported = torch.export.export(model, (x,)).module()
        assert torch.equal(exported(x), 2 * x * model.scale)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert model(mode.from_tensor(x)).shape == x.shape
            with pytest.raises(PreparationError, match="a mode, a transform or a trace is active"):
                model.prepare()
    assert model._prepared.count == 1


def test_a_compiled_optimizer_step_is_noticed(model, current):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.scale.grad = torch.ones(8)
    current()
    torch.compile(optimizer.step, backend="aot_eager")()
    assert current() == 2


def test_fsdp_writes_unseen(model, monkeypatch, x):
    from torch.distributed import fsdp

    monkeypatch.setattr(fsdp, "FSDPModule", type(model))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), 2 * x * model.scale)
            write_to_data(model)
    assert model._prepared.count == 0
    with pytest.raises(PreparationError, match="not sharded"):
        model.prepare()


# ---- copies, threads, refusals -------------------------------------------------------------------------------------------


def test_copies_start_without(model, current):
    current()
    copied = copy.deepcopy(model)
    assert copied.prepared_bytes == 0 and copied._prepared is not model._prepared
    assert current(copied) == 1
    add_in_place(copied)
    assert current(copied) == 2 and current() == 1


def test_pickles_start_without(model, current):
    current()
    for restored in (pickle.loads(pickle.dumps(model)), torch.load(saved(model), weights_only=False)):
        assert restored.prepared_bytes == 0 and current(restored) == 1


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_the_state_dict_is_that_of_the_parameters(model, current):
    current()
    assert list(model.state_dict()) == ["scale"] and not list(model.buffers())


def test_threads_prepare_once(model, x):
    wrong, start = [], threading.Barrier(8)

    def call():
        with torch.no_grad():
            start.wait()
            for _ in range(50):
                if not torch.equal(model(x), 2 * x * model.scale):
                    wrong.append(1)

    for round in range(1, 4):
        threads = [threading.Thread(target=call) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and model._prepared.count == round
        add_in_place(model)


def test_a_capture_with_nothing_current_is_refused(model, current, x, monkeypatch):
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(prepared, "_is_capturing", lambda device: True)
        for asked in (lambda: model(x), model.prepare):
            with pytest.raises(PreparationError, match=r"a CUDA graph is being captured.*call model.prepare\(\) before the capture"):
                asked()
    assert current() == 1
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(prepared, "_is_capturing", lambda device: True)
        assert torch.equal(model(x), 2 * x * model.scale)
        add_in_place(model)
        with pytest.raises(PreparationError):
            model(x)
        assert torch.equal(torch.func.functional_call(model, {"scale": torch.ones(8)}, (x,)), 2 * x), "this one prepares inside the graph"
    assert current() == 2


def test_a_package_without_prepared_weights_says_how_to_have_them(tiny, x):
    model = tiny.model()
    with torch.no_grad():
        model(x)
    assert model.prepared_bytes == 0
    with pytest.raises(PreparationError, match=r"make generate SPEC=specs/tiny.yaml PREPACK=1, or set prepack: true in specs/tiny.yaml"):
        model.prepare()


def test_a_target_that_needs_no_preparation(tiny, x):
    tiny.edit(lambda data: data.update(prepack=True))
    model = tiny.model()
    assert model.prepare() is model and model.prepared_bytes == 0
    with torch.no_grad():
        assert torch.equal(model(x), x * model.scale)


def test_what_was_never_built_is_built_first(model):
    model._loaded = Loaded()
    assert model.prepare() is model and model.prepared_bytes


def test_no_build_for_where_the_weights_are(model):
    model._loaded.programs.clear()
    model._loaded.programs[model._sizes[-1].batch, torch.device("cuda", 0)] = None
    with pytest.raises(PreparationError, match=r"the parameters are on cpu.*built: cpu.*move the model first"):
        model.prepare()


def test_a_failed_preparation_is_not_taken_for_one(package, x):
    package.change_source("cpu.cpp", "return stream != nullptr || threads < 1 ? -1 : 0;\n}\n\nextern", "return scale == nullptr ? 0 : 2;\n}\n\nextern")
    model = package.model()
    for _ in range(2):
        with torch.no_grad(), pytest.raises(LaunchError, match="double_launch failed"):
            model(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda target: target["prepare"].update(buffers=["other"]), "prepares 'other', which is none of its buffers"),
        (lambda target: target["prepare"]["steps"][0].update(args=["x", "doubled"]), "uses 'x', which is neither a parameter nor prepared"),
        (lambda target: target["prepare"]["steps"].append({"library": "linear", "args": ["scale", "scale", None], "out": "doubled"}), "is no launch"),
        (lambda target: target["steps"].insert(0, {"library": "linear", "args": ["x", "scale", None], "out": "doubled"}), "writes 'doubled', which is prepared"),
    ],
)
def test_a_manifest_that_cannot_be(package, change, message):
    with pytest.raises(PackageError, match=message):
        assert package.edit(lambda data: change(data["targets"]["cpu"])).manifest
