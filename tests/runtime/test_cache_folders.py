"""The cache on file systems that lack something: each cause is told by its name, before anything is compiled."""

import errno
import fcntl
import os
import re
import stat
import tempfile
import warnings
from pathlib import Path

import pytest

from runtime import BuildError
from runtime import cache as cache_module
from runtime import folders as folders_module
from runtime.build import ensure_built
from runtime.cache import Cache, CacheWarning, default_cache
from runtime.folders import cannot_write
from tests import tiers
from tests.fsk import words

from .file_systems import run_on_mount


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The system's temporary folder, for this test alone."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "temporary"


# ---- real file systems, or what Python would hear of them -------------------------------------------------------------

MODEL = """
import torch
from runtime import BuildError
from runtime.cache import CacheWarning, Cache
from tests.runtime.tiny_package import TinyPackage
os.environ["CODEGEN_CACHE"] = str(folder / "cache")
tiny = TinyPackage(pathlib.Path(os.environ["TINY"]))

def told():
    "Builds or finds the model; the warnings."
    from runtime import load
    load._functions.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = tiny.model()
    x = torch.randn(4, 8)
    assert torch.equal(model(x), x * model.scale)
    return [str(entry.message) for entry in caught if issubclass(entry.category, CacheWarning)]
"""


@pytest.fixture(params=tiers.quick(["mounted", "simulated"], "mounted"))
def on_mount(request, tmp_path, tiny, counting_gxx, temporary):
    """Runs code on a file system of its own; fails with its errors."""

    def run(code: str) -> str:
        done = run_on_mount(tmp_path / "mounted", MODEL + code, simulated=request.param == "simulated", TINY=str(tiny.path))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("options", "cause"),
    tiers.quick(
        [
            ("noexec", "libraries cannot be loaded from it: it is mounted noexec"),
            ("ro", "it is on a read-only file system"),
            ("size=64k", "the disk is full"),
        ],
        ("noexec", "libraries cannot be loaded from it: it is mounted noexec"),
    ),
)
def test_what_a_file_system_lacks_is_told_and_another_folder_used(on_mount, counting_gxx, temporary, options, cause):
    on_mount(f"""
mount({options!r})
(told,) = told()
assert f"{{folder}}/cache/v1 cannot be used ({cause}" in told and "is used instead; set CODEGEN_CACHE" in told, told
assert not list(folder.glob("cache/v1/*/*"))
""")
    assert len(counting_gxx.compiled) == 1
    assert list(temporary.glob("codegen-cache-*/v1/entries/*/library.so"))


def test_a_filled_cache_that_is_read_only_is_used(on_mount, counting_gxx):
    on_mount("""
mount("mode=755")
assert told() == []
(folder / "cache" / "v1").chmod(0o755)  # as a system administrator's copy has it
remount("ro")
assert told() == []
""")
    assert len(counting_gxx.compiled) == 1


def test_a_filled_cache_that_became_noexec_is_left_for_another(on_mount, counting_gxx):
    on_mount("""
mount("mode=755")
assert told() == []
remount("noexec")
(told,) = told()
assert "noexec" in told
""")
    assert len(counting_gxx.compiled) == 2


def test_no_usable_folder_at_all_is_a_sentence_before_compiling(on_mount, counting_gxx):
    on_mount("""
import tempfile
mount("noexec")
(folder / "tmp").mkdir()
os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
try:
    tiny.model()
except BuildError as error:
    assert str(error).count("noexec") == 2 and "set CODEGEN_CACHE to a folder on a local disk" in str(error), error
else:
    raise AssertionError("built")
from runtime.doctor import examine
(finding,) = [entry for entry in examine() if entry.what == "cache"]
assert finding.state == "missing" and "noexec" in finding.detail, finding
(target,) = [entry for entry in examine() if entry.what == "target cpu"]
assert target.state == "missing" and "cannot be built (cache)" in target.detail, target
assert not list((folder / "tmp").glob("codegen-cache-?????*/*")), "a folder that was only tried is left"
""")
    assert counting_gxx.compiled == []


def test_a_disk_that_fills_up_under_nvcc_leaves_nothing(on_mount):
    """The cache is named, so it is not tried out before; where nothing can be mounted, the first write fails instead."""
    on_mount("""
from runtime.build import ensure_built
build = tiny.plan("sm_80")
mount("size=300k")
store = Cache(folder / "cache" / "v1")
for _ in range(2):
    try:
        ensure_built(build, store)
    except BuildError as error:
        assert "No space left on device" in str(error) and "free some space" in str(error) and error.kept is None, error
    else:
        raise AssertionError("built")
    assert not store.failed.exists()
    assert not store.building.exists() or list(store.building.iterdir()) == []
    assert store.keys() == []
""")


def test_the_doctor_tells_of_the_cache(on_mount):
    on_mount("""
from runtime.doctor import examine
find = lambda: next(entry for entry in examine() if entry.what == "cache")
mount("mode=755")
told()
assert find().state == "ok" and "1 entries" in find().detail
remount("ro")
finding = find()
assert finding.state == "optional" and "read-only" in finding.detail and f"1 entries in {folder}/cache/v1 are used" in finding.detail, finding
from click.testing import CliRunner
from fixed_shape_kernels.cli import main
output = CliRunner().invoke(main, ["cache", "list"]).output
assert f"{folder}/cache/v1" in output and "tiny" in output, output
assert CliRunner().invoke(main, ["cache", "verify"]).output.endswith("1 sound, 0 damaged\\n")
""")


# ---- every errno ------------------------------------------------------------------------------------------------------


def inside(file: object, folder: Path) -> bool:
    """Whether an open file, by its number or itself, lies in ``folder``."""
    number = file if isinstance(file, int) else file.fileno()
    return os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_told_before_compiling(tiny, x, monkeypatch, private_cache, temporary, counting_gxx, number):
    real = fcntl.flock

    def flock(file, operation):
        if inside(file, private_cache):
            raise OSError(number, os.strerror(number))
        return real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(CacheWarning, match=re.escape(f"its file system gives no locks ({os.strerror(number)})")) as caught:
        model = tiny.model()
    assert "free some space" not in str(caught[0].message)
    assert model(x).shape == x.shape and len(counting_gxx.compiled) == 1
    assert "gives no locks" in words("doctor")


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EROFS, "read-only file system"),
        (errno.EACCES, "may not write there"),
        (errno.EPERM, "may not write there"),
        (errno.EIO, "disk or network drive fails"),
        (errno.ESTALE, "changed by its server"),
        (errno.EMFILE, "too many files open"),
    ],
)
def test_each_errno_has_a_cause_of_its_own(tiny, monkeypatch, private_cache, temporary, counting_gxx, number, cause):
    real = tempfile.TemporaryFile

    def failing(*arguments, dir=None, **more):
        if str(dir).startswith(str(private_cache)):
            raise OSError(number, os.strerror(number))
        return real(*arguments, dir=dir, **more)

    monkeypatch.setattr(tempfile, "TemporaryFile", failing)
    with pytest.warns(CacheWarning, match=cause) as caught:
        tiny.model()
    assert os.strerror(number) in str(caught[0].message)
    assert len(counting_gxx.compiled) == 1


@pytest.mark.parametrize(
    ("number", "cause", "remedy"),
    [
        (errno.ENOSPC, "the disk is full", "free some space, or set CODEGEN_CACHE"),
        (errno.EDQUOT, "quota is used up", "remove some of this user's files, or set CODEGEN_CACHE"),
        (errno.EROFS, "read-only file system", "; set CODEGEN_CACHE"),
        (errno.ENOLCK, "gives no locks", "; set CODEGEN_CACHE"),
        (errno.EIO, "drive fails", "repair the drive, or set CODEGEN_CACHE"),
        (errno.EMFILE, "too many files open", "ulimit -n"),
        (errno.EXDEV, os.strerror(errno.EXDEV), "set CODEGEN_CACHE"),
    ],
)
def test_a_cache_that_fails_in_mid_build_is_told_by_its_cause(tiny, monkeypatch, number, cause, remedy):
    """What could not be found out before, for it came later."""

    def fail(*_, **__):
        raise OSError(number, os.strerror(number), "library.so")

    monkeypatch.setattr(Cache, "publish", fail)
    with pytest.raises(BuildError, match=cause) as caught:
        ensure_built(tiny.plan())
    assert remedy in str(caught.value) and os.strerror(number) in str(caught.value)
    assert ("free some space" in str(caught.value)) == (number == errno.ENOSPC)


def test_an_error_without_a_number_is_still_a_sentence():
    assert "cannot be written: something odd; set CODEGEN_CACHE" in str(cannot_write(OSError("something odd")))


def test_a_disk_with_hardly_any_room_is_told_before_compiling(tiny, monkeypatch, private_cache, temporary):
    real = os.statvfs

    def statvfs(path):
        found = list(real(path))
        if str(path) == str(private_cache):
            found[4] = 3  # f_bavail: blocks
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.warns(CacheWarning, match="the disk is full .*less than 16 MB are free"):
        assert default_cache().root.is_relative_to(temporary)


def test_permissions_that_a_file_system_does_not_keep_are_told(monkeypatch, private_cache, temporary):
    default_cache()
    private_cache.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    with pytest.warns(CacheWarning, match="keeps no permissions"):
        default_cache()


def test_a_system_without_a_temporary_folder_is_a_sentence(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CODEGEN_CACHE", str(tmp_path / "file" / "cache"))

    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(BuildError, match="there is no folder for built libraries.*a file stands where a folder is needed.*No usable temporary"):
        default_cache()


# ---- where the folder is ----------------------------------------------------------------------------------------------


def test_a_relative_xdg_cache_home_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.delenv("CODEGEN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with pytest.warns(CacheWarning, match="XDG_CACHE_HOME is 'relative', which is no absolute path.*the build cache is") as caught:
        assert default_cache().root == tmp_path / "home" / ".cache" / "codegen" / "v1"
    assert "no home folder" not in str(caught[0].message)
    assert not (tmp_path / "relative").exists()
    assert "XDG_CACHE_HOME is 'relative'" in words("doctor")


def test_a_relative_home_is_told(monkeypatch, tmp_path, temporary):
    monkeypatch.delenv("CODEGEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(CacheWarning, match="HOME is 'nowhere', which is no absolute path"):
        assert default_cache().root.is_relative_to(temporary)
    assert not (tmp_path / "nowhere").exists()


def test_a_home_that_is_not_known_makes_no_folder_called_tilde(monkeypatch, tmp_path, temporary):
    monkeypatch.setenv("CODEGEN_CACHE", "~no_such_user/cache")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(CacheWarning, match="CODEGEN_CACHE is '~no_such_user/cache', and that home folder is not known"):
        assert default_cache().root.is_relative_to(temporary)
    assert not (tmp_path / "~no_such_user").exists()


# ---- what lies in a cache that is only read ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_cache_that_others_can_write_is_not_read_unchanged(tiny, private_cache, mode):
    ensure_built(tiny.plan())
    private_cache.chmod(mode)
    assert cache_module.find_built(tiny.plan().key) is None
    ensure_built(tiny.plan())
    assert stat.S_IMODE(private_cache.stat().st_mode) == 0o700


def test_a_lookup_writes_nothing(tiny, private_cache, monkeypatch):
    build = tiny.plan()
    library = ensure_built(build)
    before = sorted((path, path.stat().st_mtime_ns) for path in private_cache.rglob("*"))
    monkeypatch.setattr(folders_module, "usable_place", lambda: pytest.fail("the cache was tried out for writing"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ensure_built(build) == library
    assert sorted((path, path.stat().st_mtime_ns) for path in private_cache.rglob("*")) == before
