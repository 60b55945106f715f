"""The shipped example of a split model, as a user starts it: what it sends and keeps is what `mpitrain plan` said."""

import os
import sys

from mpitrain.cli.validate import main as validate
from mpitrain.config.load import load_config
from mpitrain.data.open import open_dataset
from mpitrain.errors import ExitCode
from mpitrain.partition import GridShape
from mpitrain.train.layouts import Costs
from tests.system.helpers import ROOT, execute, messages, rows, summary

SPLIT = ROOT / "jobs" / "configs" / "split.toml"


def launch(config, ranks, folder, *settings):
    command = [sys.executable, "-m", "mpitrain", "launch", config, "-n", ranks, "--oversubscribe"]
    command += ["--allow-root"] * (os.geteuid() == 0)
    options = [part for setting in (f"run.folder={folder}", *settings) for part in ("--set", setting)]
    return execute([*command, *options], cwd=folder.parent)


def test_the_example(tmp_path):
    """A quarter of the data and half of the layers a rank: one step sends the bytes that were planned for it."""
    run = tmp_path / "run"
    settings = ["train.steps=1", "data.test_samples=16"]
    assert validate(SPLIT, settings, 8) == 0
    done = launch(SPLIT, 8, run, *settings)
    assert done.returncode == 0, done.stderr
    assert "dp=4 pp=2 tp=1; 1f1b, stages begin at units 0, 4; activations int8, their gradients int8" in done.stdout

    told, (row,) = summary(run), rows(run)
    ranks = told["per_rank"]
    assert told["grid"] == {"dp": 4, "pp": 2, "tp": 1}
    assert told["replicas_identical"] is True
    assert [sum(rank["parameters"] for rank in ranks[at : at + 2]) for at in (0, 2, 4, 6)] == 4 * [
        told["num_parameters"]
    ]
    assert len({rank["parameters"] for rank in ranks[::2]}) == len({rank["parameters"] for rank in ranks[1::2]}) == 1
    for total, each in (("sent_bytes_total", "sent_bytes"), ("replica_bytes_total", "replica_bytes")):
        assert told[total] == sum(rank[each] for rank in ranks)
    assert (row["sent_bytes"], row["replica_bytes"]) == (ranks[0]["sent_bytes"], ranks[0]["replica_bytes"])

    config = load_config(SPLIT, settings).config
    planned = Costs(config, open_dataset(config.data, config.model.task, config.train.seed)).of(GridShape(4, 2, 1))
    assert told["sent_bytes_total"] == planned.configured.nbytes
    assert told["replica_bytes_total"] == planned.axes["pipeline"].configured.nbytes
    assert max(rank["array_bytes"] for rank in ranks) == planned.memory_bytes


def test_ranks_that_cover_no_grid(tmp_path):
    """T14: five ranks and a tensor axis of two; refused once, with what would do, before anything is written."""
    run = tmp_path / "run"
    refused = launch(ROOT / "jobs" / "configs" / "quickstart.toml", 5, run, "parallel.tp=2")
    assert refused.returncode == ExitCode.CONFIG
    (message,) = messages(refused)
    for words in ("pp*tp = 1*2 = 2 does not divide 5 ranks", "start a multiple of 2 ranks", "one of 1, 5"):
        assert words in message
    assert not run.exists()
