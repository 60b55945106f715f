"""What a job script is written from."""

from dataclasses import dataclass, field

from mpitrain.comm.placing import Host, Placement, topology_placement
from mpitrain.errors import ConfigError
from mpitrain.partition import GridShape
from mpitrain.topology.model import Topology

MAX_LISTED = 12
"""Lines of a list of nodes."""


@dataclass(frozen=True)
class Job:
    """A job to be written down. Paths are as the script is to name them: relative to its folder, or absolute.

    Attributes
    ----------
    config, python, mpirun : str
        Paths of the configuration, the interpreter and the launcher.
    shape : GridShape
        Grid of the ranks.
    placement : Placement
        Where they run.
    has_hosts : bool
        Whether the placement names machines; else its names are only told.
    run_folder : str
        ``run.folder``.
    overrides : tuple of str
        ``section.key=value``, for all starts.
    points : tuple of tuple of str
        The same for each task of an array; empty for a job that is none.
    topology : str
        Path of the topology; empty without one.
    emulate : bool
        Whether its sites are emulated on this machine.
    variables : dict
        Environment of the ranks, by the wish of the user.
    transport : dict
        Settings of the MPI library in the environment, which give way to what is set there.
    reason : str
        What they follow from.
    interface : str
        Network interface of every node; empty: as MPI chooses.
    wall_s, warning_s : int
        Seconds that it may run (0: no limit), and how long before that it is told to stop.
    open_mpi : bool
        Whether the launcher is Open MPI's; else it is MPICH's.
    srun : bool
        Whether Slurm starts the ranks itself.
    folder : str
        To which the script changes, as the shell reads it (not under Slurm).
    script : str
        Its own name, for the line that says how to start it.
    command : str
        The one that wrote it.
    """

    config: str
    python: str
    mpirun: str
    shape: GridShape
    placement: Placement
    has_hosts: bool = False
    run_folder: str = ""
    name: str = "mpitrain"
    overrides: tuple[str, ...] = ()
    points: tuple[tuple[str, ...], ...] = ()
    topology: str = ""
    emulate: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    transport: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    interface: str = ""
    wall_s: int = 0
    warning_s: int = 0
    open_mpi: bool = True
    srun: bool = False
    folder: str = ""
    script: str = "SCRIPT"
    command: str = ""

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.shape.size

    @property
    def hosts(self) -> list[str]:
        """Names of the machines that get ranks."""
        return [host.name for host, ranks in self._used() if ranks]

    @property
    def slots(self) -> list[int]:
        """Ranks of each of these."""
        return [len(ranks) for _, ranks in self._used() if ranks]

    @property
    def per_node(self) -> int:
        """The most ranks of a machine."""
        return max(self.slots)

    @property
    def chooses_nodes(self) -> bool:
        """Whether ranks are put on machines one by one: on some more than on others, or on machines with names."""
        return self.has_hosts or len(set(self.slots[:-1])) > 1 or self.slots[-1] > self.slots[0]

    def _used(self) -> list[tuple[Host, range]]:
        return list(zip(self.placement.hosts, self.placement.ranks(self.ranks), strict=True))

    def table(self) -> list[str]:
        """Show which ranks run where, and which of them serve."""
        lines = self.placement.table(self.ranks, self.ranks - self.shape.workers)
        return lines if len(lines) <= MAX_LISTED else [*lines[: MAX_LISTED - 2], "…", lines[-1]]


def place(ranks: int, per_node: int, topology: Topology | None, *, emulate: bool = False) -> tuple[Placement, bool]:
    """Say where ranks run, and whether on machines with names.

    Parameters
    ----------
    per_node : int
        Ranks that a machine takes where there is no topology.
    emulate : bool
        Whether the sites of the topology are made up, so that their addresses do not matter.

    Raises
    ------
    ConfigError
        The topology has fewer slots than ranks, or names some of the machines and not others.
    """
    if topology is None:
        full, rest = divmod(ranks, per_node)
        slots = [per_node] * full + [rest] * bool(rest)
        return Placement(tuple(Host(f"node {number}", each) for number, each in enumerate(slots)), "job"), False
    placement = topology_placement(topology, emulate=emulate)
    placement.check(ranks)
    if emulate:
        return placement, False
    sites = [site for site in topology.sites if site.slots]
    nameless = [site.name for site in sites if not site.host]
    if nameless and len(nameless) < len(sites):
        raise ConfigError(
            f"topology {topology.source}: site {nameless[0]} has no host, but others have; give one to all or to none"
        )
    return placement, not nameless


def fit_ranks(ranks: int | None, dp: int | None, pp: int, tp: int, servers: int, slots: int | None) -> GridShape:
    """Settle the number of ranks, and the grid on them.

    Parameters
    ----------
    ranks : int, optional
        By the wish of the user.
    dp, pp, tp, servers : int
        As configured.
    slots : int, optional
        Of the topology.

    Raises
    ------
    ConfigError
        Nothing says how many ranks, or the grid does not cover them.
    """
    if ranks is None and dp is not None:
        ranks = GridShape(dp, pp, tp, servers).size
    ranks = ranks or slots
    if ranks is None:
        raise ConfigError("job: nothing says how many ranks; give -n, --topology, or parallel.dp in the configuration")
    return GridShape.fit(ranks, dp, pp, tp, servers)
