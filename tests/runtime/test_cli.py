"""``python -m runtime``."""

import pytest
from click.testing import CliRunner

from runtime.__main__ import main
from runtime.build import ensure_built, plan_build
from runtime.errors import RuntimeFailure


def invoke(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


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
    result = invoke("build", tiny.path, "--targets", "cpu sm_80", "--capability", "8.6")
    assert result.exit_code == 0 and result.output.count("library.so") == 2
    assert "scale_kernel" in invoke("show", tiny.path).output
    assert ".target sm_86" in invoke("show", tiny.path, "--ptx", "--arch", "sm_86").output
    listed = invoke("cache", "list").output
    assert "sm_80" in listed and "cpu" in listed and "code=sm_86" in listed
    assert "2 sound, 0 damaged" in invoke("cache", "verify").output
    next((private_cache / "entries").iterdir()).joinpath("library.so").write_bytes(b"")
    result = invoke("cache", "verify")
    assert result.exit_code == 1 and "1 sound, 1 damaged" in result.output
    assert "removed 2 entries" in invoke("cache", "clear").output
    assert "0 sound, 0 damaged" in invoke("cache", "verify").output


def test_what_was_built_ahead_is_what_a_model_loads(tiny, x, counting_gxx):
    invoke("build", tiny.path, "--targets", "cpu")
    tiny.model()(x)
    assert len(counting_gxx.compiled) == 1


def test_failures_are_sentences(tmp_path):
    result = invoke("build", tmp_path)
    assert isinstance(result.exception, RuntimeFailure) and "is not a generated package" in str(result.exception)


def test_sass_without_cuobjdump_says_what_to_install(tiny, monkeypatch):
    monkeypatch.setattr("runtime.toolchain.shutil.which", lambda name, path=None: None if name == "cuobjdump" else f"/usr/bin/{name}")
    monkeypatch.setattr("runtime.toolchain.find_nvcc", lambda: plan_build(tiny.package, tiny.package.target("cpu")).tools.gxx)
    result = invoke("show", tiny.path, "--sass")
    assert "nvidia-cuda-cuobjdump" in str(result.exception)


def test_clear_lets_a_model_be_built_again(tiny):
    build = plan_build(tiny.package, tiny.package.target("cpu"))
    ensure_built(build)
    invoke("cache", "clear")
    assert ensure_built(build).exists()
