"""Records, manifests, indices and reports that are damaged or no JSON: told in a sentence, or made again."""

import json

import pytest

from runtime import Package, PackageError, kernel_report, prebuilt
from runtime.build import ensure_built
from runtime.cache import RECORD, CacheWarning, default_cache
from tests.fsk import words

DEEP = "[" * 200_000


def test_a_record_of_brackets_is_damage(tiny, counting_gxx):
    build = tiny.plan()
    record = ensure_built(build).parent / RECORD
    record.write_text(DEEP)
    assert "damaged" in words("cache", "list")
    assert "0 sound, 1 damaged" in words("cache", "verify")
    with pytest.warns(CacheWarning, match="built again"):
        ensure_built(build)
    assert len(counting_gxx.compiled) == 2


@pytest.mark.parametrize("text", ["[]", "7", "null", '"text"', '{"key": 1}', "\x00", "9" * 5000, '{"key": "' + "\\ud800" + '"}'])
def test_other_records_that_are_none_are_damage(tiny, text):
    build = tiny.plan()
    record = ensure_built(build).parent / RECORD
    record.write_text(text)
    assert "1 damaged" in words("cache", "verify")
    with pytest.warns(CacheWarning, match="built again"):
        ensure_built(build)


def test_a_manifest_or_an_index_of_brackets_is_a_sentence(tiny):
    (tiny.path / "manifest.json").write_text(DEEP)
    with pytest.raises(PackageError, match="manifest.json cannot be read .*nested too deeply"):
        _ = Package(tiny.path).manifest
    (tiny.path / prebuilt.INDEX).write_text(DEEP)
    with pytest.raises(PackageError, match="prebuilt.json cannot be read .*nested too deeply"):
        prebuilt.read_prebuilt(tiny.path)


def test_a_report_of_brackets_is_made_again(tiny):
    ask = lambda: kernel_report.compile_report(tiny.path / "scale_sm80.cu", ("-O1",), "sm_80")  # noqa: E731
    report = ask()
    (kept,) = default_cache().reports.iterdir()
    kept.write_text(DEEP)
    assert [kernel.short_name for kernel in ask().kernels] == [kernel.short_name for kernel in report.kernels]
    assert json.loads(kept.read_text())
