"""Past activations: slots on first appearance, nothing before the commit, the budget held."""

import numpy as np
import pytest

from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.errors import ConfigError
from mpitrain.parallel.coding import Differential, Plain
from mpitrain.parallel.references import FREE, References


def references(capacity=3, elements=2):
    return References(elements, 100, capacity * elements * 4, np.float32)


def rows(*values):
    return np.array([[value, -value] for value in values], np.float32)


def test_slots_go_to_the_first_samples():
    store = references()
    past, slots = store.look_up(np.array([70, 5, 70, 9, 8]))
    assert slots.tolist() == [0, 1, 0, 2, FREE]
    assert not past.any()
    store.stage(slots, rows(1, 2, 3, 4, 5))
    store.commit()
    past, slots = store.look_up(np.array([8, 9, 70, 5]))
    assert slots.tolist() == [FREE, 2, 0, 1]
    assert past.tolist() == rows(0, 4, 3, 2).tolist()  # of 70, the later one
    assert (store.hits, store.misses) == (3, 6)


def test_a_step_sees_only_what_was_committed():
    store = references()
    for value in (1, 2):
        _, slots = store.look_up(np.array([7]))
        store.stage(slots, rows(value))
    assert not store.look_up(np.array([7]))[0].any()
    store.commit()
    assert store.look_up(np.array([7]))[0].tolist() == rows(2).tolist()


def test_rollback_leaves_nothing():
    store = references()
    _, slots = store.look_up(np.array([4]))
    store.stage(slots, rows(1))
    store.commit()
    before = {name: values.copy() for name, values in store.state().items()}
    _, slots = store.look_up(np.array([4, 6]))
    store.stage(slots, rows(8, 9))
    store.rollback()
    assert all(np.array_equal(values, before[name]) for name, values in store.state().items())
    _, slots = store.look_up(np.array([3, 6]))
    assert slots.tolist() == [1, 2]
    store.rollback()


def test_arrays_of_a_state_bring_everything_back():
    old, new = references(), references()
    _, slots = old.look_up(np.array([4, 6]))
    old.stage(slots, rows(1, 2))
    old.commit()
    for name, values in new.state().items():
        values[...] = old.state()[name]
    for samples in ([6, 4, 1, 2], [1]):
        results = [store.look_up(np.array(samples)) for store in (old, new)]
        assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_staged_arrays_are_not_copied_where_all_have_slots():
    store, values = references(), rows(1, 2)
    _, slots = store.look_up(np.array([1, 2]))
    store.stage(slots, values)
    assert store.nbytes == 3 * (2 * 4 + 8) + values.nbytes


@pytest.mark.parametrize(("samples", "budget", "capacity"), [(5, 10**6, 5), (100, 7, 0), (100, 8, 1), (0, 100, 0)])
def test_capacity(samples, budget, capacity):
    store = References(2, samples, budget, np.float32)
    assert store.capacity == capacity
    past, slots = store.look_up(np.arange(2))
    store.stage(slots, rows(1, 2))
    store.commit()
    assert past.shape == (2, 2)
    assert store.state()["values"].shape == (capacity, 2)


@pytest.mark.parametrize(("elements", "capacity"), [(1, 8), (127, 8), (200, 8), (256, 6)])
@pytest.mark.parametrize("name", sorted(set(CODECS) - {"raw"}))
def test_both_ends_stay_equal_and_errors_shrink(name, elements, capacity):
    """The same samples again and again, each time in another order; with whole blocks also beside some without past."""
    rng = np.random.default_rng(elements)
    truth = rng.standard_normal((8, elements)).astype(np.float32)
    ends = [Differential(make_codec(name), references(capacity, elements)) for _ in range(2)]
    errors = []
    for _ in range(4):
        samples = rng.permutation(8)
        x, out = truth[samples], np.empty((8, elements), np.float32)
        wire = np.zeros(ends[0].max_nbytes(x.size), np.uint8)
        nbytes, nonfinite = ends[0].encode(x, samples, wire)
        assert nonfinite == 0
        ends[1].decode(wire[:nbytes], samples, out)
        for end in ends:
            end.references.commit()
        states = [end.references.state() for end in ends]
        assert all(states[0][key].tobytes() == states[1][key].tobytes() for key in states[0])
        owners = states[0]["owners"]
        errors.append(np.abs(states[0]["values"] - truth[owners]).max())
    assert errors[0] > 0
    # Four messages of topk carry a twenty-fifth of the values.
    assert (
        errors[-1] < errors[0] / {"int2": 1.4, "int2-rans": 1.4, "sign": 1.4, "ecq": 15}.get(name, 20) or name == "topk"
    )
    assert (ends[0].references.hits, ends[0].references.misses) == (3 * capacity, 32 - 3 * capacity)


def test_values_that_are_not_finite_take_slots_but_leave_no_past():
    coding = Differential(make_codec("int8"), references())
    wire = np.zeros(coding.max_nbytes(4), np.uint8)
    assert coding.encode(rows(1, np.nan), np.array([1, 2]), wire)[1] == 2
    coding.references.commit()
    assert not coding.references.look_up(np.array([2, 1]))[0].any()
    assert coding.references.look_up(np.array([9]))[1].tolist() == [2]


def test_delta_refuses_raw():
    with pytest.raises(ConfigError, match='memory = "delta" with codec = "raw"'):
        Differential(make_codec("raw"), references())


def test_plain_coding_is_the_codec():
    coding, x, out = Plain(make_codec("fp16")), rows(1, 2.5), np.empty((2, 2), np.float32)
    wire = np.zeros(coding.max_nbytes(4), np.uint8)
    assert coding.encode(x, np.arange(2), wire) == (8, 0)
    coding.decode(wire[:8], np.arange(2), out)
    assert out.tolist() == x.tolist()
