"""A worker's end: gradients go to the servers that own their buckets, changes of the weights come back."""

import time
from collections.abc import Callable, Sequence

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.comm.waiting import Requests, wait
from mpitrain.errors import ProtocolError
from mpitrain.server.clocks import may_go
from mpitrain.server.link import Link
from mpitrain.server.messages import Answer, Kind, Push
from mpitrain.server.setting import Setting, slots_of
from mpitrain.server.source import Source


class Worker:
    """Pushes gradients and takes weights.

    Parameters
    ----------
    link : Link
        On the axis of workers and servers.
    setting : Setting
        The same on both ends.
    grads, weights : list of arrays
        Those of every bucket; the weights are written by `take`.

    Attributes
    ----------
    pushed, answered : int
        Clocks of the newest push, and of the newest that was answered.
    granted : int
        Newest complete clock that was heard of.
    version, held : int
        Updates and newest complete clock of the weights that are here.
    last : int
        Clock after which the round ends.
    dead : int
        1 + the number of a worker that has died; 0 while all live.
    lost : bool
        Whether a reply did not follow on the weights that are here; the next push asks for the weights themselves.
    answer : Answer or None
        The newest one.
    drops : callable
        Tells whether the reply to a clock is to be lost, on purpose.
    """

    def __init__(self, link: Link, setting: Setting, grads: list[Floats], weights: list[Floats]) -> None:
        self.link, self.setting = link, setting
        self.pushed = self.answered = self.granted = self.version = self.held = self.last = self.dead = 0
        self.lost = False
        self.answer: Answer | None = None
        self.drops: Callable[[int], bool] = lambda clock: False
        self._grads, self._weights = grads, weights
        servers = link.axis.size - setting.workers
        self._servers = [
            Source(link, setting.workers + number, setting.owned_by(number, servers), setting, weights)
            for number in range(servers)
        ]
        self._senders = {index: push for server in self._servers for index, push in server.pushes.items()}
        self._finite = True
        self._refreshed = True

    def begin_round(self, clock: int, version: int, last: int) -> None:
        """Start from weights that are the servers', too, and hold all of ``clock``; the round ends after ``last``."""
        self.pushed = self.answered = self.granted = self.held = clock
        self.version, self.last = version, last
        self._refreshed = False
        for server in self._servers:
            server.align()

    @property
    def ended(self) -> bool:
        """Whether the refresh that ends the round has been taken."""
        return self._refreshed

    def start(self, index: int, *, key: int = 0) -> None:
        """Encode the gradient of a bucket and start sending it."""
        stream = self._senders[index]
        if (requests := stream.busy) is not None:
            self._wait(requests)
        self._finite &= stream.send(self._grads[index], key=key)
        self.poll()

    @property
    def finite(self) -> bool:
        """Whether all buckets that were started since the last push were finite."""
        return self._finite

    def push(self, *, finite: bool, lost: bool = False, **numbers: float) -> None:
        """End a push whose buckets have all been started.

        Parameters
        ----------
        finite, lost : bool
            For all ranks of the replica.
        numbers
            The other fields of `Push`.
        """
        self.pushed += 1
        for stream in self._senders.values():
            if finite:
                stream.memory.commit()
            else:
                stream.memory.rollback()
        self._finite = True
        push = Push(self.pushed, self.version, self.held, finite=finite, lost=lost, **numbers)
        for server in self._servers:
            server.outbox.send(push)

    def poll(self) -> int:
        """Advance all messages; return how many answers of all servers are complete."""
        return min(server.poll() for server in self._servers)

    @property
    def progress(self) -> int:
        """Grow whenever a server was heard."""
        return self.link.heard + sum(server.progress for server in self._servers)

    def may_go(self) -> bool:
        """Tell whether the next gradient may be pushed, with the answers taken so far."""
        rule = self.setting.rule
        inside = self.pushed - self.answered < slots_of(rule)
        return self.pushed < self.last and inside and may_go(rule, self.pushed, self.answered, self.granted)

    def verdicts(self) -> list[bool]:
        """Tell of every complete answer whether it can be decoded here: whether it follows on what is here."""
        found: list[bool] = []
        position = skipped = 0
        after_weights = False
        for number in range(self.poll()):
            answer = self._servers[0].answers[number]
            if answer.kind == Kind.WEIGHTS:
                after_weights = True
                found.append(True)
                continue
            good = after_weights or all(server.follows(position, skipped) for server in self._servers)
            self.lost |= not good
            if self.drops(int(answer.to)):
                good = False
            skipped += not good
            position += 1
            found.append(good)
        return found

    def take(self, verdicts: Sequence[bool]) -> None:
        """Take as many answers, oldest first: decode those that are good for all ranks of the replica.

        Raises
        ------
        ProtocolError, CodecError
            The servers do not tell the same, or a message is damaged.
        """
        for good in verdicts:
            answers = {server.take(good=good) for server in self._servers}
            self._note(answers, good=good)

    def _note(self, answers: set[Answer], *, good: bool) -> None:
        told = {(answer.kind, answer.version, answer.clock, answer.to) for answer in answers}
        if len(told) > 1:
            raise ProtocolError(f"servers: expected one version from all of them, got {sorted(told)}")
        answer = self.answer = min(answers)
        self.answered = max(self.answered, int(answer.to))
        self.granted = max(self.granted, int(answer.clock))
        self.last, self.dead = int(answer.last), int(answer.dead)
        if good:
            self.version, self.held = int(answer.version), int(answer.clock)
        if answer.kind == Kind.WEIGHTS:
            self.lost = False
            self._refreshed |= not answer.to

    def waiting_for(self) -> str:
        """Name the servers whose answer is missing."""
        missing = [server for server in self._servers if not server.answers]
        names = [self.link.axis.label(server.peer) for server in missing or self._servers]
        return f"an answer of {' and '.join(names)}"

    def wait_for_answer(self) -> None:
        """Wait until an answer is complete; raises PeerLostError."""
        self._wait(_Answered(self))

    def _wait(self, what: "Requests | _Answered") -> None:
        begin = time.perf_counter()
        wait(what, timeout_s=self.link.transport.timeout_s)
        self.link.waited(begin)

    def states(self) -> dict[str, DoubleBuffer]:
        """Name every memory of the pushes; a checkpoint keeps the current halves."""
        return {
            f"push{index}.{name}": buffer
            for index, stream in sorted(self._senders.items())
            for name, buffer in stream.memory.states().items()
        }

    def references(self) -> list[DoubleBuffer]:
        """List what changes of the weights follow on; no checkpoint needs it, for a round begins with the weights."""
        changes = [change for server in self._servers for change in server.changes]
        return [state for change in changes for state in change.memory.states().values()]

    def close(self) -> None:
        """Withdraw the receives; nothing may be under way."""
        for server in self._servers:
            server.close()


class _Answered:
    """The next complete answer, as something to wait for."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def progress(self) -> int:
        return self._worker.progress

    def poll(self) -> bool:
        return self._worker.poll() > 0

    def waiting_for(self) -> str:
        return self._worker.waiting_for()
