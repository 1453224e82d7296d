"""One small package, emitted once for the session; its reference is what the tests' right and wrong models are made of."""

import functools
from collections.abc import Callable

import pytest
import torch

from bench import records
from bench.subject import Emitted, emit


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Emitted:
    """Problem 30 at the benchmark's first shapes, for the CPU."""
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return emit("specs/gemm_groupnorm_hardtanh_small.yaml", target="cpu")


@pytest.fixture(scope="session")
def manifests() -> Callable[..., dict]:
    """`present_manifest`, which plans and renders a package, once for each of them: no test changes the sources."""
    return functools.cache(records.present_manifest)


@pytest.fixture
def manifests_once(manifests, monkeypatch) -> None:
    """What today's manifests say is looked up once in a session, for tests that ask for a whole ledger."""
    monkeypatch.setattr(records, "present_manifest", manifests)


@pytest.fixture(autouse=True)
def few_threads():
    """Tests run side by side: one of them must not take every core."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, 2))
    yield
    torch.set_num_threads(before)
