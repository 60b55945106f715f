"""H01: whole jobs that are killed while they save; what was complete stays, and the run goes on from there."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from mpitrain.checkpoint.steps import committed_steps, step_folders
from tests.system.helpers import (
    HANG_S,
    drive,
    environment,
    gone,
    mpirun,
    processes,
    rows,
    summary,
    train,
    write_config,
)

EVERY_STEP = ("--set", "checkpoint.every=1", "--set", "checkpoint.keep=2")


def assert_goes_on(tmp_path, config, run, ranks, *, at_least):
    """The newest step is no older than one known to be complete, is sound, and leads to the end of the run."""
    newest = max(committed_steps(run / "checkpoints"))
    assert newest >= at_least
    cases = [[*EVERY_STEP, "--resume"], ["--set", f"run.folder={tmp_path / 'whole'}"]]
    resumed, unbroken = drive(tmp_path, [["train", str(config), *case] for case in cases], ranks)
    assert [report["code"] for report in (*resumed, *unbroken)] == [0] * 2 * ranks, (resumed, unbroken)
    assert f"resume    from step {newest}" in resumed[0]["stdout"]
    assert summary(run)["param_sha256"] == summary(tmp_path / "whole")["param_sha256"]
    last = summary(run)["steps"]
    assert list(step_folders(run / "checkpoints")) == [last - 1, last]
    assert [row["step"] for row in rows(run)] == list(range(1, last + 1))


def test_a_rank_that_dies_while_it_saves(tmp_path):
    config, run = write_config(tmp_path, steps=5)
    killed = train(3, config, *EVERY_STEP, fault="kill_save:rank=2,step=4")
    assert killed.returncode != 0
    assert gone(str(config))
    assert list(committed_steps(run / "checkpoints")) == [2, 3]
    assert_goes_on(tmp_path, config, run, 3, at_least=3)


def test_a_job_that_is_killed_as_a_whole(tmp_path):
    """Every process at once by SIGKILL, at whatever point of the saves they are; twice in a row."""
    config, run = write_config(tmp_path, steps=60)
    known = 0
    for wanted in (3, 12):
        resume = ["--resume"] if known else []
        launch_and_kill(config, run, wanted, *resume)
        steps = committed_steps(run / "checkpoints")
        assert max(steps) >= max(known, wanted)
        known = max(steps)
    assert_goes_on(tmp_path, config, run, 2, at_least=known)


def launch_and_kill(config, run, wanted, *options):
    """Start a job on two ranks, and kill its launcher and its ranks once a step is complete."""
    command = [*mpirun(2), sys.executable, "-m", "mpitrain", "train", str(config), *EVERY_STEP, *options]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        limit = time.monotonic() + HANG_S
        while max(committed_steps(run / "checkpoints"), default=0) < wanted and time.monotonic() < limit:
            time.sleep(0.001)
        assert job.poll() is None, "the job ended before it could be killed"
        for process in processes(str(config)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert gone(str(config))
