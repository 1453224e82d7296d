"""The commands ``fsk doctor``, ``build``, ``show`` and ``cache``."""

import pytest
import torch

from runtime.build import ensure_built
from runtime.load import load_backward, with_backwards
from tests.fsk import fsk as invoke


@pytest.mark.parametrize("command", [[], ["doctor"], ["build"], ["show"], ["cache"], ["cache", "list"], ["cache", "verify"], ["cache", "clear"]])
def test_help(command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0 and "Usage:" in result.output


def test_doctor_lists_tools_and_targets():
    output = invoke("doctor").output
    for word in ("g++", "ninja", "nvcc", "driver", "cache", "target cpu", "target sm_80", "target sm_90a"):
        assert word in output


def test_doctor_says_what_is_missing_and_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "missing" in result.output and "apt-get install g++" in " ".join(result.output.split())


def test_build_show_and_cache(tiny, private_cache):
    result = invoke("build", tiny.path, "--target", "cpu", "--target", "sm_80", "--capability", "8.6")
    assert result.exit_code == 0 and result.output.count("library.so") == 2
    assert "scale_kernel" in invoke("show", tiny.path).output
    assert ".target sm_86" in invoke("show", tiny.path, "--ptx", "--arch", "sm_86").output
    listed = invoke("cache", "list").output
    assert "sm_80" in listed and "cpu" in listed and "code=sm_86" in listed
    assert "2 sound, 0 damaged" in invoke("cache", "verify").output
    library = next((private_cache / "entries").iterdir()) / "library.so"
    library.unlink()  # this process has mapped the old file
    library.write_bytes(b"")
    result = invoke("cache", "verify")
    assert result.exit_code == 1 and "1 sound, 1 damaged" in result.output
    assert "removed 2 entries" in invoke("cache", "clear").output
    assert "0 sound, 0 damaged" in invoke("cache", "verify").output


def test_build_makes_the_backward_too(tiny, private_cache, monkeypatch):
    tiny.add_backward()
    result = invoke("build", tiny.path, "--capability", "8.6")
    lines = [line.split(":")[0] for line in result.output.splitlines()]
    assert lines == ["tiny cpu", "tiny sm_80", "tiny cpu-backward", "tiny sm_80-backward"], result.output
    listed = invoke("cache", "list").output
    assert "cpu-backward" in listed and "sm_80-backward" in listed and listed.count("code=sm_86") == 2
    assert "4 sound, 0 damaged" in invoke("cache", "verify").output
    monkeypatch.setattr("runtime.build._build", lambda *_: pytest.fail("built again"))
    assert load_backward(tiny.package, torch.device("cpu")) is not None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr("runtime.load.check_driver", lambda _: None)
    assert load_backward(tiny.package, torch.device("cuda", 0)) is not None


def test_building_nothing_fails(tiny):
    result = invoke("build", tiny.path, "--target", "sm_80", "--capability", "7.5")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit) and "nothing of tiny was built" in result.output
    assert "not for capability 7.5" in result.output


def test_build_without_the_backward(tiny):
    tiny.add_backward()
    assert invoke("build", tiny.path, "--target", "cpu", "--no-backward").output.count("library.so") == 1
    assert "cpu-backward" not in invoke("cache", "list").output


def test_a_backward_is_built_for_the_devices_of_the_target_it_goes_with(tiny):
    """``sm_90a`` has no backward of its own: it needs ``sm_80``'s, compiled for 9.0, as a device will ask for it."""
    tiny.add_backward()
    package = tiny.edit(lambda data: data["targets"].update(sm_90a={**data["targets"]["sm_80"], "arch": "sm_90a", "min_capability": [9, 0]}))
    pairs = lambda *chosen: [(t.name, c) for t, c in with_backwards(package, [(package.target(name), c) for name, c in chosen])]  # noqa: E731
    assert pairs(("sm_90a", None)) == [("sm_90a", None), ("sm_80-backward", (9, 0))]
    assert pairs(("sm_80", None)) == [("sm_80", None), ("sm_80-backward", None)]
    assert pairs(("sm_80", (9, 0)), ("sm_90a", (9, 0))) == [("sm_80", (9, 0)), ("sm_90a", (9, 0)), ("sm_80-backward", (9, 0))]
    assert pairs(("cpu", None)) == [("cpu", None), ("cpu-backward", None)]


def test_show_has_the_backward_under_a_heading(tiny):
    tiny.add_backward()
    output = invoke("show", tiny.path, "--arch", "sm_86").output
    forward, backward = output.split("tiny, backward")
    assert "tiny, forward" in forward and "scale_kernel" in forward and "back_kernel" not in forward
    assert "back_kernel" in backward and "sm_86" in backward
    assert "back_kernel" not in invoke("show", tiny.path, "--no-backward").output
    output = invoke("show", tiny.path, "--ptx").output
    assert output.index("// tiny, forward: sm_80: scale_sm80.cu for sm_80") < output.index("// tiny, backward: sm_80-backward: backward_sm80.cu for sm_80")
    assert output.index("scale_kernel") < output.index("// tiny, backward") < output.index("back_kernel")


def test_doctor_of_a_package_says_what_is_built(tiny, private_cache):
    tiny.add_backward()
    output = " ".join(invoke("doctor", tiny.path).output.split())
    assert "tiny cpu optional not built yet: constructing a model does it" in output
    assert "tiny cpu-backward optional not built yet: the first forward that asks for gradients does it" in output
    invoke("build", tiny.path, "--target", "cpu")
    output = " ".join(invoke("doctor", tiny.path).output.split())
    assert "tiny cpu ok built" in output and "tiny cpu-backward ok built" in output


def test_doctor_of_a_package_that_cannot_run_here_fails(tiny, monkeypatch):
    monkeypatch.setenv("TARGETS", "sm_90a")
    result = invoke("doctor", tiny.path)
    assert result.exit_code == 1 and "was generated for cpu, sm_80" in " ".join(result.output.split())


def test_what_was_built_ahead_is_what_a_model_loads(tiny, x, counting_gxx):
    invoke("build", tiny.path, "--target", "cpu")
    tiny.model()(x)
    assert len(counting_gxx.compiled) == 1


def test_failures_are_sentences(tmp_path):
    result = invoke("build", tmp_path)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit) and "is not a generated package" in result.output


def test_sass_without_cuobjdump_says_what_to_install(tiny, monkeypatch):
    monkeypatch.setattr("runtime.toolchain.shutil.which", lambda name, path=None: None if name == "cuobjdump" else f"/usr/bin/{name}")
    monkeypatch.setattr("runtime.toolchain.find_nvcc", lambda: tiny.plan().tools.gxx)
    result = invoke("show", tiny.path, "--sass")
    assert result.exit_code == 1 and "nvidia-cuda-cuobjdump" in result.output


def test_clear_lets_a_model_be_built_again(tiny):
    build = tiny.plan()
    ensure_built(build)
    invoke("cache", "clear")
    assert ensure_built(build).exists()
