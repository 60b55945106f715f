"""What a user asks of a job; light enough for the command line, which needs it before anything else."""

from dataclasses import dataclass
from pathlib import Path

SLURM, MPIRUN = "slurm", "mpirun"
"""Schedulers."""


@dataclass(frozen=True)
class Wishes:
    """The options of ``mpitrain job``.

    Attributes
    ----------
    scheduler : str
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
        Network interface; empty: MPI chooses.
    srun : bool
        Whether Slurm itself starts the ranks.
    out : Path, optional
        File of the script; left out: it is printed.
    """

    scheduler: str = SLURM
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
