"""When a training loss that stays finite counts as diverged."""

import math

import pytest

from mpitrain.errors import ExitCode
from mpitrain.train.run import _crossed
from mpitrain.train.stopping import WATCHED, LossWatch


def steps_until_diverged(losses, limit, samples=1):
    watch = LossWatch()
    return next((step for step, loss in enumerate(losses, 1) if watch.diverged(loss, samples, limit)), None)


@pytest.mark.parametrize(
    ("losses", "limit", "step"),
    [
        ([2.0] * 200, 10, None),
        ([2.0] * 20 + [20.0] * 200, 10, None),  # just ten times as much
        ([2.0] * 20 + [20.1] * 200, 10, 31),
        ([2.0] * 20 + [1000.0] * 9 + [2.0] * 100, 10, None),  # outliers: the median of twenty is what counts
        ([2.0] * 20 + [1.0] * 9 + [4e3] * 20, 10, 39),
        ([2.0] * 20 + [1e30] * 100, 0, None),  # no bound
        ([2.0] * 10 + [math.nan, math.inf] + [2.0] * 10 + [30.0] * 20, 10, 33),  # rejected steps do not count
        ([0.0] * 20 + [1e-9] * 20, 10, 30),
    ],
)
def test_when_a_run_counts_as_diverged(losses, limit, step):
    assert steps_until_diverged(losses, limit) == step


def test_the_first_losses_of_a_resumed_run_are_those_of_its_first_start():
    watch = LossWatch()
    assert not any(watch.diverged(1.0, 4, 10) for _ in range(WATCHED))
    again = LossWatch(list(watch.first), [], watch.samples)
    assert [again.diverged(11.0, 4, 10) for _ in range(WATCHED)] == [False] * (WATCHED - 1) + [True]
    error = again.error(40)
    assert (error.exit_code, error.agreed) == (ExitCode.DIVERGED, True)
    assert "step 40: the median training loss of 20 steps is 11, after 1 in the first ones" in str(error)


@pytest.mark.parametrize(("samples", "step"), [(64, 20), (20, 20), (1, None)])
def test_large_batches_tell_with_the_first_step(samples, step):
    """P04: a rate that is far too high shows in the second step; of single samples nobody knows what is usual."""
    assert steps_until_diverged([1.8] + [30.0] * 100, 10, samples) == step


@pytest.mark.parametrize(
    ("every", "before", "step", "due"),
    [
        (0, 0, 100, False),
        (10, 9, 10, True),
        (10, 10, 11, False),
        (10, 0, 30, True),
        (30, 60, 89, False),
        (7, 6, 8, True),
    ],
)
def test_what_is_due_at_the_end_of_a_round(every, before, step, due):
    assert _crossed(every, before, step) is due
