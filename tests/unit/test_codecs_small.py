"""bf16, int2 and sign: golden bytes, bounds of the error, and damage."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpitrain.codecs.registry import make_codec
from mpitrain.errors import CodecError
from tests.reference import quantizers

FAST = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
LARGEST = np.finfo(np.float32).max
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = hnp.arrays(np.float32, st.integers(0, 600), elements=FLOATS)
ROWS = {"int2": 4, "sign": 8}
"""Elements in a byte."""
PLANAR = sorted(ROWS)


def encode(name, x):
    codec = make_codec(name, x.dtype)
    wire = np.full(codec.max_nbytes(x.size), 0xA5, np.uint8)
    nbytes, nonfinite = codec.encode(x, wire)
    assert nbytes == wire.size
    return wire, nonfinite


def decode(name, wire, size, dtype="f4"):
    out = np.full(size, np.nan, dtype)
    make_codec(name, dtype).decode(wire, out)
    return out


def refuse(name, wire, size, match):
    """Both ways to decode refuse the payload, and touch nothing."""
    codec = make_codec(name)
    for decoder in (codec.decode, codec.decode_add):
        out = np.ones(size, np.float32)
        with pytest.raises(CodecError, match=f"codec {name}: {match}"):
            decoder(wire, out)
        assert (out == 1).all()


def scales_of(name, wire, size):
    return quantizers.from_bf16(wire[: 2 * -(-size // make_codec(name).block)].view(np.uint16)).astype(np.float64)


def block_sums(values, block):
    """Sum a vector block by block."""
    padded = np.append(values, np.zeros(-values.size % block))
    return padded.reshape(-1, block).sum(axis=1)


# bfloat16.

PATTERNS = np.arange(2**16, dtype=np.uint16)
FINITE = PATTERNS[PATTERNS & 0x7FFF < 0x7F80]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_every_finite_bfloat16_is_coded_as_itself(dtype):
    values = quantizers.from_bf16(FINITE).astype(dtype)
    wire, nonfinite = encode("bf16", values)
    assert nonfinite == 0
    assert np.array_equal(wire.view(np.uint16), FINITE)
    assert decode("bf16", wire, FINITE.size, dtype).tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_every_midpoint_rounds_to_even_and_its_neighbours_to_the_nearest(dtype):
    low = np.arange(0x7F7F, dtype=np.uint16)
    a, b = (quantizers.from_bf16(bits).astype(np.float64) for bits in (low, low + np.uint16(1)))
    middle = ((a + b) / 2).astype(dtype)
    for x, expected in (
        (middle, low + low % 2),
        (np.nextafter(middle, np.zeros(1, dtype)), low),
        (np.nextafter(middle, np.full(1, np.inf, dtype)), low + 1),
    ):
        assert np.array_equal(encode("bf16", x)[0].view(np.uint16), expected)
        assert np.array_equal(encode("bf16", -x)[0].view(np.uint16), expected | 0x8000)


def test_golden_bytes_of_bf16():
    x = np.array([0, -0.0, 1, -1, 1 + 2**-8, 1 + 3 * 2**-8, 3.14159274, 1e-40, LARGEST, -LARGEST], np.float32)
    assert encode("bf16", x)[0].tobytes().hex() == "00000080803f80bf803f823f494001007f7f7fff"


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_finite_values_do_not_become_infinite(dtype):
    x = np.array([LARGEST, -LARGEST, 3.3961e38, 3.3962e38, 3.3895e38], dtype)
    wire, nonfinite = encode("bf16", x)
    assert nonfinite == 0
    assert np.array_equal(wire.view(np.uint16), [0x7F7F, 0xFF7F, 0x7F7F, 0x7F7F, 0x7F7F])


def test_float64_is_rounded_once():
    """Over float32, 1 + 2^-8 + 2^-40 first becomes a tie, then 1."""
    assert decode("bf16", encode("bf16", np.array([1 + 2**-8 + 2**-40]))[0], 1)[0] == 1 + 2**-7


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize("place", [0, 4095, 4096, 4999])
def test_bfloat16_that_no_encoder_writes(bits, place):
    wire, _ = encode("bf16", np.ones(5000, np.float32))
    wire.view(np.uint16)[place] = bits
    refuse("bf16", wire, 5000, "1 values that no encoder writes")


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_all_parts_of_bf16_are_counted(dtype):
    x = np.ones(9000, dtype)
    x[[0, 4095, 4096, 8191, 8999]] = [np.nan, np.inf, -np.inf, -np.nan, np.nan]
    assert encode("bf16", x)[1] == 5


@FAST
@given(x=VECTORS)
def test_error_of_bf16_is_bounded(x):
    wire, nonfinite = encode("bf16", x)
    wide = x.astype(np.float64)
    assert nonfinite == 0
    assert (np.abs(decode("bf16", wire, x.size) - wide) <= np.maximum(np.abs(wide) * 2.0**-8, 2.0**-134)).all()


# One and two bits.


@pytest.mark.parametrize("name", ["bf16", *PLANAR])
def test_float64_beyond_float32_is_counted(name):
    assert encode(name, np.array([1e300, 1.0, -1e39, np.nan]))[1] == 3
    assert encode(name, np.array([float(LARGEST), 1.0]))[1] == 0


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", PLANAR)
def test_all_blocks_are_counted(name, dtype):
    x = np.ones(1000, dtype)
    x[[0, 127, 128, 500, 999]] = [np.nan, np.inf, -np.inf, np.nan, np.nan]
    assert encode(name, x)[1] == 5


def test_golden_bytes_of_sign():
    """Bit k of byte i is element 32 k + i; of the last 11, element 2 k + i."""
    x = np.full(267, 0.5, np.float32)
    x[[0, 33, 255]] = [-0.5, -0.5, -0.5]
    x[256:] = [1, -1, 0, -0.0, -3, 1, 1, 1, 1, 1, -1]  # mean 11 / 11 = 1
    wire, _ = encode("sign", x)
    assert wire.tobytes().hex() == "003f" + "803f" + "0102" + "00" * 29 + "80" + "2401"
    out = decode("sign", wire, 267)
    assert np.array_equal(out[:256], x[:256])
    assert out[256:].tolist() == [1, -1, 1, 1, -1, 1, 1, 1, 1, 1, -1]


def test_golden_bytes_of_int2():
    """Bits 2 k and 2 k + 1 of byte i are element 32 k + i as code + 2; of the last 5, element 2 k + i."""
    x = np.zeros(133, np.float32)
    x[[0, 32, 65, 127]] = [0.5, -0.5, 0.5, -0.5]
    x[128:] = [1, -1, 0, 0.25, 1]  # mean 0.65, threshold 0.52; the three ones are above it, the quarter below a half
    wire, _ = encode("int2", x)
    assert wire.tobytes().hex() == "003f" + "803f" + "a7ba" + "aa" * 29 + "6a" + "bba9"
    assert decode("int2", wire, 133).tolist() == [*x[:131], 0, 1]


def test_signs_of_zeros():
    """One bit has no third value: beside others, a zero becomes the scale."""
    x = np.array([0.0, -0.0, 4.0, -4.0], np.float32)
    assert decode("sign", encode("sign", x)[0], 4).tolist() == [2, 2, 2, -2]
    assert not decode("sign", encode("sign", x * 0)[0], 4).any()


@pytest.mark.parametrize("name", PLANAR)
def test_scales_fall_to_zero_and_stay_finite(name):
    smallest = np.float32(2.0**-126)
    for value, expected in ((smallest, smallest), (smallest / 2, 0), (LARGEST, quantizers.from_bf16(PATTERNS[0x7F7F]))):
        for size in (1, 3, make_codec(name).block + 1):
            assert (decode(name, encode(name, np.full(size, value))[0], size) == expected).all()


@pytest.mark.parametrize("name", PLANAR)
def test_bytes_are_those_of_float64(name):
    for size in (1, 127, 1000):
        x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        assert encode(name, x)[0].tobytes() == encode(name, x.astype(np.float64))[0].tobytes()


@pytest.mark.parametrize("name", PLANAR)
def test_blocks_stand_alone(name):
    """Cut on a block, the parts give the bytes of the whole."""
    block = make_codec(name).block
    x = np.random.default_rng(6).standard_normal(4 * block + 17).astype(np.float32)
    whole, left, right = (encode(name, part)[0] for part in (x, x[: 2 * block], x[2 * block :]))
    assert whole.tobytes() == b"".join(part.tobytes() for part in (left[:4], right[:6], left[4:], right[6:]))


@pytest.mark.parametrize("name", PLANAR)
def test_outlier_spoils_only_its_own_block(name):
    """Case C22: the other blocks decode as without it."""
    block = make_codec(name).block
    x = (1e-3 * np.random.default_rng(3).standard_normal(4096)).astype(np.float32)
    plain = decode(name, encode(name, x)[0], x.size)
    x[1000] = 10.0
    out = decode(name, encode(name, x)[0], x.size)
    assert set(np.flatnonzero(out != plain) // block) == {1000 // block}


@FAST
@given(x=VECTORS)
def test_error_of_sign_is_bounded(x):
    """Values keep their signs, and the scale is the mean magnitude up to half a unit of bfloat16."""
    wire, nonfinite = encode("sign", x)
    out = decode("sign", wire, x.size).astype(np.float64)
    assert nonfinite == 0
    sizes = block_sums(np.ones(x.size), 256)
    means = block_sums(np.abs(x.astype(np.float64)), 256) / sizes
    scales = scales_of("sign", wire, x.size)
    tiny = means < 1.18e-38
    assert (scales[tiny] <= 1.18e-38).all()
    assert (np.abs(scales - means)[~tiny] <= means[~tiny] * (2.0**-8 + 2.0**-14)).all()
    assert (out * np.sign(x) >= 0).all()
    assert np.array_equal(np.abs(out), np.repeat(scales, 256)[: x.size])


@FAST
@given(x=VECTORS)
def test_error_of_int2_is_bounded(x):
    """Half a scale, or the excess over the scale; and less power than the block has, which residuals rely on."""
    wire, nonfinite = encode("int2", x)
    wide = x.astype(np.float64)
    out = decode("int2", wire, x.size).astype(np.float64)
    scales = scales_of("int2", wire, x.size)
    here = np.repeat(scales, 128)[: x.size]
    assert nonfinite == 0
    error = np.abs(out - wide)
    assert (error <= np.where(here > 0, np.maximum(here / 2, np.abs(wide) - here), np.abs(wide))).all()
    assert (scales <= np.maximum(block_maxima(wide), 1e-44) * (1 + 2.0**-8)).all()
    power, lost = block_sums(wide**2, 128), block_sums(error**2, 128)
    assert (lost[scales > 0] <= power[scales > 0] * (1 - 1 / 128 + 2.0**-14)).all()
    assert (block_maxima(wide)[scales == 0] < 1.6e-36).all()


def block_maxima(values):
    padded = np.append(np.abs(values), np.zeros(-values.size % 128))
    return padded.reshape(-1, 128).max(axis=1)


@pytest.mark.parametrize(
    ("name", "gaussian", "laplace"), [("sign", 0.34, 0.57), ("int2", 0.92, 1.16)], ids=["sign", "int2"]
)
def test_distance_from_the_bound_of_shannon(name, gaussian, laplace):
    """Bits, scales among them, beyond 1/2 log2(variance / error), which is the bound of a Gaussian source."""
    rng, size = np.random.default_rng(0), 2**18
    for draw, limit in ((rng.standard_normal, gaussian), (rng.laplace, laplace)):
        x = draw(size=size).astype(np.float32)
        wire, _ = encode(name, x)
        out = decode(name, wire, size).astype(np.float64)
        assert 8 * wire.size / size - 0.5 * np.log2(np.mean(x**2.0) / np.mean((x - out) ** 2)) <= limit


@pytest.mark.parametrize("source", ["standard_normal", "laplace"])
def test_scale_of_int2_is_nearly_the_best(source):
    """Against the best of all scales, which is the mean of the k largest magnitudes for some k."""
    x = getattr(np.random.default_rng(1), source)(size=(500, 128)).astype(np.float32)
    out = decode("int2", encode("int2", x.reshape(-1))[0], x.size).reshape(x.shape)
    kept = np.cumsum(-np.sort(-np.abs(x), axis=1), axis=1, dtype=np.float64) ** 2 / np.arange(1, 129)
    best = np.sum(x**2.0) - np.sum(kept.max(axis=1))
    assert best * (1 - 1e-6) <= np.sum((x - out.astype(np.float64)) ** 2) <= best * 1.02


# Damage.


@pytest.mark.parametrize("bits", [0x0001, 0x007F, 0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFFFF])
@pytest.mark.parametrize("name", PLANAR)
def test_scales_that_no_encoder_writes(name, bits):
    wire, _ = encode(name, np.ones(300, np.float32))
    wire[2:4].view(np.uint16)[0] = bits
    refuse(name, wire, 300, "1 block scales that no encoder writes")


def is_legal(name, wire, size):
    """Tell what the formats say of a payload of the right length."""
    codec, rows = make_codec(name), ROWS[name]
    split = 2 * -(-size // codec.block)
    if any(0 < scale < 0x80 or scale > 0x7F7F for scale in wire[:split].view(np.uint16)):
        return False
    for start in range(0, size, codec.block):
        length = min(codec.block, size - start)
        width = -(-length // rows)
        column = wire[split + start // rows :][:width]
        bits = np.array([column >> 8 // rows * row & 2 ** (8 // rows) - 1 for row in range(rows)]).reshape(-1)
        if (bits[length:] != (2 if name == "int2" else 0)).any() or (name == "int2" and (bits == 0).any()):
            return False
    return True


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 127, 128, 131, 256, 259])
@pytest.mark.parametrize("name", PLANAR)
def test_every_flipped_bit(name, size):
    """It raises, or one element changes, or one block is scaled anew; nothing else changes."""
    block = make_codec(name).block
    wire, _ = encode(name, np.random.default_rng(size).standard_normal(size).astype(np.float32))
    whole, split = decode(name, wire, size), 2 * -(-size // block)
    for position, bit in itertools.product(range(wire.size), range(8)):
        damaged = wire.copy()
        damaged[position] ^= 1 << bit
        if not is_legal(name, damaged, size):
            refuse(name, damaged, size, ".* that no encoder writes; the payload is damaged")
            continue
        changed = np.flatnonzero(decode(name, damaged, size) != whole)
        if position < split:
            assert set(changed // block) <= {position // 2}
        else:
            assert changed.size == 1
