"""The variables under which a plain ``mpirun`` inside an emulation reaches its hosts, whichever MPI it belongs to."""

import os
from collections.abc import Mapping
from pathlib import Path

from mpitrain.comm.hints import EMULATION
from mpitrain.emulate.host import DEVICE

SCHEDULERS = ("SLURM_", "PBS_", "LSB_", "PE_HOSTFILE")
"""How variables begin by which launchers recognize an allocation, whose hosts these are not."""


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


def wishes(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """List what is good for the links, where the user has not said otherwise."""
    good = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {name: value for name, value in good.items() if name not in environment}


def inherited(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a command inside may keep of the environment outside."""
    return {name: value for name, value in environment.items() if not name.startswith(SCHEDULERS)}
