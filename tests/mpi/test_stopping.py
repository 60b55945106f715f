"""Ends that all ranks decide together: target, patience, time; and losses that are means over all samples."""

import json
import os
import time

import numpy as np
import pytest

from mpitrain.comm.agreement import NumberGather
from mpitrain.comm.grid import Axis
from mpitrain.comm.machine import shared_memory_findings
from mpitrain.config.load import resolve
from mpitrain.errors import DivergedError, StoppedEarlyError
from mpitrain.train.evaluate import score
from mpitrain.train.run import train
from tests.mpi.test_train import MLP


def run(world, path, change=(), **options):
    tree = MLP | {"train": {"steps": 12, "batch_size": 12, "eval_every": 2}, "run": {"folder": str(path)}}
    return train(resolve(tree, "test", list(change)), world, **options)


def logged(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_patience(world, folder):
    """D08: ranks whose own scores differ stop at the same evaluation, in order, and the run is complete."""
    growing = ["optim.lr=10", "optim.schedule=constant", "train.patience=1", "train.clip_norm=0"]
    summary = run(world, folder / "run", growing)
    rows = logged(folder / "run")
    losses = [row["test_loss"] for row in rows if "test_loss" in row]
    first = next(i for i in range(1, len(losses)) if not losses[i] < min(losses[:i]))
    assert first == len(losses) - 1, losses
    assert (summary["stopped"], summary["steps"]) == ("patience", rows[-1]["step"])
    assert summary["steps"] == 2 * len(losses) < 12
    again = run(world, folder / "run", growing, resume="newest")
    assert again == json.loads((folder / "run" / "summary.json").read_text())
    assert logged(folder / "run") == rows
    longer = run(world, folder / "run", [*growing, "train.patience=100"], resume="newest")
    assert (longer["stopped"], longer["steps"]) == (None, 12)


@pytest.mark.parametrize(("task", "target"), [("classify", 0.0), ("forecast", 1e9)])
def test_target(world, folder, task, target):
    """An accuracy is reached from below, an error from above; both at the first evaluation here."""
    summary = run(world, folder / "run", [f"model.task={task}", f"train.target={target}"])
    assert (summary["stopped"], summary["steps"]) == ("target", 2)


def test_no_target(world, folder):
    summary = run(world, folder / "run", ["train.target=1"])
    assert (summary["stopped"], summary["steps"]) == (None, 12)


def test_time_limit(world, folder):
    """S11: a limit within the margin ends the run after its first step, on all ranks."""
    with pytest.raises(StoppedEarlyError, match=r"after step 1 by run.time_limit_s = 5 on rank 0") as caught:
        run(world, folder / "run", ["run.time_limit_s=5"])
    assert caught.value.agreed
    assert (folder / "run" / "checkpoints" / "step-00000001").exists()


def test_a_run_that_ends_in_nan_has_diverged(world, folder):
    """Few steps are not enough for train.max_skips, but a model without a finite loss is no result."""
    with pytest.raises(DivergedError, match="test loss is (nan|inf) after the last step") as caught:
        run(world, folder / "run", ["train.steps=3", "optim.lr=1e30", "optim.kind=sgd", "train.clip_norm=0"])
    assert caught.value.agreed
    assert not (folder / "run" / "summary.json").exists()


def test_scarce_shared_memory_is_told_before_training(world, folder, monkeypatch, capfd):
    """M21: once for each host, with path, free and needed size."""
    scarce = os.statvfs_result((4096, 4096, 256, 256, 256, 64, 64, 64, 0, 255))  # 256 blocks: 1 MiB
    monkeypatch.setattr(shared_memory_findings, "__defaults__", (lambda path: scarce, {"TMPDIR": "/scarce"}))
    run(world, folder / "run", ["train.steps=1"])
    told = [line for line in capfd.readouterr().err.splitlines() if "free" in line]
    if world.rank == 0 and world.size > 1:
        segments = f"{16.777216 * world.size:,.1f}"
        assert told[0].startswith(
            f"mpitrain: rank 0: /dev/shm has 1.0 MB free, {world.size} ranks need {segments} MB; "
        )
        assert told[1].startswith("mpitrain: rank 0: /scarce has 1.0 MB free, ")
        assert len(told) == 2
    else:
        assert not told


def test_loss_is_the_mean_over_samples(world):
    """D12: 1.0 of four samples and 3.0 of one are 1.4."""
    sums = np.array([4.0, 4, 1, 0] if world.rank == 0 else [3.0, 1, 1, 0] if world.rank == 1 else [0.0, 0, 0, 0])
    if world.size == 1:
        sums = np.array([7.0, 5, 2, 0])
    loss, weight, metric, _ = NumberGather(Axis(world, "world"), sums, timeout_s=60).wait().sum_in_order()
    assert score("classify", loss, weight, metric).loss == pytest.approx(1.4)
    assert score("classify", loss, weight, metric).metric == pytest.approx(0.4)


def test_summary_of_all_ranks(world, folder):
    """What every rank sent and how it spent its time adds up to the totals."""
    begin = time.perf_counter()
    summary = run(world, folder / "run")
    elapsed = time.perf_counter() - begin
    per_rank = summary["per_rank"]
    assert [totals["rank"] for totals in per_rank] == list(range(world.size))
    assert sum(totals["sent_bytes"] for totals in per_rank) == summary["sent_bytes_total"]
    rows = logged(folder / "run")
    assert per_rank[0]["sent_bytes"] == sum(row["sent_bytes"] for row in rows)
    assert per_rank[0]["compute_s"] == pytest.approx(sum(row["compute_s"] for row in rows))
    assert 0 < per_rank[0]["compute_s"] + per_rank[0]["wait_s"] < elapsed
    timed = [row for row in rows if row["step"] > 5]
    pace = sum(row["samples"] for row in timed) / sum(row["step_s"] for row in timed)
    assert world.rank or summary["samples_per_s"] == pytest.approx(pace)
    timeline = json.loads((folder / "run" / "timeline.json").read_text())
    assert timeline["step"] == 12
    assert [lane["rank"] for lane in timeline["ranks"]] == list(range(world.size))
    for lane in timeline["ranks"]:
        names = {name for name, _, _ in lane["events"]}
        # The evaluation that follows the step is no part of it.
        assert [name for name, _, _ in lane["events"]].count("forward") == 1
        assert max(end for _, _, end in lane["events"]) == max(
            end for name, _, end in lane["events"] if name in ("update", "wait")
        )
        assert {"read", "forward", "backward", "update"} <= names
        assert ({"encode", "decode", "wait"} <= names) == (world.size > 1)
        assert all(0 <= start <= end for _, start, end in lane["events"])
