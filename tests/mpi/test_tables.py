"""Tables that several ranks read at the same time."""

import os
import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis
from mpitrain.config.load import resolve
from mpitrain.config.schema import DataConfig
from mpitrain.data.open import open_dataset
from mpitrain.data.sampler import Sampler
from mpitrain.errors import DataError
from mpitrain.train.run import train

ROWS, STATIONS, WINDOW = 3000, 6, 5


@pytest.fixture
def shared(world):
    """Return a folder that all ranks see."""
    folder = Path(str(gather(Axis(world), tempfile.mkdtemp(prefix="mpitrain-tables-") if world.rank == 0 else "")[0]))
    yield folder
    world.Barrier()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("placement", ["station", "shuffled"])
def test_every_row_is_right_on_every_rank(world, shared, placement):
    """H19: row i holds value i, in compressed chunks that no window fits; three epochs, each sample once."""
    path = shared / "rows.h5"
    if world.rank == 0:
        rows = np.arange(ROWS)
        with h5py.File(path, "w") as file:
            columns = np.stack([rows, -rows], axis=1).astype(np.float64)
            file.create_dataset("log/x", data=columns, chunks=(127, 1), compression="gzip", shuffle=True)
            file.create_dataset("log/value", data=rows, chunks=(61,), compression="lzf")
            file["log/trace"] = rows // (ROWS // 10)
            file["log/station"] = rows // 50 % STATIONS
    world.Barrier()
    config = DataConfig(
        kind="windows",
        path=str(path),
        x="log/x",
        y="log/value",
        group="log/trace",
        station="log/station",
        test_groups=[4],
        window=WINDOW,
        horizon=1,
        stride=WINDOW,
    )
    dataset = open_dataset(config, "forecast", 0)
    sampler = Sampler(dataset.train_group_sizes, 32, ranks=world.size, rank=world.rank, placement=placement, seed=3)
    dataset.load(sampler.owned, np.arange(0))
    first: list[int] = []
    for step in range(3 * sampler.steps_per_epoch):
        samples = dataset.train(sampler.indices(step))
        start = samples.x[:, 0, 0].astype(int)
        expected = start[:, None] + np.arange(WINDOW)
        assert np.array_equal(samples.x, np.stack([expected, -expected], axis=2))
        assert np.array_equal(samples.y[:, 0], start + WINDOW)
        first += start.tolist()
    everyone = [start for starts in gather(Axis(world), first) for start in starts]
    starts, times = np.unique(everyone, return_counts=True)
    assert len(starts) == sum(dataset.train_group_sizes) == 9 * ((ROWS // 10 - 1) // WINDOW)
    assert set(times.tolist()) == {3}


@pytest.mark.parametrize("wrong", ["absent", "cut"])
def test_a_file_that_one_rank_cannot_read(world, wrong):
    """Every rank on a disk of its own: all are told of the one without the data, and nothing is written."""
    disk = Path(tempfile.mkdtemp(prefix=f"mpitrain-disk-{world.rank}-"))
    last, here = world.size - 1, Path.cwd()
    text = "x,y,trace\n" + "".join(f"{row},{row % 2},{row // 40}\n" for row in range(400))
    if world.rank != last or wrong == "cut":
        (disk / "table.csv").write_text(text[:-3] if world.rank == last else text)
    data = {"kind": "windows", "path": "table.csv", "group": "trace", "test_groups": [1], "window": 4}
    tree = {
        "model": {"kind": "mlp", "hidden": [4]},
        "data": data,
        "train": {"steps": 2},
        "run": {"folder": "run", "shared_fs": False},
    }
    try:
        os.chdir(disk)
        with pytest.raises(DataError) as caught:
            train(resolve(tree, "test", []), world)
        message = str(caught.value)
        assert message.startswith(f"rank {last}: " if world.size > 1 else "data")
        expected = 'there is no file "table.csv"' if wrong == "absent" else "row 399 (line 401): expected 3 fields"
        assert expected in message
        assert caught.value.agreed
        assert not (disk / "run").exists()
    finally:
        os.chdir(here)
        shutil.rmtree(disk)
