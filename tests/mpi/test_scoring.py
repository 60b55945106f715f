"""A model is scored with what it learned from its own training data, whatever the other file holds."""

import numpy as np
import pytest

from mpitrain.config.load import resolve
from mpitrain.errors import CheckpointError, DataError
from mpitrain.train.run import train
from mpitrain.train.runfolder import RunFolder
from mpitrain.train.scoring import score_run

LABELS = np.array(["high", "low"])


def write(path, *, shift=0.0, labels=LABELS, only=None, columns=("a", "b")):
    """Write a table whose label is the sign of its first column, which ``shift`` moves."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal(240).astype(np.float32)
    keep = np.ones(240, bool) if only is None else (a < 0) == only
    arrays = {columns[0]: a + shift, columns[1]: rng.standard_normal(240), "y": labels[(a < 0).astype(int)]}
    arrays["group"] = np.arange(240) // 24
    np.savez(path, **{name: values[keep] for name, values in arrays.items()})


def config(folder, x="a, b"):
    data = {"kind": "windows", "path": str(folder / "train.npz"), "x": x, "y": "y", "group": "group", "window": 1}
    return {
        "model": {"kind": "mlp", "hidden": [8]},
        "data": data | {"test_groups": [0, 1], "placement": "shuffled"},
        "train": {"steps": 60, "batch_size": 24, "eval_every": 0},
        "optim": {"lr": 0.02},
        "run": {"folder": str(folder / "run")},
    }


def test_another_file(world, folder):
    if world.rank == 0:
        write(folder / "train.npz")
        write(folder / "moved.npz", shift=1000)
        write(folder / "renamed.npz", labels=np.array(["high", "deep"]))
        write(folder / "one_class.npz", only=False)
        write(folder / "columns.npz", columns=("b", "a"))
    world.Barrier()
    summary = train(resolve(config(folder), "test", []), world)
    assert summary["metric"]["value"] > 0.9

    def score(name, **options):
        return score_run(RunFolder(folder / "run"), world, [f"data.path={folder / name}"], **options)

    again = score("train.npz")
    assert again["metric"] == summary["metric"]
    assert again["loss"] == pytest.approx(summary["loss"], rel=1e-6)
    assert score("moved.npz")["metric"]["value"] < 0.7  # the model has never seen such values: one class for all
    assert score("one_class.npz")["metric"]["value"] > 0.8
    with pytest.raises(DataError, match="the classes are .*deep.*, but the model was trained on .*low"):
        score("renamed.npz")
    with pytest.raises(CheckpointError, match="there are 60"):
        score("train.npz", step=7)
    assert score("columns.npz")["metric"]["value"] < 0.9  # by name: its a is what b was


def test_unread_keys_do_not_bind(world, folder):
    """A key that this kind of model does not read may come and go between the starts of a run."""
    if world.rank == 0:
        write(folder / "train.npz")
    world.Barrier()
    train(resolve(config(folder), "test", ["train.steps=2", "model.heads=2"]), world)
    resumed = train(resolve(config(folder), "test", ["train.steps=3"]), world, resume="newest")
    assert resumed["steps"] == 3
