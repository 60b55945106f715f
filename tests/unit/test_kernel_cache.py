"""Where machine code is kept, and what becomes of a damaged one."""

import importlib.util
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpitrain.kernels import jit, storage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """Point every place of the cache into ``tmp_path``; returns (environment, the package's own folder)."""
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(storage, "__file__", str(package / "jit.py"))
    monkeypatch.setattr(storage.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return monkeypatch, package


@pytest.fixture
def locked(homeless):
    """Let folders be made unwritable, also for root, whom permissions do not stop."""
    monkeypatch, _ = homeless
    closed = []
    writable = storage._writable

    def stand_in(folder):
        return not any(folder == c or c in folder.parents for c in closed) and writable(folder)

    monkeypatch.setattr(storage, "_writable", stand_in)
    return closed


def test_cache_in_the_package(homeless):
    assert storage.choose_folder() == homeless[1] / "__pycache__" / platform.node()


def test_cache_where_the_user_wants_it(homeless, tmp_path):
    homeless[0].setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    assert storage.choose_folder() == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()


def test_cache_that_somebody_else_put_where_the_user_wants_it(homeless, tmp_path):
    """As in the temporary folder of a cluster's node, under a name that can be guessed; root's may be a site's own."""
    wish = tmp_path / "mine"
    wish.mkdir()
    homeless[0].setenv("NUMBA_CACHE_DIR", str(wish))
    for mode, taken in ((0o700, True), (0o775, True), (0o707, False)):
        wish.chmod(mode)
        assert (storage.choose_folder() == wish) == taken, mode
    for owner, taken in ((os.geteuid(), True), (0, True), (os.geteuid() + 1, False)):
        assert storage._trusted(SimpleNamespace(st_uid=owner, st_mode=0o40700)) == taken, owner


def test_cache_of_a_wish_that_cannot_be_granted(homeless, tmp_path):
    """A path through a file cannot be made, not even by root."""
    (tmp_path / "file").write_text("")
    for wish in (str(tmp_path / "file" / "folder"), str(tmp_path / "file"), "/proc/nothing", ""):
        homeless[0].setenv("NUMBA_CACHE_DIR", wish)
        assert storage.choose_folder() == homeless[1] / "__pycache__" / platform.node()


def test_cache_falls_back_step_by_step(homeless, locked, tmp_path):
    host = platform.node()
    locked.append(homeless[1])
    assert storage.choose_folder() == tmp_path / "home" / ".cache" / "mpitrain" / host
    homeless[0].setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert storage.choose_folder() == tmp_path / "xdg" / "mpitrain" / host
    locked.append(tmp_path / "xdg")
    assert storage.choose_folder() == tmp_path / "temporary" / f"mpitrain-{os.geteuid()}" / host
    homeless[0].delenv("XDG_CACHE_HOME")
    homeless[0].delenv("HOME")
    assert storage.choose_folder() == tmp_path / "temporary" / f"mpitrain-{os.geteuid()}" / host
    locked.append(tmp_path / "temporary")
    assert storage.choose_folder() is None


def test_cache_where_others_may_write_is_refused(homeless, tmp_path):
    """Numba unpickles what it finds there."""
    host = platform.node()
    for mode in (0o777, 0o770, 0o702):
        planted = homeless[1] / "__pycache__" / host
        planted.mkdir(parents=True, exist_ok=True)
        planted.chmod(mode)
        assert storage.choose_folder() == tmp_path / "home" / ".cache" / "mpitrain" / host
    planted.chmod(0o700)
    assert storage.choose_folder() == planted


def test_cache_in_a_folder_that_another_may_replace_is_refused(homeless, locked, tmp_path):
    """Whoever made ``/tmp/mpitrain-UID`` first can swap the private folder inside it for one of his own."""
    locked.extend([homeless[1], tmp_path / "home"])
    planted = tmp_path / "temporary" / f"mpitrain-{os.geteuid()}"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    assert storage.choose_folder() is None


CACHED = """
from mpitrain.kernels.jit import kernel

@kernel
def double(x):
    return x + x
"""


@pytest.mark.parametrize("damage", ["index", "code", "both", "empty"])
def test_a_damaged_cache_is_survived(tmp_path, monkeypatch, damage):
    """Cut, overwritten or empty files cost a compilation; afterwards the files are good again."""
    monkeypatch.setattr(jit, "cache_folder", tmp_path / "cache")
    monkeypatch.setattr(jit._numba_config, "CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "cached.py"
    source.write_text(CACHED)

    def hits():
        spec = importlib.util.spec_from_file_location("cached", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.double(21) == 42
        return sum(module.double.stats.cache_hits.values())

    assert (hits(), hits()) == (0, 1)
    for path in (tmp_path / "cache").rglob("*.nb[ic]"):
        if path.suffix == ".nbi" and damage in ("index", "both", "empty"):
            path.write_bytes(b"" if damage == "empty" else b"no pickle")
        if path.suffix == ".nbc" and damage in ("code", "both", "empty"):
            path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:50])
    assert (hits(), hits()) == (0, 1)
