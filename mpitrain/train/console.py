"""What a person sees: progress on rank 0, once; warnings of other ranks with their rank."""

import contextlib
import os
import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

LINES_A_RUN = 10


class _Screen(Console):
    """A console that goes on in silence when nobody reads it any more: a closed terminal must not end a training."""

    def on_broken_pipe(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Narrator:
    """Reports of one rank.

    Parameters
    ----------
    rank : int
        Only rank 0 tells progress.
    steps : int
        Steps of the run.
    bar : bool
        Draw a progress bar; otherwise write a tenth of the lines.
    """

    def __init__(self, rank: int, steps: int, *, bar: bool = False) -> None:
        self._rank = rank
        self._steps = steps
        self._console = _Screen(file=sys.stdout, highlight=False, soft_wrap=True)
        self._has_bar = bar
        self._every = max(1, steps // LINES_A_RUN)
        self._progress: Progress | None = None
        self._last_print = 0.0

    def say(self, text: str) -> None:
        """Tell something once."""
        if self._rank == 0:
            self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Tell something that happened on this rank."""
        with contextlib.suppress(BrokenPipeError):
            print(f"mpitrain: rank {self._rank}: {text}", file=sys.stderr, flush=True)

    def step(self, step: int, text: str, *, always: bool = False) -> None:
        """Tell how far the run is; in lines, every so often, or ``always``."""
        if self._rank:
            return
        if self._has_bar:
            self._bar(step, text)
        elif always or step % self._every == 0 or step in (1, self._steps):
            self.say(f"step {step:>6}/{self._steps}  {text}")

    def _bar(self, step: int, text: str) -> None:
        if self._progress is None:
            # Where a terminal is narrow, the text gives way.
            rest = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
            columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), rest)
            self._progress = Progress(*columns, console=self._console, refresh_per_second=4, expand=True)
            self._progress.start()
            self._progress.add_task(text, total=self._steps)
        if time.monotonic() - self._last_print > 0.2 or step == self._steps:
            self._last_print = time.monotonic()
            self._progress.update(self._progress.task_ids[0], completed=step, description=text)

    def close(self) -> None:
        """End the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
