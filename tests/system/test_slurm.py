"""The shipped jobs under a real Slurm: one controller and four virtual nodes on this machine."""

import os
import re
import shutil
import sys
import time

import pytest

from mpitrain.checkpoint.store import committed_steps
from mpitrain.errors import ExitCode
from mpitrain.jobs.wishes import Wishes
from mpitrain.jobs.writer import Origin, write_job
from mpitrain.kernels.jit import cache_folder
from tests.system.helpers import HANG_S, ROOT, rows, summary
from tests.system.slurm import ENDED, Cluster, missing_programs

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
def project(cluster, tmp_path):
    """A folder from which jobs are submitted: the shipped scripts, tiny configurations in place of the shipped ones."""
    (tmp_path / "jobs" / "configs").mkdir(parents=True)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    for script in (ROOT / "jobs").glob("*.s*"):
        shutil.copy(script, tmp_path / "jobs")
    configure(tmp_path)
    yield tmp_path
    cluster.clear()


def configure(project, steps=4, every=0):
    text = TINY.format(steps=steps, every=every)
    (project / "jobs/configs/quickstart.toml").write_text(text)
    (project / "jobs/configs/split.toml").write_text(SPLIT + text.replace('[model]\nkind = "mlp"\nhidden = [8]\n', ""))


def environment(cluster, **extra):
    """Root may run Open MPI, the nodes share this machine's cores, kernels that are compiled already are used."""
    allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    return cluster.environment(**allowed, OMPI_MCA_mpi_yield_when_idle="1", NUMBA_CACHE_DIR=str(cache_folder), **extra)


def submit(cluster, project, *words, **variables):
    """Submit a script and return the number of its job."""
    return cluster.call("sbatch", "--parsable", *words, cwd=project, env=environment(cluster, **variables))


def log(project):
    return "\n".join(path.read_text() for path in project.glob("mpitrain-*.log"))


def complete(cluster, project, *words, **variables):
    """Submit a script and wait for the end, which must be a good one."""
    job = submit(cluster, project, *words, **variables)
    assert cluster.await_end(job) == {"COMPLETED"}, log(project)
    return job


def test_star(cluster, project):
    """Three workers and a server on the last node."""
    complete(cluster, project, "--nodes=4", "--ntasks=4", "jobs/star.sbatch")
    found = summary(project / "runs/star")
    assert (found["ranks"], found["grid"]["servers"], found["steps"]) == (4, 1, 4)
    assert found["replicas_identical"] is True


def test_hybrid(cluster, project):
    """Two replicas of two stages, each on a node of its own."""
    complete(cluster, project, "--nodes=2", "--ntasks=4", "jobs/hybrid.sbatch")
    found = summary(project / "runs/hybrid")
    assert (found["ranks"], found["grid"]["dp"], found["grid"]["pp"]) == (4, 2, 2)
    assert found["replicas_identical"] is True


POINTS = [('"int8"', "0"), ('"int8"', "1"), ('"int4"', "0"), ('"int4"', "1")]


def test_sweep(cluster, project):
    """S08: four tasks at once, each with its settings in its folder and its own log."""
    job = complete(cluster, project, "--ntasks=1", "--ntasks-per-node=1", "jobs/sweep.sbatch")
    found = {}
    for folder in (project / "runs/sweep").iterdir():
        resolved = (folder / "config.toml").read_text()
        found[folder.name] = re.findall(r"^(?:codec|seed) = (\S+)", resolved, re.MULTILINE)[-2:]
        assert summary(folder)["steps"] == 4
    assert found == {f"task-{n}": [seed, codec] for n, (codec, seed) in enumerate(POINTS)}
    assert {path.name for path in project.glob("*.log")} == {f"mpitrain-sweep-{job}-{n}.log" for n in range(4)}


def await_rows(cluster, run, job, step):
    """Return once a run has taken a step."""
    deadline = time.monotonic() + HANG_S
    while not ((run / "metrics.jsonl").exists() and (found := rows(run)) and found[-1]["step"] >= step):
        assert cluster.tasks(job)[0]["JobState"] in ("PENDING", "RUNNING", "COMPLETING"), log(run.parents[1])
        assert time.monotonic() < deadline, log(run.parents[1])
        time.sleep(0.05)


def await_restart(cluster, job, number):
    """Return once a job waits in the queue again."""
    deadline = time.monotonic() + HANG_S
    while (found := cluster.tasks(job)[0])["Restarts"] != str(number) or found["JobState"] != "PENDING":
        assert found["JobState"] not in ENDED, found
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_stop_and_requeue(cluster, project):
    """The warning before the time limit: saved, back in the queue, and on from there; then preempted without one."""
    configure(project, steps=10**6, every=2)
    job = submit(cluster, project, "jobs/ring.sbatch")
    run = project / "runs/ring"
    await_rows(cluster, run, job, 3)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    await_restart(cluster, job, 1)
    first = max(committed_steps(run / "checkpoints"))
    assert rows(run)[-1]["step"] == first
    await_rows(cluster, run, job, first + 3)
    cluster.call("scontrol", "requeue", job)
    await_restart(cluster, job, 2)
    second = max(committed_steps(run / "checkpoints"))
    assert second > first
    steps = second + 20  # what Slurm kills may save once more after the job is back in the queue
    configure(project, steps=steps, every=2)
    assert cluster.await_end(job) == {"COMPLETED"}, log(project)
    text = log(project)
    assert re.findall(r"start (\d) of job (\d+) on bs\[0-3\]", text) == [(str(n), job) for n in (1, 2, 3)]
    assert f"resume    from step {first} (start 2 of this run)" in text
    (third,) = re.findall(r"resume    from step (\d+) \(start 3 of this run\)", text)
    assert second <= int(third) < steps
    assert [row["step"] for row in rows(run)] == list(range(1, steps + 1))
    found = summary(run)
    assert (found["steps"], found["ranks"], found["collective"]) == (steps, 4, "ring")
    assert found["replicas_identical"] is True


STUB = """#!/bin/bash
# An MPI program, as what mpirun is for: it freezes now and then where a process ends before the others have begun.
exec .venv/bin/python -c '
import os
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
told = [rank, *(os.environ[name] for name in ("SLURMD_NODENAME", "OMP_NUM_THREADS", "FOO")), os.getcwd()]
with open(f"told-{rank}", "x") as file:
    print(*told, sep=chr(10), file=file)
'
"""


def told(cluster, project, sites, *sbatch, **wishes):
    """Submit a job whose ranks tell who and where they are; returns (node, (threads, FOO)) by rank."""
    stub = project / "py thon"
    stub.write_text(STUB)
    stub.chmod(0o755)
    wishes |= {"variables": ("FOO=a 'b$c",), "out": project / "it's.sbatch"}
    if sites:
        wishes["topology"] = write_star(project, sites)
    origin = Origin(project, str(stub), str(project / ".venv/bin/mpirun"))
    job = write_job(project / "jobs/configs/quickstart.toml", [], Wishes(**wishes), origin)
    wishes["out"].write_text(job.text)
    complete(cluster, project, *sbatch, wishes["out"])
    found = {}
    for path in project.glob("told-*"):
        rank, node, threads, foo, folder = path.read_text().splitlines()
        assert int(rank) not in found
        assert folder == str(project)
        found[int(rank)] = (node, (threads, foo))
    return [found[rank] for rank in range(len(found))]


def write_star(project, sites):
    """Write a star around a core without ranks; every site is the rest of its table."""
    text = '[defaults]\nrate_mbps = 100\ndelay_ms = 5\n[[site]]\nname = "core"\nslots = 0\n'
    for number, site in enumerate(sites):
        text += f'[[site]]\nname = "s{number}"\n{site}\n[[link]]\nbetween = ["core", "s{number}"]\n'
    path = project / "net.toml"
    path.write_text(text)
    return path


def test_where_ranks_run_and_what_they_know(cluster, project):
    """S07: a variable with spaces and quotes reaches all nodes; ranks that follow each other share one; threads."""
    found = told(cluster, project, None, "--cpus-per-task=1", ranks=4, per_node=2)
    nodes = [node for node, _ in found]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert {rest for _, rest in found} == {("1", "a 'b$c")}


def test_sites_with_different_slots(cluster, project):
    """In the order of the topology, not of the cluster's names."""
    found = told(cluster, project, ['host = "bs3"', 'host = "bs0"\nslots = 2', 'host = "bs2"'])
    assert [node for node, _ in found] == ["bs3", "bs0", "bs0", "bs2"]


def test_srun(cluster, project):
    """Where Slurm has PMIx, srun starts the ranks; where not, it says so, and nothing trains alone."""
    has_pmix = cluster.succeeds("srun", "--mpi=pmix", "true")
    job = submit(cluster, project, "jobs/srun.sbatch")
    (state,) = cluster.await_end(job)
    if has_pmix:
        assert state == "COMPLETED", log(project)
        assert summary(project / "runs/srun")["ranks"] == 4
    else:
        assert (state, cluster.tasks(job)[0]["ExitCode"]) == ("FAILED", "5:0")
        assert "Slurm cannot start MPI here (srun --mpi=pmix): every process would train alone" in log(project)
        assert not (project / "runs").exists()


def test_singletons(cluster, project):
    """Processes that srun has started, and that do not find each other, train nothing: said once."""
    command = f"srun --mpi=none {sys.executable} -m mpitrain train jobs/configs/quickstart.toml"
    job = submit(cluster, project, "--nodes=2", "--ntasks=2", "--output=mpitrain-%j.log", "--wrap", command)
    assert cluster.await_end(job) == {"FAILED"}
    assert cluster.tasks(job)[0]["ExitCode"] == f"{ExitCode.MPI}:0"
    (line,) = [line for line in log(project).splitlines() if line.startswith("mpitrain:")]
    assert line.startswith("mpitrain: launch: Slurm's srun started 2 processes (SLURM_STEP_NUM_TASKS=2), but ")
    assert "give srun --mpi=pmix" in line
    assert not (project / "runs").exists()
