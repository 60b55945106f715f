"""The simulator of the parameter server, against what can be counted by hand."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.server.clocks import Rule
from mpitrain.server.simulate import Costs, simulate

SYNC, ASYNC = Rule(), Rule("async")


def ssp(staleness):
    return Rule(staleness=staleness)


seconds = st.integers(1, 20).map(float)
tables = st.integers(1, 8).flatmap(
    lambda clocks: st.lists(st.lists(seconds, min_size=clocks, max_size=clocks), min_size=1, max_size=4)
)


@settings(max_examples=100, deadline=None)
@given(tables, st.integers(0, 9))
def test_bounds_and_closed_forms(step_s, staleness):
    """Sync: the slowest worker of every clock; async: the slowest worker; ssp: in between, and the recursion of it."""
    clocks = len(step_s[0])
    sync, between, free = (simulate(step_s, rule) for rule in (SYNC, ssp(staleness), ASYNC))
    assert sync.makespan_s == sum(max(column) for column in zip(*step_s, strict=True))
    assert free.makespan_s == max(map(sum, step_s))
    done = [[0.0] * (clocks + 1) for _ in step_s]
    for clock in range(1, clocks + 1):
        others = max(row[max(0, clock - 1 - staleness)] for row in done)
        for worker, row in enumerate(done):
            row[clock] = max(row[clock - 1], others) + step_s[worker][clock - 1]
    assert between.makespan_s == max(row[-1] for row in done)
    assert max(between.staleness) <= staleness
    assert set(sync.staleness) == {0}
    for result in (sync, between, free):
        assert sum(result.staleness.values()) == len(step_s) * clocks
        assert result.waiting_s == tuple(result.makespan_s - sum(steps) for steps in step_s)
        assert result.clocks_per_s == clocks / result.makespan_s


def test_one_permanently_slow_worker_sets_the_pace_of_every_bound():
    """A bound helps against slowness that comes and goes; here it only lets the others wait somewhere else."""
    step_s = [[1.0] * 10, [1.0] * 10, [4.0] * 10]
    for rule in (SYNC, ssp(1), ssp(4), ASYNC):
        assert simulate(step_s, rule).makespan_s == 40.0
    assert simulate(step_s, ssp(2)).waiting_s == (30.0, 30.0, 0.0)
    # With one worker in reserve the fast ones go on, but for the end of the round, where all meet.
    assert simulate([row[:1] for row in step_s], Rule(aggregate=2)).makespan_s == 4.0


def test_slowness_that_comes_and_goes_is_hidden_by_a_bound():
    step_s = [[4.0, 1.0, 1.0], [1.0, 4.0, 1.0], [1.0, 1.0, 4.0]]
    assert simulate(step_s, SYNC).makespan_s == 12.0
    assert simulate(step_s, ssp(1)).makespan_s == 8.0  # worker 2 begins clock 3 at 4, once clock 1 is complete
    assert simulate(step_s, ssp(2)).makespan_s == simulate(step_s, ASYNC).makespan_s == 6.0


def test_rounds_are_meetings():
    step_s = [[3.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 3.0]]
    assert simulate(step_s, ASYNC).makespan_s == 6.0
    assert simulate(step_s, ASYNC, rounds=[2]).makespan_s == 8.0
    assert simulate(step_s, SYNC, rounds=[1, 2, 3, 4]).makespan_s == simulate(step_s, SYNC).makespan_s == 8.0


def test_staleness_of_async_counts_updates_between():
    """Worker 0 makes updates at 1 and 2; the first one of worker 1, at 2.5, knows neither, its second one all."""
    result = simulate([[1.0, 1.0], [2.5, 2.5]], ASYNC)
    assert result.staleness == {0: 3, 2: 1}
    assert result.staleness != simulate([[1.0, 1.0], [2.5, 2.5]], SYNC).staleness == {0: 4}
    assert result.mean_staleness == 0.5


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (Costs(), 2.0),
        (Costs(latency_s=0.5), 4.0),  # two steps, each with a way there and a way back
        (Costs(update_s=0.25), 2.5),
        # Two pushes share the link: 0.2 + 0.2; so do two answers, or the weights at the end.
        (Costs(push_s=0.2), 2.8),
        (Costs(reply_s=0.2), 2.4),
        (Costs(refresh_s=0.3), 2.6),
    ],
)
def test_what_else_takes_time_in_a_synchronous_round(costs, expected):
    assert simulate([[1.0, 1.0], [1.0, 1.0]], SYNC, costs).makespan_s == pytest.approx(expected)


def test_a_window_and_a_bound_hide_the_latency():
    step_s = [[1.0] * 10]
    slow = Costs(latency_s=1.0)
    assert simulate(step_s, ASYNC, slow).makespan_s == 30.0
    assert simulate(step_s, Rule("async", window=3), slow).makespan_s == 12.0  # the last answer is waited for
    assert simulate(step_s, ssp(2), slow).makespan_s == 12.0
    assert simulate(step_s, ssp(1), slow).makespan_s == 16.0  # two steps every three seconds, and what is left


def test_the_same_seconds_give_the_same_run():
    draw = Random(3)
    step_s = [[0.05 * (4 if draw.random() < 0.15 else 1) for _ in range(200)] for _ in range(4)]
    first, again = (simulate(step_s, ssp(4), Costs(latency_s=0.001), rounds=[100]) for _ in range(2))
    assert first == again
    assert simulate(step_s, SYNC).makespan_s / first.makespan_s > 1.4
