"""Local steps: the global weights against a one-process twin, and whole runs against sync and against themselves."""

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.collectives.base import Transport
from mpitrain.collectives.registry import make_reducer
from mpitrain.comm.grid import Axis
from mpitrain.config.schema import ExchangeConfig
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.train.buckets import group_of, plan_buckets, stream_of
from mpitrain.train.outer import GlobalWeights, deal_buckets
from tests.reference.collectives import DirectTwin, RingTwin
from tests.reference.local import LocalTwin

SPECS = [
    ParamSpec("first.weight", (40, 33), std=0.5),
    ParamSpec("first.bias", (33,), std=0.1),
    ParamSpec("second.weight", (33, 50), std=0.5),
    ParamSpec("second.bias", (50,), std=0.1),
    ParamSpec("third.weight", (50, 40), std=0.5),
    ParamSpec("head.weight", (40, 3), std=0.5),
]
TWINS = {"direct": DirectTwin, "ring": RingTwin, "native": DirectTwin}


def configured(**values):
    defaults = {"when": "local", "memory": "none", "h": 3, "bucket_mb": 1e-6, "outer_lr": 0.7, "outer_momentum": 0.9}
    return ExchangeConfig(**(defaults | values))


class Both:
    """Replicas over MPI and their twin, which every rank computes as a whole."""

    def __init__(self, comm, config):
        self.axis, self.config = Axis(comm), config
        self.local = Params(Layout(SPECS, group_of(config)))
        self.local.initialize(3)
        reducer = make_reducer(config.collective, self.axis, Transport(20.0))
        alone = Axis(MPI.COMM_SELF, "replica")
        self.common = GlobalWeights(reducer, self.local, config, seed=1, shared=(), replica=alone)
        self.common.begin()
        self.twin = LocalTwin(
            self.local.flat,
            self.axis.size,
            self.buckets(),
            deal_buckets(self.local.layout, config, ()),
            h=config.h,
            lr=config.outer_lr,
            mu=config.outer_momentum,
            delay=config.delay,
            merge=config.merge,
        )

    def buckets(self):
        found = []
        for segments in plan_buckets(self.local.layout, self.config.bucket_mb):
            codec, memory = stream_of(segments[0].spec, self.config, np.float32)
            start, stop = segments[0].start, segments[-1].stop
            found.append((start, stop, TWINS[self.config.collective](codec, memory, stop - start, self.axis.size)))
        return found

    def round(self, first, length, *, samples=None, spoil=lambda step, moves: None):
        """Take a round of steps on both; ``samples`` of every replica and step, 5 + rank where left out."""
        accepted = []
        size, ranks = self.local.flat.size, self.axis.size
        padding = self.twin.weights == 0
        for turn in range(1, length + 1):
            step = first + turn - 1
            moves = np.random.default_rng(step).standard_normal((ranks, size)).astype(np.float32) * np.float32(0.01)
            moves[:, padding] = 0
            spoil(step, moves)
            used = np.array([5.0 + rank for rank in range(ranks)]) if samples is None else samples(step)
            due = float(sum(5 + rank for rank in range(ranks)))
            self.local.flat[:] += moves[self.axis.rank]
            self.common.count(float(used[self.axis.rank]), due)
            self.common.poll()
            accepted += self.common.meet(step, turn, length)[0]
            with np.errstate(all="ignore"):
                self.twin.step(turn, length, moves, used, due)
        return accepted

    def same(self):
        """Whether this replica is the twin's, to the bit."""
        mine = self.twin.replicas[self.axis.rank]
        return (
            np.array_equal(self.common.params.flat, self.twin.weights)
            and np.array_equal(self.common.momentum.flat, self.twin.momentum)
            and np.array_equal(self.local.flat, mine)
        )


@pytest.mark.parametrize("memory", ["residual", "delta"])
@pytest.mark.parametrize("codec", ["int8", "int4"])
@pytest.mark.parametrize("collective", ["direct", "ring"])
def test_outer_steps_equal_their_twin(world, everywhere, collective, codec, memory):
    both = Both(world, configured(collective=collective, codec=codec, memory=memory))
    before = both.local.flat.copy()
    for number in range(5):
        assert both.round(3 * number + 1, 3) == [True]
        assert both.same()
        assert everywhere(both.common.params.flat)
        assert np.array_equal(both.local.flat, both.common.params.flat)
    assert not np.array_equal(both.local.flat, before)


@pytest.mark.parametrize("collective", ["direct", "ring", "native"])
def test_raw_changes(comm, collective):
    """MPI's own sum has an order of its own, so it is compared by tolerance."""
    both = Both(comm, configured(collective=collective, codec="raw"))
    for number in range(3):
        both.round(3 * number + 1, 3)
    assert both.same() or collective == "native"
    assert np.allclose(both.common.params.flat, both.twin.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("merge", [0.0, 0.5])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 5), (2, 2), (3, 1), (4, 0), (4, 1)])
def test_fragments_equal_their_twin(world, everywhere, fragments, delay, merge):
    """With rounds of 6 steps, the last one short; at the end of each nothing is under way.

    Every replica misses some steps, so that it matters which ones count for a change.
    """

    def samples(step):
        return np.array([(5.0 + rank) * ((step + rank) % 3 > 0) for rank in range(world.size)])

    both = Both(world, configured(h=6, fragments=fragments, delay=delay, merge=merge, codec="int8", memory="residual"))
    for first, length in ((1, 6), (7, 6), (13, 4)):
        assert both.round(first, length, samples=samples) == [True] * fragments
        assert both.same()
        assert everywhere(both.common.params.flat)


def test_empty_shares(comm):
    """A replica without samples for a whole round has no weight; in a step or two, less."""
    both = Both(comm, configured(codec="raw"))
    last = both.axis.size - 1

    def samples(step):
        used = np.array([5.0 + rank for rank in range(both.axis.size)])
        used[last] = 0 if step <= 4 and last else used[last]
        return used

    for number in range(3):
        assert both.round(3 * number + 1, 3, samples=samples) == [True]
        assert both.same()


def test_nobody_used_a_sample(comm):
    both = Both(comm, configured(codec="int8", memory="residual"))
    both.round(1, 3)
    kept = both.common.params.flat.copy()
    assert both.round(4, 3, samples=lambda step: np.zeros(both.axis.size)) == [False]
    assert np.array_equal(both.common.params.flat, kept)
    assert both.same()
    assert both.round(7, 3) == [True]
    assert both.same()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_change_that_is_not_finite_is_rejected_everywhere(world, fragments, value):
    """Weights, momentum and memories stay; all replicas begin anew from the last global weights, and go on."""
    both = Both(world, configured(h=4, fragments=fragments, codec="int8", memory="residual", merge=0.5))
    where = both.common.sums[0].ranges[0][0]

    def spoil(step, moves):
        if step == 5:
            moves[-1, where] = value

    assert both.round(1, 4) == [True] * fragments
    memories = {name: state.current.copy() for name, state in both.common.sums[0].state().items()}
    weights = both.common.params.flat.copy()
    assert both.round(5, 4, spoil=spoil) == [False, True][:fragments]
    assert all(np.array_equal(memories[name], state.current) for name, state in both.common.sums[0].state().items())
    for start, stop in both.common.sums[0].ranges:
        assert np.array_equal(both.common.params.flat[start:stop], weights[start:stop])
    assert both.same()
    assert both.twin.skipped == 1
    assert both.round(9, 4) == [True] * fragments
    assert both.same()


def test_patience_with_slower_replicas(comm):
    """Beyond the silence of a dead peer, as long as replicas may need that compute at a tenth of the speed here."""
    both = Both(comm, configured(codec="raw"))
    reducer = both.common.sums[0].reducer
    both.common.allow(7.0)
    assert reducer.transport.timeout_s == 20 + 70
    both.common.allow(0.5)
    assert reducer.transport.timeout_s == 20 + 5
    both.round(1, 3)
    assert both.same()
