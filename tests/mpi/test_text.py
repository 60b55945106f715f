"""The lm task end to end: the same training and the same score on any number of ranks, with or without readers."""

import json
import math
import threading

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import ProcessGrid
from mpitrain.config.load import resolve
from mpitrain.data.dataset import Dataset
from mpitrain.errors import ConfigError, DataError
from mpitrain.partition import GridShape
from mpitrain.train.build import build
from mpitrain.train.evaluate import evaluate
from mpitrain.train.run import train

SENTENCES = "".join(f"the station number {i * i % 97} sends {'few' if i % 3 else 'many'} bytes\n" for i in range(60))
LM = {
    "model": {"task": "lm", "layers": 1, "d_model": 16, "heads": 2, "dropout": 0.1},
    "data": {"kind": "text", "window": 16, "stations": 5, "placement": "shuffled"},
    "train": {"steps": 12, "batch_size": 10, "eval_every": 6},
    "optim": {"lr": 0.01, "schedule": "constant"},
    "exchange": {"codec": "raw"},
    "checkpoint": {"every": 0},
}


@pytest.fixture
def folder(folder, world):
    """The folder that all ranks see, with a text in it."""
    if world.rank == 0:
        (folder / "text.txt").write_text(SENTENCES)
    world.Barrier()
    return folder


def resolved(folder, name, **sections):
    tree = {section: dict(table) for section, table in LM.items()}
    for section, table in sections.items():
        tree[section] = tree.get(section, {}) | table
    tree["data"]["path"] = str(folder / "text.txt")
    tree["run"] = {"folder": str(folder / name)}
    return resolve(tree, "test", [])


def rows_of(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_one_rank_or_many(world, folder):
    """Loss and score are means over characters, whoever has how many of them."""
    alone = train(resolved(folder, f"alone{world.rank}"), MPI.COMM_SELF)
    together = train(resolved(folder, "together"), world)
    assert together["replicas_identical"] is True
    assert together["metric"]["name"] == alone["metric"]["name"] == "test_bits_per_char"
    assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    for mine, theirs in zip(rows_of(folder, f"alone{world.rank}"), rows_of(folder, "together"), strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert theirs["bits_per_char"] == pytest.approx(theirs["loss"] / math.log(2), rel=1e-12)
    assert theirs["test_bits_per_char"] == together["metric"]["value"]
    assert together["metric"]["value"] == pytest.approx(together["loss"] / math.log(2), rel=1e-12)
    losses = [row["loss"] for row in rows_of(folder, "together")]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("placement", ["shuffled", "station"])
def test_d04_the_weight_of_a_step_is_its_number_of_characters(world, folder, monkeypatch, placement):
    counted = np.zeros(1)
    take = Dataset.train

    def counting(dataset, indices):
        samples = take(dataset, indices)
        counted[0] += samples.y.size
        assert (samples.y >= 0).all()
        return samples

    monkeypatch.setattr(Dataset, "train", counting)
    # Nothing is read ahead, so that what was counted is what was trained on.
    data, steps = {"placement": placement, "readers": 0}, {"steps": 15}
    train(resolved(folder, "run", data=data, train=steps, exchange={"codec": "int8"}), world)
    total = np.zeros(1)
    world.Allreduce(counted, total)
    assert total[0] == 16 * sum(row["samples"] for row in rows_of(folder, "run"))


def test_every_test_character_counts_once(world, folder):
    """An untrained model without any weights finds all characters equally likely: ln V each."""
    with ProcessGrid(world, GridShape(world.size)) as grid:
        parts = build(resolved(folder, "none").config, grid)
        parts.params.flat[:] = 0
        result = evaluate(parts)
        assert result.loss == pytest.approx(math.log(len(set(SENTENCES))), rel=1e-6)
        weights = [int((parts.dataset.test(parts.test_part).y >= 0).sum())]
        assert sum(count[0] for count in gather(grid.world, weights)) == round(len(SENTENCES) * 0.1)


def test_readers_change_no_bit_and_leave_no_thread(world, folder):
    found = set()
    for readers in (0, 1, 2):
        options = {"data": {"readers": readers}, "exchange": {"codec": "int8"}, "train": {"steps": 30}}
        found.add(train(resolved(folder, f"readers{readers}", **options), world)["param_sha256"])
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]
    assert len(found) == 1


def test_a_resumed_run_may_have_other_readers_and_gets_the_same_batches(world, folder):
    whole = train(resolved(folder, "whole", train={"steps": 9}), world)
    train(resolved(folder, "parts", train={"steps": 5}, checkpoint={"every": 5}), world)
    again = resolved(folder, "parts", train={"steps": 9}, data={"readers": 3}, checkpoint={"every": 5})
    assert train(again, world, resume="newest")["param_sha256"] == whole["param_sha256"]


def test_a_reader_that_fails_is_told_where_it_happened_and_leaves_no_thread(world, folder, monkeypatch):
    take, calls = Dataset.train, []

    def failing(dataset, indices):
        calls.append(len(indices))
        if len(calls) == 4:
            raise OSError("the disk is gone")
        return take(dataset, indices)

    monkeypatch.setattr(Dataset, "train", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        train(resolved(folder, f"alone{world.rank}"), MPI.COMM_SELF)
    steps = rows_of(folder, f"alone{world.rank}")
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


def test_ranks_that_read_different_texts_are_told(world, folder):
    """The same length and letters, in another order."""
    path = folder / f"text{world.rank}.txt"
    path.write_text(SENTENCES if world.rank == 0 else SENTENCES[::-1])
    tree = {section: dict(table) for section, table in LM.items()}
    tree["data"]["path"] = str(path)
    config = resolve(tree, "test", []).config
    with ProcessGrid(world, GridShape(world.size)) as grid:
        if world.size == 1:
            build(config, grid)
            return
        with pytest.raises(ConfigError, match="the data sets .*values"):
            build(config, grid)


def test_a_text_that_is_no_utf8_on_one_rank_is_refused_on_all(world, folder):
    path = folder / f"text{world.rank}.txt"
    path.write_bytes(SENTENCES.encode() + (b"\xff" if world.rank == world.size - 1 else b""))
    tree = {section: dict(table) for section, table in LM.items()}
    tree["data"]["path"] = str(path)
    with ProcessGrid(world, GridShape(world.size)) as grid, pytest.raises(DataError, match=r"byte \d+: expected UTF-8"):
        build(resolve(tree, "test", []).config, grid)
