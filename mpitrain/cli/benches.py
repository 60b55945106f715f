"""The options of ``mpitrain bench``."""

from pathlib import Path
from typing import Annotated

import typer

from mpitrain.cli.calling import Config, Emulate, Json, Ranks, Set, TopologyFile, call

DEFAULT_CELLS = ["raw", "int8:residual"]
DEFAULT_SIZES = [0.1, 1.0, 4.0]
DEFAULT_COLLECTIVES = ["direct", "ring"]
DEFAULT_STREAMS = ["int8", "int4"]
DEFAULT_RULES = ["server-sync/int8", "ssp-1/int8", "ssp-4/int8", "async/int8", "local-30/int8"]
DEFAULT_STEP_CELLS = ["raw", "fp16", "int8:residual"]
DEFAULT_SCHEDULES = ["afab", "1f1b", "interleaved"]
DEFAULT_MICRO_BATCHES = [4, 8, 16]

bench = typer.Typer(no_args_is_help=True, help="Measure, next to what a user would pick instead.")

Workers = Annotated[int, typer.Option("-n", "--ranks", min=1, help="Ranks that train; servers come on top.")]
Cells = Annotated[
    list[str] | None,
    typer.Option(
        "--cell",
        help="CODEC or CODEC:MEMORY, with WHEN/ in front unless sync: local-H, server-sync, ssp-S, async, async-dc or "
        "async-dca; +SERVER_CODEC and ,SECTION.KEY=VALUE may follow; NAME= names it. The first one is the yardstick; "
        "may be repeated.",
        metavar="CELL",
    ),
]


@bench.command("allreduce")
def bench_allreduce(
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Ranks to start; 4, or all slots of the topology.")
    ] = None,
    sizes: Annotated[
        list[float] | None, typer.Option("--size", min=0, help="MB of float32; may be repeated.", metavar="MB")
    ] = None,
    collectives: Annotated[
        list[str] | None, typer.Option("--collective", help="direct, ring, server or native; may be repeated.")
    ] = None,
    cells: Annotated[
        list[str] | None,
        typer.Option("--cell", help="CODEC or CODEC:MEMORY, beside raw; may be repeated.", metavar="CELL"),
    ] = None,
    segments: Annotated[
        list[int] | None,
        typer.Option("--segment-kb", min=0, help="exchange.segment_kb; may be repeated.", metavar="KB"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 7,
    topology: TopologyFile = None,
    emulate: Emulate = False,
    json: Json = None,
) -> None:
    """Time sums of a vector beside MPI_Allreduce, and beside the bound of the links; say whether encoding pays."""
    call(
        "bench-allreduce",
        ranks,
        sizes or DEFAULT_SIZES,
        collectives or DEFAULT_COLLECTIVES,
        cells or DEFAULT_STREAMS,
        segments=segments or [],
        repeats=repeats,
        topology=topology,
        emulate=emulate,
        path=json,
    )


@bench.command("codec")
def bench_codec(
    size: Annotated[int, typer.Option(min=1, help="Values to draw.")] = 2**24,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 9,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            help="CODEC such as int8, topk-100, ecq-2.5 or ecq-20dB; :stochastic, :residual or :delta may follow; may "
            "be repeated. Left out: a choice of all.",
            metavar="CODEC",
        ),
    ] = None,
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            help="gaussian or laplace, both where left out; or a TOML file: gradients of its model, trained on one "
            "rank. May be repeated.",
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Whose gradient is captured from a TOML file; the 100th where left out.")
    ] = None,
    overrides: Set = None,
    json: Json = None,
) -> None:
    """Measure bits, noise, distance from Shannon's bound, and the speed of codecs beside memcpy of the same array."""
    call("bench-codec", size, repeats, json, codecs or [], sources or [], overrides=overrides or [], step=step)


@bench.command("convergence")
def bench_convergence(
    config: Config,
    ranks: Workers = 4,
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
    fault: Annotated[
        str, typer.Option(help="What goes wrong in all runs on purpose, as in MPITRAIN_FAULT.", metavar="FAULTS")
    ] = "",
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
        faults=fault,
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


@bench.command("relay")
def bench_relay(
    hosts: Annotated[int, typer.Option(min=2, max=64, help="That send to one another through a hub.")] = 4,
    mbps: Annotated[float, typer.Option(min=1, help="Of all their links together.")] = 1200.0,
    seconds: Annotated[float, typer.Option(min=1, max=600, help="Of each part.")] = 5.0,
    mtu: Annotated[int, typer.Option(min=576, max=65535, help="Largest packet in bytes.")] = 9000,
    json: Json = None,
) -> None:
    """Load the links between emulated hosts: what the emulator carries, at which share of a core, how exactly."""
    call("bench-relay", hosts, mbps, seconds, mtu, json)


@bench.command("stragglers")
def bench_stragglers(
    config: Config,
    ranks: Workers = 4,
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


@bench.command("step")
def bench_step(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file; left out: a Transformer of 0.99 million parameters, 8 samples a rank."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", "--ranks", min=1, help="Ranks to start; 4, or all slots of the topology.")
    ] = None,
    cells: Annotated[
        list[str] | None,
        typer.Option("--cell", help="CODEC[:MEMORY][,SECTION.KEY=VALUE…]; may be repeated.", metavar="CELL"),
    ] = None,
    overrides: Set = None,
    topology: TopologyFile = None,
    emulate: Emulate = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed together, in each turn of every product.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every product; medians are shown.")] = 7,
    json: Json = None,
) -> None:
    """Time a training step, with and without exchange, beside torch's DDP (gloo) where torch is installed."""
    call(
        "bench-step",
        config,
        ranks,
        cells or DEFAULT_STEP_CELLS,
        overrides or [],
        topology=topology,
        emulate=emulate,
        rounds=rounds,
        steps=steps,
        path=json,
    )
