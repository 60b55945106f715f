"""What a user asks of a job; light, since the command line makes one of its options."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Scheduler(StrEnum):
    """What will run the script."""

    SLURM = "slurm"
    MPIRUN = "mpirun"


@dataclass(frozen=True)
class Wishes:
    """The options of ``mpitrain job``.

    Attributes
    ----------
    scheduler : Scheduler
        What will run the script.
    topology : Path, optional
        Sites and links.
    emulate : bool
        Whether its sites are made up on one machine.
    ranks : int, optional
        Left out: those of the grid, or all slots of the topology.
    per_node : int, optional
        Ranks of a machine where there is no topology; left out: those of a replica.
    time : str, optional
        Wall time, as ``sbatch --time`` reads it.
    step_s : float, optional
        Seconds of a step.
    sweep : tuple of str
        ``section.key=VALUE,VALUE…``.
    variables : tuple of str
        ``NAME=VALUE``, for all ranks.
    interface : str
        Network interface of every node; empty: MPI chooses.
    srun : bool
        Whether Slurm itself starts the ranks.
    out : Path, optional
        File of the script; left out: it is printed.
    """

    scheduler: Scheduler = Scheduler.SLURM
    topology: Path | None = None
    emulate: bool = False
    ranks: int | None = None
    per_node: int | None = None
    time: str | None = None
    step_s: float | None = None
    sweep: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    interface: str = ""
    srun: bool = False
    out: Path | None = None
