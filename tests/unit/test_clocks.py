"""Clocks of the parameter server: by hand, and under any interleaving of pushes, answers, deaths and stops."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.config.schema import ExchangeConfig
from mpitrain.errors import ProtocolError
from mpitrain.server.clocks import (
    Apply,
    Clocks,
    Drop,
    Refresh,
    Reply,
    Rule,
    Turns,
    granted,
    may_go,
    rule_of,
    staleness_of,
)


def started(workers, last, **rule):
    clocks = Clocks(workers, Rule(**rule))
    clocks.begin_round(last)
    return clocks


class Worker:
    """The other side: begins what it may begin, and knows only what has arrived."""

    def __init__(self, rule, last):
        self.rule, self.last = rule, last
        self.pushed = self.answered = self.held = self.version = 0
        self.begun = []  # (clock, complete clock and version of its weights)
        self.pushes, self.replies = deque(), deque()
        self.live, self.over = True, False

    def can_begin(self):
        allowed = may_go(self.rule, self.pushed, self.answered, self.held)
        return self.live and not self.over and self.pushed < self.last and allowed

    def begin(self):
        self.pushed += 1
        self.begun.append((self.pushed, self.held, self.version))
        self.pushes.append(self.pushed)

    def receive(self):
        kind, clock, self.held, self.version, self.last = self.replies.popleft()
        if kind is Refresh:
            self.over = True
        else:
            self.answered = clock


class Run:
    """A server and its workers, with messages that arrive whenever the test says so."""

    def __init__(self, workers, last, rule):
        self.rule, self.clocks = rule, Clocks(workers, rule)
        self.clocks.begin_round(last)
        self.workers = [Worker(rule, last) for _ in range(workers)]
        self.ops = []

    def choices(self):
        for number, worker in enumerate(self.workers):
            if worker.can_begin():
                yield "begin", number
            if worker.pushes and self.has_room(number):
                yield "push", number
            if worker.live and worker.replies and (self.has_room(number) or self.clocks.ended):
                yield "receive", number

    def has_room(self, number):
        """Whether another push of the worker can be taken: the server keeps few until they are applied or dropped."""
        clocks, slots = self.clocks, self.rule.window if self.rule.mode == "async" else self.rule.staleness + 1
        return clocks.pushed[number] - clocks.applied[number] - clocks.dropped[number] < slots

    def take(self, what, number):
        worker = self.workers[number]
        if what == "begin":
            worker.begin()
        elif what == "receive":
            worker.receive()
        elif what == "push":
            worker.pushes.popleft()
            self.execute(self.clocks.push(number))
        elif what == "leave" and worker.live:
            worker.live = False
            while worker.pushes:  # a goodbye comes behind what was sent
                self.take("push", number)
            self.execute(self.clocks.leave(number))
        elif what == "stop":
            self.clocks.stop()

    def execute(self, ops):
        clocks = self.clocks
        self.ops += ops
        for op in ops:
            if isinstance(op, Reply):
                self.workers[op.worker].replies.append((Reply, op.clock, clocks.clock, clocks.version, clocks.last))
            if isinstance(op, Refresh):
                for number in clocks.live:
                    news = (Refresh, 0, clocks.clock, clocks.version, clocks.last)
                    self.workers[number].replies.append(news)

    def finish(self):
        while steps := list(self.choices()):
            self.take(*steps[0])

    def of_kind(self, kind):
        return [op for op in self.ops if isinstance(op, kind)]


rules = st.one_of(
    st.builds(
        Rule,
        staleness=st.integers(0, 4),
        aggregate=st.none() | st.integers(1, 4),
        late=st.sampled_from(["apply", "drop"]),
    ),
    st.builds(Rule, mode=st.just("async"), window=st.integers(1, 3)),
)
runs = st.builds(Run, st.integers(1, 4), st.integers(1, 9), rules)
numbers = st.lists(st.integers(0, 10**6), max_size=120)


def play(run, choices, disturbances=()):
    """Let the numbers choose what happens; then let everything come to its end."""
    disturbances = dict(disturbances)
    for turn, number in enumerate(choices):
        if turn in disturbances:
            run.take(*disturbances[turn])
        steps = list(run.choices())
        if steps:
            run.take(*steps[number % len(steps)])
    run.finish()


@settings(max_examples=200, deadline=None)
@given(runs, numbers, st.data())
def test_any_interleaving_ends_and_accounts_for_every_push(run, choices, data):
    """No worker waits for ever, whoever dies and whenever somebody wants to stop (P01)."""
    last = run.clocks.last
    who = st.integers(0, len(run.workers) - 1)
    what = st.tuples(st.sampled_from(["leave", "stop"]), who)
    play(run, choices, data.draw(st.lists(st.tuples(st.integers(0, 60), what), max_size=4)))
    clocks, applies = run.clocks, run.of_kind(Apply)
    assert clocks.ended
    assert len(run.of_kind(Refresh)) == 1
    assert run.ops[-1] == Refresh()
    assert clocks.waiting == ()
    assert clocks.last <= last
    for worker in run.workers:
        assert not worker.live or (worker.over and worker.pushed == clocks.last == worker.last)
    assert [op.version for op in applies] == list(range(1, clocks.version + 1))
    assert [op.clock for op in applies] == sorted(op.clock for op in applies)
    for number, worker in enumerate(run.workers):
        of_worker = [clock for op in applies for who, clock in op.pushes if who == number]
        dropped = [op.clock for op in run.of_kind(Drop) if op.worker == number]
        assert of_worker == sorted(of_worker)  # the order of a worker's pushes is kept
        assert sorted(of_worker + dropped) == list(range(1, worker.pushed + 1))  # each of them once
        assert clocks.pushed[number] == worker.pushed == clocks.applied[number] + clocks.dropped[number]
        assert (clocks.applied[number], clocks.dropped[number]) == (len(of_worker), len(dropped))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 4), numbers)
def test_staleness_is_bounded_and_clocks_are_applied_once_in_order(workers, last, staleness, choices):
    run = Run(workers, last, Rule(staleness=staleness))
    play(run, choices)
    everyone = range(workers)
    wanted = [Apply(tuple((worker, clock) for worker in everyone), clock, clock) for clock in range(1, last + 1)]
    assert run.of_kind(Apply) == wanted
    for worker in run.workers:
        for clock, held, version in worker.begun:
            assert 0 <= clock - 1 - held <= staleness
            assert held == version
    if staleness == 0:  # the order of a synchronous server, whatever arrives first
        assert all(held == clock - 1 for worker in run.workers for clock, held, _ in worker.begun)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), numbers)
def test_async_applies_on_arrival_and_keeps_to_the_window(workers, last, window, choices):
    run = Run(workers, last, Rule(mode="async", window=window))
    for number in choices:
        steps = list(run.choices())
        if not steps:
            break
        what, who = steps[number % len(steps)]
        before = len(run.ops)
        run.take(what, who)
        worker = run.workers[who]
        assert worker.pushed - worker.answered <= window
        if what == "push":
            clock = run.clocks.count(who)
            slowest = min(run.clocks.count(each) for each in range(workers))
            answer = [Reply(who, clock)] if clock < last else [Refresh()] * (slowest == last)
            assert run.ops[before:] == [Apply(((who, clock),), run.clocks.version, slowest), *answer]
    run.finish()
    assert run.clocks.version == workers * last


@settings(max_examples=100, deadline=None)
@given(runs, numbers, st.integers(0, 100))
def test_after_a_stop_nobody_is_behind_the_end(run, choices, when):
    """The round ends where no live worker may have begun anything later, and no later than needed."""
    for number in choices[:when]:
        if steps := list(run.choices()):
            run.take(*steps[number % len(steps)])
    over = run.clocks.ended
    last, begun = run.clocks.last, max(worker.pushed for worker in run.workers)
    limits = [run.clocks.limit(number) for number in range(len(run.workers))]
    run.clocks.stop()
    assert begun <= run.clocks.last <= last
    if not over:
        assert run.clocks.last == max(limits)
    run.finish()
    assert {worker.pushed for worker in run.workers} == {run.clocks.last}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 5), min_size=1, max_size=4), rules, numbers)
def test_rounds_follow_each_other(workers, lengths, rule, choices):
    clocks, last = Clocks(workers, rule, clock=7, version=3), 7
    for length in lengths:
        last += length
        clocks.begin_round(last)
        while not clocks.ended:
            free = [w for w in range(workers) if clocks.count(w) < clocks.limit(w)]
            clocks.push(free[(choices.pop() if choices else 0) % len(free)])
        assert clocks.clock == clocks.last == last
        assert [clocks.count(worker) for worker in range(workers)] == [last] * workers
    assert clocks.version > 3
    assert sum(clocks.applied) + sum(clocks.dropped) == sum(clocks.pushed) == workers * sum(lengths)


def test_synchronous_server_by_hand():
    clocks = started(3, 2)
    assert clocks.push(2) == []
    assert clocks.push(0) == []
    assert clocks.waiting == (0, 2)
    # In rank order, whoever came first; the answers begin with worker 0 and, the next time, behind it (P12).
    assert clocks.push(1) == [Apply(((0, 1), (1, 1), (2, 1)), 1, 1), Reply(0, 1), Reply(1, 1), Reply(2, 1)]
    assert clocks.push(1) == []
    assert clocks.push(0) == []
    assert clocks.push(2) == [Apply(((0, 2), (1, 2), (2, 2)), 2, 2), Refresh()]
    assert (clocks.clock, clocks.version, clocks.ended) == (2, 2, True)


def test_bounded_staleness_by_hand():
    clocks = started(2, 9, staleness=2)
    assert clocks.push(0) == [Reply(0, 1)]
    assert clocks.push(0) == [Reply(0, 2)]
    assert clocks.push(0) == []  # three ahead of worker 1: no answer until clock 1 is complete
    assert clocks.limit(0) == 3
    assert clocks.push(1) == [Apply(((0, 1), (1, 1)), 1, 1), Reply(1, 1), Reply(0, 3)]
    assert clocks.limit(0) == 4


def test_backup_workers_by_hand():
    """P09: late pushes are applied with the next update, or dropped with a count; never silently."""
    for late in ("apply", "drop"):
        clocks = started(3, 3, aggregate=2, late=late)
        clocks.push(0)
        assert clocks.push(1) == [Apply(((0, 1), (1, 1)), 1, 1), Reply(0, 1), Reply(1, 1)]
        assert clocks.push(2) == [Drop(2, 1)] * (late == "drop") + [Reply(2, 1)]
        clocks.push(0)
        kept = ((2, 1),) if late == "apply" else ()
        assert clocks.push(1)[0] == Apply((*kept, (0, 2), (1, 2)), 2, 2)
        # The last clock of a round takes everybody's push, since all meet there.
        assert clocks.push(0) + clocks.push(1) == []
        own = Apply(((2, 2),), 3, 2) if late == "apply" else Drop(2, 2)
        assert clocks.push(2) == [own, Reply(2, 2)]
        assert clocks.push(2) == [Apply(((0, 3), (1, 3), (2, 3)), clocks.version, 3), Refresh()]
        assert clocks.dropped == ([0, 0, 2] if late == "drop" else [0, 0, 0])
        assert clocks.applied == ([3, 3, 1] if late == "drop" else [3, 3, 3])


def test_a_late_push_behind_the_last_clock_is_applied_too():
    """Worker 2 is three clocks behind when the others leave and somebody stops the round where they were."""
    clocks = started(3, 9, aggregate=2)
    for _ in range(3):
        clocks.push(0)
        clocks.push(1)
    assert clocks.clock == 3
    assert clocks.leave(0) + clocks.leave(1) == []
    clocks.stop()
    assert clocks.last == 3
    assert clocks.push(2) == [Apply(((2, 1),), 4, 3), Reply(2, 1)]
    assert clocks.push(2) == [Apply(((2, 2),), 5, 3), Reply(2, 2)]
    assert clocks.push(2) == [Apply(((2, 3),), 6, 3), Refresh()]


def test_a_late_push_waits_for_the_next_update_unless_that_waits_for_its_worker():
    def three_ahead():
        clocks = started(4, 5, aggregate=3)
        for worker in (0, 1, 2, 0, 1, 2):
            clocks.push(worker)
        assert clocks.clock == 2
        assert clocks.push(3) == [Reply(3, 1)]  # the three others suffice for clock 3
        return clocks

    clocks = three_ahead()
    clocks.push(0)
    assert clocks.leave(0) == []  # its push is here
    clocks.push(1)
    assert clocks.push(2)[0] == Apply(((3, 1), (0, 3), (1, 3), (2, 3)), 3, 3)

    clocks = three_ahead()
    # Without worker 0 they do not: the next update needs worker 3, which has to catch up first.
    assert clocks.leave(0) == [Apply(((3, 1),), 3, 2)]
    assert clocks.push(3) == [Apply(((3, 2),), 4, 2), Reply(3, 2)]
    assert clocks.push(1) + clocks.push(2) == []
    assert clocks.push(3) == [Apply(((1, 3), (2, 3), (3, 3)), 5, 3), Reply(1, 3), Reply(2, 3), Reply(3, 3)]


def test_a_worker_that_leaves_is_not_waited_for_but_counts():
    clocks = started(3, 4, staleness=1)
    clocks.push(0)
    clocks.push(1)
    clocks.push(1)
    assert clocks.leave(2) == [Apply(((0, 1), (1, 1)), 1, 1), Reply(1, 2)]
    assert clocks.leave(2) == []
    assert clocks.leave(1) == []
    assert clocks.push(0) == [Apply(((0, 2), (1, 2)), 2, 2), Reply(0, 2)]
    assert clocks.live == (0,)
    clocks.push(0)
    assert clocks.leave(0) == [Refresh()]
    assert (clocks.clock, clocks.last, clocks.pushed) == (3, 4, [3, 2, 0])


def test_workers_that_finish_at_different_clocks():
    """P03: 1, 2 and 3 steps; the server's round ends with the slowest."""
    for rule in (Rule(), Rule(staleness=2), Rule("async")):
        clocks = Clocks(3, rule)
        clocks.begin_round(9)
        for clock in (1, 2, 3):
            for worker in range(clock - 1, 3):
                clocks.push(worker)
            ops = clocks.leave(clock - 1)
        assert ops[-1] == Refresh()
        assert (clocks.pushed, clocks.applied) == ([1, 2, 3], [1, 2, 3])
        assert (clocks.clock, clocks.version) == (3, 6 if rule.mode == "async" else 3)


@pytest.mark.parametrize(
    ("rule", "allowed"), [(Rule(), 1), (Rule(staleness=2), 3), (Rule("async"), 1), (Rule("async", window=3), 3)]
)
def test_how_far_a_worker_may_go_without_news(rule, allowed):
    assert granted(rule, 0, 0) == started(2, 9, **vars(rule)).limit(0) == allowed
    assert [may_go(rule, pushed, 0, 0) for pushed in range(5)] == [pushed < allowed for pushed in range(5)]
    assert started(2, 1, **vars(rule)).limit(0) == 1


def test_a_flood_of_pushes_is_refused():
    clocks = started(2, 9, staleness=2)
    for _ in range(3):
        clocks.push(0)
    with pytest.raises(ProtocolError) as refused:
        clocks.push(0)
    assert str(refused.value) == "server: worker 0 pushed clock 4, but may be no further than clock 3"
    assert clocks.pushed == [3, 0]


def test_pushes_out_of_place_are_refused():
    clocks = Clocks(2, Rule())
    with pytest.raises(ProtocolError) as refused:
        clocks.push(0)
    assert str(refused.value) == "server: worker 0 pushed clock 1, but may be no further than clock 0"
    clocks.begin_round(1)
    clocks.leave(1)
    with pytest.raises(ProtocolError) as refused:
        clocks.push(1)
    assert str(refused.value) == "server: worker 1 has left, but pushed clock 1"
    with pytest.raises(RuntimeError, match="cannot begin at clock 1, ended: False"):
        clocks.begin_round(2)
    assert clocks.push(0)[-1] == Refresh()
    with pytest.raises(RuntimeError, match="up to clock 1 cannot begin at clock 1, ended: True"):
        clocks.begin_round(1)


def test_the_rule_of_a_configuration():
    """Sync is ssp(0), whatever else is set."""
    settings = {"staleness": 3, "window": 2, "aggregate": 2, "late": "drop"}
    rules = {mode: rule_of(ExchangeConfig(mode=mode, **settings)) for mode in ("sync", "ssp", "async")}
    assert rules["sync"] == Rule("ssp", staleness=0, aggregate=2, late="drop")
    assert rules["ssp"] == Rule("ssp", staleness=3, aggregate=2, late="drop")
    assert rules["async"] == Rule("async", window=2)


def test_staleness_counts_updates_between():
    """An update that makes version 5 of weights of version 4 is fresh; of version 2 it is two updates late."""
    assert [staleness_of(version=5, held_version=held) for held in (4, 2)] == [0, 2]


def test_turns_begin_behind_the_first_of_the_last_time():
    turns = Turns(3)
    assert [turns.order({0, 1, 2}) for _ in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert turns.order([]) == []
    assert turns.order([0, 2]) == [2, 0]


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=60))
def test_nobody_is_last_for_ever(batches):
    """Of two workers that are ready together n times in a row, each comes before the other (n - 1) / 5 times."""
    turns, run = Turns(5), 0
    both_first = {1: 0, 3: 0}
    for batch in batches:
        order = turns.order(batch | {1, 3})
        run += 1
        both_first[min((1, 3), key=order.index)] += 1
    assert min(both_first.values()) >= (run - 1) // 5
