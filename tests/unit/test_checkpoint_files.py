"""Files of a checkpoint: what exists, what is chosen, what is refused; no ranks are needed for it."""

import fcntl
import json
import os

import h5py
import msgspec
import numpy as np
import pytest

from mpitrain.checkpoint import files
from mpitrain.checkpoint.files import check_names
from mpitrain.checkpoint.pieces import list_pieces
from mpitrain.checkpoint.record import COMMIT, FORMAT, Commit, read_commit, write_commit
from mpitrain.checkpoint.steps import committed_steps, marked_steps, step_folder
from mpitrain.errors import CheckpointError, DamageError
from mpitrain.partition import ShardSpec
from tests.reference.checkpoints import owners_of, record_tensors

TENSORS = {"params/w": np.arange(6, dtype=np.float32).reshape(2, 3), "params/b": np.array([np.nan, -0.0], np.float32)}
LOCAL = {"bucket0.send.residual": np.full(5, 0.5, np.float32)}


RECORD = {"format": FORMAT, "step": 3, "ranks": 1, "shards": {"shard-00000.h5": "00"}, "index": "11"}
RECORD |= {"layout": "dp=1 pp=1 tp=1", "fixed": ['model.kind = "mlp"']}
RECORD |= {"tensors": {"params/w": {"shape": [2, 3], "dtype": "float32", "pieces": [[0, [0, 0], [2, 3]]]}}}


def commit(folder, step, **changes):
    record = {key: value for key, value in RECORD.items() if key != "format"}
    write_commit(folder, msgspec.convert(record | {"step": step} | changes, Commit))


def test_steps_are_numbers(tmp_path):
    """H04: 900, 1000, 10000 and strays."""
    for step in (900, 1000, 10000):
        commit(step_folder(tmp_path, step), step)
    commit(tmp_path / "handpicked", 20000)
    commit(tmp_path / "aside-1" / "step-00030000", 30000)
    (tmp_path / "step_2000.tmp").mkdir()
    (tmp_path / "step_99999").write_text("")
    (tmp_path / "step-99999").write_text("a plain file")
    commit(tmp_path / "step-00099998.tmp", 99998)
    (tmp_path / "step-00099997").mkdir()
    assert list(committed_steps(tmp_path)) == [900, 1000, 10000]
    commit(tmp_path / "step-77777", 77777)  # not the name under which a step is looked for
    assert list(committed_steps(tmp_path)) == list(marked_steps(tmp_path)) == [900, 1000, 10000, 77777]


def test_steps_of_more_than_eight_digits(tmp_path):
    for step in (99_999_999, 100_000_000):
        commit(step_folder(tmp_path, step), step)
    assert list(committed_steps(tmp_path))[-1] == 100_000_000


def pieces(*pieces, shape=(2, 3), dtype="float32"):
    return {"tensors": {"params/w": {"shape": shape, "dtype": dtype, "pieces": pieces}}}


MALFORMED = {
    "empty": b"",
    "half": b'{"format": 3, "step',
    "list": b"[]",
    "null": b"null",
    "no format": b'{"step": 3}',
    "not text": b"\xff\xfe\x00",
    "deep lists": b"[" * 200_000,
    "deep field": b'{"format": 3, "x": ' + b"[" * 200_000,
    "deep objects": b'{"x":' * 200_000,
}
WRONG = {
    "no step": {"step": None},
    "step as text": {"step": "3"},
    "negative step": {"step": -1},
    "broken step": {"step": 3.5},
    "no ranks": {"ranks": 0},
    "true ranks": {"ranks": True},
    "huge ranks": {"ranks": 10**15},
    "a rank without shard": {"ranks": 2},
    "numbers for shards": {"shards": [1, 2]},
    "a number for a checksum": {"shards": {"shard-00000.h5": 5}},
    "a shard elsewhere": {"shards": {"../../shard-00000.h5": "00"}},
    "no layout": {"layout": None},
    "a number for tensors": {"tensors": 7},
    "a list of tensors": {"tensors": ["params/w"]},
    "a tensor without pieces": pieces(),
    "a negative rank": pieces([-1, [0, 0], [2, 3]]),
    "a rank beyond the ranks": pieces([1, [0, 0], [2, 3]]),
    "a piece of half a place": pieces([0, [0, 0]]),
    "a piece of another dimension": pieces([0, [0], [2]]),
    "a piece that ends before it starts": pieces([0, [2, 0], [0, 3]]),
    "a piece beyond the tensor": pieces([0, [0, 0], [2, 4]]),
    "a piece elsewhere": pieces([0, [0, 0], [1, 3]], [0, [5, 0], [6, 3]]),
    "a tensor that is not whole": pieces([0, [0, 0], [1, 3]]),
    "pieces that overlap": pieces([0, [0, 0], [2, 2]], [0, [0, 1], [2, 3]]),
    "text for a shape": pieces([0, [0, 0], [2, 3]], shape="23"),
    "an unknown type": pieces([0, [0, 0], [2, 3]], dtype="float33"),
    "a type of objects": pieces([0, [0, 0], [2, 3]], dtype="O"),
    "a number for settings": {"fixed": 1},
    "numbers for settings": {"fixed": [1]},
    "no checksum of the index": {"index": None},
}
TEXTS = MALFORMED | {name: json.dumps(RECORD | change).encode() for name, change in WRONG.items()}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_malformed_records_are_damage(tmp_path, text):
    """A record that is no whole one is told with its path; the step is marked, but does not count."""
    folder = step_folder(tmp_path, 3)
    commit(folder, 3)
    assert list(committed_steps(tmp_path)) == [3]
    (folder / COMMIT).write_bytes(text)
    with pytest.raises(DamageError, match=f"{folder / COMMIT} is damaged"):
        read_commit(folder)
    assert list(committed_steps(tmp_path)) == []
    assert list(marked_steps(tmp_path)) == [3]


def test_records_of_another_version_and_of_another_step(tmp_path):
    folder = step_folder(tmp_path, 3)
    commit(folder, 4)
    assert list(committed_steps(tmp_path)) == []
    (folder / COMMIT).write_text(json.dumps({"format": FORMAT + 1, "steps": "of the future"}))
    with pytest.raises(CheckpointError, match=f"of format {FORMAT + 1}, but this version reads {FORMAT}") as caught:
        read_commit(folder)
    assert not isinstance(caught.value, DamageError)  # no reason to take an older step
    (folder / COMMIT).unlink()
    with pytest.raises(DamageError, match="never completed"):
        read_commit(folder)


def test_no_folder_no_steps(tmp_path):
    assert list(committed_steps(tmp_path / "none")) == []


def test_a_shard_keeps_bits(tmp_path):
    path = tmp_path / "deep" / files.shard_name(3)
    files.write_shard(path, TENSORS, LOCAL)
    assert path.name == "shard-00003.h5"
    files.verify_shard(path, TENSORS, LOCAL)
    with files.open_shard(path) as file:
        for name, values in TENSORS.items():
            assert files.read_array(file, f"tensors/{name}").tobytes() == values.tobytes()
            assert file[f"tensors/{name}"].attrs["global_shape"].tolist() == list(values.shape)
    assert not list(path.parent.glob(".*"))


def test_a_part_keeps_its_place(tmp_path):
    path, spec = tmp_path / files.shard_name(0), ShardSpec((2, 7), (0, 3), (2, 6))
    files.write_shard(path, TENSORS, LOCAL, {"params/w": spec})
    files.verify_shard(path, TENSORS, LOCAL)
    with files.open_shard(path) as file:
        places = {piece.name: piece.spec for piece in list_pieces(file) if piece.group == "tensors"}
        assert places == {"params/w": spec, "params/b": ShardSpec((2,), (0,), (2,))}
        part = files.read_part(file, "tensors/params/w", (slice(1, 2), slice(0, 2)))
        assert part.tolist() == [[3, 4]]
        with pytest.raises(DamageError, match=f"{path}: cannot read tensors/params/x"):
            files.read_part(file, "tensors/params/x", ())


def test_what_the_disk_did_not_keep(tmp_path):
    path = tmp_path / files.shard_name(0)
    files.write_shard(path, TENSORS, LOCAL)
    changed = TENSORS | {"params/w": TENSORS["params/w"] + 1}
    with pytest.raises(CheckpointError, match="not kept as written .*params/w"):
        files.verify_shard(path, changed, LOCAL)
    with pytest.raises(CheckpointError, match="holds no tensors/params/x"):
        files.verify_shard(path, {"params/x": TENSORS["params/w"]}, LOCAL)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 2), "float32"), ((2, 3), "float64"), ((), "float32")])
def test_arrays_of_another_model(tmp_path, shape, dtype):
    path = tmp_path / files.shard_name(0)
    files.write_shard(path, TENSORS, LOCAL)
    with files.open_shard(path) as file:
        files.check_dataset(file, "tensors/params/w", (2, 3), "float32")
        assert files.list_names(file, "local") == set(LOCAL)
        assert files.list_names(file, "other") == set()
        with pytest.raises(CheckpointError, match=rf"{path}: .* is float32 \(2, 3\), but {dtype} .* is needed"):
            files.check_dataset(file, "tensors/params/w", shape, dtype)


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
    with pytest.raises(CheckpointError, match="none is missing"):
        files.checksum(tmp_path / "none")


def test_the_index_shows_whole_tensors(tmp_path):
    """Any HDF5 viewer finds the values in the index, though they lie in shards; the folder may be moved."""
    folder = tmp_path / "old"
    owners, records = owners_of(TENSORS, 2), record_tensors(TENSORS, 2)
    for rank in range(2):
        mine = {name: values for name, values in TENSORS.items() if owners[name] == rank}
        files.write_shard(folder / files.shard_name(rank), mine, LOCAL)
    files.write_index(folder / files.INDEX, records, {"skipped": 3})
    folder = folder.rename(tmp_path / "new")
    with h5py.File(folder / files.INDEX) as index:
        for name, values in TENSORS.items():
            assert index[f"tensors/{name}"][()].tobytes() == values.tobytes()
        assert index["meta"].asstr()[()] == '{"skipped": 3}'
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


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt])
def test_a_bug_or_an_interrupt_leaves_nothing_behind(tmp_path, error):
    def fail(temporary):
        temporary.write_text("half")
        raise error

    with pytest.raises(error):
        files.write_durably(tmp_path / "file", fail)
    assert os.listdir(tmp_path) == []


def test_a_commit_record(tmp_path):
    commit(tmp_path, 4)
    assert json.loads((tmp_path / COMMIT).read_text()) == RECORD | {"step": 4}
    assert json.loads(msgspec.json.encode(read_commit(tmp_path))) == RECORD | {"step": 4}
    assert os.listdir(tmp_path) == [COMMIT]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a", "a/b"], "'a' and 'a/b'"),
        (["a/b/c/d", "a-b", "a/b"], "'a/b' and 'a/b/c/d'"),
        ([""], "''"),
        (["/a"], "'/a'"),
        (["a//b"], "'a//b'"),
        (["a/./b"], "'a/./b'"),
    ],
)
def test_names_that_hdf5_cannot_tell_apart(names, shown):
    with pytest.raises(CheckpointError, match=shown):
        check_names(names)


def test_any_other_names_go_together(tmp_path):
    """Also those of what lies beside the tensors: the facts, the groups."""
    names = ["meta", "tensors", "local", "a/b", "a/c", "a.b", "a-b", "ab", "..", "0"]
    check_names(names)
    values = {name: np.full(2, i, np.float32) for i, name in enumerate(names)}
    files.write_shard(tmp_path / files.shard_name(0), values, values)
    files.verify_shard(tmp_path / files.shard_name(0), values, values)
    files.write_index(tmp_path / files.INDEX, record_tensors(values, 1), {"a": "b"})
    with h5py.File(tmp_path / files.INDEX) as index:
        assert [index[f"tensors/{name}"][0] for name in names] == list(range(10))
    assert files.read_meta(tmp_path / files.INDEX) == {"a": "b"}


def test_locks_of_others_do_not_matter(tmp_path):
    """H05: network disks without locks, and readers that hold one for ever."""
    shard, index = tmp_path / files.shard_name(0), tmp_path / files.INDEX
    files.write_shard(shard, TENSORS, LOCAL)
    files.write_index(index, record_tensors(TENSORS, 1), {"old": 1})
    with shard.open("r+b") as one, index.open("r+b") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        with files.open_shard(shard) as file:
            assert files.read_array(file, "tensors/params/w").shape == (2, 3)
        assert files.read_meta(index) == {"old": 1}
        files.write_shard(shard, TENSORS, LOCAL)
        files.write_index(index, record_tensors(TENSORS, 1), {"new": 1})
        files.verify_shard(shard, TENSORS, LOCAL)
        assert files.read_meta(index) == {"new": 1}


@pytest.mark.parametrize("tensors", [TENSORS, {}, {"empty": np.zeros(0, np.float32)}])
@pytest.mark.parametrize("local", [LOCAL, {}])
def test_the_injected_damage_is_found(tmp_path, tensors, local):
    path = tmp_path / files.shard_name(0)
    files.write_shard(path, tensors, local)
    files.verify_shard(path, tensors, local)
    files.flip_data_byte(path)
    with pytest.raises(CheckpointError, match=str(path)):
        files.verify_shard(path, tensors, local)


def test_owners_share_the_load():
    tensors = {f"t{i}": np.zeros(100 * (i + 1), np.float32) for i in range(20)}
    owners = owners_of(tensors, 3)
    loads = [sum(tensors[n].nbytes for n, owner in owners.items() if owner == rank) for rank in range(3)]
    assert set(owners) == set(tensors)
    assert max(loads) - min(loads) <= 8000
    assert owners == owners_of(dict(reversed(tensors.items())), 3)
    assert set(owners_of(tensors, 1).values()) == {0}


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
    owners = owners_of(ODD, 3)
    for rank in range(3):
        mine = {name: values for name, values in ODD.items() if owners[name] == rank}
        files.write_shard(tmp_path / "step" / files.shard_name(rank), mine, LOCAL)
        files.verify_shard(tmp_path / "step" / files.shard_name(rank), mine, LOCAL)
        with files.open_shard(tmp_path / "step" / files.shard_name(rank)) as shard:
            for name, values in mine.items():
                out = files.read_array(shard, f"tensors/{name}")
                assert out.tobytes() == np.ascontiguousarray(values).tobytes()
    files.write_index(tmp_path / "step" / files.INDEX, record_tensors(ODD, 3), {})
    monkeypatch.chdir("/")
    with h5py.File(tmp_path / "step" / files.INDEX) as index:
        for name, values in ODD.items():
            shown = index[f"tensors/{name}"]
            assert (shown.shape, shown.dtype) == (values.shape, values.dtype)
            assert shown[()].tobytes() == np.ascontiguousarray(values).tobytes(), name
    assert not list((tmp_path / "step").glob(".*"))


def test_views_into_a_flat_buffer_are_written_as_they_are(tmp_path):
    """Tensors are slices of one allocation: only the slice is written."""
    flat = np.arange(100, dtype=np.float32)
    files.write_shard(tmp_path / "s.h5", {"a": flat[10:20].reshape(2, 5)}, {})
    flat[:] = -1
    with files.open_shard(tmp_path / "s.h5") as shard:
        assert files.read_array(shard, "tensors/a").tolist() == [list(range(10, 15)), list(range(15, 20))]


def test_large_facts_and_many_long_names(tmp_path):
    """H09: attributes end at 64 KiB; facts of 200 KB and 5,000 names of 60 characters do not."""
    names = [f"blocks.{i:04d}." + "x" * (60 - 12) for i in range(5000)]
    assert {len(name) for name in names} == {60}
    values = {name: np.full(1, i, np.float32) for i, name in enumerate(names)}
    meta = {"text": "ü" * 100_000, "names": names, "nested": {"a": [1, 2.5, None, True]}}
    shown = {name: values[name] for name in names[:100]}
    files.write_shard(tmp_path / files.shard_name(0), shown, {})
    files.verify_shard(tmp_path / files.shard_name(0), shown, {})
    files.write_index(tmp_path / files.INDEX, record_tensors(values, 1), meta)
    assert files.read_meta(tmp_path / files.INDEX) == meta
    with h5py.File(tmp_path / files.INDEX) as index:
        assert set(index["tensors"]) == set(names)
        assert [index[f"tensors/{name}"][0] for name in (names[0], names[99])] == [0, 99]
        assert json.loads(index["meta"].asstr()[()]) == meta
    commit(tmp_path, 3, tensors=record_tensors(values, 1), fixed=["x" * 200_000])
    assert read_commit(tmp_path).tensors == record_tensors(values, 1)
    assert read_commit(tmp_path).fixed == ["x" * 200_000]


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


FACTS = '{"skipped": 3, "names": [1, 2, 3]}'


@pytest.mark.parametrize("text", [FACTS[:-1] + "]", "[" * len(FACTS), "7".ljust(len(FACTS))])
def test_damaged_facts_are_a_checkpoint_error(tmp_path, text):
    files.write_index(tmp_path / files.INDEX, record_tensors(TENSORS, 1), json.loads(FACTS))
    whole = (tmp_path / files.INDEX).read_bytes()
    assert whole.count(FACTS.encode()) == 1
    (tmp_path / files.INDEX).write_bytes(whole.replace(FACTS.encode(), text.encode()))
    with pytest.raises(DamageError, match=files.INDEX):
        files.read_meta(tmp_path / files.INDEX)


def test_deeply_nested_facts(tmp_path, monkeypatch):
    monkeypatch.setattr(files.json, "dumps", lambda meta: "[" * 200_000)
    files.write_index(tmp_path / files.INDEX, {}, {})
    with pytest.raises(DamageError, match=files.INDEX):
        files.read_meta(tmp_path / files.INDEX)


@pytest.mark.parametrize("where", ["params/w", "tensors/params/x", "tensors/w"])
def test_reading_a_missing_name(tmp_path, where):
    path = tmp_path / files.shard_name(0)
    files.write_shard(path, TENSORS, LOCAL)
    with files.open_shard(path) as shard, pytest.raises(CheckpointError, match=f"{path} holds no {where};"):
        files.check_dataset(shard, where, (3,), "float32")


def test_folders_that_cannot_be_written(tmp_path):
    """A file stands where the folder should be (permissions would not stop root)."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "step" / files.shard_name(0)
    for write in (
        lambda: files.write_shard(path, TENSORS, LOCAL),
        lambda: files.write_index(path, record_tensors(TENSORS, 1), {}),
        lambda: commit(path.parent, 3),
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
    assert owners_of(tensors, 5) == {"a": 0, "b": 1, "c": 2}
    assert owners_of({}, 3) == {}
    big = {"huge": np.zeros(1000, np.float64), "empty": np.zeros(0), **tensors}
    owners = owners_of(big, 2)
    assert [name for name, owner in owners.items() if owner == owners["huge"]] == ["huge"]
