"""Job scripts as commands, and the tasks of an array."""

import os
import subprocess
import sys

from mpitrain.errors import ExitCode
from tests.system.helpers import HANG_S, environment, execute, messages, summary, train, write_config

JOB = [sys.executable, "-m", "mpitrain", "job"]


def test_eight_tasks_at_once(tmp_path):
    """S08: eight processes of one array with one configuration: eight run folders, and none failed."""
    config, run = write_config(tmp_path, steps=2)
    command = [sys.executable, "-m", "mpitrain", "train", config]
    quiet = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    tasks = [
        subprocess.Popen(command, env=environment(SLURM_ARRAY_TASK_ID=str(number)), **quiet) for number in range(8)
    ]
    for task in tasks:
        _, err = task.communicate(timeout=HANG_S)
        assert task.returncode == 0, err
    assert {path.name for path in run.iterdir()} == {f"task-{number}" for number in range(8)}
    for folder in run.iterdir():
        assert summary(folder)["steps"] == 2
        assert f'folder = "{folder}"  # SLURM_ARRAY_TASK_ID' in (folder / "config.toml").read_text()


def test_a_folder_on_the_command_line_is_taken_as_it_is(tmp_path):
    config, run = write_config(tmp_path, steps=1)
    wish = tmp_path / "here"
    assert train(0, config, "--set", f"run.folder={wish}", env={"SLURM_ARRAY_TASK_ID": "3"}).returncode == 0
    assert summary(wish)["steps"] == 1
    assert not run.exists()


def test_a_workstation_script(tmp_path):
    """Written, run twice: the second time the run is complete."""
    config, run = write_config(tmp_path, steps=2)
    script = tmp_path / "s.sh"
    written = execute([*JOB, config, "--scheduler", "mpirun", "-n", 2, "--out", script], cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert f"start it with: bash {script.name}" in written.stderr
    for words in ("done", "is complete"):
        done = execute(["bash", script], cwd="/", env=environment(PATH=os.environ["PATH"]))
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
    assert summary(run)["ranks"] == 2


def test_nothing_is_written_where_a_checkpoint_would_not_come(tmp_path):
    config, _ = write_config(tmp_path, steps=100)
    flags = ["--scheduler", "slurm", "-n", 2, "--set", "checkpoint.every=50", "--time", "10", "--step-s", "20"]
    refused = execute([*JOB, config, *flags, "--out", tmp_path / "s.sbatch"], cwd=tmp_path)
    assert refused.returncode == ExitCode.CONFIG
    assert messages(refused) == [
        "mpitrain: job: --time 00:10:00, less 60 s to save and stop, is 540 s, shorter than the 50 steps of 20 s "
        "(--step-s) up to a checkpoint; set checkpoint.every = 27 or less, or give it 00:17:40 or more"
    ]
    assert not refused.stdout
    assert not (tmp_path / "s.sbatch").exists()
