"""The number of compilers that run at once."""

import pytest

from runtime import resources


@pytest.mark.parametrize(
    "cores, gigabytes, wanted, jobs",
    [(64, 1000, 5, 5), (64, 4, 10, 2), (2, 1000, 10, 2), (64, 0.1, 10, 1), (64, 1000, 0, 1)],
)
def test_jobs_are_bounded_by_cores_and_memory(monkeypatch, cores, gigabytes, wanted, jobs):
    monkeypatch.setattr(resources, "usable_cores", lambda: cores)
    monkeypatch.setattr(resources, "free_memory", lambda: int(gigabytes * 1e9))
    assert resources.parallel_jobs(wanted) == jobs


def test_max_jobs_decides(monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "3")
    assert resources.parallel_jobs(10) == 3


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "max").write_text("3000000000\n")
    (tmp_path / "current").write_text("1000000000\n")
    monkeypatch.setattr(resources, "CGROUP_FILES", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    monkeypatch.setattr(resources, "_available_memory", lambda: 10**12)
    assert resources.free_memory() == 2_000_000_000
    (tmp_path / "max").write_text("max\n")
    assert resources.free_memory() == 10**12
