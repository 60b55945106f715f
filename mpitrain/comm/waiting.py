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


DEATHS = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED}
"""Classes of errors with which MPI tells that a process has died."""


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
        if {error.Get_error_class(), *(status.Get_error() for status in self._statuses)} & DEATHS:
            raise death(self._label) from None


def death(label: str) -> PeerLostError:
    """Build the error of a peer that MPI tells to be dead."""
    lost = PeerLostError(f"{label}: the peer has died")
    lost.bereaved = True
    return lost


class Requests:
    """A set of MPI requests that is waited for as one.

    Parameters
    ----------
    requests : sequence of MPI.Request
        Owned from now on.
    label : str
        What they carry and from whom, for the message of a timeout.
    watch : Watch, optional
        What tests them, together with others; where left out, every ``poll`` does.

    Attributes
    ----------
    received_bytes : int
        Sum of the sizes of the completed receives.
    """

    def __init__(self, requests: Sequence[MPI.Request], label: str, watch: "Watch | None" = None) -> None:
        self._requests: list[MPI.Request] = []
        self._open = 0
        self._label = label
        self._watch = watch
        self.received_bytes = 0
        self.add(requests)

    def add(self, requests: Sequence[MPI.Request]) -> None:
        """Wait for more requests."""
        self._requests += requests
        self._open += len(requests)
        if self._watch:
            self._watch.add(self, requests)

    @property
    def progress(self) -> int:
        """Count the completed requests."""
        return len(self._requests) - self._open

    def poll(self) -> bool:
        """Return whether all are complete; tests those that nobody watches.

        Raises
        ------
        PeerLostError
            MPI tells that a peer has died, as it can under ULFM.
        """
        if self._open and not self._watch:
            self.test()
        return not self._open

    def test(self) -> None:
        """Test the open requests; raises PeerLostError."""
        statuses = [MPI.Status() for _ in self._requests]
        with telling_deaths(self._label, statuses):
            done = MPI.Request.Testsome(self._requests, statuses) or []
        for status in statuses[: len(done)]:
            self.take(status)

    def take(self, status: MPI.Status) -> None:
        """Take note that one of them is complete."""
        self._open -= 1
        self.received_bytes += status.Get_count(MPI.BYTE)

    def waiting_for(self) -> str:
        """Name what is missing."""
        return self._label

    def cancel(self) -> None:
        """Withdraw the receives that nobody will send to any more; sends are left to MPI."""
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Cancel()
                request.Free()


class Watch:
    """Tests the open requests of many sets with one call to MPI.

    Attributes
    ----------
    completed : int
        Requests that were found complete so far.
    """

    def __init__(self) -> None:
        self._requests: list[MPI.Request] = []
        self._owners: list[Requests] = []
        self._statuses: list[MPI.Status] = []
        self.completed = 0

    def add(self, owner: Requests, requests: Sequence[MPI.Request]) -> None:
        """Watch more requests of a set."""
        self._requests += requests
        self._owners += [owner] * len(requests)
        self._statuses += [MPI.Status() for _ in range(len(self._requests) - len(self._statuses))]

    def look(self) -> None:
        """Test all; raises PeerLostError."""
        if not self._requests:
            return
        try:
            done = MPI.Request.Testsome(self._requests, self._statuses)
        except MPI.Exception:
            # Requests that have ended, by an error or in order, are null, and theirs are the first statuses.
            ended = [i for i, request in enumerate(self._requests) if request == MPI.REQUEST_NULL]
            for index, status in zip(ended, self._statuses, strict=False):
                if status.Get_error() in DEATHS:
                    raise death(self._owners[index].waiting_for()) from None
            for owner in self._owners:
                owner.test()  # what is pending raises with its name, too
            raise
        if not done:
            return
        for index, status in zip(done, self._statuses, strict=False):
            self._owners[index].take(status)
        self.completed += len(done)
        gone = set(done)
        left = [index for index in range(len(self._requests)) if index not in gone]
        self._requests = [self._requests[index] for index in left]
        self._owners = [self._owners[index] for index in left]


def wait_all(requests: Sequence[MPI.Request], label: str, *, timeout_s: float) -> float:
    """Wait for a few requests at once; raises PeerLostError."""
    return wait(Requests(requests, label), timeout_s=timeout_s)
