"""The parameter server: bits against a twin, versions, clocks, faults."""

import pytest

from mpitrain.codecs.registry import make_codec
from mpitrain.optim.optimizer import AdamW
from mpitrain.params import Params
from mpitrain.server.keeper import layout_of
from tests.mpi.servers import RULES, Cluster, gradient, pieces_of
from tests.reference.server import ServerTwin

LAST = 6


def on(comm, servers):
    """Tell whether there are ranks enough for that many servers and a worker."""
    return comm.size > servers


def same(got, expected):
    return all(a.tobytes() == b.tobytes() for a, b in zip(got, expected, strict=True))


def run_twin(pieces, down, workers, optimizer, last, lr=0.1):
    """Return what every worker holds before each of its steps, and the final weights."""
    params = Params(layout_of(pieces))
    params.initialize(3)
    views = [params.flat[slice(*params.layout.groups[f"bucket {piece.index}"])] for piece in pieces]
    grads, state = params.zeros_like(), optimizer.init(params)
    sums = [grads.flat[slice(*params.layout.groups[f"bucket {piece.index}"])] for piece in pieces]
    twin = ServerTwin(pieces, make_codec(down), views, workers)
    held = [[[w.copy() for w in twin.held[worker]] for worker in range(workers)]]
    for clock in range(1, last + 1):
        made = [[gradient(w, clock, piece.index, piece.size) for piece in pieces] for w in range(workers)]
        for total, value in zip(sums, twin.sums(made, clock), strict=True):
            total[:] = value
        optimizer.step(params, grads, state, lr)
        twin.weights = views
        twin.publish(refresh=clock == last)
        held.append([[w.copy() for w in twin.held[worker]] for worker in range(workers)])
    return held


STREAMS = [("raw", "none", "raw"), ("int8", "residual", "int8"), ("int4", "delta", "int8"), ("fp16", "none", "fp16")]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("codec", "memory", "down"), STREAMS)
def test_sync_has_the_bits_of_its_twin(comm, codec, memory, down, servers):
    if not on(comm, servers):
        return
    pieces = pieces_of(codec, memory, "fp16")
    cluster = Cluster(comm, RULES["sync"], servers=servers, pieces=pieces, down=down, optimizer=AdamW())
    expected = run_twin(pieces_of(codec, memory, "fp16"), down, cluster.workers, AdamW(), LAST)
    seen = cluster.run(LAST)
    if not cluster.serves:
        for clock in range(LAST):
            assert same(seen.weights[clock], expected[clock][comm.rank]), clock
        assert same(seen.final, expected[LAST][comm.rank])
        assert seen.held == [(clock, clock - 1, clock - 1) for clock in range(1, LAST + 1)]
    assert same(cluster.server_weights(), expected[LAST][0])
    cluster.close()
