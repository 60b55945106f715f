"""The options of ``mpitrain job``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mpitrain.cli.calling import NO_VALUE, Config, Emulate, NetworkInterface, Set, TopologyFile, call
from mpitrain.jobs.wishes import Scheduler, Wishes


class Launcher(StrEnum):
    """What starts the ranks within an allocation of Slurm."""

    MPIRUN = "mpirun"
    SRUN = "srun"


SchedulerName = Annotated[
    Scheduler,
    typer.Option("--scheduler", help="slurm: a batch script; mpirun: for this machine or a topology's hosts."),
]
JobRanks = Annotated[
    int | None,
    typer.Option("-n", "--ranks", min=1, help="Processes; left out: those of the grid, or all slots of --topology."),
]
PerNode = Annotated[
    int | None, typer.Option(min=1, help="Ranks of a node; left out: those of a replica. Not with --topology.")
]
WallTime = Annotated[
    str | None,
    typer.Option(help="Wall time of a start; left out: two hours (slurm), or none.", metavar="[D-]HH:MM:SS"),
]
StepSeconds = Annotated[
    float | None,
    typer.Option(
        help="Seconds of a step: --time must reach the next checkpoint. Left out: those of the last run in run.folder."
    ),
]
Sweeps = Annotated[
    list[str] | None,
    typer.Option(
        help="Make an array with a task for each value; of several sweeps, for each combination.",
        metavar="SECTION.KEY=VALUE,…",
    ),
]
Variables = Annotated[
    list[str] | None, typer.Option("--env", help="Set a variable on all ranks; may be repeated.", metavar="NAME=VALUE")
]
LauncherName = Annotated[
    Launcher, typer.Option("--launcher", help="slurm: who starts the ranks; srun needs Slurm's plugin for PMIx.")
]
Out = Annotated[Path | None, typer.Option(help="File of the script; printed where left out.", metavar="FILE")]
Replace = Annotated[bool, typer.Option("--overwrite", metavar=NO_VALUE, help="Replace that file.")]


def job(
    config: Config,
    scheduler: SchedulerName,
    overrides: Set = None,
    topology: TopologyFile = None,
    emulate: Emulate = False,
    ranks: JobRanks = None,
    per_node: PerNode = None,
    time: WallTime = None,
    step_s: StepSeconds = None,
    sweep: Sweeps = None,
    variables: Variables = None,
    interface: NetworkInterface = "",
    launcher: LauncherName = Launcher.MPIRUN,
    out: Out = None,
    overwrite: Replace = False,
) -> None:
    """Write the script of a job, with the reason of every line that may have to change; start nothing."""
    wishes = Wishes(
        scheduler=scheduler,
        topology=topology,
        emulate=emulate,
        ranks=ranks,
        per_node=per_node,
        time=time,
        step_s=step_s,
        sweep=tuple(sweep or ()),
        variables=tuple(variables or ()),
        interface=interface,
        srun=launcher is Launcher.SRUN,
        out=out,
    )
    call("job", config, overrides or [], wishes, overwrite=overwrite)
