"""A generated model as a torch operator: compilers, exporters, fake tensors, and what counts as the same operator."""

import copy
import gc
import io
import re
import shutil

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import CallError

from .generated_packages import CHAINS, assert_an_exported_program_runs, generate, import_from

pytestmark = [
    pytest.mark.usefixtures("kept_builds"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch's own modules, and the test of its tracer
    pytest.mark.filterwarnings("ignore:Converting a tensor to a Python boolean:torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


@pytest.fixture(params=CHAINS)
def package(request, shared):
    return shared(CHAINS[request.param])


@pytest.fixture
def model(package):
    torch.manual_seed(0)
    return package.ModelNew()


@pytest.fixture
def x(package):
    (x,) = package.get_inputs()
    return x


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


class Watch(TorchDispatchMode):
    """Writes down the operators that were dispatched."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


# ---- compilers and exporters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_without_a_graph_break(model, x, backend):
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(compiled(x + 1), model(x + 1))


def test_compile_as_a_part(model, x):
    """What is around the model is compiled with it, and dynamic shapes meet the fixed ones."""

    def around(x):
        return model(x * 2).relu() + 1

    with torch.no_grad():
        for dynamic in (False, True):
            compiled = torch.compile(around, fullgraph=True, backend="aot_eager", dynamic=dynamic)
            assert torch.equal(compiled(x), around(x))
            torch._dynamo.reset()


def test_a_compiled_model_sees_new_values_and_new_parameters(model, x):
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        compiled(x)
        model.norm.weight.mul_(2)
        assert torch.equal(compiled(x), model(x))
        model.norm.bias = nn.Parameter(torch.randn_like(model.norm.bias))
        assert torch.equal(compiled(x), model(x))


def test_compile_says_what_is_wrong_with_the_input(model, x):
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(Exception, match="this model was generated for batch 6 from"):
        compiled(x[:2])


@pytest.mark.parametrize("strict", [True, False])
def test_export(model, x, strict):
    with torch.no_grad():
        program = torch.export.export(model, (x,), strict=strict)
        assert torch.equal(program.module()(x), model(x))
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        assert torch.equal(torch.export.load(file).module()(x), model(x))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets == [model._operators.forward]


@pytest.mark.slow
def test_an_exported_program_needs_only_the_import(model, package, x, tmp_path):
    """In a process that constructs no model, the operator builds what it needs."""
    assert_an_exported_program_runs(model, package, x, tmp_path)


@pytest.mark.slow
def test_aot_inductor(model, x, tmp_path):
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        assert torch.equal(torch._inductor.aoti_load_package(path)(x), model(x))


# ---- tensors that are not there ------------------------------------------------------------------------------------


def test_fake_tensors(model, x):
    want = model(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        y = model(mode.from_tensor(x))
    assert (y.shape, y.dtype, y.device, y.stride()) == (want.shape, want.dtype, want.device, want.stride())


def test_the_meta_device(package, x):
    with torch.device("meta"):
        model = package.ModelNew()
    y = model(x.to("meta"))
    assert y.device.type == "meta" and y.shape == model._package.manifest.output.shape


def test_fake_tensors_are_checked(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        with pytest.raises(CallError, match="set batch: 1 and run"):
            model._operators.forward(mode.from_tensor(x[:1]), *(mode.from_tensor(p) for p in model.parameters()))


def test_opcheck(model, x):
    parameters = [parameter.detach() for parameter in model._collect(x.device)[0]]
    torch.library.opcheck(model._operators.forward, (x, *parameters))
    torch.library.opcheck(model._operators.forward_saving, (x, *parameters))


# ---- who launches --------------------------------------------------------------------------------------------------


def test_plain_calls_launch_directly_and_a_mode_sees_the_operator(model, x, monkeypatch):
    launched = []
    original = model._operators._launch
    monkeypatch.setattr(model._operators, "_launch", lambda *args: launched.append(args) or original(*args))
    with torch.no_grad():
        want = model(x)
        assert launched == []
        with Watch() as watch:
            assert torch.equal(model(x), want)
    assert model._operators.forward in watch.seen


def test_a_trace_records_the_operator(model, x):
    with torch.no_grad():
        traced = torch.jit.trace(model, x, check_trace=False)
        assert torch.equal(traced(x + 1), model(x + 1))


def test_a_subclass_of_tensor_goes_by_the_operator(model, x):
    class Named(torch.Tensor):
        pass

    with torch.no_grad():
        y = model(x.as_subclass(Named))
        assert type(y) is Named and torch.equal(torch.Tensor(y), model(x))


def test_the_operator_takes_any_strides(model, x):
    strided = torch.stack([x, x], dim=-1)[..., 0]
    with torch.no_grad():
        parameters = model._collect(x.device)[0]
        assert torch.equal(model._operators.forward(strided, *parameters), model(x))


# ---- one operator or another ---------------------------------------------------------------------------------------


def test_a_second_import_is_the_same_operator(package, model, x):
    again = import_from(model._package.path, package.__name__).ModelNew()
    assert again._operators is model._operators and type(again) is not type(model)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_the_name_is_the_content(package, model, tmp_path):
    """A copy of the folder under another import path has the same operators, one with other numbers has others."""
    namespace, _, operator = model._operators.forward.name().partition("::")
    assert re.fullmatch(rf"{package.__name__}_[0-9a-f]{{16}}", namespace) and operator == "forward.batch_6"
    shutil.copytree(model._package.path, tmp_path / "copy")
    assert import_from(tmp_path / "copy", f"another_{package.__name__}").ModelNew()._operators is model._operators
    source = tmp_path / "copy" / "cpu.cpp"
    source.write_text(source.read_text() + "// edited by hand\n")
    edited = import_from(tmp_path / "copy", f"another_{package.__name__}").ModelNew()
    assert edited._operators.namespace != namespace


def test_a_derived_class_shares_the_operator(package, model):
    class Derived(package.ModelNew):
        pass

    assert Derived()._operators is model._operators


def test_other_parameters_under_the_same_path_are_another_package(package, model, x, tmp_path):
    with torch.no_grad():
        want = model(x)
        changed = generate(tmp_path / "changed", [*CHAINS["linear"], {"add": {"name": "another", "shape": [24]}}], name=package.__name__)
        (other,) = changed.get_inputs()
        assert changed.ModelNew()(other).shape == (6, 24)
        assert torch.equal(model(x), want)


def test_the_same_package_with_other_numbers_leaves_captured_programs_alone(tmp_path):
    chain = lambda value: [CHAINS["linear"][0], {"group_norm": {"name": "norm", "num_groups": 4}}, {"add": {"value": value}}]  # noqa: E731
    first = generate(tmp_path / "first", chain(1.0), name="changing")
    (x,) = first.get_inputs()
    with torch.no_grad():
        program = torch.export.export(first.ModelNew(), (x,)).module()
        want = program(x)
        second = generate(tmp_path / "second", chain(2.0), name="changing").ModelNew()
        second.load_state_dict(program.state_dict())
        torch.testing.assert_close(second(x), want + 1)
        assert torch.equal(program(x), want)


def test_a_copy_keeps_the_operator(model):
    assert copy.deepcopy(model)._operators is model._operators


def test_operators_outlive_the_model(model, x):
    forward, parameters = model._operators.forward, [p.detach() for p in model._collect(x.device)[0]]
    want = forward(x, *parameters)
    del model
    gc.collect()
    assert torch.equal(forward(x, *parameters), want)
