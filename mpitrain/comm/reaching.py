"""Whether hosts can be reached as a launcher will reach them, within seconds: it might wait for ever."""

import os
import shlex
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from mpitrain.comm.interfaces import list_interfaces
from mpitrain.comm.placing import Host
from mpitrain.errors import LaunchError

AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")
"""Variables that name the remote shell, of Open MPI 5, 4 and MPICH."""

PATIENCE_S = 10
SSH = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={PATIENCE_S // 2}"]

Reach = Callable[[str], str]
"""Returns why a host is not reached; empty where it is."""


def check_reach(hosts: Sequence[Host], remedy: str, reach: Reach | None = None) -> None:
    """Refuse hosts that no remote shell reaches; this machine itself is always reached.

    Raises
    ------
    LaunchError
        With every such host and the last that its shell said.
    """
    others = [host for host in hosts if not is_local(host.name)]
    if not others:
        return
    reach = reach or shell_reach(os.environ)
    with ThreadPoolExecutor(max_workers=min(32, len(others))) as pool:
        reasons = list(pool.map(reach, [host.name for host in others]))
    lost = [f"{host} ({reason})" for host, reason in zip(others, reasons, strict=True) if reason]
    if lost:
        raise LaunchError(f"launch: no remote shell reaches {', '.join(lost)}; {remedy}")


def is_local(name: str) -> bool:
    """Tell whether a name or an address is certainly this machine, without asking the network."""
    mine = {"localhost", socket.gethostname(), *(each.address for each in list_interfaces() if each.address)}
    return name in mine or name.startswith("127.")


def shell_reach(environment: Mapping[str, str]) -> Reach:
    """Return what tries the remote shell that the launcher will use."""
    chosen = next((environment[name] for name in AGENTS if environment.get(name)), "")
    shell = shlex.split(chosen) if chosen else SSH

    def reach(name: str) -> str:
        try:
            done = subprocess.run(
                [*shell, name, "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer for {PATIENCE_S} s"
        except OSError as error:
            return f"{shell[0]}: {error.strerror}"
        lines = done.stderr.strip().splitlines()
        return "" if done.returncode == 0 else (lines[-1] if lines else f"{shell[0]} ended with {done.returncode}")

    return reach
