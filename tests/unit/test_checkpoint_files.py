"""Files of a checkpoint: what exists, what is chosen, what is refused; no ranks are needed for it."""

import json
import os
import stat

import h5py
import numpy as np
import pytest

from mpitrain.checkpoint import files
from mpitrain.checkpoint.snapshot import assign_owners
from mpitrain.checkpoint.store import committed_steps, step_folder
from mpitrain.errors import CheckpointError

TENSORS = {"params/w": np.arange(6, dtype=np.float32).reshape(2, 3), "params/b": np.array([np.nan, -0.0], np.float32)}
LOCAL = {"bucket0.send.residual": np.full(5, 0.5, np.float32)}


def commit(root, step):
    folder = step_folder(root, step)
    folder.mkdir(parents=True)
    files.write_commit(folder, {"step": step})


def test_steps_are_numbers(tmp_path):
    """H04: 900, 1000, 10000 and strays."""
    for step in (900, 1000, 10000):
        commit(tmp_path, step)
    (tmp_path / "handpicked").mkdir()
    files.write_commit(tmp_path / "handpicked", {"step": 20000})
    (tmp_path / "step_2000.tmp").mkdir()
    (tmp_path / "step_99999").write_text("")
    (tmp_path / "step-99999").write_text("a plain file")
    (tmp_path / "step-00099998.tmp").mkdir()
    files.write_commit(tmp_path / "step-00099998.tmp", {"step": 99998})
    (tmp_path / "step-00099997").mkdir()
    assert committed_steps(tmp_path) == [900, 1000, 10000]


def test_steps_of_more_than_eight_digits(tmp_path):
    for step in (99_999_999, 100_000_000):
        commit(tmp_path, step)
    assert committed_steps(tmp_path)[-1] == 100_000_000


@pytest.mark.parametrize("record", ["", "{", "[]", "null", '{"format": 0}', '{"step": 3}'])
def test_half_written_records_do_not_count(tmp_path, record):
    folder = step_folder(tmp_path, 3)
    folder.mkdir()
    (folder / files.COMMIT).write_text(record)
    assert files.read_commit(folder) is None
    assert committed_steps(tmp_path) == []


def test_no_folder_no_steps(tmp_path):
    assert committed_steps(tmp_path / "none") == []


def test_a_shard_keeps_bits(tmp_path):
    path = tmp_path / "deep" / files.shard_name(3)
    files.write_shard(path, TENSORS, LOCAL)
    assert path.name == "shard-00003.h5"
    files.verify_shard(path, TENSORS, LOCAL)
    with files.open_shard(path) as file:
        for name, values in TENSORS.items():
            out = np.ones_like(values)
            files.read_into(file, f"tensors/{name}", out)
            assert out.tobytes() == values.tobytes()
            assert file[f"tensors/{name}"].attrs["global_shape"].tolist() == list(values.shape)
    assert not list(path.parent.glob(".*"))


def test_what_the_disk_did_not_keep(tmp_path):
    path = tmp_path / files.shard_name(0)
    files.write_shard(path, TENSORS, LOCAL)
    changed = TENSORS | {"params/w": TENSORS["params/w"] + 1}
    with pytest.raises(CheckpointError, match="not kept as written .*params/w"):
        files.verify_shard(path, changed, LOCAL)
    with pytest.raises(CheckpointError, match="holds no tensors/params/x"):
        files.verify_shard(path, {"params/x": TENSORS["params/w"]}, LOCAL)


@pytest.mark.parametrize("wrong", [np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float64)])
def test_arrays_of_another_model(tmp_path, wrong):
    path = tmp_path / files.shard_name(0)
    files.write_shard(path, TENSORS, LOCAL)
    with files.open_shard(path) as file, pytest.raises(CheckpointError, match="this model needs"):
        files.read_into(file, "tensors/params/w", wrong)
    assert not wrong.any()


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "missing"])
def test_damaged_shards(tmp_path, damage):
    path = tmp_path / files.shard_name(0)
    files.write_shard(path, TENSORS, LOCAL)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"cut": whole[:200], "empty": b"", "text": b"text"}[damage])
    with pytest.raises(CheckpointError, match="cannot read"):
        files.open_shard(path)


def test_checksums(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert files.checksum(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(CheckpointError, match="cannot read"):
        files.checksum(tmp_path / "none")


def test_the_index_shows_whole_tensors(tmp_path):
    """Any HDF5 viewer finds the values in the index, though they lie in shards; the folder may be moved."""
    folder = tmp_path / "old"
    owners = assign_owners(TENSORS, 2)
    for rank in range(2):
        mine = {name: values for name, values in TENSORS.items() if owners[name] == rank}
        files.write_shard(folder / files.shard_name(rank), mine, LOCAL)
    files.write_index(folder / files.INDEX, TENSORS, owners, {"skipped": 3})
    folder = folder.rename(tmp_path / "new")
    with h5py.File(folder / files.INDEX) as index:
        for name, values in TENSORS.items():
            assert index[name][()].tobytes() == values.tobytes()
    assert files.read_meta(folder / files.INDEX) == {"skipped": 3}


def test_an_interrupted_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot write .*No space left on device"):
        files.write_durably(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_commit_record(tmp_path):
    files.write_commit(tmp_path, {"step": 4, "ranks": 2})
    assert files.read_commit(tmp_path) == {"format": 1, "step": 4, "ranks": 2}
    assert json.loads((tmp_path / files.COMMIT).read_text())["format"] == files.FORMAT
    assert stat.S_ISREG((tmp_path / files.COMMIT).stat().st_mode)


def test_owners_share_the_load():
    tensors = {f"t{i}": np.zeros(100 * (i + 1), np.float32) for i in range(20)}
    owners = assign_owners(tensors, 3)
    loads = [sum(tensors[n].nbytes for n, owner in owners.items() if owner == rank) for rank in range(3)]
    assert set(owners) == set(tensors)
    assert max(loads) - min(loads) <= 8000
    assert owners == assign_owners(dict(reversed(tensors.items())), 3)
    assert set(assign_owners(tensors, 1).values()) == {0}
