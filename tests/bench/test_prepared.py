"""Prepared weights as the bench sees them: timed apart, and another package than the spec's own."""

import torch

from bench.measure import preparing
from bench.subject import emit
from tests.runtime.prepared_package import write_prepared_package


def test_preparing_is_timed_and_its_memory_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("TARGETS", "cpu")
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "cache"))
    model = write_prepared_package(tmp_path / "prepared").model()
    found = preparing(model, trials=3)
    assert found["bytes"] == 32 and found["ms"] > 0 and model._prepared.count == 4
    with torch.no_grad():
        model(torch.ones(4, 8))
    assert model._prepared.count == 4, "what is timed afterwards finds it current"


def test_prepared_weights_are_a_package_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, prepacked = (emit("specs/default.yaml", "tf32", prepack=prepack) for prepack in (False, True))
    assert (plain.folder.name, prepacked.folder.name) == ("gemm_groupnorm_hardtanh_tf32", "gemm_groupnorm_hardtanh_tf32_prepacked")
    assert [prepacked.prepares(target) for target in ("cpu", "sm_80", "sm_90a")] == [False, False, True] and not plain.prepares("sm_90a")
    assert prepacked.manifest["regenerate"] == "make generate SPEC=specs/default.yaml PRECISION=tf32 PREPACK=1"
