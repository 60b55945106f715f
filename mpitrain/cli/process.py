"""Other programs, asked within a time limit."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

GRACE_S = 2.0
"""What a launcher gets to end its ranks before it is killed itself."""


@dataclass(frozen=True)
class Answer:
    """What became of a program; ``code`` is None where it took too long, ``output`` holds both of its streams."""

    code: int | None
    output: str

    @property
    def ended(self) -> str:
        """Say in words how it ended."""
        if self.code is None:
            return "took too long and was stopped"
        killed = self.code < 0 and -self.code in set(signal.Signals)
        return f"was ended by {signal.Signals(-self.code).name}" if killed else f"ended with code {self.code}"

    def last_lines(self, number: int = 12) -> str:
        """Join the last lines of the output to one, for a message."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip().strip("-")]
        return " | ".join(lines[-number:]) or "no output"


def ask(command: Sequence[str], *, timeout_s: float) -> Answer:
    """Run a program to its end, or end it: all of its process group."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer(127, f"{command[0]}: {error.strerror}")
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
            return Answer(process.returncode, output)
        except subprocess.TimeoutExpired:
            return Answer(None, _stop(process))
        except BaseException:  # Ctrl-C: nothing is left behind
            _stop(process)
            raise


def _stop(process: "subprocess.Popen[str]") -> str:
    """End a process group, first politely, and return what it had said."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=GRACE_S)[0]
    return ""
