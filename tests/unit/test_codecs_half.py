"""Half precision, case N09: as numpy rounds, and the common exponent of what is too large."""

import numpy as np
import pytest

from mpitrain.codecs.registry import make_codec
from mpitrain.errors import CodecError
from tests.reference.wires import decode, encode

LARGEST = np.finfo(np.float32).max
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
