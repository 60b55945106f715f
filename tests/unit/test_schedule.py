"""Plans of the pipeline: complete, in order, without deadlock, and as fast and as frugal as theory says."""

import itertools

import pytest

from mpitrain.errors import ConfigError
from mpitrain.parallel.schedule import Action, plan, simulate

SCHEDULES = [("afab", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)]
SIZES = list(itertools.product(range(1, 7), range(1, 10)))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_pass_once_and_backward_behind_forward(schedule, chunks):
    for stages, micros in SIZES:
        order = plan(schedule, stages, micros, chunks)
        wanted = {Action(k, c, m) for k in ("forward", "backward") for c in range(chunks) for m in range(micros)}
        assert len(order) == stages
        for actions in order:
            assert len(actions) == len(wanted)
            assert set(actions) == wanted
            place = {action: index for index, action in enumerate(actions)}
            for chunk, micro in itertools.product(range(chunks), range(micros)):
                assert place["forward", chunk, micro] < place["backward", chunk, micro]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_micro_batches_of_a_chunk_do_not_overtake_each_other(schedule, chunks):
    """Messages across one cut are taken in the order in which they are sent."""
    for stages, micros in SIZES:
        for actions in plan(schedule, stages, micros, chunks):
            for kind, chunk in itertools.product(("forward", "backward"), range(chunks)):
                assert [a.micro for a in actions if (a.kind, a.chunk) == (kind, chunk)] == list(range(micros))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_no_deadlock_and_the_bubble_of_theory(schedule, chunks):
    """T01: any number of micro-batches. (p-1)/(vm+p-1) where the groups are full, whatever the passes take."""
    for (stages, micros), (forward_s, backward_s) in itertools.product(SIZES, [(1.0, 2.0), (1.0, 1.0), (0.5, 3.0)]):
        result = simulate(plan(schedule, stages, micros, chunks), forward_s, backward_s)
        assert result.makespan_s >= chunks * micros * (forward_s + backward_s)
        if chunks == 1 or micros % stages == 0:
            assert result.bubble == pytest.approx((stages - 1) / (chunks * micros + stages - 1), abs=1e-12)


def test_uneven_groups_cost_no_more_than_the_next_full_one():
    for stages, micros in SIZES:
        for chunks in (2, 3):
            full = -(-micros // stages) * stages
            uneven = simulate(plan("interleaved", stages, micros, chunks))
            assert uneven.makespan_s <= simulate(plan("interleaved", stages, full, chunks)).makespan_s


def test_micro_batches_in_flight():
    for stages, micros in SIZES:
        assert simulate(plan("afab", stages, micros)).in_flight == [micros] * stages
        assert simulate(plan("1f1b", stages, micros)).in_flight == [min(micros, stages - s) for s in range(stages)]
        for chunks in (2, 3):
            bounds = [min(chunks * micros, 2 * (stages - 1 - s) + (chunks - 1) * stages + 1) for s in range(stages)]
            in_flight = simulate(plan("interleaved", stages, micros, chunks)).in_flight
            assert all(most <= bound for most, bound in zip(in_flight, bounds, strict=True))


def test_interleaved_with_one_chunk_is_1f1b():
    for stages, micros in SIZES:
        assert plan("interleaved", stages, micros, 1) == plan("1f1b", stages, micros, 1)


def test_a_small_plan_by_hand():
    """Three stages, four micro-batches, one letter a pass."""
    order = plan("1f1b", 3, 4)
    letters = ["".join(f"{action.kind[0]}{action.micro}" for action in actions) for actions in order]
    assert letters == ["f0f1f2b0f3b1b2b3", "f0f1b0f2b1f3b2b3", "f0b0f1b1f2b2f3b3"]


def test_simulator_finds_a_deadlock():
    """Both stages begin with what only the other one can give."""
    order = plan("1f1b", 2, 2)
    order[0].sort(key=lambda action: action.micro)
    order[1].sort(key=lambda action: (action.kind, action.micro), reverse=True)
    with pytest.raises(RuntimeError, match=r"wait for each other: stage 0 before .*backward.*stage 1 before"):
        simulate(order)


def test_refusals():
    with pytest.raises(ConfigError, match=r"parallel.schedule: expected one of 1f1b, afab, interleaved, got 'gpipe'"):
        plan("gpipe", 2, 2)
    with pytest.raises(ConfigError, match='chunks = 2 with schedule = "1f1b".*interleaved'):
        plan("1f1b", 2, 2, 2)
