"""Wishes to stop that reach a process as signals. Needs neither MPI nor numpy, so that it can listen from the start."""

import os
import signal
import sys
import time
from types import FrameType

from mpitrain.errors import ExitCode

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""What schedulers send before they kill, what a lost terminal sends, and Ctrl-C."""

ONCE = "\nmpitrain: saving a checkpoint; Ctrl-C again ends at once, without\n"
TWICE = "\nmpitrain: interrupted, left without a checkpoint\n"
"""For someone at a terminal."""


class StopRequest:
    """Whether this process has been asked to stop.

    A handler only takes note: a rank that left by itself would leave the others waiting. The loop adds up the wishes
    of all ranks at every step, so that all stop after the same one.

    Attributes
    ----------
    reason : str
        Name of the first signal; empty while there is none.
    begin : float
        When this process began to listen, on the clock of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.begin = time.perf_counter()

    def listen(self) -> None:
        """Take over the signals of this process, for good; call it from the main thread.

        Again once MPI has started: UCX, which some MPI libraries load, takes SIGHUP for itself.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self.note)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Take note of a signal; a second Ctrl-C ends the process at once, for someone who does not want to wait.

        An exception would not do: one that is raised while Python clears up is dropped. The launcher ends the others.
        """
        del frame
        # Before anything is told: whoever reads it may send the next signal at once, which is handled within this one.
        before, self.reason = self.reason, self.reason or signal.Signals(number).name
        if number == signal.SIGINT:
            # Not print, which may be in the middle of another line.
            os.write(sys.stderr.fileno(), (TWICE if before else ONCE).encode())
            if before:
                os._exit(ExitCode.INTERRUPTED)
