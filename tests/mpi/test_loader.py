"""Background reading beside MPI: every batch right on every rank, nothing left behind."""

import os
import threading

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.config.schema import DataConfig
from mpitrain.data.loader import Loader
from mpitrain.data.open import open_dataset
from mpitrain.data.sampler import Sampler

ROWS, BATCH, STEPS = 1340, 20, 201  # three epochs of 67 steps


def left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reader")]


@pytest.fixture
def numbers(world, folder):
    """Rows of which row i holds i, in a compressed file of each rank; a window is one row."""
    rows = np.arange(ROWS + 10, dtype=np.float32)
    path = folder / f"numbers{world.rank}.npz"
    config = DataConfig(kind="windows", path=str(path), group="group", test_groups=(1,), window=1)
    np.savez_compressed(path, x=np.stack([rows, -rows], 1), y=(rows % 7).astype(int), group=(rows >= ROWS).astype(int))
    return open_dataset(config, "classify", 0)


@pytest.mark.parametrize("placement", ["shuffled", "station"])
def test_m17_h19_every_row_is_right_for_three_epochs_with_two_readers_a_rank(world, numbers, monkeypatch, placement):
    def forbidden():
        raise AssertionError("a reader must not be a process")

    monkeypatch.setattr(os, "fork", forbidden)
    sizes = numbers.train_group_sizes if placement == "shuffled" else [ROWS // 5] * 5
    sampler, reference = (
        Sampler(sizes, BATCH, ranks=world.size, rank=world.rank, placement=placement, seed=1) for _ in range(2)
    )
    assert sampler.steps_per_epoch * 3 == STEPS
    numbers.load(sampler.owned, np.arange(10))
    loader = Loader(numbers, sampler, steps=STEPS, readers=2)
    seen, sums = np.zeros((3, ROWS), np.int64), np.zeros(2)
    for step in range(STEPS):
        indices, samples = loader.samples(step)
        assert np.array_equal(indices, reference.indices(step))
        assert np.array_equal(samples.x[:, 0, 0], indices)
        assert np.array_equal(samples.x[:, 0, 1], -indices)
        assert np.array_equal(samples.y, indices % 7)
        seen[step // 67, indices] += 1
        world.Allreduce(np.array([len(indices), indices.sum()], np.float64), sums)
        assert sums[0] == reference.global_count(step)
    loader.close()
    assert left() == []
    world.Allreduce(MPI.IN_PLACE, seen)
    assert (seen == 1).all()
