"""Which interface torch's gloo uses: the one of MPI, so that both send over the same link."""

import os
from collections.abc import MutableMapping, Sequence

from mpitrain.comm.interfaces import Interface, list_interfaces
from mpitrain.errors import LaunchError

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Where gloo looks for the name of its interface."""

MPI_VARIABLES = ("OMPI_MCA_btl_tcp_if_include", "MPIR_CVAR_CH3_NETWORK_INTERFACE_NAME", "FI_TCP_IFACE")
"""Where MPI libraries look for theirs; mpirun hands its ``--mca`` on in the first one."""


def choose_interface(
    *,
    one_host: bool,
    interfaces: Sequence[Interface] | None = None,
    environment: MutableMapping[str, str] = os.environ,
) -> str:
    """Choose the interface, tell gloo, and return its address.

    The user's choice for gloo comes first, then the one for MPI; without any, the loopback where all ranks share a
    host, else the first one that leads to other hosts.

    Raises
    ------
    LaunchError
        There is no such interface, or it has no address.
    """
    known = list_interfaces() if interfaces is None else interfaces
    name = environment.get(VARIABLE) or _of_mpi(known, environment)
    if name:
        chosen = next((each for each in known if each.name == name), None)
    else:
        chosen = _by_default(known, one_host=one_host)
    if chosen is None or not chosen.address:
        listed = ", ".join(map(str, known))
        raise LaunchError(f"bench step: expected an interface {name or 'to other hosts'} with an address, got {listed}")
    environment[VARIABLE] = chosen.name
    return chosen.address


def _of_mpi(known: Sequence[Interface], environment: MutableMapping[str, str]) -> str:
    """Take the first interface that the settings of MPI name; a network (a.b.c.d/n) is no name."""
    names = {each.name for each in known}
    listed = (name for variable in MPI_VARIABLES for name in environment.get(variable, "").split(","))
    return next((name for name in listed if name in names), "")


def _by_default(known: Sequence[Interface], *, one_host: bool) -> Interface | None:
    if one_host:
        return next((each for each in known if each.loopback), None)
    usable = [each for each in known if each.up and each.address and not each.loopback]
    return next((each for each in usable if not each.internal), next(iter(usable), None))
