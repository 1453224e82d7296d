"""The examples under examples/: each builds a model, which is optimised and computes what it did."""

import importlib.util
from pathlib import Path

import pytest
import torch

import fixed_shape_kernels as fsk

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_right_and_nothing_in_it_is_replaced_wrongly(path, tmp_path):
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(path.stem, path))
    module.__spec__.loader.exec_module(module)
    model, x = module.build()
    opt = fsk.optimize(model, x, min_gain=0.0, cache_dir=tmp_path)
    assert opt.report.replaced and not [row for row in opt.report.rows if row.status in ("wrong", "failed", "not traced")]
    with torch.no_grad():
        torch.testing.assert_close(opt(x), model(x), rtol=1e-4, atol=1e-5)
