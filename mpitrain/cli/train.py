"""``mpitrain train``."""

import sys
from pathlib import Path

from msgspec import structs

from mpitrain.comm.agreement import agree, gather
from mpitrain.comm.grid import Axis
from mpitrain.comm.hints import ARRAY_TASK, array_task, is_launched
from mpitrain.comm.runtime import Position, fail, finish, start
from mpitrain.comm.signals import StopRequest
from mpitrain.config.load import Resolved, load_config
from mpitrain.train.run import train
from mpitrain.train.session import Resume


def main(
    config: Path,
    overrides: list[str],
    *,
    resume: Resume | None,
    overwrite: bool,
    progress: str,
    stop: StopRequest,
) -> int:
    """Train on all ranks of the world; every way out has its documented code."""
    position = Position()
    try:
        world = start()
        stop.listen()
        axis = Axis(world, "world")
        resolved = agree(axis, lambda: load_config(config, overrides))
        summary = train(
            in_own_folder(axis, resolved),
            world,
            resume=resume,
            overwrite=overwrite,
            bar=_wants_bar(progress),
            position=position,
            stop=stop,
        )
        if axis.rank == 0:
            _report(summary)
        finish()
    except BaseException as error:  # whatever it is, no rank may be left waiting
        fail(error, position)
    return 0


def in_own_folder(axis: Axis, resolved: Resolved) -> Resolved:
    """Give each task of a Slurm array a folder below the one that the file names for all of them. Collective.

    What ``--set`` names is meant for this task alone.
    """
    task = gather(axis, array_task())[0]
    if task is None or resolved.sources.get("run.folder") == "--set":
        return resolved
    run = structs.replace(resolved.config.run, folder=str(Path(resolved.config.run.folder) / f"task-{task}"))
    return Resolved(structs.replace(resolved.config, run=run), resolved.sources | {"run.folder": ARRAY_TASK})


def _wants_bar(progress: str) -> bool:
    """Decide between bar and lines: a launcher may give its ranks a terminal that is not the user's."""
    if progress == "auto":
        return sys.stdout.isatty() and not is_launched()
    return progress == "bar"


def _report(summary: dict[str, object]) -> None:
    metric = summary["metric"]
    ratio = summary["ratio"]
    sent = f", {ratio:.2f}x fewer bytes than a float32 ring" if isinstance(ratio, float) else ""
    speed = summary["samples_per_s"]
    pace = f", {speed:,.0f} samples/s after warm-up" if isinstance(speed, float) else ""
    print(f"done      {metric['name']} {metric['value']:.4f}{sent}{pace}")  # type: ignore[index]
    sys.stdout.flush()
