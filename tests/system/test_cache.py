"""Machine code of the kernels: shared, damaged or forbidden, its folder costs time and never the run."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from mpitrain.kernels import storage
from tests.system.helpers import (
    NOBODY,
    ROOT,
    as_nobody,
    environment,
    execute,
    messages,
    mpirun,
    summary,
    train,
    write_config,
)

IMPORT = "import os; import mpitrain.kernels.jit as jit; print(os.geteuid(), jit.__file__)"


def cache_files(folder):
    return sorted(path for path in folder.rglob("*") if path.suffix in (".nbi", ".nbc"))


def test_cold_and_damaged_cache(tmp_path):
    """N01: four ranks start together on an empty folder, then on truncated files; the result is that of a good one."""
    cache = tmp_path / "cache"
    config, run = write_config(tmp_path, steps=2)
    found = []
    for _ in range(2):
        result = train(4, config, "--overwrite", env={"NUMBA_CACHE_DIR": str(cache)})
        assert result.returncode == 0, result.stderr
        assert not messages(result)
        assert f"kernels kept in {cache}" in result.stdout
        found.append((summary(run)["param_sha256"], summary(run)["replicas_identical"]))
        files = cache_files(cache)
        assert files
        for number, path in enumerate(files[:: len(files) // 6 + 1]):
            path.write_bytes(path.read_bytes()[: (0, 7, -20)[number % 3]])
    assert found[0] == found[1]
    assert found[0][1] is True


@pytest.fixture
def open_folder():
    """A folder of an ordinary user; pytest's own can be entered by their owner alone."""
    folder = Path(tempfile.mkdtemp(prefix="mpitrain-test-"))
    yield folder
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink())]:
        path.chmod(0o700)
    shutil.rmtree(folder)


def test_a_tree_that_is_only_read(open_folder):
    """N03: package tree read-only, no HOME, no NUMBA_CACHE_DIR, not root: import and two ranks work."""
    tree, temporary = open_folder / "tree", open_folder / "tmp"
    for name in ("kernels", "mpitrain"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    temporary.mkdir(mode=0o700)
    config, run = write_config(open_folder, steps=1)
    for path in [*tree.rglob("*"), tree]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o555)
    if os.geteuid() == 0:
        for path in (open_folder, temporary):
            os.chown(path, NOBODY, NOBODY)
    env = environment(PYTHONPATH=str(tree), XDG_CACHE_HOME=None, NUMBA_CACHE_DIR=None, TMPDIR=str(temporary))
    homeless = ["env", "-u", "HOME", sys.executable]  # the ranks alone: mpirun itself refuses to start without
    where = execute(as_nobody(*homeless, "-c", IMPORT), cwd=open_folder, env=env)
    user, _, file = where.stdout.partition(" ")
    assert user != "0"
    assert file.startswith(str(tree)), where.stderr
    result = execute(as_nobody(*mpirun(2), *homeless, "-m", "mpitrain", "train", config), cwd=open_folder, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("kernels kept in") == 1
    assert f"kernels kept in {temporary}" in result.stdout
    assert summary(run)["replicas_identical"] is True
    assert not list(tree.rglob("__pycache__"))


def test_no_folder_at_all(monkeypatch):
    """N03: Python finds no temporary folder either; kernels are then compiled in every process."""

    def nothing():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(storage.tempfile, "gettempdir", nothing)
    monkeypatch.setattr(storage, "_writable", lambda folder: False)
    assert storage.choose_folder() is None


LARGEST_CODE = """
import numpy as np
from mpitrain.codecs.registry import make_codec
from mpitrain.kernels.residual import encode_residual_int8
codec, x, rest = make_codec("int8"), np.ones(4, np.float32), np.empty(4, np.float32)
wire = np.empty(codec.max_nbytes(4), np.uint8)
codec.encode_residual(x, np.zeros_like(x), wire, rest)
print(wire[-1], sum(encode_residual_int8._cache_hits.values()))
"""


def test_a_kernel_is_compiled_anew_where_one_that_it_uses_has_changed(tmp_path):
    """Numba looks at a kernel's own file only."""
    for name in ("mpitrain", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    env = environment(PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    source = tmp_path / "kernels/quantize.py"
    told = []
    for limit in (127, 127, 100):
        source.write_text(source.read_text().replace("LIMIT = np.float32(127.0)", f"LIMIT = np.float32({limit}.0)"))
        result = execute([sys.executable, "-c", LARGEST_CODE], cwd=tmp_path, env=env)
        assert result.returncode == 0, result.stderr
        told.append(result.stdout.split())
    assert told == [["126", "0"], ["126", "1"], ["100", "0"]]
