"""Bytes of a sum, counted by hand; tests/mpi holds them against what ranks count."""

import pytest

from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.predicted import Sent, latencies, memory_elements, payload_nbytes, sent_for_sum


def test_a_vector_that_divides_evenly():
    """Four chunks of a block: 2(p-1)/p of the vector from every rank, with a header a message."""
    message = 16 + 128 + 2
    for collective in ("direct", "ring"):
        sent = sent_for_sum(collective, make_codec("int8"), "residual", 512, 4)
        assert sent == [Sent(6 * message, 6)] * 4
    assert sent_for_sum("native", make_codec("raw"), "none", 512, 4) == [Sent(2048, 1)] * 4
    assert sent_for_sum("direct", make_codec("int8"), "residual", 512, 1) == [Sent(0, 0)]


def test_a_ragged_vector():
    """Of three elements on two ranks, rank 0 owns two; of one element on three, rank 0 owns all."""
    raw = make_codec("raw")
    assert sent_for_sum("direct", raw, "none", 3, 2) == [Sent(20 + 24, 2), Sent(24 + 20, 2)]
    assert sent_for_sum("direct", raw, "none", 1, 3) == [Sent(40, 2), Sent(20, 1), Sent(20, 1)]
    assert sent_for_sum("ring", raw, "none", 1, 3) == [Sent(20, 1), Sent(40, 2), Sent(20, 1)]
    assert sent_for_sum("direct", raw, "none", 0, 3) == [Sent()] * 3


def test_a_sum_through_servers():
    """With one, a vector from everyone to it and from it to everyone; two cut it at a block and send as often."""
    message = 16 + 128 + 2
    half, whole = message, 16 + 256 + 4
    sent = sent_for_sum("server", make_codec("int8"), "residual", 256, 4)
    assert sent == [*[Sent(whole, 1)] * 3, Sent(3 * whole, 3)]
    sent = sent_for_sum("server", make_codec("int8"), "residual", 256, 4, servers=2)
    assert sent == [*[Sent(2 * half, 2)] * 2, *[Sent(4 * half, 4)] * 2]
    assert sent_for_sum("server", make_codec("raw"), "none", 1, 4, servers=3)[1:] == [
        Sent(3 * 20, 3),
        Sent(20, 1),
        Sent(20, 1),
    ]


def test_segments_cost_a_header_each():
    """Two chunks of 600 and 514 elements in segments of 256, or 1024: one more block each, and no other bytes."""
    codec = make_codec("int8")
    first, second = 640 + 5 * 2 + 3, 474 + 4 * 2 + 2  # with the factors of delta
    expected = [Sent(first + second + 5 * 16, 5)] * 2
    for collective in ("direct", "ring"):
        assert sent_for_sum(collective, codec, "delta", 1114, 2, segment=256) == expected
        whole = sent_for_sum(collective, codec, "delta", 1114, 2, segment=1024)
        assert whole == sent_for_sum(collective, codec, "delta", 1114, 2) == [Sent(first + second + 2 * 16, 2)] * 2
    server = sent_for_sum("server", codec, "none", 257, 3, segment=256)
    assert server == [*[Sent(257 + 3 * 2 + 2 * 16, 2)] * 2, Sent(2 * (257 + 3 * 2 + 2 * 16), 4)]
    assert sent_for_sum("native", make_codec("raw"), "none", 512, 2, segment=256) == [Sent(2048, 1)] * 2


@pytest.mark.parametrize(("size", "factors"), [(0, 0), (1, 1), (256, 1), (257, 2)])
def test_delta_sends_factors(size, factors):
    codec = make_codec("fp16")
    assert payload_nbytes(codec, "none", size) == payload_nbytes(codec, "residual", size) == 2 * size
    assert payload_nbytes(codec, "delta", size) == 2 * size + factors


def test_messages_in_a_row():
    assert [latencies("direct", ranks) for ranks in (1, 2, 5)] == [0, 2, 2]
    assert [latencies("server", ranks) for ranks in (1, 2, 5)] == [0, 2, 2]
    assert [latencies("ring", ranks) for ranks in (1, 2, 5)] == [0, 2, 8]
    assert [latencies("native", ranks) for ranks in (1, 2, 4, 5)] == [0, 2, 4, 6]


def test_memories_in_two_halves():
    assert memory_elements("direct", "none", 100, 2) == [0, 0]
    assert memory_elements("native", "none", 100, 2) == [0, 0]
    assert memory_elements("ring", "residual", 100, 2) == memory_elements("direct", "residual", 100, 2) == [200, 200]
    assert memory_elements("direct", "delta", 100, 2) == memory_elements("ring", "delta", 100, 2) == [400, 400]
    # A worker keeps what it has sent and what it has decoded, a server what each of four has sent and its own sum.
    assert memory_elements("server", "delta", 100, 5) == [400, 400, 400, 400, 1000]
    assert memory_elements("server", "residual", 100, 5) == [200] * 5
