"""The variables under which a plain ``mpirun`` inside an emulation reaches its hosts, whichever MPI it belongs to."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mpitrain.comm.family import MPICH, OPEN_MPI, library
from mpitrain.comm.hints import EMULATION
from mpitrain.comm.machine import physical_cores
from mpitrain.comm.transport import transport, user_settings
from mpitrain.emulate.host import DEVICE
from mpitrain.kernels.storage import choose_folder
from mpitrain.topology.describe import bdp_bytes
from mpitrain.topology.model import Topology

SCHEDULERS = ("SLURM_", "PBS_", "LSB_", "PE_HOSTFILE")
"""How variables begin by which launchers recognize an allocation, whose hosts these are not."""

NEWEST = (5, 0)
"""Open MPI's version where none can be asked."""

ASK_S = 20.0


def variables(mark: str, agent: Path, hostfile: Path) -> dict[str, str]:
    """List what must be so, whatever the user has set: who runs where, and how it is reached.

    Parameters
    ----------
    mark : str
        Of the emulation.
    agent : Path
        Stand-in for ssh.
    hostfile : Path
        Hosts and slots for Open MPI (``name slots=n``); MPICH finds its own beside it (``name:n``).
    """
    found = {
        EMULATION: mark,
        # Open MPI 5
        "PRTE_MCA_plm_ssh_agent": str(agent),
        "PRTE_MCA_prte_default_hostfile": str(hostfile),
        "PRTE_MCA_prte_if_include": DEVICE,
        "PRTE_MCA_hwloc_default_binding_policy": "none",  # every host sees the same cores, and would take the first
        # Open MPI 4
        "OMPI_MCA_plm_rsh_agent": str(agent),
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_oob_tcp_if_include": DEVICE,
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_btl_tcp_if_include": DEVICE,
        # MPICH
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(agent),
        "HYDRA_HOST_FILE": f"{hostfile}.mpich",
        "HYDRA_IFACE": DEVICE,
    }
    if os.geteuid() == 0:  # root only because it takes root to make hosts
        found |= dict.fromkeys(
            (f"{who}_ALLOW_RUN_AS_ROOT{sure}" for who in ("OMPI", "PRTE") for sure in ("", "_CONFIRM")), "1"
        )
    return found


@cache
def open_mpi_version() -> tuple[int, ...]:
    """Ask the installed launcher for its version, without loading MPI; that of another MPI, or none, says 5.

    The one beside this Python goes first, as in `launching.find_launcher`.
    """
    beside = Path(sys.executable).with_name("mpirun")
    program = beside if beside.exists() else shutil.which("mpirun")
    if program is None:
        return NEWEST
    try:
        said = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return NEWEST
    found = library(said.stdout)
    return found.version if found.open_mpi and found.version else NEWEST


def wishes(
    topology: Topology, open_mpi: tuple[int, ...], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """List what is good for the links of a topology in a version of Open MPI, where the user has not said otherwise."""
    ranks = topology.slots
    crowded = ranks > physical_cores(os.sched_getaffinity(0))
    user = user_settings(environment)
    found: dict[str, str] = {}
    for family, version in ((MPICH, (4, 0)), (OPEN_MPI, open_mpi)):
        settings = transport(family, version, bdp_bytes(topology, ranks), DEVICE, oversubscribed=crowded, user=user)
        found |= settings.environment
    return found


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a command inside may keep of the environment outside, and what it needs.

    Open MPI does not start without a home; and kernels that were compiled for this machine suit all of its hosts.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(SCHEDULERS)}
    return {"HOME": tempfile.gettempdir(), "NUMBA_CACHE_DIR": str(choose_folder() or "")} | kept
