"""Loops that do several passes in one: the same bytes and the same floats as the passes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.codecs.base import Codec
from mpitrain.codecs.int4 import Int4
from mpitrain.codecs.int8 import Int8
from mpitrain.codecs.memory import SENDERS
from mpitrain.errors import CodecError
from mpitrain.kernels import delta

FUSED = {"int8": Int8, "int4": Int4}
SIZES = [0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 130, 191, 255, 256, 257, 1000]
KEY = 0x0123456789ABCDEF


def passes(kind):
    """Make a codec that has only the passes of the contract."""

    class Passes(kind):
        encode_residual = Codec.encode_residual
        fuses_residual = False
        encode_difference = Codec.encode_difference
        decode_difference = Codec.decode_difference

    return Passes


def vectors(dtype, size, seed=0):
    """Name vectors that are easy and such as are not."""
    rng = np.random.default_rng(seed)
    info = np.finfo(dtype)
    normal = rng.standard_normal(size).astype(dtype)
    wide = (normal * 10.0 ** rng.uniform(-44, 38, size)).astype(dtype)
    spoiled = normal.copy()
    spoiled[rng.random(size) < 0.01] = np.nan
    spoiled[size // 2 :: 200] = -np.inf
    with np.errstate(over="ignore"):
        edges = np.array([info.max, -info.max, info.tiny, -0.0, 0.0, info.smallest_subnormal, 3.4e38, 1.5e-36], dtype)
    return {
        "normal": normal,
        "zeros": np.zeros(size, dtype),
        "minus zeros": -np.zeros(size, dtype),
        "subnormal": (normal * info.tiny / 8).astype(dtype),
        "tiny": (normal * 1e-36).astype(dtype),
        "huge": (np.sign(normal) * 3.3e38).astype(dtype),
        "largest": rng.uniform(1e38, 3.4028e38, size).astype(dtype),  # their prediction overflows
        "wide": wide,
        "edges": rng.choice(edges, size).astype(dtype),
        "spoiled": spoiled,
        "halves": (rng.integers(-254, 255, size) / 2).astype(dtype),
    }


def run(method, codec, x, error, *, decoded, first=0):
    """Return all that ``encode_residual`` writes, as bytes; of a bad vector only the count."""
    wire = np.full(codec.max_nbytes(x.size) + 8, 0xEE, np.uint8)
    rest, told = np.full_like(x, 7), np.full_like(x, 7)
    inputs = x.tobytes(), error.tobytes()
    nbytes, nonfinite = method(codec, x, error, wire, rest, told if decoded else None, KEY, first)
    assert (x.tobytes(), error.tobytes()) == inputs
    assert (wire[codec.max_nbytes(x.size) :] == 0xEE).all()
    assert decoded or (told == 7).all()
    return (nonfinite,) if nonfinite else (nonfinite, wire[:nbytes].tobytes(), rest.tobytes(), told.tobytes())


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # infinity minus infinity, in numpy's sum
def test_residual_equals_the_passes(name, size, dtype, stochastic):
    codec = FUSED[name](dtype, stochastic=stochastic)
    named, others = vectors(dtype, size), vectors(dtype, size, seed=1)
    for x in named.values():
        for error in (*others.values(), x):  # twice the same overflows where it is huge
            for decoded, first in ((True, 0), (False, 2**32 - 100)):
                plain = run(Codec.encode_residual, codec, x, error, decoded=decoded, first=first)
                assert run(type(codec).encode_residual, codec, x, error, decoded=decoded, first=first) == plain


def there_and_back(kind, codec, x, past, *, added, first):
    """Return all that both ends of a delta write, as bytes; of a bad vector only the count."""
    wire, factors = np.full(codec.max_nbytes(x.size) + 8, 0xEE, np.uint8), np.full(-(-x.size // 128), 99, np.uint8)
    following, got, acc = np.full_like(x, 7), np.full_like(x, 7), np.full_like(x, 0.3)
    inputs = x.tobytes(), past.tobytes()
    nbytes, nonfinite = kind.encode_difference(codec, x, past, wire, following, factors, KEY, first)
    assert (x.tobytes(), past.tobytes()) == inputs
    assert (wire[codec.max_nbytes(x.size) :] == 0xEE).all()
    if nonfinite:
        return (nonfinite,)
    kind.decode_difference(codec, wire[:nbytes], past, factors, got, acc if added else None)
    assert got.tobytes() == following.tobytes()
    return nonfinite, wire[:nbytes].tobytes(), factors.tobytes(), got.tobytes(), acc.tobytes()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FUSED)
def test_delta_equals_the_passes(name, size, dtype, stochastic):
    codec = FUSED[name](dtype, stochastic=stochastic)
    named, others = vectors(dtype, size), vectors(dtype, size, seed=1)
    for x in named.values():
        mixed = 0.7 * np.nan_to_num(x, posinf=0, neginf=0) + 0.1 * others["normal"]
        for past in (*others.values(), x, mixed.astype(dtype)):
            for added, first in ((True, 0), (False, 2**32 - 100)):
                plain = there_and_back(Codec, codec, x, past, added=added, first=first)
                assert there_and_back(type(codec), codec, x, past, added=added, first=first) == plain


@pytest.mark.parametrize(
    ("places", "expected"), [((0, 4, 8), 11), ((0, 5, 8), 12), ((2, 6, 126), 11), ((2, 7, 126), 12)]
)
def test_sums_of_a_factor_have_a_fixed_order(places, expected):
    """Every fourth element goes into one sum, in order: 100 counts as 96 in that of 1e17, in full elsewhere."""
    x, factors = np.zeros(128), np.zeros(1, np.uint8)
    x[list(places)] = 1e17, 100, -1e17
    delta.fit_factors(x, np.ones(128), factors)
    assert factors.tolist() == [expected]


@pytest.mark.parametrize("name", FUSED)
def test_residual_beyond_the_largest_float_is_counted(name):
    x = np.ones(300, np.float32)
    x[[1, 150, 299]] = 3e38
    assert run(FUSED[name].encode_residual, FUSED[name](), x, x, decoded=False) == (3,)


@pytest.mark.parametrize("memory", ["residual", "delta"])
@given(
    data=st.data(), name=st.sampled_from(sorted(FUSED)), stochastic=st.booleans(), dtype=st.sampled_from(["f4", "f8"])
)
@settings(max_examples=40, deadline=None)
def test_streams_equal_those_of_the_passes(memory, data, name, stochastic, dtype):
    """Over several steps, some of them rolled back, in parts or whole: the same bytes and states."""
    size = data.draw(st.integers(0, 600))
    ends = [kind(dtype, stochastic=stochastic) for kind in (FUSED[name], passes(FUSED[name]))]
    fused, plain = (SENDERS[memory](codec, size) for codec in ends)
    scales = data.draw(st.lists(st.sampled_from([0.0, 1e-41, 1e-36, 1.0, 1e30, np.nan]), min_size=1, max_size=6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    for step, scale in enumerate(scales):
        x = (rng.standard_normal(size) * scale).astype(dtype)
        cut = min(size, data.draw(st.sampled_from([0, 256, 512])))
        end = data.draw(st.sampled_from(["commit", "rollback"]))
        for at, stop in ((cut, size), (0, cut)):
            wires = [np.zeros(sender.max_nbytes(stop - at), np.uint8) for sender in (fused, plain)]
            told = [np.zeros(stop - at, dtype) if data.draw(st.booleans()) else None for _ in ends]
            results = [
                sender.encode(x[at:stop], wire, decoded, key=step, first=at, at=at)
                for sender, wire, decoded in zip((fused, plain), wires, told, strict=True)
            ]
            assert results[0] == results[1]
            if not results[0][1]:
                assert wires[0].tobytes() == wires[1].tobytes()
                assert told[0] is None or told[1] is None or told[0].tobytes() == told[1].tobytes()
        for sender in (fused, plain):
            getattr(sender, "rollback" if np.isnan(scale) else end)()
        (kept,), (expected,) = fused.states().values(), plain.states().values()
        assert kept.current.tobytes() == expected.current.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", FUSED)
def test_residual_of_misaligned_and_read_only_vectors(name, dtype):
    """Buffers may begin at any byte, as a part of a message does."""
    codec = FUSED[name](dtype)
    plain = run(Codec.encode_residual, codec, *(vectors(dtype, 300, s)["normal"] for s in (0, 1)), decoded=True)
    x, error, rest, told = (np.zeros(300 * codec.dtype.itemsize + 1, np.uint8)[1:].view(dtype) for _ in range(4))
    x[:], error[:] = (vectors(dtype, 300, s)["normal"] for s in (0, 1))
    x.flags.writeable = False
    wire = np.zeros(codec.max_nbytes(300) + 1, np.uint8)[1:]
    nbytes, bad = codec.encode_residual(x, error, wire, rest, told, KEY)
    assert (bad, wire[:nbytes].tobytes(), rest.tobytes(), told.tobytes()) == plain


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", FUSED)
def test_delta_of_misaligned_vectors(name, dtype):
    codec = FUSED[name](dtype)
    given_x, given_past = (vectors(dtype, 300, s)["normal"] for s in (0, 1))
    plain = there_and_back(Codec, codec, given_x, given_past, added=True, first=0)
    x, past, got, acc = (np.zeros(300 * codec.dtype.itemsize + 1, np.uint8)[1:].view(dtype) for _ in range(4))
    x[:], past[:], acc[:] = given_x, given_past, 0.3
    x.flags.writeable = past.flags.writeable = False
    wire, factors = np.zeros(codec.max_nbytes(300) + 1, np.uint8)[1:], np.zeros(3, np.uint8)
    nbytes, bad = codec.encode_difference(x, past, wire, got, factors, KEY)
    wire, told = wire[:nbytes], got.copy()
    codec.decode_difference(wire, past, factors, got, acc)
    assert got.tobytes() == told.tobytes()
    assert (bad, wire.tobytes(), factors.tobytes(), got.tobytes(), acc.tobytes()) == plain


@pytest.mark.parametrize("name", FUSED)
def test_a_refused_difference_leaves_all_as_it_was(name):
    codec = FUSED[name]()
    wire, factors = np.full(codec.max_nbytes(300), 0xFF, np.uint8), np.zeros(3, np.uint8)
    following, acc = np.full(300, 5, np.float32), np.full(300, 6, np.float32)
    for payload in (wire, wire[1:]):
        with pytest.raises(CodecError):
            codec.decode_difference(payload, np.ones(300, np.float32), factors, following, acc)
    assert (following == 5).all()
    assert (acc == 6).all()


@pytest.mark.parametrize("which", ["past", "following", "acc", "factors"])
@pytest.mark.parametrize("wrong", [np.zeros(299, "f4"), np.zeros(300, "f8"), np.zeros(600, "f4")[::2]])
@pytest.mark.parametrize("name", FUSED)
def test_arrays_of_the_wrong_kind_are_refused_by_delta(name, wrong, which):
    codec = FUSED[name]()
    arrays = {key: np.zeros(300, np.float32) for key in ("past", "following", "acc")}
    arrays |= {"factors": np.zeros(3, np.uint8)} | {which: wrong}
    wire = np.zeros(codec.max_nbytes(300), np.uint8)
    codec.encode(np.zeros(300, np.float32), wire)
    with pytest.raises((TypeError, CodecError), match="expected"):
        codec.decode_difference(wire, **arrays)
    acc = arrays.pop("acc")
    if acc is not wrong:
        with pytest.raises(TypeError, match="expected"):
            codec.encode_difference(np.zeros(300, np.float32), wire=wire, **arrays)


@pytest.mark.parametrize("which", ["error", "next_error", "decoded"])
@pytest.mark.parametrize("wrong", [np.zeros(299, "f4"), np.zeros(300, "f8"), np.zeros(600, "f4")[::2]])
@pytest.mark.parametrize("name", FUSED)
def test_arrays_of_the_wrong_kind_are_refused(name, wrong, which):
    codec = FUSED[name]()
    arrays = {key: np.zeros(300, np.float32) for key in ("error", "next_error", "decoded")} | {which: wrong}
    with pytest.raises(TypeError, match="expected contiguous vectors of 300 float32"):
        codec.encode_residual(np.zeros(300, np.float32), wire=np.zeros(999, np.uint8), **arrays)


@pytest.mark.parametrize("name", FUSED)
def test_a_residual_below_the_smallest_scale_waits(name):
    """It is neither sent nor lost nor changed by steps without a gradient; what is subnormal becomes 0 (C17)."""
    size = 300
    sender, codec = SENDERS["residual"](FUSED[name](), size), FUSED[name]()
    error = np.random.default_rng(2).choice(np.array([1e-41, -1e-41, 3e-45, -0.0, 2e-38, -2e-38], "f4"), size)
    sender.residual.current[:] = error
    nothing, wire = np.zeros(size, np.float32), np.zeros(codec.max_nbytes(size), np.uint8)
    zeros = wire.copy()
    codec.encode(nothing, zeros)
    kept = np.where(abs(error) < np.finfo(np.float32).tiny, np.float32(0), error)
    for step in range(2000):
        assert sender.encode(nothing, wire, None, key=step, first=0) == (wire.size, 0)
        sender.commit()
        assert wire.tobytes() == zeros.tobytes()
        assert sender.residual.current.tobytes() == kept.tobytes()
    sender.encode(np.full(size, 1e-30, np.float32), wire, None, key=0, first=0)
    decoded = np.zeros(size, np.float32)
    codec.decode(wire, decoded)
    assert (sender.residual.next + decoded).tobytes() == (kept + np.float32(1e-30)).tobytes()
