"""`mpitrain bench step` on any number of ranks, with a model as small as can be: counts and bits, no seconds."""

from types import SimpleNamespace

import pytest

from mpitrain.bench import step as command
from mpitrain.bench.ours import OurFamily
from mpitrain.bench.rounds import Family, Taken, Turns, measure
from mpitrain.bench.step import Request
from mpitrain.comm.agreement import gather
from mpitrain.train.start import fit_grid

TINY = ["model.layers=1", "model.d_model=8", "model.d_ff=16", "data.window=4", "data.samples=200"]


def family(axis, cells, *overrides):
    configs = Request(None, [*TINY, "data.test_samples=16", *overrides], cells, 2, 3).resolve(axis.size)
    return OurFamily(axis, [(cell, fit_grid(resolved, axis)[0].config) for cell, resolved in configs])


def test_without_exchange_the_loop_trains_and_sends_nothing(axis, everywhere):
    ours = family(axis, ["raw", "int8:residual"])
    before = ours.alone.parts.params.flat.copy()
    alone = [ours.alone.step() for _ in range(3)]
    assert [taken.sent_bytes for taken in alone] == [0, 0, 0]
    assert (ours.alone.parts.params.flat != before).any()
    assert ours.alone.parts.num_parameters == ours.ways[0].parts.num_parameters
    assert len(ours.alone.parts.sampler.indices(0)) == len(ours.ways[0].parts.sampler.indices(0)) == 8
    taken = [[way.step() for _ in range(3)] for way in ours.ways]
    for way in ours.ways:
        assert everywhere(way.parts.params.flat)
    if axis.size == 1:  # with one batch for one rank, nothing tells the loop with exchange from that without
        assert taken == [alone, alone]
        assert (ours.ways[0].parts.params.flat == ours.alone.parts.params.flat).all()
    else:
        assert taken[0][0].sent_bytes > 1.8 * taken[1][0].sent_bytes > 0
    ours.close()


class Fake:
    """A product that notes who takes a step when."""

    def __init__(self, name, log, sent_bytes):
        self.name, self._log, self._sent_bytes = name, log, sent_bytes

    def step(self):
        self._log.append(self.name)
        return Taken(1.0, 1.0, self._sent_bytes)


def test_turns_follow_each_other_and_all_ranks_measure_the_same(axis):
    log = []
    products = [Fake("a", log, 5 + axis.rank), Fake("b", log, None)]
    found = measure(axis, products, Turns(rounds=2, steps=3, warm_up=1))
    assert log == (["a"] * 4 + ["b"] * 4) * 2
    assert (found["a"].sent_bytes, found["b"].sent_bytes) == (5, None)
    table = [[len(one.step_s), *one.step_s] for one in found.values()]
    assert gather(axis, table) == [table] * axis.size
    assert [row[0] for row in table] == [2, 2]
    assert all(seconds > 0 for row in table for seconds in row[1:])


class TwinPeers:
    """Peers that are our own step without exchange again."""

    def __init__(self, world, alone, joint, *, timeout_s):
        self.family, self.closed = Family(alone, [Fake("twin", [], None)]), False
        assert timeout_s == joint.parts.config.network.peer_timeout_s

    def close(self):
        self.closed = True


def no_torch():
    raise ImportError("No module named 'torch'\nand more")


@pytest.mark.parametrize("missing_on", [None, 0, -1])
def test_peers_are_built_where_all_ranks_can_import_them(axis, missing_on, capsys):
    config = SimpleNamespace(network=SimpleNamespace(peer_timeout_s=60.0))
    step = SimpleNamespace(parts=SimpleNamespace(config=config))
    ours = SimpleNamespace(alone=step, ways=[step])
    lacks = missing_on is not None and axis.rank == missing_on % axis.size
    peers = command._peers(axis, no_torch if lacks else lambda: TwinPeers, ours, timeout_s=60.0)
    told = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert (peers is None) == (missing_on is not None)
    if missing_on is not None and axis.rank == 0:
        assert f"torch cannot be imported on rank {missing_on % axis.size} (No module named 'torch')" in told
        assert "pip install torch==2.13.0" in told
    else:
        assert told == ""


def test_a_table_with_and_without_peers(axis, folder, capsys):
    request = Request(None, [*TINY, "data.test_samples=16"], ["raw", "int8"], 1, 1)
    path = folder / f"records-{axis.rank}.json"
    command._measure(axis, request, no_torch, path)
    told = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert ("exposed: step minus the same step without exchange" in told) == (axis.rank == 0)
    assert path.exists() == (axis.rank == 0)
    if axis.rank == 0:
        assert path.read_text().count('"peer": null') == 2
