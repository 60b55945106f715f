"""Signals, time limits and kills: every way to stop leaves one checkpoint of one step, and the run goes on from it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpitrain.checkpoint.store import committed_steps
from mpitrain.comm.signals import ONCE
from mpitrain.errors import ExitCode
from tests.system.helpers import (
    HANG_S,
    ROOT,
    environment,
    execute,
    gone,
    messages,
    mpirun,
    rows,
    summary,
    train,
    write_config,
)

ENDLESS = 1_000_000
TRAIN = [sys.executable, "-m", "mpitrain", "train"]
ROOT_FLAGS = ["--allow-root"] * (os.geteuid() == 0)


class Job:
    """A training under way; ended with the test, whatever becomes of it."""

    def __init__(self, command, run, **variables):
        self.run = run
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=run.parent,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.communicate()

    def await_rows(self, count=3):
        """Return once some steps have been taken."""
        deadline = time.monotonic() + HANG_S
        while not ((self.run / "metrics.jsonl").exists() and len(rows(self.run)) >= count):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "no step was taken"
            time.sleep(0.01)

    def end(self):
        out, err = self.process.communicate(timeout=HANG_S)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)


def pid_of_rank(rank, config):
    """Find the process of a rank by the environment that mpirun gave it."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"OMPI_COMM_WORLD_RANK={rank}".encode() in variables and os.fsencode(str(config)) in arguments:
                return int(folder.name)
    raise AssertionError(f"no process of rank {rank}")


def assert_stopped(result, run, reason):
    """One checkpoint at the last step that was logged, one message, exit code 75; `reason` is a regular expression."""
    assert result.returncode == ExitCode.STOPPED, result.stderr
    (step,) = committed_steps(run / "checkpoints")
    assert [row["step"] for row in rows(run)] == list(range(1, step + 1))
    (message,) = messages(result)
    assert re.match(f"mpitrain: stopped after step {step} by {reason}, with a checkpoint", message), message
    assert not (run / "summary.json").exists()
    assert json.loads((run / "timeline.json").read_text())["step"] == step
    return step


def assert_goes_on(config, run, step, ranks):
    """The same command with --resume auto takes the steps after, and only them."""
    done = train(ranks, config, "--resume", "auto", "--set", f"train.steps={step + 2}")
    assert done.returncode == 0, done.stderr
    assert f"resume    from step {step} (start 2 of this run)" in done.stdout
    assert [row["step"] for row in rows(run)] == list(range(1, step + 3))
    starts = [json.loads(line)["step"] for line in (run / "starts.jsonl").read_text().splitlines()]
    assert starts == [0, step]


def test_a_signal_to_one_rank(tmp_path):
    """S01: all four ranks save the step after which rank 2 was told to stop."""
    config, run = write_config(tmp_path, steps=ENDLESS)
    with Job([*mpirun(4), *TRAIN, config], run) as job:
        job.await_rows()
        os.kill(pid_of_rank(2, config), signal.SIGUSR1)
        step = assert_stopped(job.end(), run, "SIGUSR1 on rank 2")
    assert_goes_on(config, run, step, 4)


def test_a_signal_to_the_launcher(tmp_path):
    """S01: mpirun passes SIGUSR1 on."""
    config, run = write_config(tmp_path, steps=ENDLESS)
    with Job([*mpirun(2), *TRAIN, config], run) as job:
        job.await_rows()
        job.process.send_signal(signal.SIGUSR1)
        assert_stopped(job.end(), run, "SIGUSR1 on rank 0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_launch(tmp_path, number):
    """What would make mpirun kill the ranks reaches them as a wish."""
    config, run = write_config(tmp_path, steps=ENDLESS)
    flags = ["-n", 2, *ROOT_FLAGS, "--oversubscribe"]
    with Job([sys.executable, "-m", "mpitrain", "launch", config, *flags], run) as job:
        job.await_rows()
        job.process.send_signal(number)
        result = job.end()
    result.stderr = result.stderr.replace(ONCE, "")
    assert_stopped(result, run, "SIGUSR1 on rank 0")


def test_launch_interrupted_twice(tmp_path):
    """The second Ctrl-C has the launcher end the ranks: nothing is left behind."""
    config, run = write_config(tmp_path, steps=ENDLESS)
    command = [sys.executable, "-m", "mpitrain", "launch", config, "-n", 2, *ROOT_FLAGS, "--oversubscribe"]
    with Job(command, run, MPITRAIN_FAULT=f"delay:step=5,seconds={10 * HANG_S}") as job:
        job.await_rows(4)
        job.process.send_signal(signal.SIGINT)
        assert job.process.stderr.readline() + job.process.stderr.readline() == ONCE
        job.process.send_signal(signal.SIGINT)
        assert job.end().returncode == ExitCode.INTERRUPTED
    assert gone(str(config))
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_a_single_process(tmp_path, number):
    config, run = write_config(tmp_path, steps=ENDLESS)
    with Job([*TRAIN, config], run) as job:
        job.await_rows()
        job.process.send_signal(number)
        result = job.end()
    result.stderr = result.stderr.replace(ONCE, "")
    assert_stopped(result, run, f"{number.name} on rank 0")


def test_interrupted_twice(tmp_path):
    """The second Ctrl-C does not wait for the step."""
    config, run = write_config(tmp_path, steps=ENDLESS)
    with Job([*TRAIN, config], run, MPITRAIN_FAULT=f"delay:step=5,seconds={10 * HANG_S}") as job:
        job.await_rows(4)
        job.process.send_signal(signal.SIGINT)
        assert job.process.stderr.readline() + job.process.stderr.readline() == ONCE
        job.process.send_signal(signal.SIGINT)
        result = job.end()
    assert result.returncode == ExitCode.INTERRUPTED, result.stderr
    assert messages(result) == ["mpitrain: interrupted, left without a checkpoint"]
    assert not (run / "checkpoints").exists()


def test_time_limit(tmp_path):
    """S11: a run that would go on for ever ends by itself before its time is over, and goes on later."""
    config, run = write_config(tmp_path, steps=ENDLESS)
    result = train(2, config, "--set", "run.time_limit_s=6", "--set", "run.time_margin_s=2")
    step = assert_stopped(result, run, "run.time_limit_s = 6 on rank [01]")
    assert_goes_on(config, run, step, 2)


def test_the_whole_job_is_killed(tmp_path):
    """S04: the same command again goes on from the last checkpoint, and ends where an unbroken run does."""
    config, run = write_config(tmp_path, steps=20)
    again = ["--set", "checkpoint.every=10", "--resume", "auto"]
    killed = train(2, config, *again, fault="kill:step=15")
    assert killed.returncode != 0
    assert list(committed_steps(run / "checkpoints")) == [10]
    done = train(2, config, *again)
    assert done.returncode == 0, done.stderr
    assert "resume    from step 10 (start 2 of this run)" in done.stdout
    assert [row["step"] for row in rows(run)] == list(range(1, 21))
    whole = tmp_path / "whole"
    assert train(2, config, "--set", f"run.folder={whole}").returncode == 0
    assert summary(run)["param_sha256"] == summary(whole)["param_sha256"]
    complete = train(2, config, *again)
    assert complete.returncode == 0
    assert "is complete" in complete.stdout


def test_an_explicit_step_wins(tmp_path):
    """H20: step 2 is what was asked for; step 4 is set aside, not overwritten; a step that is not there is refused."""
    config, run = write_config(tmp_path, steps=4)
    assert train(0, config, "--set", "checkpoint.every=2").returncode == 0
    later = {path.name: path.read_bytes() for path in (run / "checkpoints" / "step-00000004").iterdir()}
    first = rows(run)
    missing = train(0, config, "--resume", "3")
    assert missing.returncode == ExitCode.CHECKPOINT
    assert "2, 4" in missing.stderr
    done = train(0, config, "--resume", "2", "--set", "checkpoint.every=2", "--set", "optim.lr=0.5")
    assert done.returncode == 0, done.stderr
    assert "resume    from step 2 (start 2 of this run)" in done.stdout
    (aside,) = (run / "checkpoints").glob("aside-*")
    assert {path.name: path.read_bytes() for path in (aside / "step-00000004").iterdir()} == later
    kept = [json.loads(line) for line in (aside / "metrics.jsonl").read_text().splitlines()]
    assert kept == first
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    assert rows(run)[:2] == first[:2]
    assert list(committed_steps(run / "checkpoints")) == [2, 4]


def test_eval(tmp_path):
    """Each test sample counts once on any number of ranks: the score of the training's end, again."""
    config, run = write_config(tmp_path, steps=4)
    assert train(2, config, "--set", "checkpoint.every=2").returncode == 0
    whole = summary(run)
    for ranks in (1, 3):
        launcher = mpirun(ranks) if ranks > 1 else []
        command = [*launcher, sys.executable, "-m", "mpitrain", "eval", run, "--json", tmp_path / "score.json"]
        done = execute(command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        score = json.loads((tmp_path / "score.json").read_text())
        assert (score["step"], score["num_test"], score["ranks"]) == (4, 10, ranks)
        assert score["metric"] == whole["metric"]
        assert score["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    older = execute([sys.executable, "-m", "mpitrain", "eval", run, "--step", "2"], cwd=tmp_path)
    assert f"{run} at step 2: test_accuracy" in older.stdout
    nothing = execute([sys.executable, "-m", "mpitrain", "eval", tmp_path], cwd=tmp_path)
    assert nothing.returncode == ExitCode.CONFIG
    assert "is not a run folder" in nothing.stderr


STUB = """#!/usr/bin/env bash
printf "%s\\n" "$*" >> calls
trap 'exit 75' USR1
for _ in $(seq 600); do sleep 0.1; done
"""


@pytest.mark.parametrize("has_scontrol", [True, False])
def test_the_slurm_script(tmp_path, has_scontrol):
    """S10: the signal goes on to mpirun; code 75 puts the job back, or warns where it cannot."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "date", "seq", "sleep"):
        (tools / name).symlink_to(shutil.which(name))
    launcher = tmp_path / ".venv" / "bin" / "mpirun"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(STUB)
    launcher.chmod(0o755)
    (launcher.parent / "python").touch()
    (tmp_path / "jobs" / "configs").mkdir(parents=True)
    (tmp_path / "jobs" / "configs" / "split.toml").touch()
    if has_scontrol:
        (tools / "scontrol").write_text("#!/usr/bin/env bash\necho scontrol $@ >> calls\n")
        (tools / "scontrol").chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(ROOT / "jobs" / "hybrid.sbatch"), "--set", "train.steps=5"],
        cwd=tmp_path,
        env={"PATH": str(tools), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_NTASKS": "8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + HANG_S
    while not (tmp_path / "calls").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    out, err = job.communicate(timeout=HANG_S)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].startswith("-n 8 --map-by slot --bind-to none ")
    what = "-m mpitrain train jobs/configs/split.toml --resume auto --set run.folder=runs/hybrid --set train.steps=5"
    assert calls[0].endswith(f" .venv/bin/python {what}")
    assert "start 3 of job 7" in out
    if has_scontrol:
        assert (job.returncode, calls[1:]) == (0, ["scontrol requeue 7"])
    else:
        assert job.returncode == ExitCode.STOPPED
        assert err.startswith("warning: this job could not be put back into the queue")
