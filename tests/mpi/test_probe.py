"""Measuring links between real ranks: counts and agreement, never seconds."""

from itertools import permutations

import pytest

from mpitrain.bench.probe import find_stations, measured
from mpitrain.comm.agreement import gather
from mpitrain.comm.probing import FIRST_BYTES, STREAMS, Limits, host_names, probe
from mpitrain.errors import LaunchError

LITTLE = Limits(seconds=10.0, stream_bytes=FIRST_BYTES, timeout_s=20.0)


def test_every_ordered_pair_is_measured_once(axis):
    ways = probe(axis, list(range(axis.size)), LITTLE)
    assert sorted((way.source, way.dest) for way in ways) == list(permutations(range(axis.size), 2))
    for way in ways:
        assert way.alpha_s > 0
        assert way.bytes_s > 0
        assert way.sent_bytes == STREAMS * FIRST_BYTES
    told = [[way.source, way.dest, way.alpha_s, way.bytes_s] for way in ways]
    assert gather(axis, told) == [told] * axis.size


def test_ranks_that_are_left_out_hear_the_result(axis):
    chosen = [rank for rank in range(axis.size) if rank != 1]
    ways = probe(axis, chosen, LITTLE)
    assert sorted((way.source, way.dest) for way in ways) == list(permutations(chosen, 2))
    assert len(gather(axis, len(ways))) == axis.size


def test_from_ranks_to_a_topology(axis):
    names = host_names(axis)
    assert len(names) == axis.size
    if axis.size == 1:
        with pytest.raises(LaunchError):
            find_stations(names)
        return
    stations = find_stations(names)
    topology = measured(stations, probe(axis, [station.rank for station in stations], LITTLE))
    assert topology.slots == axis.size
    assert len(topology.links) == axis.size * (axis.size - 1) // 2
