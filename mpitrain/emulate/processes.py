"""Which processes belong to an emulation, and how they are ended.

Everything that starts inside carries the mark of its emulation in its environment, ``PID:START`` of the emulator, where
START is the time of its start in ticks of the kernel: together they name a process for good. A process that has
cleared its environment still lives in the network namespace of a host.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from mpitrain.comm.hints import EMULATION

PROC = Path("/proc")
GRACE_S = 2.0
"""From the wish to end to the order."""

LIMIT_S = 5.0
"""From the order to giving up: a process may hang in the kernel."""

Namespace = tuple[int, int]
"""Device and number of the file that stands for it."""


def make_mark(process: int) -> str:
    """Name a process for good."""
    return f"{process}:{_start(process)}"


def is_alive(mark: str) -> bool:
    """Tell whether the process of a mark is still there, a text that is no mark is not."""
    process, _, start = mark.partition(":")
    return process.isdecimal() and start.isdecimal() and _start(int(process)) == int(start)


def namespace(process: int | str, kind: str = "net") -> Namespace | None:
    """Return the namespace of a process; None where it is gone, or another user's."""
    try:
        status = (PROC / str(process) / "ns" / kind).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def members(mark: str, namespaces: Collection[Namespace]) -> list[int]:
    """List the processes of an emulation, this one left out."""
    return [each for each, found in _marked() if found == mark or namespace(each) in namespaces]


def stale_marks() -> set[str]:
    """List the marks of emulations whose emulator is gone.

    In containers other processes may have the same numbers: only those that count as this one does are looked at.
    """
    here = namespace("self", "pid")
    marks = {mark for process, mark in _marked() if mark and namespace(process, "pid") == here}
    return {mark for mark in marks if not is_alive(mark)}


def end_stale() -> int:
    """End what dead emulations have left behind; return the number of processes."""
    ended = 0
    own = namespace("self")
    for mark in stale_marks():
        found = {namespace(process) for process in members(mark, ())} - {None, own, namespace(1)}
        spaces = [space for space in found if space]
        ended += len(members(mark, spaces))
        end_all(partial(members, mark, spaces))
    return ended


def end_all(find: Callable[[], list[int]]) -> list[int]:
    """End processes, first politely, and return those that are left: none but in a broken kernel."""
    for wish, limit_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, LIMIT_S)):
        deadline = time.monotonic() + limit_s
        told: set[int] = set()
        while (found := find()) and time.monotonic() < deadline:
            for process in found:
                if process not in told or wish == signal.SIGKILL:
                    told.add(process)
                    _signal(process, wish)
            time.sleep(0.01)
        if not found:
            return []
    return find()


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
        os.kill(process, signal.SIGCONT)  # a stopped one takes no wish
    except (ProcessLookupError, PermissionError):
        pass


def _marked() -> Iterator[tuple[int, str]]:
    """Yield the processes that live and can be looked into, with their mark or nothing."""
    wanted = f"{EMULATION}=".encode()
    for folder in PROC.iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found = next((each for each in variables if each.startswith(wanted)), b"")
        yield int(folder.name), os.fsdecode(found[len(wanted) :])


def _start(process: int) -> int | None:
    """Read when a process began (proc(5): the 22nd field, counted behind a name that may hold anything)."""
    try:
        fields = (PROC / str(process) / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
