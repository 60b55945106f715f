"""``mpitrain bench pipeline``: the bubble of every schedule with stages of a fixed time, beside its theory.

Alone, it starts its ranks itself; under a launcher, these are the ranks.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain.bench.ranks import on_ranks
from mpitrain.bench.records import show
from mpitrain.bench.stages import CHUNKS, Case, measure
from mpitrain.comm.agreement import agree
from mpitrain.comm.grid import Axis
from mpitrain.comm.hints import is_launched
from mpitrain.comm.launching import mpirun
from mpitrain.comm.runtime import Position, ensure_home, fail
from mpitrain.errors import ConfigError, MpitrainError

DEFAULT_RANKS = 4


def main(
    ranks: int | None,
    schedules: Sequence[str],
    micro_batches: Sequence[int],
    *,
    forward_s: float,
    elements: int,
    repeats: int,
    path: Path | None,
) -> int:
    """Measure every schedule with every number of micro-batches; rank 0 prints the table."""

    def on(axis: Axis) -> None:
        cases = agree(axis, lambda: make_cases(schedules, micro_batches, forward_s, elements))
        records = measure(axis, cases, repeats)
        if axis.rank == 0:
            show(f"pipeline, {axis.size} stages, medians of {repeats}", records, path)

    if is_launched():
        return on_ranks("pipeline", ranks, on)
    try:
        make_cases(schedules, micro_batches, forward_s, elements)
        return _launch(ranks or DEFAULT_RANKS)
    except MpitrainError as error:
        fail(error, Position())


def _launch(ranks: int) -> int:
    """Start the very same command on ranks."""
    ensure_home()
    launcher = mpirun(ranks, allow_root=True, oversubscribe=True)
    command = [*launcher, sys.executable, "-m", "mpitrain", *sys.argv[1:]]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def make_cases(schedules: Sequence[str], micro_batches: Sequence[int], forward_s: float, elements: int) -> list[Case]:
    """Combine every schedule with every number of micro-batches; raises ConfigError for an unknown schedule."""
    unknown = next((schedule for schedule in schedules if schedule not in CHUNKS), None)
    if unknown is not None:
        raise ConfigError(f"bench: --schedule: expected one of {', '.join(CHUNKS)}, got {unknown!r}")
    return [Case(schedule, micros, forward_s, elements) for schedule in schedules for micros in micro_batches]
