"""Codecs against their numpy twins bit for bit, golden bytes, and arrays that they refuse."""

import struct

import numpy as np
import pytest

from mpitrain.codecs.int4 import Int4
from mpitrain.codecs.int8 import Int8
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.errors import ConfigError
from tests.reference import entropy, quantizers
from tests.reference.wires import COARSEST, LIMITS, decode, encode

SIZES = [0, 1, 2, 127, 128, 129, 1000]
LARGEST = np.finfo(np.float32).max
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
