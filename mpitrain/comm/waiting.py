"""The only wait of the package: it yields the processor, and it always ends."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from mpi4py import MPI

from mpitrain.errors import PeerLostError

SPIN_S = 30e-6
"""Longest busy wait. Short, since there may be more ranks than cores."""

MAX_SLEEP_S = 0.5e-3

LATENESS = 0.01
"""Share of a wait by which its end may be noticed late."""


abandoned: list[object] = []
"""What nobody waits for any more. MPI may still write into its buffers, so they stay for the life of the process."""


class Waitable(Protocol):
    """Something that completes as messages arrive."""

    @property
    def progress(self) -> int:
        """Grow whenever a peer was heard; the time limit starts anew then."""

    def poll(self) -> bool:
        """Advance without blocking; return whether it is complete."""

    def waiting_for(self) -> str:
        """Name what is missing, for the message of a timeout."""


def wait(what: Waitable, *, timeout_s: float) -> float:
    """Block until ``what`` is complete; return the seconds it took.

    Tests, spins for ``SPIN_S``, then sleeps between tests: ``LATENESS`` of what it has waited, at most ``MAX_SLEEP_S``.

    Raises
    ------
    PeerLostError
        Nothing was heard from any peer for ``timeout_s`` seconds.
    """
    start = heard = now = time.perf_counter()
    progress = what.progress
    while not what.poll():
        now = time.perf_counter()
        if what.progress != progress:
            progress, heard = what.progress, now
        elif now - heard > timeout_s:
            abandoned.append(what)
            raise PeerLostError(
                f"no message for {timeout_s:g} s while waiting for {what.waiting_for()}; the peer died, or its link "
                "is down for longer than network.peer_timeout_s"
            )
        if now - heard > SPIN_S:
            time.sleep(min(max(LATENESS * (now - heard), SPIN_S), MAX_SLEEP_S))
    return time.perf_counter() - start


class telling_deaths:  # noqa: N801  (used like a function)
    """Turn what MPI tells of a dead peer, where it can (under ULFM), into a PeerLostError that names it.

    A class, not a generator: it is entered at every look at a message, and generators cost a tenth of a step there.
    """

    __slots__ = ("_label", "_statuses")

    def __init__(self, label: str, statuses: Sequence[MPI.Status] = ()) -> None:
        self._label, self._statuses = label, statuses

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, MPI.Exception):
            return
        classes = {error.Get_error_class(), *(status.Get_error() for status in self._statuses)}
        if classes & {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}:
            lost = PeerLostError(f"{self._label}: the peer has died")
            lost.bereaved = True
            raise lost from None


class Requests:
    """A set of MPI requests that is waited for as one.

    Parameters
    ----------
    requests : sequence of MPI.Request
        Owned from now on.
    label : str
        What they carry and from whom, for the message of a timeout.

    Attributes
    ----------
    received_bytes : int
        Sum of the sizes of the completed receives.
    """

    def __init__(self, requests: Sequence[MPI.Request], label: str) -> None:
        self._requests = list(requests)
        self._statuses = [MPI.Status() for _ in self._requests]
        self._open = len(self._requests)
        self._label = label
        self.received_bytes = 0

    @property
    def progress(self) -> int:
        """Count the completed requests."""
        return len(self._requests) - self._open

    def poll(self) -> bool:
        """Test the open requests; raises PeerLostError where MPI tells that a peer has died (it can under ULFM)."""
        if self._open:
            with telling_deaths(self._label, self._statuses):
                done = MPI.Request.Testsome(self._requests, self._statuses) or []
            self._open -= len(done)
            self.received_bytes += sum(self._statuses[i].Get_count(MPI.BYTE) for i in range(len(done)))
        return not self._open

    def waiting_for(self) -> str:
        """Name what is missing."""
        return self._label

    def cancel(self) -> None:
        """Withdraw the receives that nobody will send to any more; sends are left to MPI."""
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
                request.Free()


def wait_all(requests: Sequence[MPI.Request], label: str, *, timeout_s: float) -> float:
    """Wait for a few requests at once; raises PeerLostError."""
    return wait(Requests(requests, label), timeout_s=timeout_s)
