"""The command line: light enough that ``--help`` needs neither MPI nor numpy.

What a command does lives in a module that is imported once it is called.
"""

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import mpitrain
from mpitrain.cli.benches import bench
from mpitrain.cli.calling import (
    NO_VALUE,
    Config,
    Emulate,
    HostFile,
    Json,
    NetworkInterface,
    Set,
    SomeRanks,
    TopologyFile,
    call,
    writable,
)
from mpitrain.cli.job import job
from mpitrain.cli.precision import sensitivity
from mpitrain.comm.hints import hinted_rank
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.threads import limit_threads
from mpitrain.errors import ExitCode

NEWEST = "newest"
RESUME_VALUES = rf"auto|{NEWEST}|[0-9]+"


class Progress(StrEnum):
    """How ``train`` tells how far it is."""

    AUTO = "auto"
    BAR = "bar"
    LINES = "lines"


class Page(StrEnum):
    """What ``reference`` prints."""

    CONFIG = "config"
    TOPOLOGY = "topology"


app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Train one model over slow links."
)
app.add_typer(bench, name="bench")

Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        help="Go on from a checkpoint in run.folder: the newest one (no value), the newest sound one or from the start "
        "where there is none (auto), or that of a STEP.",
        metavar="[auto|STEP]",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", metavar=NO_VALUE, help="Replace the run that run.folder holds.")
]
Root = Annotated[bool, typer.Option("--allow-root", metavar=NO_VALUE, help="Let Open MPI run as root, in containers.")]
Oversubscribe = Annotated[bool, typer.Option("--oversubscribe", metavar=NO_VALUE, help="Allow more ranks than cores.")]


def _chosen(resume: str | None) -> str | int | None:
    """Read the value of ``--resume``."""
    if resume is not None and not re.fullmatch(RESUME_VALUES, resume):
        raise typer.BadParameter(f"--resume: expected auto, a step or no value, got {resume!r}")
    return int(resume) if resume and resume.isdigit() else resume


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mpitrain {mpitrain.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", metavar=NO_VALUE, callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train one numpy model over slow links with compressed MPI collectives."""


@app.command()
def train(
    config: Config,
    overrides: Set = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    progress: Annotated[Progress, typer.Option(help="auto: a bar on a terminal.")] = Progress.AUTO,
) -> None:
    """Train; under mpirun or srun on all their ranks, alone on one."""
    chosen, stop = _chosen(resume), StopRequest()
    stop.listen()
    call("train", config, overrides or [], resume=chosen, overwrite=overwrite, progress=progress.value, stop=stop)


@app.command()
def launch(
    config: Config,
    ranks: SomeRanks = None,
    overrides: Set = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    allow_root: Root = False,
    oversubscribe: Oversubscribe = False,
    survive: Annotated[
        bool,
        typer.Option("--survive", metavar=NO_VALUE, help="Where servers hold the weights, go on when a worker dies."),
    ] = False,
    topology: TopologyFile = None,
    emulate: Emulate = False,
    hostfile: HostFile = None,
    interface: NetworkInterface = "",
    variables: Annotated[
        list[str] | None,
        typer.Option(
            "--env", help="Set a variable on all ranks, or forward it; may be repeated.", metavar="NAME[=VALUE]"
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", metavar=NO_VALUE, help="Show the command and do not run it.")
    ] = False,
) -> None:
    """Start mpirun with the right flags for the installed MPI and the network, and train on its ranks."""
    chosen, stop = _chosen(resume), StopRequest()
    stop.listen()
    call(
        "launch",
        config,
        ranks,
        overrides or [],
        resume=chosen,
        overwrite=overwrite,
        allow_root=allow_root,
        oversubscribe=oversubscribe,
        survive=survive,
        topology=topology,
        emulate=emulate,
        hostfile=hostfile,
        interface=interface,
        variables=variables or [],
        show=show,
        stop=stop,
    )


@app.command()
def emulate(
    topology: Annotated[Path, typer.Argument(help="TOML file of sites and links.", metavar="TOPOLOGY")],
    command: Annotated[
        list[str], typer.Argument(help="After --: what to run on the first host with slots.", metavar="-- COMMAND…")
    ],
    show: Annotated[
        bool, typer.Option("--print", metavar=NO_VALUE, help="Show the command and its variables, and do not run it.")
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", callback=writable, help="Also write what went over the links as JSON.", metavar="FILE"),
    ] = None,
) -> None:
    """Run a command on emulated hosts, joined by links as slow as those of a topology; mpirun in it spans them."""
    stop = StopRequest()
    stop.listen()
    call("emulate", topology, command, output=json, show=show, stop=stop)


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a training (its run.folder).", metavar="RUN")],
    step: Annotated[int | None, typer.Option(min=0, help="Checkpoint to score; the newest one where left out.")] = None,
    overrides: Set = None,
    json: Json = None,
) -> None:
    """Score a run on its test samples, on any number of ranks."""
    call("eval", run, overrides or [], step=step, output=json)


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders; several are compared. And files of bench codec --json: rate and distortion.",
            metavar="RUN|FILE…",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="HTML file; report.html in the first run folder where left out, else beside the first file.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Sum up runs, and draw them into one HTML file; needs no MPI."""
    call("report", paths, output)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Run folder, its checkpoints, or one step.", metavar="PATH")],
    other: Annotated[
        Path | None, typer.Argument(help="Compare with this one, tensor by tensor.", metavar="OTHER")
    ] = None,
    json: Annotated[bool, typer.Option("--json", metavar=NO_VALUE, help="Print JSON instead.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", metavar=NO_VALUE, help="List every tensor.")] = False,
) -> None:
    """Verify a checkpoint and show what it holds; exit 4 if it is not sound."""
    call("inspect", path, other, as_json=json, all_tensors=tensors)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="TOML file of a run to be.", metavar="[CONFIG]")] = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="Ranks meant for this machine.")] = None,
    topology: TopologyFile = None,
) -> None:
    """Say what is wrong with this machine before a job does; tries a run on two ranks."""
    call("doctor", config, ranks, topology)


@app.command()
def validate(
    config: Config,
    overrides: Set = None,
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="Processes that will run it.")] = None,
) -> None:
    """Check a configuration, and show every value with its source; needs no MPI."""
    call("validate", config, overrides or [], ranks)


@app.command()
def plan(
    config: Config,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, help="Processes that the run will have.")],
    overrides: Set = None,
    measure: Annotated[
        bool, typer.Option("--measure", metavar=NO_VALUE, help="Cut by measured seconds, not by counted work.")
    ] = False,
    json: Json = None,
) -> None:
    """Show where the model can be cut, and what every layout of the ranks sends and keeps; starts no other process."""
    call("plan", config, ranks, overrides or [], measure=measure, output=json)


app.command("job")(job)
app.command("sensitivity")(sensitivity)


@app.command()
def probe(
    ranks: SomeRanks = None,
    topology: TopologyFile = None,
    emulate: Emulate = False,
    hostfile: HostFile = None,
    interface: NetworkInterface = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="To be spent on a direction of a pair, about.")] = 3.0,
    out: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write a topology for launch, job and emulate.", metavar="FILE"),
    ] = None,
    json: Json = None,
) -> None:
    """Measure latency and rate between all pairs of hosts, one pair and direction at a time."""
    call(
        "probe",
        ranks,
        topology=topology,
        emulate=emulate,
        hostfile=hostfile,
        interface=interface,
        seconds=seconds,
        out=out,
        json=json,
    )


@app.command()
def reference(
    page: Annotated[
        Page, typer.Argument(help="Of a configuration, or of a topology.", metavar="[config|topology]")
    ] = Page.CONFIG,
) -> None:
    """Print the page of all keys: values, bounds, defaults, meanings."""
    call("reference" if page is Page.CONFIG else f"reference-{page.value}")


def with_resume_value(arguments: list[str]) -> list[str]:
    """Spell out what ``--resume`` without a value means: options of the parser always have one."""
    end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows belongs to another command
    own, following = arguments[:end], [*arguments, ""][1 : end + 1]
    return [
        f"{word}={NEWEST}" if word == "--resume" and not re.fullmatch(RESUME_VALUES, after) else word
        for word, after in zip(own, following, strict=True)
    ] + arguments[end:]


def run() -> None:
    """Run the console script."""
    if (warning := limit_threads()) and hinted_rank() == 0:
        typer.echo(f"mpitrain: {warning}", err=True)
    try:
        code = app(with_resume_value(sys.argv[1:]), prog_name="mpitrain", standalone_mode=False)
    except Exception as error:
        # A wrong command line: rank 0 says it for all. Anything else goes its way.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message().rstrip(".")  # empty where the help was asked for by giving no command
        if message and hinted_rank() == 0:
            typer.echo(f"mpitrain: {message}; see --help of mpitrain and of the command", err=True)
        code = int(ExitCode.CONFIG)
    sys.exit(code if isinstance(code, int) else 0)
