"""From a configuration, a topology and wishes to the script of a job; everything is checked before it is written."""

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.comm.family import OPEN_MPI
from mpitrain.comm.placing import Placement
from mpitrain.comm.transport import Kernel, transport
from mpitrain.config.load import load_config
from mpitrain.config.schema import Config
from mpitrain.errors import ConfigError
from mpitrain.jobs.job import Job, fit_ranks, place
from mpitrain.jobs.shell import quote
from mpitrain.jobs.slurm import slurm_script
from mpitrain.jobs.sweep import points
from mpitrain.jobs.wall import Pace, check_wall, find_pace, format_time, parse_time, warning_s
from mpitrain.jobs.wishes import Scheduler, Wishes
from mpitrain.jobs.workstation import workstation_script
from mpitrain.partition import GridShape
from mpitrain.topology.describe import bdp_bytes
from mpitrain.topology.graph import ring_note
from mpitrain.topology.load import load_topology
from mpitrain.topology.model import Topology

NODES = Kernel(explicit={"w": 0, "r": 0})
"""The nodes' kernels as far as they are known here: none is trusted to grant a socket's buffer. One that is asked for
more than it grants, as most would be, gives less than it would have grown to by itself."""

DEFAULT_TIME = "02:00:00"
"""Wall time of a Slurm job where none is given."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]*")
NETWORK = re.compile(r"[0-9A-Fa-f.:]+/[0-9]{1,3}")


@dataclass(frozen=True)
class Origin:
    """Where a script is written, and for which MPI.

    Attributes
    ----------
    folder : Path
        The one to which paths are relative, those below it at least.
    python, mpirun : str
        Absolute paths.
    family, version : str, tuple of int
        Of the MPI library that the interpreter uses.
    command : str
        What wrote it.
    """

    folder: Path
    python: str
    mpirun: str
    family: str = OPEN_MPI
    version: tuple[int, ...] = (5, 0)
    command: str = ""

    def relative(self, path: str | Path) -> str:
        """Name a path from the folder where it lies below it, else absolutely."""
        absolute = Path(os.path.abspath(path))  # not resolved: a virtual environment is a link to another Python
        return str(absolute.relative_to(self.folder) if absolute.is_relative_to(self.folder) else absolute)

    def program(self, path: str) -> str:
        """Name a program, which the shell would look for elsewhere were there no slash in its name."""
        name = self.relative(path)
        return name if "/" in name else f"./{name}"

    def change(self, out: Path | None) -> str:
        """Write for a shell how a script at ``out`` finds the folder."""
        script = Path(os.path.abspath(out)) if out else None
        if script is None or not script.is_relative_to(self.folder):
            return quote(str(self.folder))
        up = "/.." * (len(script.relative_to(self.folder).parts) - 1)
        return f'"$(dirname -- "$0"){up}"'


@dataclass(frozen=True)
class Written:
    """A script, and what its user should know."""

    text: str
    job: Job
    notes: tuple[str, ...] = field(default=())


def write_job(config: Path, overrides: list[str], wishes: Wishes, origin: Origin) -> Written:
    """Check everything that can be known before a job starts, and write its script.

    Raises
    ------
    ConfigError
        A configuration, topology, grid, wall time or wish that cannot work, with the remedy.
    """
    _check_wishes(wishes)
    tasks = points(list(wishes.sweep))
    resolved = load_config(config, overrides).config
    for task in tasks:
        load_config(config, [*overrides, *task])
    topology = load_topology(wishes.topology) if wishes.topology else None
    shape, placement, has_hosts = _ranks(resolved, wishes, topology)
    bdp = bdp_bytes(topology, shape.size) if topology else None
    pace = find_pace(wishes.step_s, Path(resolved.run.folder))
    wall_s, warn_s, notes = _wall(resolved, wishes, pace)
    job = Job(
        config=origin.relative(config),
        python=origin.program(origin.python),
        mpirun=origin.program(origin.mpirun),
        shape=shape,
        placement=placement,
        has_hosts=has_hosts,
        run_folder=resolved.run.folder,
        name=_name(wishes.out or config),
        overrides=tuple(overrides),
        points=tuple(tasks),
        topology=origin.relative(wishes.topology) if wishes.topology else "",
        emulate=wishes.emulate,
        variables=_variables(wishes.variables),
        interface=wishes.interface,
        wall_s=wall_s,
        warning_s=warn_s,
        open_mpi=origin.family == OPEN_MPI,
        srun=wishes.srun,
        folder=origin.change(wishes.out),
        script=origin.relative(wishes.out) if wishes.out else "SCRIPT",
        command=origin.command,
        transport=_transport(bdp, wishes.interface, origin),
        reason=_reason(bdp) if bdp else "",
    )
    if wishes.scheduler == Scheduler.SLURM and job.chooses_nodes and not (job.open_mpi or job.srun):
        raise ConfigError(
            f"job: {origin.family}'s launcher fills Slurm's nodes in their own order, but the topology has hosts or "
            "different slots; add --launcher srun, or give all sites the same slots and no host"
        )
    text = slurm_script(job) if wishes.scheduler == Scheduler.SLURM else workstation_script(job)
    return Written(text, job, (*notes, *_ring(resolved, topology, shape)))


def _check_wishes(wishes: Wishes) -> None:
    """Refuse wishes that exclude each other."""
    slurm = wishes.scheduler == Scheduler.SLURM
    if wishes.emulate and wishes.topology is None:
        raise ConfigError("job: --emulate makes up the sites of a topology; add --topology FILE")
    if wishes.emulate and slurm:
        raise ConfigError("job: --emulate makes up hosts on one machine, not under Slurm; add --scheduler mpirun")
    if wishes.emulate and wishes.interface:
        raise ConfigError("job: --interface: emulated hosts have one interface; leave it out, or --emulate")
    if not slurm and (wishes.sweep or wishes.srun):
        name = "--sweep makes an array" if wishes.sweep else "--launcher srun is"
        raise ConfigError(f"job: {name} of Slurm; leave it out, or write for --scheduler slurm")
    if wishes.per_node is not None and wishes.topology is not None:
        raise ConfigError("job: --per-node and the slots of --topology both say how many ranks a node has; give one")
    if wishes.step_s is not None and not 0 < wishes.step_s < math.inf:
        raise ConfigError(f"job: --step-s: expected more than 0 seconds, got {wishes.step_s:g}")
    # A batch script looks for the interface on its nodes, by name; `mpitrain launch` takes either.
    interface, network = wishes.interface, not slurm and NETWORK.fullmatch(wishes.interface)
    if interface and not (network or INTERFACE.fullmatch(interface)):
        expected = "a name such as eth0" + " or a network such as 10.0.0.0/8" * (not slurm)
        raise ConfigError(f"job: --interface: expected {expected}, got {interface!r}")


def _ranks(config: Config, wishes: Wishes, topology: Topology | None) -> tuple[GridShape, Placement, bool]:
    """Settle the grid and where it runs."""
    parallel = config.parallel
    slots = topology.slots if topology else None
    shape = fit_ranks(wishes.ranks, parallel.dp, parallel.pp, parallel.tp, config.exchange.servers or 0, slots)
    # A replica stays on a node, unless the user says otherwise: activations inside, gradients between.
    per_node = wishes.per_node or parallel.pp * parallel.tp
    return shape, *place(shape.size, per_node, topology, emulate=wishes.emulate)


def _wall(config: Config, wishes: Wishes, pace: Pace | None) -> tuple[int, int, list[str]]:
    """Settle and check the wall time; returns it, how long before its end the job is told to stop, and notes."""
    slurm = wishes.scheduler == Scheduler.SLURM
    if wishes.time is None and not slurm:
        return 0, 0, []
    wall_s = parse_time(wishes.time or DEFAULT_TIME)
    warn_s = warning_s(config, pace) if slurm else math.ceil(config.run.time_margin_s)
    check_wall(config, wall_s, warn_s, pace)
    notes = []
    if pace is None and config.checkpoint.every:
        notes.append(
            f"how long a step takes is not known, so it was not checked that checkpoint.every = "
            f"{config.checkpoint.every} steps fit into {format_time(wall_s)}; give --step-s SECONDS (a short run "
            "writes them into its metrics.jsonl)"
        )
    return wall_s, warn_s, notes


def _ring(config: Config, topology: Topology | None, shape: GridShape) -> list[str]:
    """Note where another order of the sites would be nearer around the ring."""
    note = ring_note(topology, shape.size) if topology and config.exchange.collective == "ring" else ""
    return [note] * bool(note)


def _variables(items: tuple[str, ...]) -> dict[str, str]:
    """Read ``NAME=VALUE``."""
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not VARIABLE.fullmatch(name) or "\0" in value:
            raise ConfigError(f"job: --env: expected NAME=VALUE, got {item!r}")
        found[name] = value
    return found


def _transport(bdp: int | None, interface: str, origin: Origin) -> dict[str, str]:
    """Derive the settings of MPI from the links."""
    return transport(origin.family, origin.version, bdp, interface, kernel=NODES).environment


def _reason(bdp: int) -> str:
    return (
        f"for {bdp:,} bytes on the way (rate times round trip of the topology); sockets' buffers are left to the "
        "nodes' kernels, which let them grow"
    )


def _name(path: Path) -> str:
    """Name the job after a file, in letters that sbatch takes in file names, too."""
    word = re.sub(r"[^A-Za-z0-9_.]+", "-", path.stem).strip("-")
    return f"mpitrain-{word or 'job'}"
