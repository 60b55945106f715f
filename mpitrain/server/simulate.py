"""What a rule of the parameter server gives, event by event: the same `Clocks`, given seconds, without messages."""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mpitrain.server.clocks import Apply, Clocks, Refresh, Reply, Rule, may_go, staleness_of


@dataclass(frozen=True)
class Costs:
    """Seconds beside the steps themselves.

    Attributes
    ----------
    latency_s : float
        One way, for every message.
    push_s, reply_s, refresh_s : float
        For which a push, an answer, or the weights at the end of a round keep the server's link busy; it carries one
        message at a time in each direction, first come, first served.
    update_s : float
        Of one update at the server.
    """

    latency_s: float = 0.0
    push_s: float = 0.0
    reply_s: float = 0.0
    refresh_s: float = 0.0
    update_s: float = 0.0


FREE = Costs()
"""Nothing takes time but the steps."""


@dataclass(frozen=True)
class Simulated:
    """What came out.

    Attributes
    ----------
    clocks : int
        Steps of every worker.
    makespan_s : float
        Until all workers have the last weights.
    waiting_s : tuple of float
        Of every worker: when it does not compute.
    staleness : mapping
        How many gradients came how many updates late (`staleness_of`).
    """

    clocks: int
    makespan_s: float
    waiting_s: tuple[float, ...]
    staleness: Mapping[int, int]

    @property
    def clocks_per_s(self) -> float:
        """Throughput: steps that every worker has taken, a second."""
        return self.clocks / self.makespan_s

    @property
    def mean_staleness(self) -> float:
        """Mean over all gradients."""
        return sum(late * number for late, number in self.staleness.items()) / sum(self.staleness.values())


def simulate(
    step_s: Sequence[Sequence[float]], rule: Rule, costs: Costs = FREE, *, rounds: Sequence[int] = ()
) -> Simulated:
    """Run workers and one server through their clocks.

    Parameters
    ----------
    step_s : sequence of sequences
        Seconds of every step of every worker: ``step_s[worker][clock - 1]``, as many for each.
    rule : Rule
        When pushes are applied and answered.
    costs : Costs
        What else takes time.
    rounds : sequence of int
        Clocks, ascending, after which all meet; the last clock is always one.
    """
    clocks = len(step_s[0])
    run = _Run(step_s, rule, costs)
    for last in sorted({*rounds, clocks}):
        run.round(last)
    waiting = tuple(run.now - sum(steps) for steps in step_s)
    return Simulated(clocks, run.now, waiting, dict(sorted(run.staleness.items())))


@dataclass
class _Worker:
    pushed: int = 0
    answered: int = 0
    held_clock: int = 0
    held_version: int = 0
    busy: bool = False
    based_on: dict[int, int] = field(default_factory=dict)
    """Version of the weights that a clock was computed on, until its gradient is applied."""


class _Line:
    """A thing that does one thing at a time: a direction of the server's link, or the server."""

    def __init__(self) -> None:
        self._free = 0.0

    def take(self, now: float, seconds: float) -> float:
        """Return when something is done that could begin now."""
        self._free = max(now, self._free) + seconds
        return self._free


class _Run:
    def __init__(self, step_s: Sequence[Sequence[float]], rule: Rule, costs: Costs) -> None:
        self.now = 0.0
        self.staleness: Counter[int] = Counter()
        self._step_s, self._rule, self._costs = step_s, rule, costs
        self._clocks = Clocks(len(step_s), rule)
        self._workers = [_Worker() for _ in step_s]
        self._inward, self._outward, self._server = _Line(), _Line(), _Line()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def round(self, last: int) -> None:
        """Let all workers reach clock ``last``, and get the weights."""
        self._clocks.begin_round(last)
        for worker in range(len(self._workers)):
            self._go_on(worker)
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (time, self._scheduled, happen))

    def _go_on(self, number: int) -> None:
        """Begin the next step, if the worker has finished the last one and may."""
        worker = self._workers[number]
        allowed = may_go(self._rule, worker.pushed, worker.answered, worker.held_clock)
        if not worker.busy and worker.pushed < self._clocks.last and allowed:
            worker.busy = True
            worker.based_on[worker.pushed + 1] = worker.held_version
            self._at(self.now + self._step_s[number][worker.pushed], partial(self._step_done, number))

    def _step_done(self, number: int) -> None:
        worker = self._workers[number]
        worker.busy = False
        worker.pushed += 1
        arrival = self._inward.take(self.now + self._costs.latency_s, self._costs.push_s)
        self._at(arrival, partial(self._push_arrives, number))
        self._go_on(number)

    def _push_arrives(self, number: int) -> None:
        for op in self._clocks.push(number):
            done = self._server.take(self.now, self._costs.update_s if isinstance(op, Apply) else 0.0)
            if isinstance(op, Apply):
                self._count(op)
            elif isinstance(op, Reply):
                self._send(op.worker, done, self._costs.reply_s)
            elif isinstance(op, Refresh):
                for worker in self._clocks.live:
                    self._send(worker, done, self._costs.refresh_s)

    def _count(self, op: Apply) -> None:
        for number, clock in op.pushes:
            held_version = self._workers[number].based_on.pop(clock)
            self.staleness[staleness_of(version=op.version, held_version=held_version)] += 1

    def _send(self, number: int, now: float, seconds: float) -> None:
        clocks = self._clocks
        arrival = self._outward.take(now, seconds) + self._costs.latency_s
        news = partial(self._answer_arrives, number, clocks.count(number), clocks.clock, clocks.version)
        self._at(arrival, news)

    def _answer_arrives(self, number: int, answered: int, clock: int, version: int) -> None:
        worker = self._workers[number]
        worker.answered, worker.held_clock, worker.held_version = answered, clock, version
        self._go_on(number)
