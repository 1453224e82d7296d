"""The convolution as a product of windows and filters on a GPU, held to what the one-pass convolutions are held to."""

import pytest
import yaml

torch = pytest.importorskip("torch")

from codegen.manifest import Package  # noqa: E402
from codegen.plan.conv_gemm.route import CONV_GEMM  # noqa: E402
from codegen.spec import load_spec  # noqa: E402
from codegen.targets import DEVICES  # noqa: E402
from tests.codegen.conv_cases import chain  # noqa: E402
from tests.codegen.forced import planned_by, request_for  # noqa: E402
from tests.codegen.gpu_models import built_convolution, built_models  # noqa: E402
from tests.codegen.test_conv_sm90a_gpu import (  # noqa: E402, F401  tests of any convolution, on the models of this module
    PRECISIONS,
    full_precision_eager,
    test_error_is_within_the_promise,
    test_error_on_constant_images_is_within_the_promise,
    test_infinity_and_nan_come_out_where_they_do_in_pytorch,
    test_runs_are_bitwise_equal,
    test_samples_that_fp16_cannot_hold_keep_their_accuracy,
    test_weights_of_any_size_keep_their_accuracy,
)

pytestmark = pytest.mark.gpu

CASES = {
    "plain": chain(cin=64, cout=96, size=28, groups=8, pool=0, batch=12, before=("silu",), after=("relu",)),
    "strided": chain(cin=66, cout=40, size=(37, 34), kernel=(2, 3), groups=5, pool=2, batch=9, stride=[3, 2], padding=[1, 0], dilation=[2, 1], bias=False),
    "groups": chain(cin=144, cout=48, size=(18, 17), kernel=(2, 4), groups=3, pool=0, batch=10, conv_groups=4, padding=[0, 1]),
    "many_groups": chain(cin=320, cout=24, size=12, kernel=3, groups=12, pool=3, batch=40, conv_groups=8, padding=[1, 2]),
    "odd_plane": chain(cin=37, cout=222, size=(21, 23), groups=6, pool=0, batch=8),
    "pointwise": chain(cin=264, cout=136, size=(13, 14), kernel=1, groups=17, pool=0, batch=25, before=("tanh",)),
    "slices": chain(cin=512, cout=22, size=8, kernel=6, groups=11, pool=0, batch=12),
    "few_filters": chain(cin=99, cout=6, size=(31, 200), groups=2, pool=0, batch=8, padding=2),
}


@pytest.fixture(scope="module", params=[(n, p) for n in CASES for p in PRECISIONS], ids="-".join)
def built(request, tmp_path_factory):
    name, precision = request.param
    folder = tmp_path_factory.mktemp(f"{name}_{precision}")
    return built_convolution(folder, name, CASES[name], precision, lambda spec: planned_by(CONV_GEMM, spec, DEVICES["h100"]))


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_every_tile_and_slice_gives_the_product(tmp_path, precision):
    """All that the planner may choose, on a shape that no tile divides."""
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(chain(cin=90, cout=150, size=(19, 21), groups=3, pool=0, batch=5, padding=1) | {"name": "conv_tiles"}, sort_keys=False))
    spec = load_spec(path, precision)
    request = request_for(CONV_GEMM, spec, DEVICES["h100"])
    for number, offer in enumerate(CONV_GEMM.offers(request)):
        ours, eager = built_models(Package(spec, (CONV_GEMM.plan(request, offer),)), tmp_path / str(number))
        x = torch.randn(spec.input_shape, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).to(next(ours.parameters()).dtype)
        reference = eager.double()(x.double())
        limit = {"fp32": 5e-7, "tf32": 1e-3, "fp16": 1e-3, "bf16": 8e-3}[precision]
        assert float((ours(x).double() - reference).norm() / reference.norm()) <= limit, offer.choice.label
