"""The examples under examples/: each builds models, which are optimised and compute what they did."""

import importlib.util
from pathlib import Path

import pytest
import torch

import fixed_shape_kernels as fsk

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def load(path):
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(path.stem, path))
    module.__spec__.loader.exec_module(module)
    return module


CASES = [(path, name) for path in EXAMPLES for name in getattr(load(path), "NAMES", (None,))]


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path.stem}-{name}" if name else path.stem for path, name in CASES])
def test_an_example_is_right_and_nothing_in_it_is_replaced_wrongly(path, name, tmp_path):
    model, given = load(path).build(*([name] if name else []))
    given = given if isinstance(given, tuple) else (given,)
    opt = fsk.optimize(model, *given, min_gain=0.0, cache_dir=tmp_path)
    assert opt.report.replaced and not [row for row in opt.report.rows if row.status in ("wrong", "failed", "not traced")]
    with torch.no_grad():
        torch.testing.assert_close(opt(*given), model(*given), rtol=1e-4, atol=1e-5)
