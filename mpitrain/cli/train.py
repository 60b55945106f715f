"""``mpitrain train``."""

import sys
from pathlib import Path

from mpitrain.comm.agreement import agree
from mpitrain.comm.grid import Axis
from mpitrain.comm.hints import is_launched
from mpitrain.comm.runtime import Position, fail, finish, start
from mpitrain.comm.signals import StopRequest
from mpitrain.config.load import load_config
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
            resolved,
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
