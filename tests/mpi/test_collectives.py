"""Every collective × codec × memory against its one-process twin, bit for bit, over several steps."""

import itertools
from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Bucket, Transport
from mpitrain.collectives.predicted import Sent, memory_elements, sent_for_sum
from mpitrain.collectives.registry import make_reducer
from mpitrain.comm.frame import HEADER_BYTES
from mpitrain.errors import ConfigError
from tests.reference.collectives import DirectTwin, RingTwin, ServerTwin

TWINS = {
    "direct": DirectTwin,
    "ring": RingTwin,
    **{f"server{n}": partial(ServerTwin, servers=n) for n in (1, 2, 3) if n < MPI.COMM_WORLD.Get_size()},
}
"""By the name of the collective and, where ranks serve, their number: as many as the ranks at hand allow."""

SIZES = [0, 1, 2, 3, 5, 7, 127, 129, 640, 4097]
STREAMS = [
    ("raw", "none", False),
    *itertools.product(["fp16", "int8", "int4"], ["none", "residual", "delta"], [False]),
    *itertools.product(["int8", "int4"], ["none", "residual"], [True]),
    *itertools.product(["bf16", "int2", "sign"], ["residual"], [False]),
]
SEGMENT = 512
"""Elements of the segments in which chunks travel; the twins know none. The sizes give one, several, ragged ones."""

SEGMENTED = Transport(timeout_s=30, segment=SEGMENT)


def contribution(rank, step, size, dtype=np.float32):
    rng = np.random.default_rng([rank, step, size])
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-3, 3)).astype(dtype)


def split_name(collective):
    """Return the collective of a test's name, and the ranks that serve."""
    name = collective.rstrip("123")
    return name, int(collective[len(name) :] or 1)


def reducer_of(collective, axis, transport=None):
    name, servers = split_name(collective)
    return make_reducer(name, axis, transport, servers=servers)


def run_steps(axis, collective, codec, memory, size, steps=3, dtype=np.float32, transport=SEGMENTED):
    """Return (sums, traffics) of this rank and what the twin says."""
    ranks = axis.size
    reducer = reducer_of(collective, axis, transport)
    work = np.zeros(size, dtype)
    state = reducer.open(Bucket(work), codec, memory)
    twin = TWINS[collective](codec, memory, size, ranks)
    results = []
    for step in range(steps):
        keys = [noise_key(7, step, rank) for rank in range(ranks)]
        work[:] = contribution(axis.rank, step, size, dtype)
        pending = reducer.start(state, keys[axis.rank])
        traffic = pending.wait()
        assert not pending.nonfinite
        state.commit()
        expected = twin.sum([contribution(rank, step, size, dtype) for rank in range(ranks)], keys)
        results.append((work.copy(), expected, traffic))
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", TWINS)
def test_bits_and_bytes(axis, everywhere, collective, size):
    kind, servers = split_name(collective)
    for name, memory, stochastic in STREAMS:
        codec = make_codec(name, stochastic=stochastic)
        predicted = sent_for_sum(kind, codec, memory, size, axis.size, servers=servers, segment=SEGMENT)[axis.rank]
        for got, expected, traffic in run_steps(axis, collective, codec, memory, size):
            case = (collective, name, memory, stochastic, size)
            assert got.tobytes() == expected.tobytes(), case
            assert everywhere(got), case
            assert Sent(traffic.sent_bytes, traffic.messages) == predicted, case


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", ["native", *TWINS])
def test_memories_take_what_is_predicted(axis, collective, size):
    kind, servers = split_name(collective)
    for name, memory, stochastic in STREAMS[:1] if collective == "native" else STREAMS:
        codec = make_codec(name, stochastic=stochastic)
        state = reducer_of(collective, axis).open(Bucket(np.zeros(size, np.float32)), codec, memory)
        held = sum(half.size for buffer in state.states().values() for half in (buffer.current, buffer.next))
        expected = memory_elements(kind, memory, size, axis.size, codec.block, servers=servers)[axis.rank]
        assert held == expected, (collective, name, memory, size)


@pytest.mark.parametrize("collective", TWINS)
def test_float64(axis, collective):
    for name, memory in [("raw", "none"), ("fp16", "residual"), ("int8", "delta"), ("int4", "residual")]:
        codec = make_codec(name, np.float64)
        for got, expected, _ in run_steps(axis, collective, codec, memory, 1000, dtype=np.float64):
            assert got.tobytes() == expected.tobytes()
            assert got.dtype == np.float64


@pytest.mark.parametrize("collective", ["native", *TWINS])
def test_raw_sum_is_near_float64(axis, collective):
    size = 5000
    reducer = reducer_of(collective, axis)
    work = contribution(axis.rank, 0, size)
    state = reducer.open(Bucket(work), make_codec("raw"), "none")
    reducer.start(state).wait()
    parts = [contribution(rank, 0, size).astype(np.float64) for rank in range(axis.size)]
    scale = np.sum(np.abs(parts), axis=0)
    assert np.all(np.abs(work - np.sum(parts, axis=0)) <= axis.size * 2.0**-23 * scale)


@pytest.mark.parametrize("collective", TWINS)
def test_pieces(axis, collective):
    """Pieces of 64 KiB, and sizes around one piece, change no bit; nor do they where segments are larger or smaller."""
    codec = make_codec("raw")
    for size in (40_003, (65536 - HEADER_BYTES) // 4 - 1, (65536 - HEADER_BYTES) // 4, (65536 - HEADER_BYTES) // 4 + 1):
        whole = [Transport(30, piece) for piece in (4 * 10**6, 65536, 4099)]
        for transports in (whole, [Transport(30, 4099, 5120)]):
            runs = [run_steps(axis, collective, codec, "none", size, steps=1, transport=each) for each in transports]
            assert all(got.tobytes() == expected.tobytes() for ((got, expected, _),) in runs)
            assert len({traffic.sent_bytes for ((_, _, traffic),) in runs}) == 1


@pytest.mark.parametrize("segment", [None, 64_000])
@pytest.mark.parametrize("collective", TWINS)
def test_large_messages_do_not_deadlock(axis, collective, segment):
    """M08: far above any eager limit; every send has its receive posted."""
    codec, transport = make_codec("raw"), Transport(30, segment=segment)
    for got, expected, _ in run_steps(axis, collective, codec, "none", 2**20, steps=1, transport=transport):
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("memory", "name"), [("none", "raw"), ("residual", "int8"), ("delta", "fp16"), ("residual", "int4")]
)
@pytest.mark.parametrize("collective", ["native", *TWINS])
def test_nonfinite_reaches_every_rank_and_undoes_the_step(axis, everywhere, collective, memory, name):
    if collective == "native" and name != "raw":
        return
    size = 1000 * axis.size  # two segments a chunk
    reducer = reducer_of(collective, axis, SEGMENTED)
    work = np.zeros(size, np.float32)
    state = reducer.open(Bucket(work), make_codec(name), memory)
    positions = [0, size // 2, size - 1]
    before = None
    for step, bad in enumerate([None, np.nan, None, np.inf, -np.inf, None]):
        work[:] = contribution(axis.rank, step, size)
        if bad is not None and axis.rank == step % axis.size:
            work[positions[step % 3]] = bad
        pending = reducer.start(state, noise_key(1, step, axis.rank))
        pending.wait()
        assert pending.nonfinite == (bad is not None)
        if pending.nonfinite:
            before = {k: s.current.tobytes() for k, s in state.states().items()}
            state.rollback()
            assert before == {k: s.current.tobytes() for k, s in state.states().items()}
        else:
            state.commit()
            assert everywhere(work)


@pytest.mark.parametrize(("name", "limit"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("collective", TWINS)
def test_equal_ones_do_not_wrap(axis, collective, name, limit):
    """C05: the largest code everywhere, on every rank."""
    reducer = reducer_of(collective, axis)
    work = np.ones(300, np.float32)
    state = reducer.open(Bucket(work), make_codec(name), "none")
    reducer.start(state).wait()
    assert np.all(np.abs(work / axis.size - 1) <= axis.size / limit)


@pytest.mark.parametrize("collective", TWINS)
def test_half_neither_overflows_nor_forgets(axis, collective):
    """C06: sums above the range of a half stay finite; what is below it is recovered by the residual."""
    reducer = reducer_of(collective, axis)
    work = np.empty(500, np.float32)
    state = reducer.open(Bucket(work), make_codec("fp16"), "residual")
    work[:] = 30000.0
    reducer.start(state).wait()
    state.commit()
    assert np.allclose(work / axis.size, 30000.0, rtol=1e-3)
    state = reducer.open(Bucket(work), make_codec("fp16"), "residual")
    total = np.zeros(500)
    for _ in range(200):
        work[:] = 1e-7 / axis.size
        reducer.start(state).wait()
        state.commit()
        total += work
    assert np.allclose(total, 200 * 1e-7, rtol=0.02)


@pytest.mark.parametrize(("name", "limit"), [("int8", 127), ("int4", 7)])
def test_error_feedback_loses_nothing(axis, name, limit):
    """Over many steps the mean of the decoded sums tends to the true sum: the residual is bounded."""
    size, steps = 400, 50
    reducer = make_reducer("direct", axis)
    work = np.empty(size, np.float32)
    for memory, bound in (("none", None), ("residual", 2.0)):
        state = reducer.open(Bucket(work), make_codec(name), memory)
        drift = np.zeros(size)
        exact = np.sum([contribution(rank, 0, size).astype(np.float64) for rank in range(axis.size)], axis=0)
        for _ in range(steps):
            work[:] = contribution(axis.rank, 0, size)
            reducer.start(state).wait()
            state.commit()
            drift += work - exact
        step = np.max(np.abs(exact)) / limit
        if axis.size > 1 and bound is None:
            assert np.max(np.abs(drift)) > 3 * step  # without feedback the same error is made every time
        elif bound is not None:
            parts = [np.max(np.abs(contribution(rank, 0, size))) / limit for rank in range(axis.size)]
            assert np.max(np.abs(drift)) <= bound * (step + sum(parts))


def test_many_buckets_in_flight(axis, everywhere):
    """Buckets may overtake each other; each keeps its own messages."""
    reducer = make_reducer("direct", axis)
    works = [np.empty(100 + 37 * i, np.float32) for i in range(12)]
    states = [reducer.open(Bucket(work, index=i), make_codec("raw"), "none") for i, work in enumerate(works)]
    for i, work in enumerate(works):
        work[:] = contribution(axis.rank, i, work.size)
    pending = [reducer.start(state) for state in states]
    for item in reversed(pending) if axis.rank % 2 else pending:
        item.wait()
    for i, work in enumerate(works):
        twin = DirectTwin(make_codec("raw"), "none", work.size, axis.size)
        expected = twin.sum([contribution(rank, i, work.size) for rank in range(axis.size)], [0] * axis.size)
        assert work.tobytes() == expected.tobytes()


def test_a_server_bears_the_star(axis):
    """A rank sends the vector once, here whole; what the only server sends grows with the ranks."""
    if axis.size == 1:
        return  # refused, see below
    message = HEADER_BYTES + 640 + 5 * 2
    for _, _, traffic in run_steps(axis, "server1", make_codec("int8"), "residual", 640, transport=Transport(30)):
        times = axis.size - 1 if axis.rank == axis.size - 1 else 1
        assert (traffic.sent_bytes, traffic.messages) == (times * message, times)
        assert traffic.received_bytes == times * message


def test_impossible_numbers_of_servers_are_named(axis):
    """P13: none, all, more than there are."""
    for servers in (-1, 0, axis.size, axis.size + 1):
        with pytest.raises(ConfigError, match=rf"servers = {servers} of {axis.size} rank.*(set|start)"):
            make_reducer("server", axis, servers=servers)
