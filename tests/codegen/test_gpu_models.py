"""What the GPU tests stand on, tried on the cpu target: two packages of one name, equal parameters, equal results."""

import os
import sys

import torch

from codegen.package import make_package
from tests.codegen.gemm_cases import Case
from tests.codegen.gpu_models import built_models


def test_models_of_one_name_are_kept_apart_and_equal_their_references(tmp_path):
    before = dict(os.environ), list(sys.path)
    for number, width in enumerate((24, 48)):
        folder = tmp_path / str(number)
        folder.mkdir()
        spec = Case("layer", 5, 16, width, 4).spec(folder, "fp32", None)
        ours, eager = built_models(make_package(spec, ("cpu",)), folder, "cpu")
        x = torch.randn(5, 16)
        with torch.no_grad():
            assert eager.gemm.weight.shape == (width, 16) and torch.allclose(ours(x), eager(x), atol=1e-5)
            assert not torch.equal(eager.norm.weight, torch.ones(width)) and torch.equal(ours.norm.weight, eager.norm.weight)
    assert (dict(os.environ), list(sys.path)) == before and "layer" not in sys.modules
