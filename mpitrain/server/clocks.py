"""The clocks of a parameter server: a pure state machine, without messages and without numbers.

A *clock* is a worker's count of steps, a *version* the number of updates applied, a *round* the clocks up to the next
point at which all ranks meet. ``push`` and ``leave`` answer with operations, to be executed in their order by every
server alike. ``ssp(s)`` is the stale synchronous parallel of Ho et al. (2013), ``ssp(0)`` the synchronous server,
``aggregate`` the backup workers of Chen et al. (2016).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mpitrain.config.schema import ExchangeConfig
from mpitrain.errors import ProtocolError

ASYNC = "async"


@dataclass(frozen=True)
class Rule:
    """When pushes are applied, and how far a worker may run ahead.

    Attributes
    ----------
    mode : "ssp" or "async"
        ssp: clock c is applied once, when all live pushes of it are in; async: a push is applied on arrival.
    staleness : int
        ssp: clocks that a worker may be ahead of the newest complete one that it holds.
    window : int
        async: pushes that a worker may have without an answer.
    aggregate : int, optional
        ssp: pushes that complete a clock; None: those of all live workers. The last clock of a round takes all.
    late : "apply" or "drop"
        What becomes of a push whose clock is complete: it joins the next update, or is dropped. Where that update waits
        for this worker to catch up, a late push is an update of its own: a server has room for s + 1 pushes a worker.
    """

    mode: str = "ssp"
    staleness: int = 0
    window: int = 1
    aggregate: int | None = None
    late: str = "apply"


def rule_of(exchange: ExchangeConfig) -> Rule:
    """Read the rule of a server from its configuration; keys that the mode does not read have no effect."""
    if exchange.mode == ASYNC:
        return Rule(ASYNC, window=exchange.window)
    staleness = exchange.staleness if exchange.mode == "ssp" else 0
    return Rule(staleness=staleness, aggregate=exchange.aggregate, late=exchange.late)


class Apply(NamedTuple):
    """Make one update of these (worker, clock), in this order; then ``version`` and complete ``clock`` are as told."""

    pushes: tuple[tuple[int, int], ...]
    version: int
    clock: int


class Drop(NamedTuple):
    """Forget the push that this worker made of this clock."""

    worker: int
    clock: int


class Reply(NamedTuple):
    """Send the newest weights to a worker: the answer to its push of this clock."""

    worker: int
    clock: int


class Refresh(NamedTuple):
    """Send the weights themselves to all live workers: the round is over."""


Op = Apply | Drop | Reply | Refresh


def granted(rule: Rule, answered: int, held_clock: int) -> int:
    """Return the highest clock that a worker may begin.

    Parameters
    ----------
    answered : int
        Newest of its clocks that has been answered.
    held_clock : int
        Newest complete clock whose weights it has received.
    """
    return answered + rule.window if rule.mode == ASYNC else held_clock + rule.staleness + 1


def may_go(rule: Rule, pushed: int, answered: int, held_clock: int) -> bool:
    """Tell whether a worker that has pushed up to clock ``pushed`` may begin the next one (see `granted`)."""
    return pushed < granted(rule, answered, held_clock)


def staleness_of(*, version: int, held_version: int) -> int:
    """Count the updates between the weights that a gradient was computed on and its own update.

    With ssp, where every live push takes part in its clock, this is (clock - 1) - complete clock of the weights <= s.

    Parameters
    ----------
    version : int
        Of the `Apply` that the gradient takes part in.
    held_version : int
        Of the weights that it was computed on.
    """
    return version - 1 - held_version


class Turns:
    """Round-robin over workers that are ready at the same time: who came first the last time comes last."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._first = workers - 1

    def order(self, ready: Iterable[int]) -> list[int]:
        """Order them, starting behind the worker that came first the last time."""
        ordered = sorted(ready, key=lambda worker: (worker - self._first - 1) % self._workers)
        self._first = ordered[0] if ordered else self._first
        return ordered


class Clocks:
    """Who has pushed what, what is applied when, and who is answered.

    Parameters
    ----------
    workers : int
        Numbered from 0; all are live.
    rule : Rule
        How strict.
    clock, version : int
        Where all of them start.

    Attributes
    ----------
    clock : int
        Newest complete clock: every push of it and of earlier ones has been applied (or comes too late).
    version : int
        Updates applied so far.
    last : int
        Clock after which the round ends.
    ended : bool
        Whether the round is over.
    pushed, applied, dropped : list of int
        Pushes of every worker in all rounds; pushed = applied + dropped at the end of a round.

    Notes
    -----
    Of a worker at most one push is without an answer here: it was not allowed to make another one.
    """

    def __init__(self, workers: int, rule: Rule, *, clock: int = 0, version: int = 0) -> None:
        self.rule = rule
        self.clock = self.last = clock
        self.version = version
        self.ended = True
        self.pushed, self.applied, self.dropped = [0] * workers, [0] * workers, [0] * workers
        self._live = set(range(workers))
        self._waiting: set[int] = set()
        self._counts = [clock] * workers
        self._answered = [clock] * workers
        self._held = [clock] * workers
        self._pending: list[tuple[int, int]] = []  # (clock, worker): sorts as pushes are applied
        self._turns = Turns(workers)

    @property
    def live(self) -> tuple[int, ...]:
        """Workers that have not left."""
        return tuple(sorted(self._live))

    @property
    def waiting(self) -> tuple[int, ...]:
        """Live workers whose newest push has no answer yet."""
        return tuple(sorted(self._waiting))

    def count(self, worker: int) -> int:
        """Return the clock of the newest push of a worker."""
        return self._counts[worker]

    def limit(self, worker: int) -> int:
        """Return the highest clock that a worker may have begun, by the replies that were due to it so far."""
        return min(self.last, granted(self.rule, self._answered[worker], self._held[worker]))

    def begin_round(self, last: int) -> None:
        """Let all live workers start from the weights of the last refresh; the round ends after clock ``last``."""
        if not self.ended or last <= self.last:
            raise RuntimeError(f"a round up to clock {last} cannot begin at clock {self.last}, ended: {self.ended}")
        self.clock = max(self.clock, self.last)
        for worker in self._live:
            self._counts[worker] = self._answered[worker] = self._held[worker] = self.clock
        self.last = last
        self.ended = not self._live

    def push(self, worker: int) -> list[Op]:
        """Take note that the next push of a worker is there.

        Raises
        ------
        ProtocolError
            The worker has left, or it could not have begun that clock.
        """
        clock, limit = self._counts[worker] + 1, self.limit(worker)
        if worker not in self._live:
            raise ProtocolError(f"server: worker {worker} has left, but pushed clock {clock}")
        if self.ended or clock > limit:
            raise ProtocolError(
                f"server: worker {worker} pushed clock {clock}, but may be no further than clock {limit}"
            )
        self._counts[worker] = clock
        self.pushed[worker] += 1
        self._waiting.add(worker)
        if self.rule.late == "drop" and clock <= self.clock and self.rule.mode != ASYNC:
            self.dropped[worker] += 1
            return [Drop(worker, clock), *self._advance()]
        self._pending.append((clock, worker))
        return self._advance()

    def leave(self, worker: int) -> list[Op]:
        """Stop counting on a worker that has finished or died; what it has pushed still counts."""
        self._live.discard(worker)
        self._waiting.discard(worker)
        return [] if self.ended else self._advance()

    def stop(self) -> None:
        """End the round as early as may be: after the highest clock that a live worker may have begun already.

        Every reply from now on must tell the workers of it.
        """
        if not self.ended:
            self.last = max([self.clock, *(self.limit(worker) for worker in self._live)])

    def _advance(self) -> list[Op]:
        """Do all that is due."""
        ops: list[Op] = []
        while (taken := self._due()) is not None:
            ops.append(self._apply(taken))
        ops += [self._reply(worker) for worker in self._turns.order(filter(self._is_answered, self._waiting))]
        if all(self._counts[worker] >= self.last for worker in self._live):
            if self._pending:  # late, or pushed by workers that left, of clocks that nobody else will begin
                ops.append(self._apply(self._pending))
            self.ended = True
            self._waiting.clear()
            ops.append(Refresh())
        return ops

    def _due(self) -> list[tuple[int, int]] | None:
        """Return the pushes of the next update, if it is due; sets the complete clock."""
        if self.rule.mode == ASYNC:
            self.clock = min((self._counts[worker] for worker in self._live), default=self.clock)
            return self._pending or None
        clock = self.clock + 1
        missing = any(self._counts[worker] < clock for worker in self._live)
        present = {worker for pushed, worker in self._pending if pushed == clock}
        if clock <= self.last and present and (not missing or self._is_enough(len(present))):
            self.clock = clock
            return [push for push in self._pending if push[0] <= clock]
        late = [push for push in self._pending if push[0] <= self.clock]
        others = self._live - {worker for _, worker in late}
        able = present | {worker for worker in others if self._counts[worker] >= self.clock}
        return late if late and not self._is_enough(len(able)) else None

    def _is_enough(self, pushes: int) -> bool:
        """Tell whether so many pushes complete the next clock without those of other live workers."""
        aggregate = self.rule.aggregate
        return aggregate is not None and self.clock + 1 < self.last and pushes >= aggregate

    def _apply(self, taken: list[tuple[int, int]]) -> Apply:
        self.version += 1
        self._pending = [push for push in self._pending if push not in taken]
        for _, worker in taken:
            self.applied[worker] += 1
        return Apply(tuple((worker, clock) for clock, worker in sorted(taken)), self.version, self.clock)

    def _is_answered(self, worker: int) -> bool:
        count = self._counts[worker]
        return count < self.last and (self.rule.mode == ASYNC or self.clock >= count - self.rule.staleness)

    def _reply(self, worker: int) -> Reply:
        self._waiting.discard(worker)
        self._answered[worker], self._held[worker] = self._counts[worker], self.clock
        return Reply(worker, self._counts[worker])
