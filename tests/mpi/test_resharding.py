"""Real ranks save in one layout and load in another: on as many ranks or on fewer, from one disk or from many."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mpitrain.checkpoint import files, transfer
from mpitrain.checkpoint.pieces import list_pieces
from mpitrain.checkpoint.record import COMMIT, read_commit
from mpitrain.checkpoint.snapshot import Snapshot
from mpitrain.checkpoint.steps import committed_steps, step_folder
from mpitrain.checkpoint.store import CheckpointStore
from mpitrain.comm.agreement import gather
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.grid import Axis
from mpitrain.config.load import resolve
from mpitrain.errors import CheckpointError
from mpitrain.partition import GridShape, ShardSpec
from mpitrain.train.run import train
from tests.reference.layouts import TIED, held, layouts, whole_tensors


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch):
    """Spare the wait for the disk: it guards against what no test here does."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def disks(world):
    """A folder for every rank, all of them on one disk."""
    mine = tempfile.mkdtemp(prefix="mpitrain-disks-") if world.rank == 0 else None
    path = Path(gather(Axis(world), mine)[0])
    yield [path / f"disk-{rank}" for rank in range(world.size)]
    gather(Axis(world), None)
    shutil.rmtree(path, ignore_errors=True)


def grids(ranks):
    return [grid for grid in layouts(ranks) if grid.size == ranks]


def pairs(ranks):
    """Choose pairs of layouts of as many ranks: each one with itself and with the next two."""
    every = grids(ranks)
    return [
        (one, every[(i + ahead) % len(every)]) for i, one in enumerate(every) for ahead in range(min(3, len(every)))
    ]


def state(grid, rank, step, *, blank=False):
    """Return what a rank of a grid holds at a step; blank where it is to be loaded."""
    tensors, shards = held(grid, rank, whole_tensors(step))
    local = {f"stage{grid.coordinates(rank)[1]}.residual": np.full(5, 10.0 * step + rank, np.float32)}
    for array in (*tensors.values(), *local.values()) if blank else ():
        array[...] = -7
    return Snapshot(step, tensors, local, {"skipped": step}, ['model.kind = "mlp"'], shards, str(grid))


def make_store(axis, root, *, keep=9):
    return CheckpointStore(root, axis, keep, FaultHook("", axis.rank))


def save(axis, root, grid, *steps):
    for step in steps:
        make_store(axis, root).save(state(grid, axis.rank, step))


def load(axis, root, grid, *, memories, step=None, fallback=False):
    """Load, and compare all that comes back, bit by bit, with what that step of this layout would hold."""
    found, warnings = state(grid, axis.rank, 0, blank=True), []
    make_store(axis, root).load(found, step=step, fallback=fallback, warn=warnings.append)
    expected = state(grid, axis.rank, found.step)
    assert found.meta == expected.meta
    assert {name: values.tobytes() for name, values in found.tensors.items()} == {
        name: values.tobytes() for name, values in expected.tensors.items()
    }
    for name, values in found.local.items():
        assert values.tolist() == (expected.local[name].tolist() if memories else [-7.0] * 5)
    return found.step, warnings


def group(world, ranks):
    """Return the axis of some ranks; None on the others."""
    comm = world.Split(0 if world.rank in ranks else 1, list(ranks).index(world.rank) if world.rank in ranks else 0)
    return Axis(comm) if world.rank in ranks else None


def test_layouts_of_as_many_ranks(axis, folder):
    """Parameters and moments, bit for bit; memories only in the layout that saved them, and otherwise it is told."""
    for one, other in pairs(axis.size):
        root = folder / f"{one} to {other}"
        save(axis, root, one, 3)
        step, warnings = load(axis, root, other, memories=one == other)
        told = f"resumed on another grid ({other} instead of {one}): codec memories start anew"
        assert (step, warnings) == (3, [told] if one != other and axis.rank == 0 else [])


def test_pieces_are_written_once(axis, folder):
    for grid in grids(axis.size):
        save(axis, folder / str(grid), grid, 1)
        gather(axis, None)
        record = read_commit(step_folder(folder / str(grid), 1))
        assert (record.layout, record.ranks) == (str(grid), axis.size)
        written = 0
        for rank in range(axis.size):
            with files.open_shard(step_folder(folder / str(grid), 1) / files.shard_name(rank)) as shard:
                written += sum(piece.nbytes for piece in list_pieces(shard) if piece.group == "tensors")
        assert written == sum(values.nbytes for values in whole_tensors(1).values())


def test_fewer_and_more_ranks(world, folder):
    """n ranks save and m load, and the other way round."""
    everyone = Axis(world)
    for number in range(1, world.size + 1):
        some = group(world, range(number))
        one, other = grids(world.size)[number % len(grids(world.size))], grids(number)[-1]
        root, same = folder / str(number), one == other
        save(everyone, root, one, 1)
        if some:
            assert load(some, root, other, memories=same)[0] == 1
            save(some, root, other, 2)
        gather(everyone, None)
        assert load(everyone, root, one, memories=same)[0] == 2
        assert load(everyone, root, one, step=1, memories=True)[0] == 1


def test_steps_of_more_ranks_go_as_a_whole(world, folder):
    """Fewer ranks remove all shards of what more have saved, also what a kill left half-written."""
    save(Axis(world), folder, grids(world.size)[0], 1, 2)
    world.Barrier()
    alone = group(world, [0])
    if alone:
        (step_folder(folder, 2) / f".{files.shard_name(world.size)}.tmp").write_text("half")
        make_store(alone, folder, keep=1).save(state(GridShape(1), 0, 3))
        assert os.listdir(folder) == [step_folder(folder, 3).name]
    world.Barrier()


def test_a_step_of_format_2(axis, folder):
    """A run of an earlier version goes on, with its memories where its ranks are as many."""
    grid = GridShape(axis.size)
    save(axis, folder, grid, 1)
    gather(axis, None)
    if axis.rank == 0:
        path = step_folder(folder, 1) / COMMIT
        record = json.loads(path.read_text())
        owners = {name: tensor["pieces"][0][0] for name, tensor in record.pop("tensors").items()}
        record |= {"format": 2, "owners": owners, "fixed": [*record["fixed"], f"parallel.dp = {axis.size}"]}
        path.write_text(json.dumps(record))
    gather(axis, None)
    other = grids(axis.size)[0]
    load(axis, folder, other, memories=other == grid)
    load(axis, folder, grid, memories=True)


@pytest.mark.parametrize("bytes_at_once", [1, 100])
def test_many_rounds(axis, folder, monkeypatch, bytes_at_once):
    """A limit below the size of a row, and one that cuts tensors."""
    monkeypatch.setattr(transfer, "BLOCK_BYTES", bytes_at_once)
    monkeypatch.setattr(transfer, "ROUND_BYTES", 2 * bytes_at_once)
    one, other = grids(axis.size)[0], grids(axis.size)[-1]
    save(axis, folder, one, 1)
    load(axis, folder, other, memories=one == other)


def test_disks_of_hosts_with_two_ranks_each(world, disks):
    """run.shared_fs = false: one rank a host goes on with what two have saved, and the other way round."""
    everyone, first_of_host = Axis(world), group(world, range(0, world.size, 2))
    root = disks[world.rank // 2]
    one, other = grids(world.size)[-1], grids((world.size + 1) // 2)[0]
    save(everyone, root, one, 1)
    if first_of_host:
        assert load(first_of_host, root, other, memories=one == other)[0] == 1
        save(first_of_host, root, other, 2)
    gather(everyone, None)
    assert load(everyone, root, one, memories=one == other)[0] == 2


def test_hosts_that_changed_places(world, disks):
    """Rank 0 apart, which keeps the record: every shard is read where it is, also the memories."""
    order = [0, *range(world.size - 1, 0, -1)]
    turned = group(world, order)
    for grid in grids(world.size):
        root = disks[world.rank] / str(grid)
        save(Axis(world), root, grid, 1)
        assert load(turned, root, grid, memories=True)[0] == 1


def test_a_shard_that_nobody_has(axis, disks):
    """It is named, with the remedy; an older step of another layout takes its place, memories apart."""
    one, other = grids(axis.size)[0], grids(axis.size)[-1]
    root, last = disks[axis.rank], axis.size - 1
    save(axis, root, one, 1)
    save(axis, root, other, 2)
    lost = step_folder(root, 2) / files.shard_name(last)
    if axis.rank == last:
        lost.unlink()
    with pytest.raises(CheckpointError, match=f"rank {last}: .*{lost.name} is missing.*run.shared_fs = false"):
        load(axis, root, one, memories=False)
    step, warnings = load(axis, root, other, fallback=True, memories=one == other)
    assert step == 1
    assert [lost.name in text for text in warnings] == ([True] + [False] * (one != other)) * (axis.rank == 0)


def test_what_nobody_needs_is_not_read(axis, folder):
    """The embedding alone comes from the shards that hold it, whatever became of the others."""
    one, other = GridShape(1, axis.size, 1), grids(axis.size)[-1]
    save(axis, folder, one, 1)
    gather(axis, None)
    name, whole = f"params/{TIED}", whole_tensors(1)
    holders = {piece.rank for piece in read_commit(step_folder(folder, 1)).tensors[name].pieces}
    if axis.rank == 0:
        for rank in set(range(axis.size)) - holders:
            (step_folder(folder, 1) / files.shard_name(rank)).write_text("damaged")
    gather(axis, None)
    blank = {key: np.full_like(values, -7) for key, values in held(other, axis.rank, whole)[0].items() if key == name}
    shards = held(other, axis.rank, whole)[1]
    meta = make_store(axis, folder).load_tensors(blank, shards=shards)
    assert meta == {"skipped": 1, "step": 1, "ranks": axis.size}
    assert all(values.tobytes() == held(other, axis.rank, whole)[0][key].tobytes() for key, values in blank.items())
    if axis.size > 1:
        with pytest.raises(CheckpointError, match="is damaged"):
            load(axis, folder, other, memories=False)


def test_ranks_that_hold_too_much_or_too_little(axis, folder):
    """A bug ends on all ranks alike, and leaves nothing that counts."""
    shape, rank = (axis.size + 1, 2), axis.rank
    spec = ShardSpec(shape, (rank, 0), (rank + 1, 2))
    snapshot = Snapshot(1, {"w": np.zeros((1, 2), np.float32)}, {}, shards={"w": spec})
    with pytest.raises(CheckpointError, match="internal error: w cannot be saved: its shards hold") as caught:
        make_store(axis, folder).save(snapshot)
    assert caught.value.agreed
    assert not committed_steps(folder)


def test_a_disk_that_fails_after_its_files_were_checked(axis, folder, monkeypatch):
    """All ranks end; no older step is taken, and nobody waits for what will not come."""
    one, other = grids(axis.size)[0], grids(axis.size)[-1]
    save(axis, folder, one, 1, 2)
    if axis.rank == axis.size - 1:
        monkeypatch.setattr(files, "read_part", lambda file, name, index: files.read_array(file, "nothing"))
    with pytest.raises(CheckpointError, match="holds no nothing") as caught:
        load(axis, folder, other, fallback=True, memories=False)
    assert caught.value.agreed


CONFIG = {
    "model": {"kind": "mlp", "hidden": [6]},
    "data": {"stations": 6, "samples": 60, "test_samples": 10, "window": 4, "placement": "shuffled"},
    "train": {"batch_size": 12, "eval_every": 0},
    "optim": {"schedule": "constant"},
    "exchange": {"codec": "fp16", "memory": "residual"},
    "checkpoint": {"every": 2},
}


def test_a_run_goes_on_on_other_ranks(world, folder, capsys):
    """The sums of what all have done stay; the loss is that of an unbroken run, but for memories and rounding."""

    def run(comm, name, steps, resume=None):
        tree = {**CONFIG, "train": {**CONFIG["train"], "steps": steps}, "run": {"folder": str(folder / name)}}
        return train(resolve(tree, "test", []), comm, resume=resume)

    alone = group(world, [0])
    whole = run(world, "whole", 6)
    first = run(world, "split", 4)
    capsys.readouterr()
    if alone:
        resumed = run(alone.comm, "split", 6, resume="newest")
        assert resumed["sent_bytes_total"] == first["sent_bytes_total"]
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-3)
        assert resumed["steps"] == 6
        run(alone.comm, "one", 4)
    world.Barrier()
    capsys.readouterr()
    more = run(world, "one", 6, resume="newest")
    told = f"resumed on another grid (dp={world.size} pp=1 tp=1 instead of dp=1 pp=1 tp=1): codec memories start anew"
    assert (told in capsys.readouterr().out) == (world.rank == 0 and world.size > 1)
    assert more["loss"] == pytest.approx(whole["loss"], rel=1e-3)
    assert more["replicas_identical"]
