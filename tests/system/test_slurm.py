"""The shipped jobs under a real Slurm: one controller and four virtual nodes on this machine."""

import json
import os
import re
import shutil
import time

import pytest

from mpitrain.checkpoint.store import committed_steps
from mpitrain.errors import ExitCode
from mpitrain.kernels.jit import cache_folder
from tests.system.helpers import HANG_S, ROOT, messages, rows, summary
from tests.system.slurm import Cluster, missing_programs

TINY = """
[model]
kind = "mlp"
hidden = [8]
[data]
samples = 60
test_samples = 10
window = 4
stations = 6
[train]
steps = {steps}
batch_size = 12
eval_every = 0
[checkpoint]
every = {every}
"""
SPLIT = '[parallel]\ndp = 2\npp = 2\n[model]\nkind = "mlp"\nhidden = [8, 8, 8]\n'


@pytest.fixture(scope="module")
def cluster():
    """The cluster of all tests here; a machine without Slurm is a visible skip, and fails in CI."""
    if missing := missing_programs():
        message = f"Slurm is not installed ({', '.join(missing)}): apt-get install slurm-wlm slurm-client munge"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with Cluster() as running:
        yield running


@pytest.fixture
def project(tmp_path):
    """A folder from which jobs are submitted: the shipped scripts, tiny configurations in place of the shipped ones."""
    (tmp_path / "jobs" / "configs").mkdir(parents=True)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    for script in (ROOT / "jobs").glob("*.s*"):
        shutil.copy(script, tmp_path / "jobs")
    configure(tmp_path)
    return tmp_path


def configure(project, steps=4, every=0):
    text = TINY.format(steps=steps, every=every)
    (project / "jobs/configs/quickstart.toml").write_text(text)
    (project / "jobs/configs/split.toml").write_text(SPLIT + text.replace('[model]\nkind = "mlp"\nhidden = [8]\n', ""))


def environment(cluster, **extra):
    """Root may run Open MPI; kernels that are compiled already are used."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return cluster.environment(**root, NUMBA_CACHE_DIR=str(cache_folder), **extra)


def submit(cluster, project, *words, **variables):
    """Submit a script and return the number of its job."""
    return cluster.call("sbatch", "--parsable", *words, cwd=project, env=environment(cluster, **variables))


def log(project):
    return "\n".join(path.read_text() for path in project.glob("mpitrain-*.log"))


def complete(cluster, project, *words, **variables):
    """Submit a script and wait for the end, which must be a good one."""
    job = submit(cluster, project, *words, **variables)
    (state,) = cluster.await_end(job)
    assert state == "COMPLETED", log(project)
    return job


def test_star(cluster, project):
    """Three workers and a server on the last node."""
    complete(cluster, project, "--nodes=4", "--ntasks=4", "jobs/star.sbatch")
    found = summary(project / "runs/star")
    assert (found["ranks"], found["grid"]["servers"], found["steps"]) == (4, 1, 4)
    assert found["replicas_identical"] is True
