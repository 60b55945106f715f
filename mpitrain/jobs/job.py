"""What a job script is written from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mpitrain.errors import ConfigError
from mpitrain.partition import GridShape
from mpitrain.topology.model import Topology


@dataclass(frozen=True)
class Node:
    """A machine and the ranks that follow each other on it.

    Attributes
    ----------
    ranks : int
        How many.
    site : str
        Name in the topology; empty without one.
    host : str
        Its address, where the topology names one.
    """

    ranks: int
    site: str = ""
    host: str = ""


@dataclass(frozen=True)
class Job:
    """A job to be written down. Paths are as the script is to name them: relative to its folder, or absolute.

    Attributes
    ----------
    config, python, mpirun : str
        Paths of the configuration, the interpreter and the launcher.
    shape : GridShape
        Grid of the ranks.
    nodes : tuple of Node
        Where they run, in their order.
    run_folder : str
        ``run.folder``.
    overrides : tuple of str
        ``section.key=value``, for all starts.
    points : tuple of tuple of str
        The same for each task of an array; empty for a job that is none.
    topology : str
        Path of the topology; empty without one.
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
    command : str
        The command that wrote the script.
    """

    config: str
    python: str
    mpirun: str
    shape: GridShape
    nodes: tuple[Node, ...]
    run_folder: str
    name: str = "mpitrain"
    overrides: tuple[str, ...] = ()
    points: tuple[tuple[str, ...], ...] = ()
    topology: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    transport: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    interface: str = ""
    wall_s: int = 0
    warning_s: int = 0
    open_mpi: bool = True
    srun: bool = False
    command: str = ""

    @property
    def ranks(self) -> int:
        """All ranks."""
        return sum(node.ranks for node in self.nodes)

    @property
    def per_node(self) -> int:
        """The most ranks of a node."""
        return max(node.ranks for node in self.nodes)

    @property
    def chooses_nodes(self) -> bool:
        """Whether ranks must be put on nodes one by one: not the same number on each, or on nodes with names."""
        same = all(node.ranks == self.per_node for node in self.nodes[:-1])
        return not same or any(node.host for node in self.nodes)


def place(ranks: int, per_node: int, topology: Topology | None) -> tuple[Node, ...]:
    """Put ranks on nodes, each filled before the next.

    Parameters
    ----------
    per_node : int
        Ranks that a node takes where there is no topology.

    Raises
    ------
    ConfigError
        The topology has fewer slots than ranks.
    """
    if topology is None:
        full, rest = divmod(ranks, per_node)
        return tuple(Node(number) for number in [per_node] * full + [rest] * bool(rest))
    sites = topology.place(ranks)
    used = list(dict.fromkeys(site.name for site in sites))
    names = [site.name for site in sites]
    nodes = tuple(Node(names.count(name), name, topology.site(name).host) for name in used)
    if any(node.host for node in nodes) and not all(node.host for node in nodes):
        without = next(node.site for node in nodes if not node.host)
        raise ConfigError(
            f"topology {topology.name}: site {without} has no host, but others have; give a host to all or to none"
        )
    return nodes


def describe_nodes(nodes: Sequence[Node], shape: GridShape) -> list[str]:
    """Say in lines which ranks run where, and what they do."""
    lines, first = [], 0
    for number, node in enumerate(nodes):
        ranks = range(first, first + node.ranks)
        first += node.ranks
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        where = node.site or f"node {number}"
        serving = sum(rank >= shape.workers for rank in ranks)
        what = "" if not serving else " (serves)" if serving == node.ranks else f" (the last {serving} serve)"
        lines.append(f"{where}{f' at {node.host}' * bool(node.host)}: {which}{what}")
    return lines if len(lines) <= MAX_LISTED else [*lines[: MAX_LISTED - 2], "…", lines[-1]]


MAX_LISTED = 12
"""Lines of a list of nodes."""


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
