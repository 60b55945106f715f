"""Codecs against their numpy twins bit for bit, golden bytes, bounds of the error, and payloads nobody wrote."""

import itertools
import math
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpitrain.codecs.int4 import Int4
from mpitrain.codecs.int8 import Int8
from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.errors import CodecError, ConfigError
from tests.reference import entropy, quantizers

SIZES = [0, 1, 2, 127, 128, 129, 1000]
LARGEST = np.finfo(np.float32).max
FAST = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = hnp.arrays(np.float32, st.integers(0, 300), elements=FLOATS)
NAMES = st.sampled_from(sorted(CODECS))
LIMITS = {"int8": 127, "int4": 7}
"""Largest code of the block-scaled codecs; they are also those that can round at random."""

TWINS = {
    "raw": lambda x: x.tobytes(),
    "fp16": quantizers.half_bytes,
    "int8": quantizers.int8_bytes,
    "int4": quantizers.int4_bytes,
    "bf16": quantizers.bf16_bytes,
    "int2": quantizers.int2_bytes,
    "sign": quantizers.sign_bytes,
    "topk": quantizers.topk_bytes,
}
CODED = {"int8-rans": (1, 0x80), "int4-rans": (2, 0x08), "int2-rans": (4, 0x2A)}
"""Values in a byte of codes, and by what symbols differ from bytes."""


def read_coded(name):
    """Return a twin of a decoder: the payload without its coder, decoded by the plain codec."""
    plain, (in_byte, zero) = name.removesuffix("-rans"), CODED[name]

    def read(data, size):
        uncoded = entropy.decode_coded(data, 2 * -(-size // 128), -(-size // in_byte), zero) if size else b""
        return decode(make_codec(plain), np.frombuffer(uncoded, np.uint8), size)

    return read


READERS = {"ecq": entropy.decode_ecq} | {name: read_coded(name) for name in CODED}
"""Twins of decoders, for formats that leave the encoder a choice."""
COARSEST = LIMITS | {"int2": 1, "sign": 1, "ecq": 7, "int8-rans": 127, "int4-rans": 7, "int2-rans": 1}
"""The maximum of a small vector divided by its largest error, about; others err less than int8."""


def noise_twin(key_a, key_b, index):
    """Draw as ``kernels.rng.noise`` documents it: lowbias32, in Python's integers."""
    h = (index * 0x9E3779B9 + key_a) % 2**32
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15 ^ key_b) * 0x846CA68B % 2**32
    return np.float32((h ^ h >> 16) >> 8) * np.float32(2.0**-24)


def stochastic_twin(name, x, key, first):
    limit = LIMITS[name]
    scales, _ = quantizers.int4_encode(x) if name == "int4" else quantizers.int8_encode(x)
    inverse = np.float32(1) / np.repeat(quantizers.from_bf16(scales), 128)[: x.size]
    noise = [noise_twin(key % 2**32, key >> 32, i % 2**32) for i in range(first, first + x.size)]
    codes = np.clip(np.floor(x * inverse + np.array(noise, np.float32)), -limit, limit).astype(np.int8)
    return scales.tobytes() + (quantizers.int4_pack(codes) if name == "int4" else codes).tobytes()


def encode(codec, x, **more):
    """Encode into a longer buffer full of rubbish, and check that nothing beyond the payload was touched."""
    wire = np.full(codec.max_nbytes(x.size) + 8, 0xA5, np.uint8)
    before = x.tobytes()
    nbytes, nonfinite = codec.encode(x, wire[: codec.max_nbytes(x.size)], **more)
    assert x.tobytes() == before
    assert (wire[codec.max_nbytes(x.size) :] == 0xA5).all()
    assert nbytes <= codec.max_nbytes(x.size)
    return wire[:nbytes], nonfinite


def decode(codec, wire, size):
    out = np.full(size, np.nan, codec.dtype)
    codec.decode(wire, out)
    return out


def one_zero_block(dtype):
    x = np.random.default_rng(1).standard_normal(3 * 128).astype(dtype)
    x[128:256] = 0
    x[130:140] = -0.0
    return x


def vectors(dtype=np.float32):
    """Name vectors of every size and of every kind that has broken a quantizer somewhere."""
    for size in SIZES:
        rng = np.random.default_rng(size)
        normal = rng.standard_normal(size)
        yield f"normal-{size}", normal.astype(dtype)
        yield f"gradient-{size}", (1e-6 * normal).astype(dtype)
        yield f"log-{size}", (normal * 10.0 ** rng.integers(-37, 37, size)).astype(dtype)
        yield f"zeros-{size}", np.zeros(size, dtype)
    yield "negative-zeros", np.full(130, -0.0, dtype)
    yield "one-zero-block", one_zero_block(dtype)
    yield "subnormal", (np.arange(-100, 100) * np.float64(2.0**-149)).astype(dtype)
    yield "half-subnormal", (np.arange(-1000, 1000) * 2.0**-26).astype(dtype)
    yield "tiny", np.full(129, 1e-37, dtype)
    yield "tiny-scales", (np.linspace(1e-37, 4e-36, 3000)).astype(dtype)
    yield "huge", np.array([3e38, -3e38, 1.0, 0.0], dtype)
    yield "largest", np.array([LARGEST, -LARGEST, 1e38], dtype)
    yield "ties", (np.arange(-254, 255) / 2).astype(dtype)
    yield "outlier", np.append((1e-3 * np.random.default_rng(2).standard_normal(4096)), 10.0).astype(dtype)


CASES = [pytest.param(x, id=f"{name}-{x.dtype}") for dtype in ("f4", "f8") for name, x in vectors(dtype)]


def test_twin_of_bf16_rounds_up():
    values = np.array([1.0, 1.0 + 2**-20, 1.0078125, 3e-30], np.float32)
    up = quantizers.from_bf16(quantizers.bf16_up(values))
    assert up[0] == 1
    assert up[2] == values[2]
    assert (up >= values).all()
    assert (up <= values * (1 + 2**-7)).all()


@pytest.mark.parametrize("x", CASES)
def test_bytes_equal_the_twin_and_decode_to_finite_values(x):
    for name in CODECS:
        codec = make_codec(name, x.dtype)
        wire, nonfinite = encode(codec, x)
        assert nonfinite == 0
        with np.errstate(under="ignore"):
            assert name not in TWINS or wire.tobytes() == TWINS[name](x), name
        out = decode(codec, wire, x.size)
        assert name in TWINS or np.array_equal(out, READERS[name](wire.tobytes(), x.size)), name
        assert np.isfinite(out).all(), name
        assert name == "sign" or (out[x == 0] == 0).all(), name
        acc = np.linspace(-1, 1, x.size).astype(x.dtype)
        with np.errstate(over="ignore"):
            expected = acc + out
        codec.decode_add(wire, acc)
        assert np.array_equal(acc, expected), name


@pytest.mark.parametrize("size", SIZES)
def test_int8_decode_equals_the_twin(size):
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    wire, _ = encode(Int8(), x)
    assert decode(Int8(), wire, size).tobytes() == quantizers.block_decode(*quantizers.int8_encode(x)).tobytes()


def test_zero_block_leaves_its_neighbours_alone():
    """Case C01."""
    for name in CODECS:
        codec = make_codec(name)
        size = max(codec.block, 128)
        x = np.random.default_rng(1).standard_normal(3 * size).astype(np.float32)
        x[size : 2 * size] = 0
        x[size : size + 10] = -0.0
        alone = np.concatenate([x[:size], x[2 * size :]])
        out = decode(codec, encode(codec, x)[0], x.size)
        assert (out[size : 2 * size] == 0).all()
        others = decode(codec, encode(codec, alone)[0], alone.size)
        if codec.fixed_size:
            assert np.array_equal(np.delete(out, np.s_[size : 2 * size]), others)
        elif name == "ecq":
            assert np.delete(out, np.s_[size : 2 * size]) == pytest.approx(others, abs=0.5)


@pytest.mark.parametrize("name", LIMITS)
def test_outlier_spoils_only_its_own_block(name):
    """Case C22: the other blocks keep the error of their own maximum."""
    codec = make_codec(name)
    x = (1e-3 * np.random.default_rng(3).standard_normal(4096)).astype(np.float32)
    x[1000] = 10.0
    out = decode(codec, encode(codec, x)[0], x.size)
    blocks = np.abs(x).reshape(-1, 128).max(axis=1)
    errors = np.abs(x - out).reshape(-1, 128).max(axis=1)
    ordinary = np.arange(blocks.size) != 1000 // 128
    assert (errors[ordinary] <= blocks[ordinary] / LIMITS[name]).all()
    assert out[1000] == pytest.approx(10, rel=2**-7)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_small_vectors_do_not_grow(name, size):
    """Case C14."""
    codec = make_codec(name)
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    wire, _ = encode(codec, x)
    assert codec.nbytes(size) <= codec.max_nbytes(size) <= 4 * size + 16 * (not codec.fixed_size)
    assert wire.size == codec.nbytes(size) or not codec.fixed_size
    if name != "topk":  # a choice of these few would lose the others
        assert decode(codec, wire, size) == pytest.approx(x, abs=float(np.abs(x).max()) / COARSEST.get(name, 127))


@pytest.mark.parametrize("name", sorted(CODECS))
def test_empty_vector_costs_nothing(name):
    codec = make_codec(name)
    assert codec.max_nbytes(0) == codec.nbytes(0) == 0
    assert decode(codec, encode(codec, np.zeros(0, np.float32))[0], 0).size == 0


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", [1, 2, 128, 129, 1000])
def test_values_that_are_not_finite_are_counted(name, dtype, size):
    codec = make_codec(name, dtype)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        for places in ([0], [size // 2], [size - 1], [0, size // 2, size - 1], range(size)):
            x = np.random.default_rng(size).standard_normal(size).astype(dtype)
            x[list(places)] = bad
            assert encode(codec, x)[1] == len(set(places))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", LIMITS)
def test_all_blocks_are_counted(name, stochastic):
    x = np.ones(1000, np.float32)
    x[[0, 127, 128, 500, 999]] = [np.nan, np.inf, -np.inf, np.nan, np.nan]
    assert encode(make_codec(name, stochastic=stochastic), x)[1] == 5


@pytest.mark.parametrize("name", ["raw", "fp16"])
def test_finite_float64_stays_finite(name):
    """What float64 can hold, these two carry; the values of the others are finite in float32."""
    codec = make_codec(name, np.float64)
    x = np.array([1e300, -1e308, np.finfo(np.float64).max, 1.0])
    wire, nonfinite = encode(codec, x)
    assert nonfinite == 0
    assert decode(codec, wire, 4) == pytest.approx(x, rel=2**-10, abs=float(x.max()) * 2.0**-24)


@pytest.mark.parametrize("name", LIMITS)
def test_float64_beyond_float32_is_counted(name):
    codec = make_codec(name, np.float64)
    assert encode(codec, np.array([1e300, 1.0, -1e39, np.nan]))[1] == 3
    assert encode(codec, np.array([float(LARGEST), 1.0]))[1] == 0


# Golden bytes: a released format never changes.

GOLDEN = np.array([0.0, -0.0, 1.0, -1.0, 0.3, -127.0, 1e-8, 65504.0, 3.14159274, 2.5, -0.75, 100.0], np.float32)

GOLDEN_BYTES = {
    "raw": "00000000000000800000803f000080bf9a99993e0000fec277cc2b3200e07f47db0f4940000020400000 40bf0000c842",
    "fp16": "00000080003c00bccd34f0d70000ff7b4842004100ba4056",
}
"""Written down from the formats' documentation, by hand and with ``struct``."""


def test_golden_bytes():
    for name, text in GOLDEN_BYTES.items():
        codec = make_codec(name)
        wire, _ = encode(codec, GOLDEN)
        assert wire.tobytes().hex() == text.replace(" ", "")
        half = struct.pack("<12e", *GOLDEN) if name == "fp16" else struct.pack("<12f", *GOLDEN)
        assert wire.tobytes() == half


def test_golden_bytes_of_a_common_exponent():
    x = np.array([65520.0, 1.0, -131072.0], np.float32)  # largest is 2^17: divided by 2^(18 - 15)
    wire, _ = encode(make_codec("fp16"), x)
    assert wire.tobytes().hex() == "0070" + "0030" + "00f4" + "0300"
    assert decode(make_codec("fp16"), wire, 3).tolist() == [65536.0, 1.0, -131072.0]


def test_golden_bytes_of_int8():
    x = np.zeros(130, np.float32)
    x[:4] = [127.0, -63.5, 2.5, -0.4]  # scale 1 = 0x3f80; ties to even
    x[128:] = [2.0, -1.0]  # scale 2/127 rounded up to bfloat16: 0x3c82 = 0.01586914
    wire, _ = encode(Int8(), x)
    assert wire.tobytes().hex() == "803f" + "823c" + "7fc00200" + "00" * 124 + "7ec1"
    out = decode(Int8(), wire, 130)
    assert out[:4].tolist() == [127.0, -64.0, 2.0, 0.0]
    assert out[128:].tolist() == [126 * 0.015869140625, -63 * 0.015869140625]


def test_golden_bytes_of_stochastic_int8():
    x = np.linspace(-1, 1, 16).astype(np.float32)
    wire, _ = encode(Int8(stochastic=True), x, key=0x0123456789ABCDEF, first=5)
    assert wire.tobytes().hex() == "023c" + "8293a4b5c5d6e7f708192a3b4b5c6d7e"


def test_golden_bytes_of_int4():
    x = np.zeros(131, np.float32)
    x[[0, 1, 2, 63]] = [7.0, -3.5, 2.5, -7.0]  # scale 1 = 0x3f80; ties to even; codes plus 8
    x[[64, 65, 127]] = [-1.0, 6.6, 1.0]  # the high halves of bytes 0, 1 and 63
    x[128:] = [2.0, -1.0, 0.5]  # scale 2/7 rounded up to bfloat16: 0x3e93 = 0.287109375
    wire, _ = encode(Int4(), x)
    assert wire.tobytes().hex() == "803f" + "933e" + "7ff48a" + "88" * 60 + "91" + "af" + "85"
    out = decode(Int4(), wire, 131)
    assert out[[0, 1, 2, 63, 64, 65, 127]].tolist() == [7.0, -4.0, 2.0, -7.0, -1.0, 7.0, 1.0]
    assert (out[128:] / 0.287109375).tolist() == [7.0, -3.0, 2.0]


def test_golden_bytes_of_stochastic_int4():
    x = np.linspace(-1, 1, 17).astype(np.float32)
    wire, _ = encode(Int4(stochastic=True), x, key=0x0123456789ABCDEF, first=5)
    assert wire.tobytes().hex() == "133e" + "81a2b3b4c5d5e6f788"


def test_formats_are_numbered_for_ever():
    numbers = {"raw": 0, "fp16": 1, "int8": 2, "int4": 3, "bf16": 4, "int2": 5, "sign": 6, "topk": 7, "ecq": 8}
    numbers |= {"int8-rans": 9, "int4-rans": 10, "int2-rans": 11}
    blocks = (
        dict.fromkeys(numbers, 1) | {"int8": 128, "int4": 128, "int2": 128, "sign": 256} | dict.fromkeys(CODED, 128)
    )
    assert {name: kind.format_number for name, kind in CODECS.items()} == numbers
    assert {name: kind.wire_id for name, kind in CODECS.items()} == {name: name for name in CODECS}
    assert {name: kind.block for name, kind in CODECS.items()} == blocks


# Half precision, case N09.

HALVES = np.arange(2**16, dtype=np.uint16)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_every_half_is_decoded_as_numpy_does(dtype):
    out = decode(make_codec("fp16", dtype), HALVES.view(np.uint8), HALVES.size)
    expected = HALVES.view(np.float16).astype(dtype)
    assert np.array_equal(out, expected, equal_nan=True)
    assert np.array_equal(np.signbit(out), np.signbit(expected))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_every_finite_half_is_encoded_as_itself(dtype):
    finite = HALVES[np.isfinite(HALVES.view(np.float16))]
    wire, nonfinite = encode(make_codec("fp16", dtype), finite.view(np.float16).astype(dtype))
    assert nonfinite == 0
    assert np.array_equal(wire.view(np.uint16), finite)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_every_midpoint_between_halves_rounds_as_numpy_does(dtype):
    positive = HALVES[:0x7C00].view(np.float16).astype(np.float64)
    middles = (positive[:-1] + positive[1:]) / 2
    x = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9), -middles]).astype(dtype)
    wire, _ = encode(make_codec("fp16", dtype), x)
    assert np.array_equal(wire.view(np.float16), x.astype(np.float16))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("value", [65504.0, 65519.99, 6e-8, 2.9e-8, 2.0**-25, 2.0**-24, 1 + 2**-11 + 2**-40])
def test_boundaries_of_half(dtype, value):
    x = np.array([value, -value], dtype)
    wire, nonfinite = encode(make_codec("fp16", dtype), x)
    assert nonfinite == 0
    assert wire.tobytes() == x.astype(np.float16).tobytes()


def test_float64_is_rounded_once():
    """In two roundings 1 + 2^-11 + 2^-40 first becomes a tie, then 1."""
    wire, _ = encode(make_codec("fp16", np.float64), np.array([1 + 2**-11 + 2**-40]))
    assert wire.view(np.float16)[0] == 1 + 2**-10


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("value", [65520.0, 1e5, 2.0**20, 1e30, 3e38, float(LARGEST)])
def test_common_exponent_keeps_large_halves_finite(dtype, value):
    codec = make_codec("fp16", dtype)
    x = np.array([value, -value, value / 3, 0.0], dtype)
    wire, nonfinite = encode(codec, x)
    assert (wire.size, nonfinite) == (10, 0)
    assert decode(codec, wire, 4) == pytest.approx(x, rel=2**-10)


@pytest.mark.parametrize("exponent", [-1, 0, 114, 32767, -32768])
def test_common_exponents_that_no_encoder_writes(exponent):
    wire = np.frombuffer(np.float16([1, 2]).tobytes() + np.int16(exponent).tobytes(), np.uint8)
    with pytest.raises(CodecError, match=f"exponent from 1 to 11[23], got {exponent}"):
        decode(make_codec("fp16"), wire, 2)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_largest_values_round_trip_through_the_common_exponent(dtype):
    x = np.array([np.finfo(dtype).max, np.finfo(dtype).max / 2], dtype)
    codec = make_codec("fp16", dtype)
    out = decode(codec, encode(codec, x)[0], 2)
    assert np.isfinite(out).all()
    assert out == pytest.approx(x, rel=2**-10)


# Arrays that the kernels would misread, case N11.


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize(
    "x",
    [
        np.zeros(4, np.int32),
        np.zeros(4, bool),
        np.zeros(4, np.complex64),
        np.zeros(4, object),
        np.zeros(4, np.float64),
        np.zeros(4, np.float16),
        np.zeros(4, ">f4"),
        np.zeros(8, np.float32)[::2],
        np.zeros(4, np.float32)[::-1],
        np.zeros((2, 2), np.float32),
        np.zeros((), np.float32),
    ],
    ids=lambda x: f"{x.dtype}-{x.shape}-{x.strides}",
)
def test_arrays_of_the_wrong_kind_are_refused(name, x):
    codec = make_codec(name)
    wire = np.zeros(64, np.uint8)
    with pytest.raises(TypeError, match=rf"codec {name}: expected .* got .*{x.dtype}"):
        codec.encode(x, wire)
    assert not wire.any()


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("dtype", [np.float16, np.int32, np.complex64, bool, object])
def test_types_that_no_codec_serves_are_refused(name, dtype):
    with pytest.raises(TypeError, match=f"codec {name}: expected vectors of float32 or float64"):
        make_codec(name, dtype)


def test_unknown_codecs_are_refused():
    with pytest.raises(ConfigError, match="codec: expected one of raw, fp16, .*, got 'int3'; did you mean int8"):
        make_codec("int3")
    for name in CODECS.keys() - LIMITS.keys() - {"int8-rans", "int4-rans"}:
        with pytest.raises(ConfigError, match=f"needs one of int8, int4, int8-rans, int4-rans, got '{name}'"):
            make_codec(name, stochastic=True)


# Properties.


@FAST
@given(x=VECTORS)
def test_error_of_raw_is_nothing(x):
    codec = make_codec("raw")
    assert decode(codec, encode(codec, x)[0], x.size).tobytes() == x.tobytes()


@FAST
@given(x=VECTORS)
def test_error_of_half_is_bounded(x):
    """Half an ulp: 2^-11 of the value, or half the smallest subnormal of the (common) exponent."""
    codec = make_codec("fp16")
    wire, nonfinite = encode(codec, x)
    out = decode(codec, wire, x.size).astype(np.float64)
    exponent = 0 if wire.size == 2 * x.size else int(wire[-2:].view(np.int16)[0])
    assert nonfinite == 0
    assert (np.abs(out - x) <= np.maximum(np.abs(x.astype(np.float64)) * 2.0**-11, 2.0 ** (exponent - 25))).all()


@FAST
@given(x=VECTORS, name=st.sampled_from(list(LIMITS)), key=st.integers(0, 2**64 - 1), stochastic=st.booleans())
def test_error_of_blocks_is_bounded(x, name, key, stochastic):
    """Half a scale to the nearest, one at random; scales at most (1 + 2^-7) max / limit; tiny maxima vanish."""
    codec = make_codec(name, stochastic=stochastic)
    wire, nonfinite = encode(codec, x, key=key)
    assert nonfinite == 0
    out = decode(codec, wire, x.size).astype(np.float64)
    blocks = -(-x.size // 128)
    scales = quantizers.from_bf16(wire[: 2 * blocks].view(np.uint16)).astype(np.float64)
    for block in range(blocks):
        here = np.s_[128 * block : 128 * block + 128]
        maximum = float(np.abs(x[here]).max())
        error = np.abs(out[here] - x[here]).max()
        assert scales[block] <= (1 + 2**-7) * max(maximum, 1e-44) / LIMITS[name]
        if scales[block]:
            assert error <= scales[block] * (1.0 if stochastic else 0.5) * (1 + 2**-15)
        else:
            assert maximum < {"int8": 1.5e-36, "int4": 8.3e-38}[name]


@FAST
@given(name=NAMES, size=st.integers(0, 300), rubbish=st.binary(max_size=700), dtype=st.sampled_from(["f4", "f8"]))
def test_random_payloads_raise_nothing_but_codec_errors(name, size, rubbish, dtype):
    codec = make_codec(name, dtype)
    wire = np.frombuffer(rubbish, np.uint8)
    for decoder in (codec.decode, codec.decode_add):
        try:
            decoder(wire, np.zeros(size, dtype))
        except CodecError:
            continue
        assert wire.size <= codec.max_nbytes(size)
        assert codec.nbytes(size) <= wire.size or not codec.fixed_size


@FAST
@given(data=st.data(), name=NAMES, size=st.integers(1, 300))
def test_damaged_payloads_raise_or_stay_bounded(data, name, size):
    codec = make_codec(name)
    wire = encode(codec, np.random.default_rng(size).standard_normal(size).astype(np.float32))[0].copy()
    cut = data.draw(st.integers(0, wire.size - 1))
    for damaged in (wire[:cut], np.append(wire, np.zeros(cut + 3, np.uint8))):
        with pytest.raises(CodecError, match=rf"codec {name}: {'expected' if codec.fixed_size else ''}"):
            decode(codec, damaged, size)
    wire[data.draw(st.integers(0, wire.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        out = decode(codec, wire, size)
    except CodecError:
        return
    if name in COARSEST:
        assert np.isfinite(out).all()


@pytest.mark.parametrize("bits", [0x0001, 0x007F, 0x7C02, 0x7E13, 0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFFFF])
@pytest.mark.parametrize("name", LIMITS)
def test_scales_that_no_encoder_writes(name, bits):
    codec = make_codec(name)
    wire, _ = encode(codec, np.ones(130, np.float32))
    wire[2:4].view(np.uint16)[0] = bits
    for decoder in (codec.decode, codec.decode_add):
        out = np.ones(130, np.float32)
        if (name, bits) == ("int4", 0x7C02):
            decoder(wire, out)
            continue
        with pytest.raises(CodecError, match=f"codec {name}: 1 block scales that no encoder writes"):
            decoder(wire, out)
        assert (out == 1).all()


@pytest.mark.parametrize("size", [1, 2, 5, 127, 128, 129, 131, 256])
def test_every_flipped_bit_of_int4(size):
    """It raises, or one element changes by whole scales, or one block is scaled anew; nothing else changes."""
    codec = Int4()
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    wire, _ = encode(codec, x)
    whole, blocks = decode(codec, wire, size), -(-size // 128)
    for position, bit in itertools.product(range(wire.size), range(8)):
        damaged = wire.copy()
        damaged[position] ^= 1 << bit
        low, high = damaged[2 * blocks :] & 15, damaged[2 * blocks :] >> 4
        scales = damaged[: 2 * blocks].view(np.uint16)
        legal = low.all() and high.all() and (size % 2 == 0 or high[-1] == 8)
        legal &= all(scale == 0 or 0x0080 <= scale <= 0x7E12 for scale in scales)
        if not legal:
            with pytest.raises(CodecError, match="codec int4: .* that no encoder writes; the payload is damaged"):
                decode(codec, damaged, size)
            continue
        out = decode(codec, damaged, size)
        assert np.isfinite(out).all()
        changed = np.flatnonzero(out != whole)
        if position < 2 * blocks:
            assert set(changed // 128) == {position // 2}
        else:
            assert changed.size == 1


@pytest.mark.parametrize("size", [1, 2, 129, 130])
def test_codes_that_no_encoder_writes(size):
    """A half of 0 would be -8; the half behind the last of an odd number of elements is no element's."""
    codec = Int4()
    wire, _ = encode(codec, np.ones(size, np.float32))
    bad = [(place, value) for place in (2 * -(-size // 128), wire.size - 1) for value in (0x08, 0x80, 0x00)]
    bad += [(wire.size - 1, spare << 4 | 15) for spare in (1, 7, 9, 15)] if size % 2 else []
    for place, value in bad:
        damaged = wire.copy()
        damaged[place] = value
        for decoder in (codec.decode, codec.decode_add):
            out = np.ones(size, np.float32)
            with pytest.raises(CodecError, match="codec int4: a code that no encoder writes"):
                decoder(damaged, out)
            assert (out == 1).all()


@pytest.mark.parametrize("size", [1, 2, 129, 300])
@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_misaligned_buffers(name, dtype, size):
    codec = make_codec(name, dtype)
    x = (1e5 * np.random.default_rng(size).standard_normal(size)).astype(dtype)
    wire, _ = encode(codec, x)
    expected = decode(codec, wire, size)
    for offset in (1, 2, 3):
        buffer = np.zeros(wire.size + offset, np.uint8)
        buffer[offset:] = wire
        assert decode(codec, buffer[offset:], size).tobytes() == expected.tobytes()
        acc = np.zeros(size, dtype)
        codec.decode_add(buffer[offset:], acc)
        assert np.array_equal(acc, expected)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_encoding_into_a_misaligned_buffer(name, offset):
    codec = make_codec(name)
    x = np.random.default_rng(0).standard_normal(129).astype(np.float32)
    buffer = np.zeros(codec.max_nbytes(129) + offset, np.uint8)
    nbytes, _ = codec.encode(x, buffer[offset:])
    assert buffer[offset : offset + nbytes].tobytes() == encode(codec, x)[0].tobytes()


# Stochastic rounding.


@pytest.mark.parametrize("name", LIMITS)
def test_stochastic_rounding_is_right_on_average(name):
    """The mean over 2,000 keys lies within 5 sigma; one rounding has a variance of at most scale² / 4."""
    codec, keys = make_codec(name, stochastic=True), 2000
    x = np.random.default_rng(4).standard_normal(300).astype(np.float32)
    wire = np.zeros(codec.max_nbytes(300), np.uint8)
    total = np.zeros(300)
    out = np.zeros(300, np.float32)
    for key in range(keys):
        codec.encode(x, wire, noise_key(7, key))
        codec.decode(wire, out)
        total += out
    scales = np.repeat(quantizers.from_bf16(wire[:6].view(np.uint16)), 128)[:300].astype(np.float64)
    part = x / scales - np.floor(x / scales)
    sigma = scales * np.sqrt(part * (1 - part) / keys)
    # The noise has 24 bits and the scaled value a float32's: both may shift the mean by some 2^-17 of a scale.
    assert (np.abs(total / keys - x) <= 5 * sigma + scales * 2.0**-16).all()


@pytest.mark.parametrize("name", LIMITS)
def test_stochastic_rounding_depends_on_the_key_alone(name):
    x = np.random.default_rng(5).standard_normal(1000).astype(np.float32)
    codec = make_codec(name, stochastic=True)
    first, again = encode(codec, x, key=123)[0], encode(codec, x, key=123)[0]
    assert first.tobytes() == again.tobytes()
    for other in (124, 123 + 2**32, 123 << 32, 2**64 - 1):
        assert (encode(codec, x, key=other)[0] != first).mean() > 0.2


@pytest.mark.parametrize("first", [0, 5, 2**31, 2**32 - 3, 2**32 + 7, 2**40])
@pytest.mark.parametrize("name", LIMITS)
def test_stochastic_rounding_equals_the_twin(name, first):
    key, codec = noise_key(8, 9), make_codec(name, stochastic=True)
    for size in (1, 2, 300, 301):
        x = np.random.default_rng(7).standard_normal(size).astype(np.float32)
        assert encode(codec, x, key=key, first=first)[0].tobytes() == stochastic_twin(name, x, key, first)


@pytest.mark.parametrize("start", [0, 5, 2**31, 2**32 - 128, 2**32 + 7])
@pytest.mark.parametrize("name", LIMITS)
def test_stochastic_rounding_of_two_halves(name, start):
    """Cut on a block, the parts give the bytes of the whole: the noise belongs to the element."""
    x = np.random.default_rng(6).standard_normal(640).astype(np.float32)
    codec, cut, key = make_codec(name, stochastic=True), 256, noise_key(1, 2, 3)
    whole = encode(codec, x, key=key, first=start)[0]
    left = encode(codec, x[:cut], key=key, first=start)[0]
    right = encode(codec, x[cut:], key=key, first=start + cut)[0]
    assert whole[:10].tobytes() == left[:4].tobytes() + right[:6].tobytes()
    assert whole[10:].tobytes() == left[4:].tobytes() + right[6:].tobytes()


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_stochastic_rounding_keeps_what_needs_no_rounding(name, limit):
    x = np.resize(np.arange(-limit, limit + 1), 128).astype(np.float32)
    x[0] = limit
    wire, _ = encode(make_codec(name, stochastic=True), x, key=9)
    assert decode(make_codec(name), wire, 128).tolist() == x.tolist()


def test_noise_keys():
    """Golden values: they are part of what makes a run repeatable."""
    golden = {
        (): "0000000000000000",
        (0,): "e220a8397b1dcdaf",  # the first number of splitmix64 from seed 0, as published
        (1,): "910a2dec89025cc1",
        (0, 0): "a706dd2f4d197e6f",
        (1, 2, 3): "6ae515c1c0ac7e37",
        (-1,): "e4d971771b652c20",
        (2**64,): "e220a8397b1dcdaf",
        (42, 1000, 7): "1d246a902cf48c5f",
    }
    assert {parts: f"{noise_key(*parts):016x}" for parts in golden} == golden


def test_noise_keys_differ():
    keys = {noise_key(seed, step, rank) for seed in range(8) for step in range(64) for rank in range(8)}
    assert len(keys) == 8 * 64 * 8
    assert noise_key(1, 2) != noise_key(2, 1)
    assert all(0 <= key < 2**64 for key in keys)
    ones = np.mean([key.bit_count() for key in keys])
    assert math.isclose(ones, 32, abs_tol=0.4)
