"""Wheels that are damaged, or on a machine that cannot run them."""

import shutil

import pytest

from runtime import Package, PackageError, UnsupportedDeviceError, load, prebuilt


def test_a_sound_one_loads_and_builds_nothing(tiny_wheel, monkeypatch, tmp_path, private_cache):
    shutil.rmtree(private_cache, ignore_errors=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load.load(Package(tiny_wheel)).built == ("cpu",)
    assert not private_cache.exists()


@pytest.mark.parametrize("damage", ["alter", "truncate", "remove", "swap"])
def test_a_damaged_library_is_refused(tiny_wheel, damage):
    library = tiny_wheel / "libraries" / "cpu.so"
    content = library.read_bytes()
    library.unlink()  # a new file: the old one may be mapped
    if damage == "alter":
        library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncate":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "swap":
        library.symlink_to("/proc/self/exe")
    with pytest.raises(PackageError, match=r"cpu.so (is damaged|cannot be read).*install the wheel again"):
        load.load(Package(tiny_wheel))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("manifest.json", lambda text: text.replace('"batch": 4', '"batch": 5'), "manifest.json is damaged"),
        ("prebuilt.json", lambda text: text[:50], "prebuilt.json cannot be read"),
        ("prebuilt.json", lambda text: "[]", "prebuilt.json cannot be read"),
        ("prebuilt.json", lambda text: text.replace('"format": 1', '"format": 2'), "has format 2"),
        ("prebuilt.json", lambda text: text.replace('"cpu": {', '"other": {'), "names no library for cpu"),
    ],
)
def test_a_damaged_description_is_refused(tiny_wheel, name, change, message):
    file = tiny_wheel / name
    file.write_text(change(file.read_text()))
    with pytest.raises(PackageError, match=f"{message}.*install the wheel again"):
        load.load(Package(tiny_wheel))


@pytest.mark.parametrize(
    "made, driver, capability, refusal",
    [
        ([13, 0], (13, 0), (9, 0), None),
        ([13, 2], (13, 0), (8, 6), None),
        ([13, 2], (13, 0), (9, 0), "has to compile it.*CUDA 13.2 or later"),
        ([13, 0], (12, 9), (8, 0), "made with CUDA 13.0.*supports CUDA 12.9: install a driver for CUDA 13"),
        ([12, 4], (13, 0), (10, 0), None),
        ([13, 0], None, (8, 0), None),
    ],
)
def test_the_driver_must_be_able_to_run_the_code(tiny_wheel, monkeypatch, made, driver, capability, refusal):
    entry = {"file": "libraries/sm_80.so", "sha256": "", "cuda": made, "capability": [8, 0]}
    packed = prebuilt.Prebuilt(tiny_wheel, {"libraries": {"sm_80": entry}})
    monkeypatch.setattr(prebuilt, "driver_version", lambda: driver)
    if refusal is None:
        assert packed.library("sm_80", capability).path == tiny_wheel / "libraries" / "sm_80.so"
    else:
        with pytest.raises(UnsupportedDeviceError, match=refusal):
            packed.library("sm_80", capability)


def test_a_processor_that_lacks_something_is_told(tiny_wheel, monkeypatch):
    monkeypatch.setattr(prebuilt, "processor_abilities", lambda: {"sse2", "avx", "movbe", "abm", "f16c"})
    with pytest.raises(UnsupportedDeviceError, match="level x86-64-v3, and this one lacks avx2, bmi1, bmi2, fma"):
        load.load(Package(tiny_wheel))


def test_another_kind_of_processor_is_told(tiny_wheel, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UnsupportedDeviceError, match="made for x86-64 processors, and this machine is aarch64"):
        load.load(Package(tiny_wheel))


def test_a_wheel_on_a_noexec_mount_is_told(tiny_wheel, monkeypatch):
    library = tiny_wheel / "libraries" / "cpu.so"
    library.unlink()
    library.write_bytes(b"no library")
    with pytest.raises(PackageError, match="C library is at least as new"):
        prebuilt.open_library(library)
    monkeypatch.setattr(prebuilt, "can_be_loaded", lambda path: False)
    with pytest.raises(PackageError, match="mounted noexec") as caught:
        prebuilt.open_library(library)
    assert "C library" not in str(caught.value)
