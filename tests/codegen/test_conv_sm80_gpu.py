"""The one-pass convolution for mma.sync on a GPU, held to what the one for Hopper is held to: the family, precisions, adversarial data."""

import pytest

torch = pytest.importorskip("torch")

from codegen.plan.conv_sm80.route import CONV_SM80  # noqa: E402
from codegen.targets import DEVICES  # noqa: E402
from tests.codegen.conv_cases import FAMILY, chain  # noqa: E402
from tests.codegen.forced import planned_by  # noqa: E402
from tests.codegen.gpu_models import built_convolution  # noqa: E402
from tests.codegen.test_conv_sm90a_gpu import (  # noqa: E402, F401  tests of any one-pass convolution, on the models of this module
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
    **FAMILY,
    "many_turns": chain(size=128, batch=140, after=({"clamp": {"min": 0.0, "max": 1.0}},)),
    "tiles_of_channels": chain(cout=160, groups=20, size=24, pool=2, batch=40),
    "tall_tiles": chain(cin=3, cout=80, size=(24, 19), kernel=4, groups=5, pool=2, batch=20),
}


@pytest.fixture(scope="module", params=[(n, p) for n in CASES for p in PRECISIONS if (n, p) != ("pointwise", "fp32")], ids="-".join)
def built(request, tmp_path_factory):
    name, precision = request.param
    folder = tmp_path_factory.mktemp(f"{name}_{precision}")
    return built_convolution(folder, name, CASES[name], precision, lambda spec: planned_by(CONV_SM80, spec, DEVICES["a100"]))
