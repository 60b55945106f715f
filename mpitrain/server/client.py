"""What a server keeps of one worker."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.arrays import Floats
from mpitrain.codecs.memory import RECEIVERS, DoubleBuffer
from mpitrain.comm.frame import Tag
from mpitrain.errors import PeerLostError, ProtocolError
from mpitrain.server.keeper import Keeper
from mpitrain.server.link import Link
from mpitrain.server.mail import Inbox, Outbox
from mpitrain.server.messages import Answer, Push
from mpitrain.server.setting import Setting, align, down_memory, slots_of
from mpitrain.server.stream import Incoming, Outgoing


class Client:
    """Streams to and from one worker, and how far each has come.

    Attributes
    ----------
    controls : dict of int to Push
        What was told of its pushes, by clock, as long as it is needed.
    arrived, consumed, answered : int
        Clocks of the newest push that is here, that was decoded, that was answered.
    changes : list of Outgoing
        Changes of the weights, one for every piece.
    heard, told : float
        When it was last heard, and when it was last told something, on the clock of `time.perf_counter`.
    gone : bool
        Whether the worker has died; nothing is sent to it any more.
    """

    def __init__(self, link: Link, setting: Setting, keeper: Keeper, worker: int) -> None:
        self.worker = worker
        self.controls: dict[int, Push] = {}
        self.arrived = self.consumed = self.answered = 0
        self.heard = self.told = time.perf_counter()
        self.gone = False
        self._keeper, self._link = keeper, link
        self._slots = slots = slots_of(setting.rule)
        self._inbox = Inbox(link, worker, len(Push._fields))
        self._outbox = Outbox(link, worker, len(Answer._fields))
        self.pushes: list[Incoming] = []
        self.changes: list[Outgoing] = []
        for piece in keeper.pieces:
            receiver = RECEIVERS[piece.memory](piece.codec, piece.size)
            self.pushes.append(Incoming(link, worker, Tag.PUSH.of_bucket(piece.index), receiver, slots))
            down = down_memory(setting.down, piece.size)
            self.changes.append(Outgoing(link, worker, Tag.REPLY.of_bucket(piece.index), down, slots))
        self._backups: dict[int, list[Floats]] = {}
        self._newest = 0
        self._progress = 0

    def begin_round(self, clock: int, version: int) -> None:
        """Start from weights that the worker holds, too."""
        self.arrived = self.consumed = self.answered = self._newest = clock
        self.controls.clear()
        self.hold_weights(version)
        self.heard = self.told = time.perf_counter()

    @property
    def progress(self) -> int:
        """Grow whenever something arrives."""
        return self._newest + sum(push.progress for push in self.pushes)

    @property
    def waits(self) -> bool:
        """Whether it may be that the worker waits for this server: its newest push has no answer, or found no room."""
        return self.arrived > self.answered or self._newest >= self.consumed + self._slots

    def poll(self, last: int) -> Iterator[Push]:
        """Advance all messages; yield the pushes that are complete now, up to clock ``last``.

        A worker that has the weights of the end of a round may begin the next one before this server does.
        """
        if not self.gone:
            try:
                yield from self._poll(last)
            except PeerLostError:
                self.gone = True

    def _poll(self, last: int) -> Iterator[Push]:
        self._outbox.poll()
        for change in self.changes:
            change.poll()
        room = min(self._slots + self.consumed, last)
        while self._newest < room and (values := self._inbox.take()) is not None:
            push = Push(*values)
            self._newest += 1
            if push.clock != self._newest:
                name = self._link.axis.label(self.worker)
                raise ProtocolError(f"{name}: expected the push of clock {self._newest}, got {push.clock:g}")
            self.controls[self._newest] = push
        here = min((push.arrived() for push in self.pushes), default=self._slots)
        if (progress := self.progress) != self._progress:
            self._progress, self.heard = progress, time.perf_counter()
        while self.arrived < min(self._newest, self.consumed + here):
            self.arrived += 1
            yield self.controls[self.arrived]

    def consume(self, clock: int, samples: float | None) -> None:
        """Take a push, the oldest one, into a sum of that many samples in all; for nothing where None counts it."""
        push = self.controls[clock]
        if not push.finite:
            for stream in self.pushes:
                stream.skip()
        elif samples is None:
            self._keeper.forget(self.pushes)
        else:
            self._keeper.take(self.pushes, push.divisor / samples, self._backup(int(push.version)))
        self.consumed = clock
        self._prune()

    def _backup(self, version: int) -> list[Floats] | None:
        """Return the weights of the worker at a version, and forget older ones."""
        self._backups = {known: weights for known, weights in self._backups.items() if known >= version}
        return self._backups.get(version)

    @contextmanager
    def mourning(self) -> Iterator[None]:
        """Take note of a death that sending meets."""
        try:
            yield
        except PeerLostError:
            self.gone = True

    def send_change(self, version: int) -> bool:
        """Send what has changed of the weights; return whether they are finite."""
        finite = True
        with self.mourning():
            for number, change in enumerate(self.changes):
                if change.send(self._keeper.weights(number)):
                    change.memory.commit()
                else:
                    change.memory.rollback()
                    finite = False
        self._keep(version)
        return finite

    def _keep(self, version: int) -> None:
        """Keep what the worker has decoded, for the correction of its next gradients."""
        if self._keeper.policy.compensation is None:
            return
        held = [self._held(number) for number in range(len(self.changes))]
        if self._slots == 1:  # the next gradient is computed on these weights, and corrected before they are replaced
            self._backups.clear()
            self._backups[version] = held
        else:
            self._backups[version] = [weights.copy() for weights in held]

    def _held(self, number: int) -> Floats:
        """Return the weights of a piece as the worker has them, a view or, where nobody remembers them, a copy."""
        states = list(self.changes[number].memory.states().values())
        return states[0].current if states else self._keeper.weights(number).copy()

    def hold_weights(self, version: int) -> None:
        """Go on from the weights themselves."""
        for number, change in enumerate(self.changes):
            align(change.memory, self._keeper.weights(number))
        self._keep(version)

    @property
    def sequence(self) -> int:
        """Number of the next change."""
        return self.changes[0].sequence if self.changes else 0

    def tell(self, answer: Answer) -> None:
        """Send numbers."""
        with self.mourning():
            self._outbox.send(answer)
        self.told = time.perf_counter()

    def answer(self, clock: int) -> None:
        """Take note that a push was answered."""
        self.answered = clock
        self.heard = self.told
        self._prune()

    def _prune(self) -> None:
        done = min(self.consumed, self.answered)
        self.controls = {clock: push for clock, push in self.controls.items() if clock > done}

    def states(self) -> dict[str, DoubleBuffer]:
        """Name every memory of its pushes; a checkpoint keeps the current halves."""
        return {
            f"push{piece.index}.worker{self.worker}.{name}": buffer
            for piece, stream in zip(self._keeper.pieces, self.pushes, strict=True)
            for name, buffer in stream.memory.states().items()
        }

    def close(self) -> None:
        """Withdraw the receives."""
        self._inbox.cancel()
        for push in self.pushes:
            push.cancel()
