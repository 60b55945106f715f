"""The parameter server: bits against a twin, versions, clocks, faults."""

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.codecs.registry import make_codec
from mpitrain.comm.waiting import wait
from mpitrain.errors import PeerLostError
from mpitrain.optim.compensation import Compensation
from mpitrain.optim.optimizer import AdamW, Sgd
from mpitrain.params import Params
from mpitrain.server.clocks import Rule
from mpitrain.server.keeper import Policy, layout_of
from tests.mpi.servers import RULES, Cluster, PlusOne, gradient, pieces_of
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


def zeroed(cluster):
    """Begin with weights of 0 everywhere, so that counts are exact."""
    cluster.params.flat[:] = 0
    if cluster.serves:
        cluster.seen.params.flat[:] = 0
    return cluster


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", RULES)
def test_no_pull_is_torn(comm, mode, servers):
    """P07: an update adds 1 everywhere; whatever a worker holds shows one count, that of its version."""
    if not on(comm, servers):
        return
    cluster = zeroed(Cluster(comm, RULES[mode], servers=servers, optimizer=PlusOne()))
    for last in (10, 12):
        seen = cluster.run(last)
    for weights, (_, _, version) in zip(seen.weights, seen.held, strict=True):
        assert all((part == version).all() for part in weights)
    updates = 12 * (cluster.workers if mode in ("async", "window") else 1)
    assert all((part == updates).all() for part in cluster.server_weights())
    if not cluster.serves:
        assert seen.worker.version == updates
        assert all((part == updates).all() for part in seen.final)
    cluster.close()


@pytest.mark.parametrize("mode", ["sync", "ssp", "async", "window"])
def test_clocks_stay_within_their_bounds(comm, mode):
    if not on(comm, 1):
        return
    rule = RULES[mode]
    cluster = Cluster(comm, rule, pieces=pieces_of("int8", "residual"), down="int8")
    seen = cluster.run(20)
    if cluster.serves:
        taken = [each for update in seen.service.record.updates for each in update.taken]
        assert len(taken) == 20 * cluster.workers
        assert all(each.counted and each.staleness >= 0 for each in taken)
        if rule.mode == "ssp":
            assert max(each.staleness for each in taken) <= rule.staleness
        assert [update.version for update in seen.service.record.updates] == list(
            range(1, len(seen.service.record.updates) + 1)
        )
    elif rule.mode == "ssp":
        assert all(clock - 1 - held <= rule.staleness for clock, held, _ in seen.held)
    cluster.close()


def test_servers_share_what_one_would_do(comm):
    """Clipped by the norm over all buckets, whoever owns them."""
    if not on(comm, 2):
        return
    policy = Policy(rate=lambda version, staleness: 0.01 * (version + 1), clip_norm=3.0)
    two = Cluster(comm, RULES["sync"], servers=2, optimizer=AdamW(), policy=policy)
    two.run(LAST)
    expected = two.server_weights()
    fewer = comm.Split(int(comm.rank == comm.size - 1), comm.rank)
    if comm.rank < comm.size - 1:
        one = Cluster(fewer, RULES["sync"], servers=1, optimizer=AdamW(), policy=policy)
        one.run(LAST)
        assert same(one.server_weights(), expected)
        if one.serves:
            assert two.seen.service.keeper.pieces != one.seen.service.keeper.pieces
            norms = [update.norm for update in one.seen.service.record.updates]
            assert norms == [update.norm for update in two.seen.service.record.updates]
            assert min(norms) > 3
        one.close()
    fewer.Free()
    two.close()


def test_one_worker_alone_is_in_step_in_every_mode(comm):
    if not on(comm, 1):
        return
    pair = comm.Split(int(comm.rank > 1), comm.rank)
    if comm.rank < 2:
        finals = []
        for mode in ("sync", "async"):
            cluster = Cluster(pair, RULES[mode], pieces=pieces_of("int8", "residual"), down="int8", optimizer=AdamW())
            cluster.run(LAST)
            finals.append(cluster.server_weights())
            cluster.close()
        assert same(*finals)
    pair.Free()


@pytest.mark.parametrize("servers", [1, 2])
def test_a_lost_answer_is_followed_by_the_weights_themselves(comm, servers):
    """The reply to clock 2 is lost; the reply to 3 does not follow on what is there; the push of 4 asks for all."""
    if not on(comm, servers):
        return
    cluster = zeroed(Cluster(comm, RULES["sync"], servers=servers, down="int8", optimizer=PlusOne()))
    if comm.rank == 0:
        cluster.seen.worker.drops = lambda clock: clock == 2
    seen = cluster.run(8)
    if comm.rank == 0:
        assert [version for _, _, version in seen.held] == [0, 1, 1, 1, 4, 5, 6, 7]
        # Alone, the two pushes that are too stale make no update.
        assert all((part == (4 if cluster.workers > 1 else 2)).all() for part in seen.weights[4])
    elif not cluster.serves:
        assert [version for _, _, version in seen.held] == list(range(8))
    else:
        counted = [[each.counted for each in update.taken] for update in seen.service.record.updates]
        others = [True] * (cluster.workers - 1)
        stale = [[clock not in (3, 4), *others] for clock in range(1, 9)]
        assert counted == stale
    updates = 8 if cluster.workers > 1 else 6
    assert all((part == updates).all() for part in cluster.server_weights())
    cluster.close()


@pytest.mark.parametrize("servers", [1, 2])
def test_what_is_not_finite_counts_for_nothing(comm, servers):
    """The others' gradients are scaled up, so that the update is their mean; alone, there is none."""
    if not on(comm, servers):
        return
    cluster = Cluster(comm, RULES["sync"], servers=servers, optimizer=Sgd())

    def made(worker, clock, index, size):
        values = gradient(worker, clock, index, size) / cluster.workers
        if (worker, clock, index) == (0, 2, 2):
            values[7] = np.nan
        return values

    before = [part.copy() for part in cluster.server_weights()]
    cluster.run(1, made)
    first = cluster.server_weights()
    cluster.run(2, made)
    second = cluster.server_weights()
    others = range(1, cluster.workers)
    for index, (was, now) in enumerate(zip(first, second, strict=True)):
        grads = [made(worker, 2, index, was.size) for worker in others]
        mean = sum(grads) * (cluster.workers / len(others)) if grads else np.zeros_like(was)
        assert np.allclose(now, was - np.float32(0.1) * mean, rtol=1e-5, atol=1e-7)
    assert not same(before, first)
    assert same(first, second) == (cluster.workers == 1)
    if cluster.serves:
        assert cluster.seen.service.rejected == (cluster.workers == 1)
    cluster.close()


@pytest.mark.parametrize("late", ["apply", "drop"])
def test_late_pushes_are_applied_or_counted(comm, late):
    """P09: two workers are enough; whatever the others push is accounted for."""
    if not on(comm, 3):
        return
    cluster = Cluster(comm, Rule("ssp", aggregate=2, late=late), pieces=pieces_of("int8", "delta"), down="int8")
    seen = cluster.run(20)
    if cluster.serves:
        record = seen.service.record
        applied = [each for update in record.updates for each in update.taken]
        assert len(applied) + len(record.dropped) == 20 * cluster.workers
        assert late == "drop" or not record.dropped
        assert {(each.worker, each.clock) for each in [*applied, *record.dropped]} == {
            (worker, clock) for worker in range(cluster.workers) for clock in range(1, 21)
        }
    cluster.close()


@pytest.mark.parametrize("mode", RULES)
def test_a_wish_ends_the_round_for_all(comm, mode):
    if not on(comm, 1):
        return
    rule = RULES[mode]
    cluster = Cluster(comm, rule)
    seen = cluster.run(500, stop=lambda worker, clock: float(worker == 0 and clock == 3))
    last = np.array([0 if cluster.serves else seen.worker.pushed])
    highest = comm.allreduce(int(last[0]), MPI.MAX)
    assert cluster.serves or seen.worker.pushed == highest == seen.worker.last
    assert not cluster.serves or seen.service.last == highest
    assert 3 <= highest < 500
    if mode == "sync":
        assert highest == 3
    cluster.run(highest + 2)
    cluster.close()


@pytest.mark.parametrize("compensation", [None, *(Compensation(strength=30.0, decay=m) for m in (None, 0.9))])
@pytest.mark.parametrize("down", ["raw", "int8"])
@pytest.mark.parametrize("mode", ["async", "window"])
def test_late_gradients_are_corrected_by_what_their_worker_had(comm, mode, down, compensation):
    """The order of the updates is only known afterwards; replayed in one process, it gives the same bits."""
    if not on(comm, 1):
        return
    policy = Policy(rate=lambda version, staleness: 0.1 / (1 + staleness), compensation=compensation)
    cluster = Cluster(comm, RULES[mode], policy=policy, optimizer=Sgd(momentum=0.9), down=down)
    seen = cluster.run(12)
    if cluster.serves:
        assert len(seen.service.record.updates) == 12 * cluster.workers
        weights = replay(seen.service.record.updates, cluster.setting, compensation)
        assert weights.tobytes() == seen.params.flat.tobytes()
    cluster.close()


def replay(updates, setting, compensation):
    """Make the updates of a record again, with the gradients that workers made up; returns the weights."""
    params = Params(layout_of(setting.pieces))
    params.initialize(3)
    grads, optimizer = params.zeros_like(), Sgd(momentum=0.9)
    state = optimizer.init(params)
    squares = compensation and compensation.init(params).get("mean_square")
    parts = [slice(*params.layout.groups[f"bucket {piece.index}"]) for piece in setting.pieces]
    twin = ServerTwin(setting.pieces, setting.down, [params.flat[part] for part in parts], setting.workers)
    held = {(worker, 0): [weights.copy() for weights in twin.weights] for worker in range(setting.workers)}
    for update in updates:
        (taken,) = update.taken
        for piece, part in zip(setting.pieces, parts, strict=True):
            values = grads.flat[part]
            values[:] = gradient(taken.worker, taken.clock, piece.index, piece.size)
            values *= np.float32(taken.push.divisor)
            if compensation:
                then = held[taken.worker, int(taken.push.version)][piece.index]
                compensation.correct(values, params.flat[part], then, squares.flat[part] if squares else None)
        optimizer.step(params, grads, state, 0.1 / (1 + taken.staleness))
        twin.weights = [params.flat[part] for part in parts]
        held[taken.worker, update.version] = [weights.copy() for weights in twin.answer(taken.worker)]
    return params.flat


def test_a_silent_worker_is_named(comm):
    if not on(comm, 1):
        return
    cluster = Cluster(comm, RULES["async"], timeout_s=0.5)
    if cluster.serves:
        service = cluster.seen.service
        service.begin_round(5)
        with pytest.raises(PeerLostError, match=r"no message for 0.5 s from worker 0 \(rank 0 of all\); it died"):
            wait(service, timeout_s=30)
    comm.Barrier()
    cluster.close()


def test_a_silent_server_is_named(comm):
    if not on(comm, 1):
        return
    cluster = Cluster(comm, RULES["sync"], timeout_s=0.1)
    if not cluster.serves:
        cluster.seen.worker.begin_round(0, 0, 5)
        cluster.step(gradient, {})
        with pytest.raises(
            PeerLostError, match=rf"waiting for an answer of server 0 \(rank {cluster.workers} of all\)"
        ):
            cluster.seen.worker.wait_for_answer()
    comm.Barrier()
    cluster.close()


def test_a_flood_finds_no_room(comm):
    """A worker that pushes without leave: no more of it is taken than there is room for, until it has been applied."""
    if not on(comm, 2):
        return
    cluster = Cluster(comm, RULES["sync"])
    if cluster.serves:
        service = cluster.seen.service
        service.begin_round(9)
        client = service._clients[0]
        while not client.arrived:
            service.poll()
        comm.Barrier()
        for _ in range(100):
            service.poll()
        assert (client.arrived, len(client.controls)) == (1, 1)
    else:
        cluster.seen.worker.begin_round(0, 0, 9)
        for _ in range(2 if comm.rank == 0 else 0):
            cluster.step(gradient, {})
        comm.Barrier()
    comm.Barrier()
    cluster.close()
