"""Saving and loading by all ranks: which step is chosen, what is refused, what is never lost."""

import os
import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.checkpoint import files
from mpitrain.checkpoint.record import COMMIT
from mpitrain.checkpoint.snapshot import Snapshot
from mpitrain.checkpoint.steps import committed_steps, step_folder
from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.comm.agreement import gather
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import Axis
from mpitrain.errors import CheckpointError

SHAPES = {"params/w": (3, 4), "params/b": (2,), "optimizer/m/w": (3, 4), "params/s": (), "params/none": (0, 2)}


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch):
    """Spare the wait for the disk: it guards against what no test here does."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def root(axis):
    """A folder that all ranks share."""
    mine = tempfile.mkdtemp(prefix="mpitrain-checkpoints-") if axis.rank == 0 else None
    path = Path(gather(axis, mine)[0])
    yield path / "checkpoints"
    gather(axis, None)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def disk(axis):
    """A folder that this rank has for itself."""
    path = Path(tempfile.mkdtemp(prefix=f"mpitrain-disk-{axis.rank}-"))
    yield path / "checkpoints"
    shutil.rmtree(path)


def make_store(axis, root, *, keep=9, fault=""):
    return CheckpointStore(root, axis, keep, FaultHook(fault, axis.rank))


def state(axis, step, *, fill=None, fixed=('model.kind = "mlp"',)):
    """A snapshot whose every array tells its step and place; with ``fill`` one that waits to be loaded."""
    tensors = {
        name: np.full(shape, step * 100 + i if fill is None else fill, np.float32)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    local = {"bucket0.residual": np.full(5, step * 100 + 50 + axis.rank if fill is None else fill, np.float32)}
    return Snapshot(step, tensors, local, {"skipped": step}, list(fixed))


def save(axis, root, *steps, **options):
    store = make_store(axis, root, **options)
    for step in steps:
        store.save(state(axis, step))
    return store


def assert_loaded(axis, found, step):
    """Every array is that of the step, on every rank."""
    expected = state(axis, step)
    assert (found.step, found.meta) == (step, {"skipped": step})
    for ours, theirs in ((found.tensors, expected.tensors), (found.local, expected.local)):
        assert {name: values.tobytes() for name, values in ours.items()} == {
            name: values.tobytes() for name, values in theirs.items()
        }
    assert set(gather(axis, found.step)) == {step}


def damage(axis, path, kind):
    """Let rank 0 break a file, once the others have read what they want."""
    gather(axis, None)
    if axis.rank == 0:
        if kind == "cut":
            os.truncate(path, path.stat().st_size - 1)
        elif kind == "half":
            os.truncate(path, path.stat().st_size // 2)
        elif kind == "gone":
            path.unlink()
        elif kind == "bit":
            text = bytearray(path.read_bytes())
            text[len(text) // 2] ^= 1
            path.write_bytes(text)
        else:
            path.write_text(kind)
    gather(axis, None)


def refused(axis, action, *parts):
    """Check that all ranks refuse with one message that has all parts."""
    with pytest.raises(CheckpointError) as caught:
        action()
    assert caught.value.agreed
    assert set(gather(axis, str(caught.value))) == {str(caught.value)}
    for part in parts:
        assert str(part) in str(caught.value)


def test_the_newest_or_the_one_asked_for(axis, root):
    """H20: exactly the step that was asked for, or the list of those there are."""
    store = make_store(axis, root)
    assert store.newest() is None
    refused(axis, lambda: store.load(state(axis, 0, fill=-1)), f"no complete step in {root}")
    save(axis, root, 100, 200, 300)
    for step, expected in ((None, 300), (100, 100), (200, 200), (300, 300)):
        found = state(axis, 0, fill=-1)
        store.load(found, step=step)
        assert_loaded(axis, found, expected)
    refused(axis, lambda: store.load(state(axis, 0), step=150), "no complete step 150", "100, 200, 300")
    assert store.newest() == 300
    with pytest.raises(ValueError, match="explicit step"):
        store.load(state(axis, 0), step=100, fallback=True)


SPOILT = [("shard", "cut"), ("shard", "gone"), ("shard", "bit"), (files.INDEX, "bit"), (files.INDEX, "gone")]
SPOILT += [(COMMIT, "half"), (COMMIT, "["), (COMMIT, "[" * 100_000), (COMMIT, '{"format": 2, "step": 1}')]


@pytest.mark.parametrize(("name", "kind"), SPOILT)
def test_one_damaged_file_of_the_newest_step(axis, root, name, kind):
    """H03: all ranks go back to the newest sound step, and the file is named once; strictly, all refuse."""
    store = save(axis, root, 1, 2, 3)
    bad = step_folder(root, 3) / (files.shard_name(axis.size - 1) if name == "shard" else name)
    damage(axis, bad, kind)
    found, warnings = state(axis, 0, fill=-1), []
    refused(axis, lambda: store.load(found), bad, "--resume auto", "1, 2 with --resume STEP")
    assert store.newest() == 3
    store.load(found, fallback=True, warn=warnings.append)
    assert_loaded(axis, found, 2)
    assert len(warnings) == (1 if axis.rank == 0 else 0)
    assert all(str(bad) in text and "step 3" in text for text in warnings)
    refused(axis, lambda: store.load(found, step=3), bad)
    store.load(found, step=1)
    assert_loaded(axis, found, 1)


def test_every_damaged_shard_is_told(axis, root):
    store = save(axis, root, 1, 2, 3)
    shards = [step_folder(root, step) / files.shard_name(rank) for step in (3, 2) for rank in range(axis.size)]
    for path in shards:
        damage(axis, path, "gone")
    found, warnings = state(axis, 0, fill=-1), []
    store.load(found, fallback=True, warn=warnings.append)
    assert_loaded(axis, found, 1)
    if axis.rank == 0:
        assert [next(path for path in shards if str(path) in text) for text in warnings] == shards
    damage(axis, step_folder(root, 1) / COMMIT, "half")
    refused(axis, lambda: store.load(found, fallback=True, warn=warnings.append), "none of the steps", "1, 2, 3")
    assert store.newest() == 3


def test_wrong_settings_are_no_damage(axis, root):
    """There is nothing to fall back to: an older step has the same settings."""
    store = save(axis, root, 1, 2)
    other = state(axis, 0, fixed=['model.kind = "transformer"'])
    refused(axis, lambda: store.load(other, fallback=True), "written with", "step-00000002")
    fewer = state(axis, 0)
    del fewer.tensors["params/b"]
    refused(axis, lambda: store.load(fewer, fallback=True), "another model")
    damage(axis, step_folder(root, 2) / COMMIT, '{"format": 1}')
    refused(axis, lambda: store.load(state(axis, 0), fallback=True), "of format 1")


@pytest.mark.parametrize("place", ["root", "disk"])
def test_later_steps_are_set_aside(axis, place, request):
    """H20: what lies after the step that a run goes on from is moved, never deleted or overwritten."""
    root = request.getfixturevalue(place)
    store = save(axis, root, 100, 200, 300)
    before = contents(root)
    assert store.set_aside_after(300) == []
    assert store.set_aside_after(100) == ["aside-1/step-00000200", "aside-1/step-00000300"]
    assert store.newest() == 100
    moved = {name.replace("aside-1/", ""): text for name, text in contents(root).items()}
    assert moved == before
    store.save(state(axis, 200))
    store.save(state(axis, 100))  # whoever forgets to call it overwrites nothing either
    assert store.newest() == 100
    assert sorted(os.listdir(root)) == ["aside-1", "aside-2", "step-00000100"]
    assert {name: text for name, text in contents(root).items() if "aside-1" in name}.items() <= {
        name.replace("step-", "aside-1/step-"): text for name, text in before.items()
    }.items()
    for step, folder in ((300, "aside-1"), (200, "aside-2")):
        found = state(axis, 0, fill=-1)
        make_store(axis, root / folder).load(found, step=step)
        assert_loaded(axis, found, step)


def contents(root):
    """Return all files of a disk by relative path."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_failed_save_removes_nothing(axis, root):
    """H13: keep = 1, and three saves in a row whose bytes the disk does not keep."""
    save(axis, root, 1, keep=1)
    broken = make_store(axis, root, keep=1, fault=f"corrupt_save:rank={axis.size - 1}")
    for step in (2, 3, 4):
        path = step_folder(root, step) / files.shard_name(axis.size - 1)
        refused(axis, lambda step=step: broken.save(state(axis, step)), path, "not kept as written")
    store = make_store(axis, root, keep=1)
    assert list(committed_steps(root)) == [1]
    found = state(axis, 0, fill=-1)
    store.load(found)
    assert_loaded(axis, found, 1)
    make_store(axis, root, keep=2).save(state(axis, 5))
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000005"]  # what is half-written takes no place
    store.save(state(axis, 6))
    assert os.listdir(root) == ["step-00000006"]


def test_steps_that_go_stop_counting_first(axis, root, monkeypatch):
    """A kill among the removals leaves no step that says it is complete and lacks shards."""
    remove, seen = CheckpointStore._remove, []

    def watched(store, names):
        seen.extend((name, (root / name / COMMIT).exists()) for name in names)
        remove(store, names)

    monkeypatch.setattr(CheckpointStore, "_remove", watched)
    save(axis, root, 1, 2, 3, keep=1)
    assert seen == [("step-00000001", False), ("step-00000002", False)]


@pytest.mark.parametrize("comm", ["world"], indirect=True)
def test_the_folder_does_not_grow(axis, root):
    """H11, H18: fifty saves, one after the other, of which two stay."""
    store = save(axis, root, 1, keep=2)
    one = sum(map(len, contents(root).values()))
    for step in range(2, 51):
        store.save(state(axis, step))
    gather(axis, None)
    assert list(committed_steps(root)) == [49, 50]
    assert sum(map(len, contents(root).values())) <= 2.5 * one


def test_tensors_of_any_number_of_ranks(axis, root):
    """All ranks, or one alone, read whole tensors, whoever wrote them; h5py needs no MPI for it (H07)."""
    assert not h5py.get_config().mpi
    save(axis, root, 1, 2)
    alone = Axis(MPI.COMM_SELF)
    if axis.rank == 0:
        save(alone, root.with_name("alone"), 1, 2)
    gather(axis, None)
    for reader, folder in (
        (alone, root),
        (axis, root),
        (axis, root.with_name("alone")),
        (alone, root.with_name("alone")),
    ):
        for step, expected in ((None, 2), (1, 1)):
            wanted = {name: values for name, values in state(axis, 0).tensors.items() if name.startswith("params/")}
            meta = make_store(reader, folder).load_tensors(wanted, step=step)
            ranks = axis.size if folder == root else 1
            assert meta == {"skipped": expected, "step": expected, "ranks": ranks}
            whole = state(axis, expected).tensors
            assert {name: values.tobytes() for name, values in wanted.items()} == {
                name: whole[name].tobytes() for name in wanted
            }


def test_tensors_that_cannot_be_read(axis, root):
    store = save(axis, root, 1)
    name = "params/w"
    path = next(p for p in sorted(root.rglob("shard-*")) if holds(p, name))
    unknown = {"params/x": np.zeros(2, np.float32)}
    refused(axis, lambda: store.load_tensors(unknown), "another model", "lacks params/x")
    wrong = {name: np.zeros(7, np.float32)}
    refused(axis, lambda: store.load_tensors(wrong), path.parent, "this model needs float32 (7,)")
    refused(axis, lambda: store.load_tensors({}, step=2), "no complete step 2")
    damage(axis, path, "cut")
    refused(axis, lambda: store.load_tensors({name: np.zeros((3, 4), np.float32)}), path, "damaged")
    damage(axis, path, "gone")
    refused(axis, lambda: store.load_tensors({name: np.zeros((3, 4), np.float32)}), path, "shared_fs = false")
    damage(axis, step_folder(root, 1) / COMMIT, "[")
    refused(axis, lambda: store.load_tensors({}), COMMIT, "no other step")


def holds(path, name):
    with files.open_shard(path) as file:
        return f"tensors/{name}" in file


def test_private_disks(axis, disk):
    """Damage on one disk sends all ranks back; ranks that have changed places are told so."""
    store = save(axis, disk, 1, 2, 3)
    last = axis.size - 1
    if axis.rank == last:
        (step_folder(disk, 3) / files.shard_name(last)).unlink()
    found, warnings = state(axis, 0, fill=-1), []
    store.load(found, fallback=True, warn=warnings.append)
    assert_loaded(axis, found, 2)
    assert len(warnings) == (axis.rank == 0)
    assert store.set_aside_after(2) == ["aside-1/step-00000003"]
    assert all(gather(axis, not step_folder(disk, 3).exists()))
    assert store.newest() == 2
    if axis.size > 1:
        turned = Axis(axis.comm.Split(0, axis.size - axis.rank))
        with pytest.raises(
            CheckpointError, match=f"rank {last} finds step 2 in .*, but rank 0 does not; .* same order"
        ):
            make_store(turned, disk).newest()
        turned.comm.Free()


class DiedError(BaseException):
    """Stands for SIGKILL: nothing that would clean up gets anything done."""


def dying(monkeypatch, after):
    """Let the process die instead of its operation number ``after`` on folders and whole files, and for good."""
    done = []

    def mortal(operation):
        def attempt(*args, **options):
            done.append(operation.__name__)
            if len(done) > after:
                raise DiedError
            return operation(*args, **options)

        return attempt

    for name in ("mkdir", "replace", "rename", "unlink", "rmdir", "fsync"):
        monkeypatch.setattr(os, name, mortal(getattr(os, name)))
    return done


def lives(monkeypatch, after, action):
    """Do something; tell whether it came to its end before the process died."""
    with monkeypatch.context() as patch:
        dying(patch, after)
        try:
            action()
        except DiedError:
            return False
    return True


@pytest.mark.parametrize("comm", ["world"], indirect=True)
def test_death_at_any_moment_of_a_save(axis, root, monkeypatch):
    """H01: then the step before is there, whole, or already the new one; the next save leaves nothing else behind."""
    alone, loaded = Axis(MPI.COMM_SELF), []
    for after in range(100 if axis.rank == 0 else 0):
        here = root / str(after)
        store = save(alone, here, 1, 2, keep=1)
        finished = lives(monkeypatch, after, lambda store=store: store.save(state(alone, 3)))
        found = state(alone, 0, fill=-1)
        store.load(found)
        assert_loaded(alone, found, found.step)
        loaded.append(found.step)
        store.save(state(alone, 4))
        assert os.listdir(here) == [step_folder(here, 4).name]
        if finished:
            break
    assert loaded == sorted(loaded)
    assert set(loaded) == ({2, 3} if axis.rank == 0 else set())
    assert len(loaded) < 100
    gather(axis, None)


@pytest.mark.parametrize("comm", ["world"], indirect=True)
def test_death_while_steps_are_set_aside(axis, root, monkeypatch):
    """Every step is still somewhere, and the next attempt moves the rest."""
    alone = Axis(MPI.COMM_SELF)
    for after in range(100 if axis.rank == 0 else 0):
        here = root / str(after)
        store = save(alone, here, 1, 2, 3)
        finished = lives(monkeypatch, after, lambda store=store: store.set_aside_after(1))
        assert sorted(path.parent.name for path in here.rglob(COMMIT)) == [f"step-0000000{step}" for step in (1, 2, 3)]
        store.set_aside_after(1)
        assert list(committed_steps(here)) == [1]
        if finished:
            break
    gather(axis, None)
