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
    assert list(committed_steps(tmp_path)) == [900, 1000, 10000]


def test_steps_of_more_than_eight_digits(tmp_path):
    for step in (99_999_999, 100_000_000):
        commit(tmp_path, step)
    assert list(committed_steps(tmp_path))[-1] == 100_000_000


@pytest.mark.parametrize("record", ["", "{", "[]", "null", '{"format": 0}', '{"step": 3}'])
def test_half_written_records_do_not_count(tmp_path, record):
    folder = step_folder(tmp_path, 3)
    folder.mkdir()
    (folder / files.COMMIT).write_text(record)
    assert files.read_commit(folder) is None
    assert list(committed_steps(tmp_path)) == []


def test_no_folder_no_steps(tmp_path):
    assert list(committed_steps(tmp_path / "none")) == []


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
    with files.open_shard(path) as file, pytest.raises(CheckpointError, match=f"{path}: .*this model needs"):
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
    with pytest.raises(CheckpointError, match=f"cannot read {path}"):
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


ODD = {
    "nan.payloads": np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x7F800000], np.uint32).view(np.float32),
    "zeros": np.array([0.0, -0.0], np.float64),
    "subnormal": np.array([1, 0x807FFFFF, 0x00800000], np.uint32).view(np.float32),
    "scalar": np.array(-0.0, np.float32),
    "empty": np.zeros(0, np.float32),
    "empties/with.shape": np.zeros((3, 0, 2), np.float64),
    "deep/name/of a tensor": np.arange(24.0).reshape(2, 3, 4),
    "name.mit.ä": np.ones(1, np.float32),
    "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
}


def test_odd_arrays_keep_their_bits_and_are_seen_whole(tmp_path, monkeypatch):
    owners = assign_owners(ODD, 3)
    for rank in range(3):
        mine = {name: values for name, values in ODD.items() if owners[name] == rank}
        files.write_shard(tmp_path / "step" / files.shard_name(rank), mine, LOCAL)
        files.verify_shard(tmp_path / "step" / files.shard_name(rank), mine, LOCAL)
        with files.open_shard(tmp_path / "step" / files.shard_name(rank)) as shard:
            for name, values in mine.items():
                out = np.full(values.shape, 7, values.dtype)
                files.read_into(shard, f"tensors/{name}", out)
                assert out.tobytes() == np.ascontiguousarray(values).tobytes()
    files.write_index(tmp_path / "step" / files.INDEX, ODD, owners, {})
    monkeypatch.chdir("/")
    with h5py.File(tmp_path / "step" / files.INDEX) as index:
        for name, values in ODD.items():
            assert (index[name].shape, index[name].dtype) == (values.shape, values.dtype)
            assert index[name][()].tobytes() == np.ascontiguousarray(values).tobytes(), name
    assert not list((tmp_path / "step").glob(".*"))


def test_views_into_a_flat_buffer_are_written_as_they_are(tmp_path):
    """Tensors are slices of one allocation: only the slice is written, and reading fills only the slice."""
    flat = np.arange(100, dtype=np.float32)
    files.write_shard(tmp_path / "s.h5", {"a": flat[10:20].reshape(2, 5)}, {})
    flat[:] = -1
    with files.open_shard(tmp_path / "s.h5") as shard:
        files.read_into(shard, "tensors/a", flat[50:60].reshape(2, 5))
    assert flat[50:60].tolist() == list(range(10, 20))
    assert (np.delete(flat, np.s_[50:60]) == -1).all()


def test_large_facts_and_many_long_names(tmp_path):
    """H09: attributes end at 64 KiB; facts of 200 KB and 5,000 names of 60 characters do not."""
    names = [f"blocks.{i:04d}." + "x" * (60 - 12) for i in range(5000)]
    assert {len(name) for name in names} == {60}
    values = {name: np.full(1, i, np.float32) for i, name in enumerate(names)}
    meta = {"text": "ü" * 100_000, "names": names, "nested": {"a": [1, 2.5, None, True]}}
    shown = {name: values[name] for name in names[:100]}
    files.write_shard(tmp_path / files.shard_name(0), shown, {})
    files.verify_shard(tmp_path / files.shard_name(0), shown, {})
    files.write_index(tmp_path / files.INDEX, values, dict.fromkeys(names, 0), meta)
    assert files.read_meta(tmp_path / files.INDEX) == meta
    with h5py.File(tmp_path / files.INDEX) as index:
        assert set(index) == {*names, "meta"}
        assert [index[name][0] for name in (names[0], names[99])] == [0, 99]
    files.write_commit(tmp_path, {"step": 1, "owners": dict.fromkeys(names, 0)})
    assert files.read_commit(tmp_path)["owners"] == dict.fromkeys(names, 0)


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9, 0.99])
def test_a_shard_cut_anywhere_is_refused_with_its_path(tmp_path, keep):
    path = tmp_path / files.shard_name(0)
    tensors = {f"t{i}": np.arange(500, dtype=np.float32) for i in range(20)}
    files.write_shard(path, tensors, LOCAL)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(CheckpointError, match=str(path)):
        files.verify_shard(path, tensors, LOCAL)
    with pytest.raises(CheckpointError, match=str(path)):
        files.read_meta(path)


def test_damaged_facts_are_a_checkpoint_error(tmp_path):
    files.write_index(tmp_path / files.INDEX, TENSORS, dict.fromkeys(TENSORS, 0), {"skipped": 3})
    whole = (tmp_path / files.INDEX).read_bytes()
    assert whole.count(b'{"skipped": 3}') == 1
    (tmp_path / files.INDEX).write_bytes(whole.replace(b'{"skipped": 3}', b'{"skipped": 3]'))
    with pytest.raises(CheckpointError, match=files.INDEX):
        files.read_meta(tmp_path / files.INDEX)


@pytest.mark.parametrize("where", ["params/w", "tensors/params/x", "tensors/w"])
def test_reading_a_missing_name(tmp_path, where):
    path = tmp_path / files.shard_name(0)
    files.write_shard(path, TENSORS, LOCAL)
    with files.open_shard(path) as shard, pytest.raises(CheckpointError, match=f"{path} holds no {where};"):
        files.read_into(shard, where, np.zeros(3, np.float32))


def test_folders_that_cannot_be_written(tmp_path):
    """A file stands where the folder should be (permissions would not stop root)."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "step" / files.shard_name(0)
    for write in (
        lambda: files.write_shard(path, TENSORS, LOCAL),
        lambda: files.write_index(path, TENSORS, dict.fromkeys(TENSORS, 0), {}),
        lambda: files.write_commit(path.parent, {}),
        lambda: files.write_shard(tmp_path / "file" / "shard.h5", TENSORS, LOCAL),
    ):
        with pytest.raises(CheckpointError, match=f"cannot write {tmp_path}.*(Not a directory|File exists)"):
            write()
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_in_the_place_of_the_file(tmp_path):
    path = tmp_path / files.shard_name(0)
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"cannot write {path}"):
        files.write_shard(path, TENSORS, LOCAL)
    assert os.listdir(tmp_path) == [path.name]


def test_an_interrupted_shard_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*args, **more):
        raise OSError(28, "No space left on device")

    path = tmp_path / files.shard_name(0)
    files.write_shard(path, TENSORS, LOCAL)
    before = path.read_bytes()
    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(files.os, name, fail)
            with pytest.raises(CheckpointError, match="No space left on device"):
                files.write_shard(path, TENSORS, {})
        assert os.listdir(tmp_path) == [path.name]
        assert path.read_bytes() == before
    with monkeypatch.context() as patch:
        patch.setattr(h5py.File, "create_dataset", fail)
        with pytest.raises(CheckpointError, match="No space left on device"):
            files.write_shard(path, TENSORS, LOCAL)
    assert os.listdir(tmp_path) == [path.name]


def test_owners_of_little():
    tensors = {name: np.zeros(4, np.float32) for name in "cab"}
    assert assign_owners(tensors, 5) == {"a": 0, "b": 1, "c": 2}
    assert assign_owners({}, 3) == {}
    big = {"huge": np.zeros(1000, np.float64), "empty": np.zeros(0), **tensors}
    owners = assign_owners(big, 2)
    assert [name for name, owner in owners.items() if owner == owners["huge"]] == ["huge"]
