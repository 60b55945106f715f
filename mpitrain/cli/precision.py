"""``mpitrain sensitivity`` on the command line."""

from pathlib import Path
from typing import Annotated

import typer

from mpitrain.cli.calling import NO_VALUE, Config, Json, Set, call, writable

RulesFile = Annotated[
    Path | None,
    typer.Option(
        callback=writable, help="Write CONFIG with the rules; left out: the rules are printed.", metavar="FILE"
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", metavar=NO_VALUE, help="Replace the file of --out.")]


def sensitivity(
    config: Config,
    overrides: Set = None,
    ratio: Annotated[
        float | None,
        typer.Option(min=1, help="Budget: how many times less than float32 a gradient takes; 10 if none is given."),
    ] = None,
    bytes_per_value: Annotated[float | None, typer.Option(min=0, help="Budget: bytes a value of a gradient.")] = None,
    error: Annotated[
        float | None,
        typer.Option(min=0, help="Budget: squared error of the preconditioned update, over its square; fewest bytes."),
    ] = None,
    loss_pct: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Budget: what a step may lose of the test loss, in percent; upper bounds of all tensors, added up.",
        ),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option("--codec", help="To choose from; may be repeated. Left out: twelve from fp16 to topk-100."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="To train raw before anything is measured.")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="Steps on which everything is measured.")] = 8,
    no_loss: Annotated[
        bool, typer.Option("--no-loss", metavar=NO_VALUE, help="Measure updates only: much faster for large models.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", min=1, help="Of the run, for what it will send; left out: four replicas."),
    ] = None,
    out: RulesFile = None,
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """Measure what codecs do to every tensor's update and to the loss, and write rules that keep to a budget.

    One rank trains raw for --steps steps (from train.init, if set). Then the gradient of every tensor goes through
    every codec, and bytes are dealt out where they lower the error of the preconditioned update most. Tensors with one
    dimension or few values keep fp16, those that a rule of CONFIG fits keep its codec.
    """
    budget = {"ratio": ratio, "bytes_per_value": bytes_per_value, "error": error, "loss_pct": loss_pct}
    call(
        "sensitivity",
        config,
        overrides or [],
        codecs=codecs or [],
        budget=budget,
        ranks=ranks,
        steps=steps,
        samples=samples,
        with_loss=not no_loss,
        out=out,
        overwrite=overwrite,
        output=json,
    )
