"""The parent of a launcher: hands wishes to stop on, and returns the job's exit code."""

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from mpitrain.comm.signals import ONCE, STOP_SIGNALS, TWICE, StopRequest
from mpitrain.errors import ExitCode

GRACE_S = 3.0
"""From an order to end at once to the kill: a launcher waits for hosts that it cannot reach."""

LINGER_S = 30.0
"""For so long a launcher may go on without ranks on this host, which end together, if one of them fails."""

TOLD = "\nmpitrain: the command is told to stop; Ctrl-C again ends at once\n"
"""For someone at a terminal, where nothing is trained."""

RANK = b"OMPI_COMM_WORLD_RANK="


def supervise(
    command: list[str],
    stop: StopRequest,
    environment: Mapping[str, str] | None = None,
    *,
    together: bool = False,
    trains: bool = True,
) -> int:
    """Run a launcher to its end, in this process's environment or another, and return its exit code.

    A wish to stop (Ctrl-C, SIGTERM, …) goes on as SIGUSR1, which launchers pass to all ranks, so that these save and
    leave: what the launcher gets itself, it takes as an order to kill them. A second Ctrl-C is that order.

    Parameters
    ----------
    environment : mapping, optional
        Of the launcher; this process's where left out.
    together : bool
        Whether the ranks end together. Then a launcher (of Open MPI) that goes on after those of this host is ended:
        it waits for a host that it has lost, up to a quarter of an hour.
    trains : bool
        Whether the ranks answer a wish to stop with a checkpoint. Anything else that it ends has the exit code of
        shells, 128 and the signal's number.
    """
    if stop.reason:  # while this command was loading
        return _never_began() if trains else int(ExitCode.INTERRUPTED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have had it ignored: no exit code would be kept
    # A group of its own, or the terminal's Ctrl-C would reach the launcher, too.
    job = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=_end_with_parent,  # noqa: PLW1509 (unsafe beside threads, and there are none)
    )
    asked: list[int] = []
    ordered: list[float] = []
    hand_on = _handler(job, asked, ordered, ONCE if trains else TOLD)
    for number in STOP_SIGNALS:
        signal.signal(number, hand_on)
    if stop.reason:  # while the launcher was being started
        hand_on(signal.SIGUSR1, None)
    code = _wait(job, ordered, together=together)
    code = code if code >= 0 else 128 - code
    if ordered:
        if trains:
            print(TWICE, end="", file=sys.stderr, flush=True)
        return int(ExitCode.INTERRUPTED)
    if asked and code == 128 + signal.SIGUSR1:  # the ranks were not yet listening
        return _never_began() if trains else 128 + asked[0]
    return code


def _handler(
    job: "subprocess.Popen[bytes]", asked: list[int], ordered: list[float], once: str
) -> Callable[[int, FrameType | None], None]:
    """Make what hands signals on to a launcher: it notes them in ``asked``, and in ``ordered`` when to end at once."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        del frame
        again = number == signal.SIGINT and signal.SIGINT in asked
        asked.append(number)
        if again:
            ordered.append(time.monotonic())
        job.send_signal(signal.SIGTERM if again else signal.SIGUSR1)
        if number == signal.SIGINT and not again:
            print(once, end="", file=sys.stderr, flush=True)

    return hand_on


def _wait(job: "subprocess.Popen[bytes]", ordered: list[float], *, together: bool) -> int:
    """Wait for a launcher, and end it where it waits in vain; return its exit code.

    ``ordered`` holds when it was told to end at once, on the monotonic clock; orders may come in meanwhile.
    """
    seen_s = 0.0
    while True:
        left_s = ordered[0] + GRACE_S - time.monotonic() if ordered else GRACE_S
        if left_s <= 0:
            job.kill()
            return job.wait()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.wait(left_s)
        if not together:
            continue
        if has_ranks(job.pid):
            seen_s = time.monotonic()
        elif seen_s and time.monotonic() - seen_s > LINGER_S:
            print(
                f"mpitrain: launch: the ranks of this host ended {LINGER_S:g} s ago, but the launcher waits for "
                "others, whose host it has lost; ended it",
                file=sys.stderr,
                flush=True,
            )
            job.kill()
            job.wait()
            return int(ExitCode.MPI)


def has_ranks(launcher: int) -> bool:
    """Tell whether a process has started ranks of Open MPI that still run."""
    for path in Path("/proc").glob(f"{launcher}/task/*/children"):
        for child in _read(path).split():
            if RANK in _read(Path("/proc") / child.decode() / "environ"):
                return True
    return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def _never_began() -> int:
    """Say that nothing was trained, and return the code that asks for another start."""
    print("mpitrain: stopped before the first step; start again", file=sys.stderr, flush=True)
    return int(ExitCode.STOPPED)


def _end_with_parent() -> None:
    """Have the kernel end the launcher if this process is killed: no job is left behind (prctl(2), Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
