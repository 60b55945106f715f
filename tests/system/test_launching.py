"""The way from the shell to the ranks: launcher, threads, output, and a machine without MPI."""

import json
import os
import sys

import pytest

from mpitrain.comm.machine import physical_cores
from mpitrain.comm.threads import THREAD_VARIABLES
from mpitrain.errors import ExitCode
from tests.system.helpers import (
    ROOT,
    environment,
    environment_without,
    execute,
    messages,
    mpirun,
    summary,
    train,
    write_config,
)

MPITRAIN = [sys.executable, "-m", "mpitrain"]
QUICKSTART = "jobs/configs/quickstart.toml"
CORES = physical_cores(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The same run on one rank and on four."""
    results = {}
    for ranks in (1, 4):
        config, _ = write_config(tmp_path_factory.mktemp(f"lines{ranks}"), steps=20)
        results[ranks] = train(ranks, config)
        assert results[ranks].returncode == 0, results[ranks].stderr
    return results


def test_progress_is_told_once(outputs):
    """U04: as many lines from four ranks as from one."""
    one, four = (len(outputs[ranks].stdout.splitlines()) for ranks in (1, 4))
    assert abs(one - four) <= 0.05 * one + 1
    assert outputs[4].stdout.count("step     20/20") == 1
    assert outputs[4].stdout.count("1 BLAS thread a rank") == 1
    assert not any(messages(outputs[ranks]) for ranks in (1, 4))


@pytest.mark.parametrize(("variable", "family"), [("PMI_SIZE", "MPICH"), ("OMPI_COMM_WORLD_SIZE", "Open MPI")])
def test_contradicting_launcher(tmp_path, variable, family):
    """M11: one process that a launcher of another MPI believes to be one of four."""
    config, run = write_config(tmp_path)
    result = train(0, config, env={variable: "4"})
    assert result.returncode == ExitCode.MPI, result.stderr
    assert len(messages(result)) == 1
    assert family in result.stderr
    assert f"{variable}=4" in result.stderr
    assert "sees 1" in result.stderr
    assert not run.exists()


def launch(tmp_path, ranks, *options):
    config, _ = write_config(tmp_path)
    return execute([*MPITRAIN, "launch", config, "-n", ranks, *options], cwd=tmp_path)


def test_printed_command_yields_when_oversubscribed(tmp_path):
    """M18: ranks that wait leave the core; where every rank has its own, nothing is added."""
    root = ["--allow-root"] * (os.geteuid() == 0)
    crowded = launch(tmp_path, CORES + 1, *root, "--oversubscribe", "--print")
    roomy = launch(tmp_path, CORES, *root, "--print")
    assert crowded.returncode == roomy.returncode == 0, crowded.stderr + roomy.stderr
    assert "--mca mpi_yield_when_idle 1" in crowded.stdout
    assert "mpi_yield" not in roomy.stdout
    assert "--oversubscribe" not in roomy.stdout
    for result in (crowded, roomy):
        assert ("--allow-run-as-root" in result.stdout) == (os.geteuid() == 0)
        assert not list(tmp_path.glob("run"))


def test_launcher_refuses_with_the_flags_to_add(tmp_path):
    """M20."""
    result = launch(tmp_path, CORES + 1)
    assert result.returncode == ExitCode.MPI
    wanted = "--allow-root --oversubscribe" if os.geteuid() == 0 else "--oversubscribe"
    assert len(messages(result)) == 1
    assert f"add {wanted} to launch" in result.stderr
    assert result.stdout == ""


def test_launch_trains_and_passes_on_the_code(tmp_path):
    """M20: with the flags it starts; the code of the ranks is that of the command."""
    flags = ["--allow-root"] * (os.geteuid() == 0) + ["--oversubscribe"]
    good = launch(tmp_path, 2, *flags, "--set", "train.steps=1")
    assert good.returncode == 0, good.stderr
    assert (tmp_path / "run" / "summary.json").exists()
    bad = launch(tmp_path, 2, *flags, "--set", "train.steps=none", "--overwrite")
    assert bad.returncode == ExitCode.CONFIG, bad.stderr


THREADS = """
import json, sys
from mpitrain.comm.threads import limit_threads
limit_threads()
import numpy, threadpoolctl
numpy.ones((64, 64)) @ numpy.ones((64, 64))
json.dump([pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"], sys.stdout)
"""


@pytest.mark.parametrize(("wish", "expected"), [(None, 1), ("2", min(2, CORES)), ("4000", CORES)])
def test_blas_threads(tmp_path, wish, expected):
    """M22, N08: one thread a rank, unless the user has said otherwise; never more than processors."""
    clean = dict.fromkeys(THREAD_VARIABLES) | {"OMP_NUM_THREADS": wish}
    result = execute([sys.executable, "-c", THREADS], cwd=tmp_path, env=environment(**clean))
    assert result.returncode == 0, result.stderr
    threads = json.loads(result.stdout)
    assert threads
    assert set(threads) == {expected}


def test_threads_of_a_rank_on_one_core(tmp_path):
    """N08: bound to one core and asked for eight, it takes one, says so once, and trains the same bits."""
    core = min(os.sched_getaffinity(0))
    results, hashes = [], []
    for name, threads in (("one", "1"), ("eight", "8")):
        (tmp_path / name).mkdir()
        config, run = write_config(tmp_path / name)
        variables = dict.fromkeys(THREAD_VARIABLES) | {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
        command = [*mpirun(2), *MPITRAIN, "train", config]
        bind = {"preexec_fn": lambda: os.sched_setaffinity(0, {core})}
        results.append(execute(command, cwd=tmp_path, env=environment(**variables), **bind))
        assert results[-1].returncode == 0, results[-1].stderr
        hashes.append(summary(run)["param_sha256"])
    assert not messages(results[0])
    assert messages(results[1]) == [
        "mpitrain: OMP_NUM_THREADS=8, but a rank may use 1 of the processors here; taking 1"
    ]
    assert hashes[0] == hashes[1]


@pytest.fixture
def without_mpi(tmp_path):
    """An environment in which what needs a compiler or MPI is not installed."""
    return environment_without(tmp_path, "mpi4py", "numba", "h5py")


@pytest.mark.parametrize(
    "options", [["--help"], ["--version"], ["train", "--help"], ["launch", "--help"], ["bench", "--help"]]
)
def test_help_needs_no_mpi(tmp_path, without_mpi, options):
    result = execute([*MPITRAIN, *options], cwd=tmp_path, env=without_mpi)
    assert result.returncode == 0, result.stderr
    assert "mpitrain" in result.stdout
    typed = [line for line in result.stdout.splitlines() if "<bool>" in line]
    assert all("--help" in line for line in typed), "a flag takes no value"


def test_validation_and_reference_need_no_mpi(tmp_path, without_mpi):
    """U09: neither MPI nor a compiler, HDF5 or numpy."""
    config, run = write_config(tmp_path)
    (tmp_path / "stub" / "numpy").mkdir()
    (tmp_path / "stub" / "numpy" / "__init__.py").write_text("raise ImportError('numpy is blocked by a test')\n")
    for command in (["validate", config, "--set", "optim.lr=3"], ["reference"]):
        result = execute([*MPITRAIN, *command], cwd=tmp_path, env=without_mpi)
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
    result = execute([*MPITRAIN, "validate", config, "-n", "2", "--set", "optim.lr=3"], cwd=tmp_path, env=without_mpi)
    assert "lr = 3.0  # --set" in result.stdout.splitlines()
    assert not run.exists()


@pytest.mark.parametrize("command", [["train"], ["launch", "-n", "1"]])
def test_advice_without_mpi(tmp_path, without_mpi, command):
    """One line that says what to install."""
    config, run = write_config(tmp_path)
    result = execute([*MPITRAIN, *command, config], cwd=tmp_path, env=without_mpi)
    assert "Traceback" not in result.stderr
    assert result.returncode == ExitCode.MPI, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "pip install" in result.stderr
    assert not run.exists()


def test_usage_errors(tmp_path):
    odd = os.fsdecode(b"run.folder=\xff")
    for options in (["fly"], ["train"], ["train", "x.toml", "--fast"], ["validate", ROOT / QUICKSTART, "--set", odd]):
        result = execute([*MPITRAIN, *options], cwd=tmp_path)
        assert result.returncode == ExitCode.CONFIG
        assert "Traceback" not in result.stderr
