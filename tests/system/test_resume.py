"""Stopping and going on is not stopping: the same bits, and refusals where they could not be."""

import hashlib
import json
import shutil

import h5py

from mpitrain.checkpoint.record import COMMIT
from mpitrain.checkpoint.store import committed_steps
from mpitrain.errors import ExitCode
from tests.system.helpers import drive, gone, messages, rows, snapshot, summary, train, write_config

TRANSFORMER = """
[model]
kind = "transformer"
layers = 1
d_model = 8
heads = 2
dropout = 0.1
[data]
samples = 60
test_samples = 10
window = 4
stations = 6
[train]
steps = {steps}
batch_size = 8
eval_every = 0
[optim]
kind = "adamw"
schedule = "cosine"
warmup_steps = 5
[checkpoint]
every = 0
[run]
folder = "{folder}"
"""

SAME = ("step", "epoch", "loss", "accuracy", "lr", "grad_norm", "samples", "sent_bytes", "messages", "skipped")
"""Columns that a resumed run shares with an unbroken one; the others are seconds."""


def assert_same_run(run, whole):
    ours, theirs = rows(run), rows(whole)
    assert [row["step"] for row in ours] == list(range(1, 21))
    for name in SAME:
        assert [row[name] for row in ours] == [row[name] for row in theirs], name
    for name in ("param_sha256", "loss", "metric", "sent_bytes_total", "ratio"):
        assert summary(run)[name] == summary(whole)[name], name
    assert summary(run)["replicas_identical"] is True


def test_stopped_in_order(tmp_path):
    """C08, H14: 10 + 10 steps are 20; AdamW, warm-up and cosine, dropout, stochastic int8 with residual."""
    config, run = write_config(tmp_path, steps=20, text=TRANSFORMER)
    exchange = ("--set", "exchange.memory=residual", "--set", "exchange.rounding=stochastic")
    stopped = train(2, config, *exchange, fault="stop:rank=1,step=10")
    assert stopped.returncode == ExitCode.STOPPED, stopped.stderr
    assert list(committed_steps(run / "checkpoints")) == [10]
    assert not (run / "summary.json").exists()
    assert len(messages(stopped)) == 1
    assert "--resume" in messages(stopped)[0]
    go_on(tmp_path, config, exchange, 2)


def test_a_killed_rank(tmp_path):
    """M04: rank 1 dies by SIGKILL; its peers end, and --resume ends where an unbroken run does (C08: with delta)."""
    config, run = write_config(tmp_path, steps=20, text=TRANSFORMER)
    options = ("--set", "exchange.memory=delta", "--set", "checkpoint.every=10")
    killed = train(4, config, *options, fault="kill:rank=1,step=12")
    assert killed.returncode != 0
    assert gone(str(config))
    assert list(committed_steps(run / "checkpoints")) == [10]
    assert not (run / "summary.json").exists()
    go_on(tmp_path, config, options, 4)


def test_a_lost_rank(tmp_path):
    """M08: rank 2 falls silent in step 5; rank 0 saves step 4 alone, from which all go on to the same bits."""
    config, run = write_config(tmp_path, steps=20, text=TRANSFORMER)
    raw = ("--set", "exchange.codec=raw", "--set", "exchange.memory=none", "--set", "network.peer_timeout_s=2")
    lost = train(4, config, *raw, fault="delay:rank=2,step=5,seconds=60")
    assert lost.returncode == ExitCode.MPI, lost.stderr
    assert "no message for 2 s while waiting for" in lost.stderr
    assert "; rank 0 has saved step 4, go on with --resume auto" in lost.stderr
    assert list(committed_steps(run / "checkpoints")) == [4]
    assert gone(str(config))
    whole = tmp_path / "whole"
    cases = [["--resume", "auto"], ["--set", f"run.folder={whole}"]]
    resumed, unbroken = drive(tmp_path, [["train", str(config), *raw, *case] for case in cases], 4)
    assert [report["code"] for report in (*resumed, *unbroken)] == [0] * 8, (resumed, unbroken)
    assert "resume    from step 4" in resumed[0]["stdout"]
    assert [row["step"] for row in rows(run)] == list(range(1, 21))
    assert summary(run)["param_sha256"] == summary(whole)["param_sha256"]


def go_on(tmp_path, config, options, ranks):
    """Resume from step 10, to the bits of an unbroken run; but not where a memory is missing (C08)."""
    run, whole, copy = tmp_path / "run", tmp_path / "whole", tmp_path / "copy"
    shard = forget_a_memory(run, copy)
    before = snapshot(copy)
    cases = [
        ["--resume", "--set", f"run.folder={copy}"],
        ["--resume"],
        ["--set", f"run.folder={whole}"],
    ]
    forgotten, resumed, unbroken = drive(tmp_path, [["train", str(config), *options, *case] for case in cases], ranks)
    assert [report["code"] for report in forgotten] == [ExitCode.CHECKPOINT] * ranks, forgotten
    assert [report["stderr"].count("mpitrain: ") for report in forgotten] == [1] + [0] * (ranks - 1), forgotten
    assert "codec memories" in forgotten[0]["stderr"]
    assert shard in forgotten[0]["stderr"]
    assert snapshot(copy) == before
    assert [report["code"] for report in (*resumed, *unbroken)] == [0] * 2 * ranks, (resumed, unbroken)
    assert "resume    from step 10" in resumed[0]["stdout"]
    assert "resume" not in unbroken[0]["stdout"]
    assert_same_run(run, whole)


def forget_a_memory(run, copy):
    """Copy a run and remove a memory from a shard, as if it had never been there; returns the shard's name."""
    shutil.copytree(run, copy)
    (shard,) = copy.glob("checkpoints/step-00000010/shard-00001.h5")
    with h5py.File(shard, "r+") as file:
        del file[f"local/{next(iter(file['local']))}"]
    record = json.loads((shard.parent / COMMIT).read_text())
    record["shards"][shard.name] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (shard.parent / COMMIT).write_text(json.dumps(record))
    return shard.name
