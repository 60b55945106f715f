"""The library call: any array, exact errors, on every rank."""

import numpy as np
import pytest

import mpitrain
from mpitrain.errors import ConfigError, PeerLostError


def expected_sum(shape, ranks, dtype=np.float32):
    return sum(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype) + rank for rank in range(ranks))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_any_layout(comm, dtype):
    """M07: strided, transposed, sliced, 0-d and empty arrays; neighbours stay as they are."""
    base = np.full(64, -5, dtype)
    matrix = np.zeros((4, 6), dtype)
    views = [base[::2], base[3:-1], matrix.T, np.asfortranarray(matrix), np.zeros((), dtype), np.zeros((0, 3), dtype)]
    for array in views:
        work = np.float64 if dtype == np.float64 else np.float32
        with mpitrain.Allreduce(comm, array.size, codec="raw", dtype=work) as allreduce:
            array[...] = np.arange(array.size).reshape(array.shape) + comm.rank
            allreduce(array)
            assert np.array_equal(array, expected_sum(array.shape, comm.size, dtype))
    assert np.all(base[:3:2] != -5)
    untouched = np.full(64, -5, dtype)
    with mpitrain.Allreduce(comm, 32, codec="raw", dtype=np.promote_types(dtype, np.float32)) as allreduce:
        untouched[::2] = comm.rank
        allreduce(untouched[::2])
    assert np.all(untouched[1::2] == -5)


@pytest.mark.parametrize("bad", [np.zeros(4, np.int32), np.zeros(4, bool), np.zeros(4, np.complex64), [1.0] * 4])
def test_wrong_types_are_named_before_anything_is_sent(comm, bad):
    with mpitrain.Allreduce(comm, 4, name="gradient of w") as allreduce:
        kind = str(getattr(bad, "dtype", "list"))
        with pytest.raises(TypeError, match=f"gradient of w.*{kind}"):
            allreduce(bad)
        array = np.ones(4, np.float32)
        traffic = allreduce(array)
        assert np.allclose(array, comm.size, rtol=0.02)
        assert (traffic.messages == 0) == (comm.size == 1)


def test_wrong_size_and_read_only(comm):
    with mpitrain.Allreduce(comm, 4) as allreduce:
        with pytest.raises(ValueError, match="expected 4 elements, got 5"):
            allreduce(np.zeros(5, np.float32))
        frozen = np.zeros(4, np.float32)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            allreduce(frozen)


def test_nonfinite_is_raised_everywhere_and_changes_nothing(comm):
    with mpitrain.Allreduce(comm, 300, codec="int8", memory="residual") as allreduce:
        array = np.ones(300, np.float32)
        if comm.rank == comm.size - 1:
            array[17] = np.nan
        before = array.copy()
        with pytest.raises(FloatingPointError, match="array"):
            allreduce(array)
        assert array.tobytes() == before.tobytes()
        array = np.ones(300, np.float32)
        allreduce(array)
        assert np.allclose(array, comm.size, rtol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "ecq-99"}, "Allreduce: codec: expected ecq or ecq-BITS"),
        ({"codec": "sign", "memory": "delta"}, 'Allreduce: exchange.memory = "delta" with codec "sign"'),
        ({"codec": 3}, "Allreduce: codec: expected one of raw, fp16, .*, got 3"),
        ({"codec": "int9"}, "Allreduce: codec: expected one of raw, fp16, .*, got 'int9'; did you mean int8"),
        ({"memory": "some"}, "memory: expected one of"),
        ({"collective": "star"}, "collective: expected one of"),
        ({"collective": "native"}, 'carries codec "raw" only'),
        ({"codec": "raw", "memory": "delta"}, "no error to remember"),
        ({"codec": "fp16", "rounding": "stochastic"}, "stochastic"),
        ({"rounding": "up"}, "rounding: expected one of"),
    ],
)
def test_refusals(comm, options, message):
    with pytest.raises(ConfigError, match=message):
        mpitrain.Allreduce(comm, 10, **options)
    with pytest.raises(ConfigError, match="size of 0 or more"):
        mpitrain.Allreduce(comm, -1)


def test_servers_add_up(comm, everywhere):
    """The last ranks of the communicator serve; their arrays count, too."""
    for servers in (None, *range(1, comm.size)):
        if comm.size == 1:
            break
        with mpitrain.Allreduce(comm, 5, codec="raw", collective="server", servers=servers) as allreduce:
            array = np.arange(5, dtype=np.float32) + comm.rank
            traffic = allreduce(array)
            assert np.array_equal(array, expected_sum((5,), comm.size))
            assert everywhere(array)
            serving = servers or 1
            parts, sums = (serving - 1, comm.size - 1) if comm.rank >= comm.size - serving else (serving, 0)
            assert traffic.messages == parts + sums


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collective": "server", "servers": 0}, r"servers = 0 of \d rank"),
        ({"collective": "server", "servers": 99}, r"servers = 99 of \d rank"),
        ({"collective": "server", "servers": 1.5}, "servers: expected a number of ranks, got 1.5"),
        ({"servers": 1}, 'servers = 1 is read by collective "server", got "direct"'),
    ],
)
def test_impossible_servers(comm, options, message):
    with pytest.raises(ConfigError, match=message):
        mpitrain.Allreduce(comm, 10, **options)
    if comm.size == 1:
        with pytest.raises(ConfigError, match="servers = 1 of 1 rank leave .*; start 2 or more"):
            mpitrain.Allreduce(comm, 10, collective="server")


def test_different_arguments_are_refused_on_all_ranks(comm):
    if comm.size == 1:
        return
    with pytest.raises(ConfigError, match="differ: rank 0 has"):
        mpitrain.Allreduce(comm, 10, codec="fp16" if comm.rank == 1 else "int8")


def test_integers_of_numpy_and_limits(comm):
    with mpitrain.Allreduce(comm, np.int64(3), codec="raw", seed=np.int64(5)) as allreduce:
        array = np.ones(3, np.float32)
        allreduce(array)
        assert np.all(array == comm.size)
    for options in ({"timeout_s": 0}, {"max_message_bytes": 0}, {"segment_kb": -1}, {"dtype": np.int32}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            mpitrain.Allreduce(comm, 3, **options)


def test_closed_and_lost(comm):
    allreduce = mpitrain.Allreduce(comm, 3, codec="raw", timeout_s=0.3)
    array = np.ones(3, np.float32)
    if comm.size > 1:  # rank 0 stays away from a call: the others say so, and cannot go on as if nothing had been
        if comm.rank:
            with pytest.raises(PeerLostError, match=r"rank \d"):
                allreduce(array)
            with pytest.raises(ValueError, match="lost a peer"):
                allreduce(array)
        comm.Barrier()
        allreduce._closed = True
    allreduce.close()
    allreduce.close()
    with pytest.raises(ValueError, match="closed"):
        allreduce(array)


def test_a_sum_that_overflows_is_not_finite(comm):
    with mpitrain.Allreduce(comm, 2, codec="raw") as allreduce:
        array = np.full(2, 3e38, np.float32)
        if comm.size == 1:
            allreduce(array)
        else:
            with pytest.raises(FloatingPointError, match="in the sum"):
                allreduce(array)


def test_no_communicator_is_leaked(world):
    """M15: thousands of set-ups in one process."""
    array = np.ones(3, np.float32)
    for _ in range(300):
        with mpitrain.Allreduce(world, 3, codec="raw") as allreduce:
            allreduce(array)
            array[:] = 1
