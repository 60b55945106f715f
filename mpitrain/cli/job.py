"""The options of ``mpitrain job``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mpitrain.cli.calling import NO_VALUE, Config, Emulate, NetworkInterface, Set, TopologyFile, call


class Scheduler(StrEnum):
    """What will run the script."""

    SLURM = "slurm"
    MPIRUN = "mpirun"


class Launcher(StrEnum):
    """What starts the ranks within an allocation of Slurm."""

    MPIRUN = "mpirun"
    SRUN = "srun"


def job(
    config: Config,
    scheduler: Annotated[
        Scheduler, typer.Option(help="slurm: a batch script; mpirun: one for this machine or a topology's hosts.")
    ],
    overrides: Set = None,
    topology: TopologyFile = None,
    emulate: Emulate = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", min=1, help="Processes; left out: those of the grid, or all slots of --topology."
        ),
    ] = None,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a node; left out: those of a replica. Not with --topology.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(help="Wall time of a start; left out: two hours (slurm), or none.", metavar="[D-]HH:MM:SS"),
    ] = None,
    step_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds of a step: --time must reach the next checkpoint. Left out: those of the last run in "
            "run.folder."
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Make an array with a task for each value; of several sweeps, for each combination.",
            metavar="SECTION.KEY=VALUE,…",
        ),
    ] = None,
    variables: Annotated[
        list[str] | None, typer.Option("--env", help="Set a variable on all ranks.", metavar="NAME=VALUE")
    ] = None,
    interface: NetworkInterface = "",
    launcher: Annotated[
        Launcher, typer.Option(help="slurm: who starts the ranks; srun needs Slurm's plugin for PMIx.")
    ] = Launcher.MPIRUN,
    out: Annotated[
        Path | None, typer.Option(help="File of the script; printed where left out.", metavar="FILE")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar=NO_VALUE, help="Replace that file.")] = False,
) -> None:
    """Write the script of a job, with the reason of every line that may have to change; start nothing."""
    call(
        "job",
        config,
        overrides or [],
        scheduler=scheduler.value,
        topology=topology,
        emulate=emulate,
        ranks=ranks,
        per_node=per_node,
        time=time,
        step_s=step_s,
        sweep=sweep or [],
        variables=variables or [],
        interface=interface,
        srun=launcher is Launcher.SRUN,
        out=out,
        overwrite=overwrite,
    )
