"""shared_fs = false: every rank keeps its run folder on a disk of its own; only messages are shared."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from mpitrain.comm.agreement import gather
from mpitrain.comm.grid import Axis
from mpitrain.config.load import resolve
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.train.run import train

CONFIG = {
    "model": {"kind": "mlp", "hidden": [6]},
    "data": {"stations": 6, "samples": 60, "test_samples": 10, "window": 4},
    "train": {"batch_size": 12, "eval_every": 0},
    "optim": {"schedule": "constant"},
    "checkpoint": {"every": 2, "keep": 1},
}


def test_train_save_retire_and_resume(world):
    """Saved, replaced and resumed, every rank in a working directory of its own."""
    disk = Path(tempfile.mkdtemp(prefix=f"mpitrain-disk-{world.rank}-"))
    try:
        run(world, disk, steps=4)
        whole = run(world, disk.with_name(disk.name + "-whole"), steps=6)
        resumed = run(world, disk, steps=6, resume="newest")
        assert resumed["param_sha256"] == whole["param_sha256"]
        folders = sorted(path.name for path in (disk / "run" / "checkpoints").iterdir())
        assert folders == ["step-00000006"]
        assert (disk / "run" / "checkpoints" / folders[0] / f"shard-{world.rank:05d}.h5").exists()
        assert all(gather(Axis(world), (disk / "run" / "summary.json").exists() == (world.rank == 0)))
        if world.rank == 0:
            rows = [json.loads(line)["step"] for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
            assert rows == [1, 2, 3, 4, 5, 6]
    finally:
        shutil.rmtree(disk)
        shutil.rmtree(disk.with_name(disk.name + "-whole"), ignore_errors=True)


def test_what_a_resumed_run_must_share_with_its_past(world):
    """Other data, seeds or streams are refused by name, and nothing is touched; a complete run stays as it is."""
    disk = Path(tempfile.mkdtemp(prefix=f"mpitrain-disk-{world.rank}-"))
    try:
        first = run(world, disk, steps=4)
        before = contents(disk)
        for key, value, message in (
            ("train.seed", 1, "written with train.seed = 0, but now it is train.seed = 1"),
            ("exchange.collective", "ring", 'written with exchange.collective = "direct"'),
            ("data.samples", 66, "written with data.samples = 60"),
        ):
            with pytest.raises(CheckpointError, match=message):
                run(world, disk, steps=6, resume="newest", change=f"{key}={value}")
        with pytest.raises(ConfigError, match="train.steps = 3, but .* is at step 4"):
            run(world, disk, steps=3, resume="newest")
        again = run(world, disk, steps=4, resume="newest")
        assert (again["param_sha256"], again["sent_bytes_total"]) == (first["param_sha256"], first["sent_bytes_total"])
        assert contents(disk) == before
    finally:
        shutil.rmtree(disk)


def contents(disk):
    return {path: path.read_bytes() for path in disk.rglob("*") if path.is_file()}


def run(world, disk, *, steps, resume=None, change=None):
    tree = {**CONFIG, "train": {**CONFIG["train"], "steps": steps}, "run": {"folder": "run", "shared_fs": False}}
    disk.mkdir(exist_ok=True)
    here = Path.cwd()
    os.chdir(disk)
    try:
        return train(resolve(tree, "test", [change] if change else []), world, resume=resume)
    finally:
        os.chdir(here)
