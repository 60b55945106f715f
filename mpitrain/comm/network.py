"""What a command is told about its network: a topology or a host file, an interface, and how many ranks follow."""

from dataclasses import dataclass
from pathlib import Path

from mpitrain.comm.hints import allocated_tasks
from mpitrain.comm.placing import Placement, read_hostfile, topology_placement
from mpitrain.comm.reaching import check_reach
from mpitrain.errors import ConfigError
from mpitrain.topology.describe import bdp_bytes
from mpitrain.topology.load import load_topology
from mpitrain.topology.model import Topology


@dataclass(frozen=True)
class Wishes:
    """What a user asks of a launch.

    Attributes
    ----------
    allow_root, oversubscribe : bool
        Whether to do what Open MPI refuses by default.
    survive : bool
        Whether the others go on when a rank dies (ULFM).
    interface : str
        Network interface to use; empty: MPI chooses.
    bdp_bytes : float, optional
        Of the links (`comm.transport`); None where they are unknown.
    placement : Placement, optional
        Hosts; this one where left out.
    crowded : bool
        Whether all hosts are made up and share the cores of this one.
    variables : tuple of str
        To be set on all ranks, ``NAME=VALUE``, or forwarded, ``NAME``.
    """

    allow_root: bool = False
    oversubscribe: bool = False
    survive: bool = False
    interface: str = ""
    bdp_bytes: float | None = None
    placement: Placement | None = None
    crowded: bool = False
    variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    """Where ranks run and what lies between them.

    Attributes
    ----------
    topology : Topology, optional
        The links.
    placement : Placement, optional
        Hosts with slots; None: this one, or what Slurm has granted.
    emulate : bool
        Whether the sites of the topology are made up on this machine.
    interface : str
        Empty: MPI chooses.
    """

    topology: Topology | None = None
    placement: Placement | None = None
    emulate: bool = False
    interface: str = ""

    @property
    def slots(self) -> int:
        """Ranks that all hosts together may run; 0 where none are named."""
        return self.placement.slots if self.placement else 0

    def ranks(self, wanted: int | None) -> int:
        """Settle the number of ranks: the one asked for, all slots, or what Slurm has granted.

        Raises
        ------
        ConfigError
            More than there are slots, or none of these tells.
        """
        if self.placement:
            number = self.placement.slots if wanted is None else wanted
            self.placement.check(number)
            return number
        if wanted is not None:
            return wanted
        granted = allocated_tasks()
        if granted is None or granted[1] < 1:
            raise ConfigError("hosts: how many ranks? Give -n, a --topology or a --hostfile, or start it under Slurm")
        return granted[1]

    def wishes(self, ranks: int, *, allow_root: bool, oversubscribe: bool, **others: object) -> Wishes:
        """Say what the launcher is to do with so many ranks; ``others`` are further fields of Wishes."""
        return Wishes(
            allow_root=allow_root or self.emulate,  # which takes root, of a kind
            oversubscribe=oversubscribe,
            interface=self.interface,
            bdp_bytes=bdp_bytes(self.topology, ranks) if self.topology else None,
            placement=self.placement,
            crowded=self.emulate,
            **others,  # type: ignore[arg-type]
        )

    def check_reach(self, ranks: int) -> None:
        """Refuse hosts that a launcher could not reach; raises LaunchError. Within Slurm no remote shell is used."""
        if self.emulate or self.placement is None or allocated_tasks():
            return
        parts = zip(self.placement.hosts, self.placement.ranks(ranks), strict=True)
        remedy = "correct the host file, or start what is missing"
        if self.topology:
            remedy = (
                f'set host = "ADDRESS" for these sites in {self.topology.source or self.topology.name}, or add '
                "--emulate, where a command has it, to make them up on this machine"
            )
        check_reach([host for host, run in parts if run], remedy)


def read_network(
    topology: Path | None = None, hostfile: Path | None = None, *, emulate: bool = False, interface: str = ""
) -> Network:
    """Read what the options name; raises ConfigError for a file that is wrong or options that exclude each other."""
    if emulate and topology is None:
        raise ConfigError("hosts: --emulate makes up the sites of a topology; add --topology FILE")
    if topology is not None and hostfile is not None:
        raise ConfigError('hosts: --topology and --hostfile both name hosts; leave one out (sites may have host = "…")')
    if emulate and interface:
        raise ConfigError("hosts: --interface: emulated hosts have one interface; leave it out, or --emulate")
    if topology is not None:
        read = load_topology(topology)
        return Network(read, topology_placement(read, emulate=emulate), emulate, interface)
    return Network(None, read_hostfile(hostfile) if hostfile else None, emulate, interface)
