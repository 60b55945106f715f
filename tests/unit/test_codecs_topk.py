"""The codec topk: the exact choice, the bytes, the cost of the places, and payloads nobody wrote."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpitrain.codecs.registry import make_codec
from mpitrain.codecs.topk import SAMPLED_FROM, TopK
from mpitrain.errors import CodecError
from mpitrain.kernels import rice
from tests.reference import quantizers
from tests.reference.wires import decode, encode_finite

FAST = settings(max_examples=100, deadline=None, derandomize=True, database=None)
DAMAGED = settings(max_examples=500, deadline=None, derandomize=True, database=None)
SIZES = [1, 2, 31, 32, 33, 127, 128, 129, 1000, SAMPLED_FROM - 1, SAMPLED_FROM, SAMPLED_FROM + 1, 20_000]


def check(x, one_in):
    """Compare bytes, values and sums with the twin."""
    codec = TopK(x.dtype, one_in)
    wire = encode_finite(codec, x)
    assert wire.tobytes() == quantizers.topk_bytes(x, one_in)
    assert wire.size <= codec.max_nbytes(x.size) <= x.nbytes + 16
    out = decode(codec, wire, x.size)
    assert out.tobytes() == quantizers.topk_decoded(x, one_in).tobytes()
    acc = np.ones_like(x)
    with np.errstate(over="ignore"):
        codec.decode_add(wire, acc)
        assert np.array_equal(acc, 1 + out)
    return out


def shapes(size, dtype):
    """Name vectors on which a choice may go wrong."""
    rng = np.random.default_rng(size)
    normal = rng.standard_normal(size).astype(dtype)
    yield "normal", normal
    yield "equal", np.full(size, -2.5, dtype)
    yield "zeros", np.zeros(size, dtype)
    yield "few", np.where(rng.random(size) < 0.003, normal, dtype(0))
    yield "rounded", np.round(normal)
    yield "one-tail", np.where(np.arange(size) < size // 50, 1000 * normal, normal)
    yield "rising", np.linspace(-1, 3, size).astype(dtype)
    yield "subnormal", (normal * 1e-38).astype(dtype)
    yield "log", (normal * 10.0 ** rng.integers(-37, 37, size)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_values_equal_the_twin(size, dtype):
    """One in 1 and more than size: everything, and a single value."""
    for _, x in shapes(size, dtype):
        for one_in in (1, 7, 100, 10**6) if size <= 1000 else (20, 1000):
            check(x, one_in)


def test_an_empty_vector_is_no_byte():
    check(np.zeros(0, np.float32), 100)
    assert TopK().nbytes(0) == TopK().max_nbytes(0) == 0
    with pytest.raises(CodecError, match="codec topk: expected 0 bytes"):
        decode(TopK(), np.zeros(6, np.uint8), 0)


@FAST
@given(
    x=hnp.arrays(np.float32, st.integers(0, 200), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)),
    one_in=st.integers(1, 50),
)
def test_any_finite_vector(x, one_in):
    check(x, one_in)


@FAST
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=100), one_in=st.integers(1, 30))
def test_of_equal_magnitudes_the_first_are_sent(values, one_in):
    x = np.array(values, np.float32)
    sent = np.flatnonzero(check(x, one_in))
    chosen = sorted(range(x.size), key=lambda i: (-abs(values[i]), i))[: math.ceil(x.size / one_in)]
    assert sent.tolist() == sorted(i for i in chosen if values[i])


def test_magnitudes_count_and_not_values():
    """Case C15."""
    out = check(np.array([-9, 1, 2, -8, 3], np.float32), 3)
    assert np.flatnonzero(out).tolist() == [0, 3]
    assert out[[0, 3]] == pytest.approx([-9, -8], rel=1 / 8)


@pytest.mark.parametrize("kind", ["sorted", "periodic", "two-scales", "ones-and-zeros"])
def test_a_misled_sample_does_not_change_the_choice(kind):
    """The search of the whole vector takes over where the threshold leaves too few or too many."""
    size, rng = 70_001, np.random.default_rng(4)
    x = {
        "sorted": np.sort(rng.standard_normal(size)),
        "periodic": np.where(np.arange(size) % 16 == 3, 100.0, 1.0) * rng.standard_normal(size),
        "two-scales": np.where(np.arange(size) < 650, 1e6, 1e-6) * rng.standard_normal(size),
        "ones-and-zeros": (rng.random(size) < 0.5).astype(float),
    }[kind].astype(np.float32)
    out = np.zeros(size, np.float32)
    codec = TopK()
    codec.decode(encode_finite(codec, x), out)
    assert np.array_equal(np.flatnonzero(out), quantizers.topk_choice(x, 100))


def test_every_value_errs_by_an_eighth_at_most():
    x = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(1).integers(-30, 30, x.size).astype(np.float32)
    out = check(x[:1000], 1)
    assert np.abs(out / x[:1000] - 1).max() <= 1 / 8
    largest = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max, 70_000], np.float32)
    assert check(largest, 1) == pytest.approx(largest, rel=1 / 8)


def test_what_is_taken_for_zero():
    tiny = float(np.finfo(np.float32).tiny)
    for dtype in (np.float32, np.float64):
        x = np.array([tiny, -np.nextafter(dtype(tiny), dtype(0)), 0.0, -0.0, 5e-324], dtype)
        assert np.flatnonzero(check(x, 1)).tolist() == [0]


def test_values_beyond_float32_are_counted():
    x = np.zeros(10_000)
    x[[5, 9_000]] = [1e39, -1e300]
    codec = TopK(np.float64, 10**6)
    assert codec.encode(x, np.zeros(codec.max_nbytes(x.size), np.uint8)) == (0, 2)
    x[5] = np.nan
    assert codec.encode(x, np.zeros(codec.max_nbytes(x.size), np.uint8)) == (0, 2)


def binomial_bits(size, count):
    return (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2)


def bits_of(places):
    gaps = (np.diff(places, prepend=-1) - 1).astype(np.uint32)
    return rice.fit_shifts(gaps, np.zeros(-(-gaps.size // rice.BLOCK), np.uint8))


@pytest.mark.parametrize("one_in", [2, 3, 5, 10, 100, 1000])
@pytest.mark.parametrize("size", [64_000, 1_000_000])
def test_places_cost_hardly_more_than_their_entropy(size, one_in):
    x = np.random.default_rng(one_in).standard_normal(size).astype(np.float32)
    codec = TopK(one_in=one_in)
    wire = encode_finite(codec, x)
    count = codec.count(size)
    assert bits_of(quantizers.topk_choice(x, one_in)) <= 1.05 * binomial_bits(size, count)
    assert wire.size == pytest.approx(codec.nbytes(size), rel=0.06)


@pytest.mark.parametrize("size", [64_000, 1_000_000])
def test_clustered_places_cost_less(size):
    """The shifts follow a dense region, but for the block that jumps there; runs shorter than a block do no harm."""
    rng, count = np.random.default_rng(1), size // 100
    rows = 50 * rng.choice(size // 50, count // 50, replace=False)
    dense = np.sort(size // 3 + rng.choice(4 * count, count, replace=False))
    assert bits_of((np.sort(rows)[:, None] + np.arange(50)).ravel()) <= 1.05 * binomial_bits(size, count)
    assert bits_of(dense) <= 1.03 * binomial_bits(4 * count, count) + 12 * rice.BLOCK
    assert bits_of(np.arange(count) + size // 3) <= 0.14 * binomial_bits(size, count) + 12 * rice.BLOCK


@pytest.mark.parametrize("one_in", [1, 2, 3, 10, 100, 10**9])
def test_no_vector_needs_more_than_the_bound(one_in):
    """The costliest values: magnitudes all over the exponents, at places that defeat any one shift."""
    for size in [*range(1, 40), 257, 3000]:
        codec = TopK(one_in=one_in)
        rng = np.random.default_rng(size)
        x = np.zeros(size, np.float32)
        k = codec.count(size)
        x[-k:] = rng.choice([1e-37, 1e38, -1e38], k)
        for vector in (x, x[::-1].copy(), rng.permutation(x)):
            assert encode_finite(codec, vector).size <= codec.max_nbytes(size) <= 4 * size + 16


def test_golden_bytes():
    """By hand. 2.0 is level 0x200, 3.0 level 0x202; -3.0 its level with a sign."""
    x = np.zeros(12, np.float32)
    x[[1, 5, 6]] = [2.0, -3.0, 2.0]
    # Gaps 1, 3, 0: shift 1 costs 9 bits, 0 costs 7: 00000, then 01 0001 1.
    # Levels 0, 5, 0: shift 0 costs 8 bits, 1 costs 8, the smaller wins: 00000, then 1 000001 1.
    text = "00000" + "0100011" + "00000" + "10000011"
    text += "0" * (-len(text) % 8)
    expected = bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))
    wire = encode_finite(TopK(one_in=4), x)
    assert wire.tobytes() == bytes([3, 0, 0, 0, 0x00, 0x02]) + expected
    assert decode(TopK(one_in=4), wire, 12)[[1, 5, 6]].tolist() == [2.25, -3.25, 2.25]


def test_golden_bytes_of_several_blocks():
    x = np.arange(-700, 700, dtype=np.float32)
    wire = encode_finite(TopK(one_in=10), x)
    assert wire.tobytes().hex() == GOLDEN_HEX
    assert decode(TopK(np.float64, 1), wire, 1400).tolist() == quantizers.topk_decoded(x, 10).tolist()


GOLDEN_HEX = (
    "8c00000020020300000000000000000000000000000000000000000000000000001000000000000000000000000000000000"
    "00000000e0ffffffffffffffff0f00000000000000000000000000000000000000feffffffffffff83ff0fffffffffffffff"
    "ff7f00000000000000aaaaaaaaaaaaaaaaaaaaaaaaaaaaaafeff5f5555555555555555555555159024499224"
)


# Payloads nobody wrote.


def try_damaged(codec, wire, size):
    """Decode: a CodecError, with the sum as before, or finite values."""
    acc = np.ones(size, codec.dtype)
    try:
        codec.decode_add(wire, acc)
    except CodecError:
        assert (acc == 1).all()
        return False
    assert np.isfinite(acc).all()
    assert np.isfinite(decode(codec, wire, size)).all()
    return True


@DAMAGED
@given(size=st.integers(0, 300), rubbish=st.binary(max_size=200), dtype=st.sampled_from(["f4", "f8"]))
def test_random_payloads(size, rubbish, dtype):
    try_damaged(TopK(dtype), np.frombuffer(rubbish, np.uint8), size)


@DAMAGED
@given(data=st.data(), size=st.integers(1, 600), one_in=st.integers(1, 60))
def test_damaged_payloads(data, size, one_in):
    codec = TopK(one_in=one_in)
    wire = encode_finite(codec, np.random.default_rng(size).standard_normal(size).astype(np.float32))
    cut = data.draw(st.integers(0, wire.size - 1))
    for damaged in (wire[:cut], np.append(wire, np.zeros(cut + 1, np.uint8))):
        with pytest.raises(CodecError, match="codec topk: expected"):
            decode(codec, damaged, size)
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(0, wire.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try_damaged(codec, wire, size)
    try_damaged(codec, encode_finite(codec, np.ones(size, np.float32)), data.draw(st.integers(0, size)))


@pytest.mark.parametrize(
    ("header", "size", "reason"),
    [
        ("", 5, "6 bytes or more"),
        ("0600000000 02", 5, "at most 0 values"),
        ("060000000002ffff", 5, "at most 5 values"),
        ("09000000000200 00", 99, "at most 8 values"),
        ("000000000002", 5, "a level that 0 values"),
        ("010000000300ffff", 5, "a level that 1 values"),
        ("01000000fc03ffff", 5, "a level that 1 values"),
        ("00000000000000", 5, "fill the payload"),
        ("01000000fb03200c", 5, "fill the payload"),
        ("0200000000022218", 5, "fill the payload"),
    ],
)
def test_headers_that_no_encoder_writes(header, size, reason):
    with pytest.raises(CodecError, match=reason):
        decode(TopK(), np.frombuffer(bytes.fromhex(header), np.uint8), size)


def test_places_beyond_the_vector_are_refused():
    x = np.ones(300, np.float32)
    wire = encode_finite(TopK(one_in=2), np.roll(x * np.r_[0:2].repeat(150), 0).astype(np.float32))
    assert decode(TopK(), wire, 300)[150:].all()
    with pytest.raises(CodecError, match="expected places below 299, got 299"):
        decode(TopK(), wire, 299)


def test_a_payload_may_lie_anywhere():
    x = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    wire = encode_finite(TopK(one_in=5), x)
    shifted = np.zeros(wire.size + 1, np.uint8)
    shifted[1:] = wire
    assert decode(TopK(), shifted[1:], 500).tobytes() == decode(TopK(), wire, 500).tobytes()


def test_the_share_is_positive():
    with pytest.raises(ValueError, match="one value in 1 or more, got 0"):
        TopK(one_in=0)
    assert make_codec("topk").one_in == 100
