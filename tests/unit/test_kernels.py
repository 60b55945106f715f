"""Kernels that are used by more than one wrapper, against plain numpy; and the whole set without the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain.kernels import delta, half, int4, quantize, reduce
from mpitrain.kernels.rng import noise
from tests.reference import quantizers

ROOT = Path(__file__).resolve().parents[2]
SIZES = [0, 1, 2, 3, 4, 5, 127, 128, 129, 300]
NEAREST = quantize.NEAREST
FLOATS = [np.float32, np.float64]


def draw(size, dtype, seed=0):
    return np.random.default_rng([size, seed]).standard_normal(size).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_sums_and_scans(size, dtype):
    x, acc = draw(size, dtype), draw(size, dtype, 1)
    expected = acc + x
    reduce.add(x, acc)
    assert acc.tobytes() == expected.tobytes()
    out = np.empty_like(x)
    assert reduce.copy_count_not_finite(x, out) == reduce.count_not_finite(x) == 0
    assert out.tobytes() == x.tobytes()
    for bad in (np.nan, np.inf, -np.inf):
        for position in {0, size // 2, size - 1} if size else ():
            y = x.copy()
            y[position] = bad
            assert reduce.copy_count_not_finite(y, out) == reduce.count_not_finite(y) == 1
            assert out.tobytes() == y.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_prediction(size, dtype):
    blocks = -(-size // delta.BLOCK)
    x, past, out = draw(size, dtype), draw(size, dtype, 1), np.empty(size, dtype)
    x[: size // 2] = past[: size // 2] * dtype(0.6)
    factors, unit = np.zeros(blocks, np.uint8), dtype(1 / delta.LEVELS)
    delta.fit_factors(x, past, factors)
    for block in range(blocks):
        here = slice(block * delta.BLOCK, (block + 1) * delta.BLOCK)
        a, b = x[here].astype(np.float64), past[here].astype(np.float64)
        fit = np.clip(a @ b / (b @ b), 0, 1) * delta.LEVELS
        assert abs(int(factors[block]) - fit) <= 0.5 + 1e-6
    share = np.repeat(factors.astype(dtype) * unit, delta.BLOCK)[:size]
    delta.subtract_prediction(x, past, factors, unit, out)
    assert np.allclose(out, x - share * past, rtol=0, atol=1e-6)
    delta.add_prediction(past, factors, unit, out)
    assert np.allclose(out, x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("past", [0.0, np.nan, np.inf, 1e-45, 3e38])
def test_prediction_from_a_useless_past(past):
    """No past, or one of which nothing can be computed, predicts nothing and harms nothing."""
    x = np.ones(200, np.float32)
    factors = np.full(2, 99, np.uint8)
    delta.fit_factors(x, np.full(200, past, np.float32), factors)
    assert np.all(factors <= 15)
    if past in (0.0, 3e38) or not np.isfinite(past):
        assert not factors.any()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 8, 9])
def test_factors_are_packed_two_to_a_byte(count):
    factors = (np.arange(count) * 7 % 16).astype(np.uint8)
    packed, back = np.full((count + 1) // 2, 255, np.uint8), np.zeros(count, np.uint8)
    delta.pack_factors(factors, packed)
    delta.unpack_factors(packed, back)
    assert np.array_equal(back, factors)
    if count == 3:
        assert packed.tolist() == [0x70, 0x0E]


def test_noise():
    """The twin in Python's integers; uniform, and unrelated for neighbouring indices and keys."""
    for key_a, key_b, index in [(0, 0, 0), (1, 2, 3), (2**32 - 1, 2**32 - 1, 2**32 - 1), (77, 5, 2**31)]:
        assert noise(np.uint32(key_a), np.uint32(key_b), np.uint32(index)) == quantizers.noise(key_a, key_b, index)
    table = np.array([[noise(np.uint32(k), np.uint32(9), np.uint32(i)) for i in range(500)] for k in range(20)])
    assert table.min() >= 0
    assert table.max() < 1
    assert abs(table.mean() - 0.5) < 5 * np.sqrt(1 / 12 / table.size)
    assert abs(np.corrcoef(table[:, 1:].ravel(), table[:, :-1].ravel())[0, 1]) < 5 / np.sqrt(table.size)
    assert abs(np.corrcoef(table[1:].ravel(), table[:-1].ravel())[0, 1]) < 5 / np.sqrt(table.size)


def test_scales_stay_in_their_range():
    """The largest element never leaves the codes, whatever its exponent."""
    for exponent in np.arange(-149, 128):
        x = np.array([2.0**exponent, -(2.0**exponent) * 0.999], np.float32)
        scales, codes = np.zeros(1, np.uint16), np.zeros(2, np.int8)
        assert quantize.encode_int8(x, scales, codes, NEAREST) == 0
        assert scales[0] == 0 or quantize.MIN_SCALE <= scales[0] <= quantize.MAX_SCALE
        assert (codes[0] >= 125) if scales[0] else not codes.any()


def test_the_smallest_scale_is_still_sent():
    """A scale is rounded up to the smallest normal one; what would need a smaller one becomes zeros."""
    smallest = np.float32(2.0**-126)
    below = np.array([0x007F0000], np.uint32).view(np.float32)[0]
    for step, scale, code in ((smallest, 0x0080, 127), (np.nextafter(below, smallest), 0x0080, 126), (below, 0, 0)):
        x = np.array([127, -127], np.float32) * step
        scales, codes = np.full(1, 7, np.uint16), np.full(2, 99, np.int8)
        assert quantize.encode_int8(x, scales, codes, NEAREST) == 0
        assert (scales[0], codes.tolist()) == (scale, [code, -code])


UNCOMPILED = """
import numpy as np
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.kernels.reduce import count_not_finite
assert not hasattr(count_not_finite, "signatures"), "compiled after all"
for size in (1, 5, 300):
    for bad in (np.nan, np.inf, -np.inf):
        for position in {0, size // 2, size - 1}:
            x = np.ones(size, np.float32)
            x[position] = bad
            assert count_not_finite(x) == 1
            for name in CODECS:
                codec = make_codec(name)
                found = codec.encode(x, np.zeros(codec.max_nbytes(size), np.uint8))[1]
                assert found == 1, (name, size, position, bad, found)
"""


def test_nonfinite_without_the_compiler():
    """N05: the flags are the same with NUMBA_DISABLE_JIT=1."""
    env = os.environ | {"NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", UNCOMPILED]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


# Half precision: float64 in one rounding.


@pytest.mark.parametrize("size", SIZES)
def test_half_of_float64_is_rounded_once(size):
    rng = np.random.default_rng(size)
    x = rng.standard_normal(size) * 2.0 ** rng.integers(-30, 14, size)
    x = np.concatenate([x, x.astype(np.float16) * (1 + 2.0**-11), x.astype(np.float16) * (1 + 2.0**-11 + 2.0**-50)])
    for values in (x, -x, np.append(x, [np.nan, np.inf, -np.inf, 5e-324, 2.0**-25, np.nextafter(2.0**-25, 1)])):
        halves, expected = np.empty(values.size, np.uint16), values.astype(np.float16)
        assert half.encode_half_wide(values, np.float64(1), halves) == np.sum(~np.isfinite(expected))
        assert np.array_equal(halves.view(np.float16), expected, equal_nan=True)
        out, acc = np.empty_like(values), np.ones_like(values)
        half.decode_half(halves, np.float64(0.5), out)
        half.decode_half_add(halves, np.float64(0.5), acc)
        assert np.array_equal(out, expected.astype(np.float64) / 2, equal_nan=True)
        assert np.array_equal(acc, 1 + out, equal_nan=True)


@pytest.mark.parametrize("size", SIZES)
def test_half_of_float32(size):
    x = (draw(size, np.float32) * 2.0 ** np.random.default_rng(size).integers(-30, 20, size)).astype(np.float32)
    for values in (x, np.append(x, np.array([np.nan, -np.inf, 65520, 65519.99, -0.0, 1e-45, 2.0**-25], np.float32))):
        with np.errstate(over="ignore"):
            expected = (values * np.float32(0.5)).astype(np.float16)
        halves = np.empty(values.size, np.uint16)
        assert half.encode_half(values, np.float32(0.5), halves) == np.sum(~np.isfinite(expected))
        assert np.array_equal(halves.view(np.float16), expected, equal_nan=True)
        assert np.array_equal(np.signbit(halves.view(np.float16)), np.signbit(expected))
        out, acc = np.empty_like(values), np.ones_like(values)
        half.decode_half(halves, np.float32(2), out)
        half.decode_half_add(halves, np.float32(2), acc)
        assert np.array_equal(out, expected.astype(np.float32) * 2, equal_nan=True)
        assert np.array_equal(acc, 1 + out, equal_nan=True)


# Blocks of int8.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_int8_equals_the_twin(size, dtype):
    x = draw(size, dtype)
    scales, codes = np.full(-(-size // 128), 7, np.uint16), np.full(size, 99, np.int8)
    assert quantize.encode_int8(x, scales, codes, NEAREST) == 0
    assert b"".join([scales.tobytes(), codes.tobytes()]) == quantizers.int8_bytes(x)
    out, acc = np.empty_like(x), np.ones_like(x)
    expected = quantizers.block_decode(scales, codes).astype(dtype)
    quantize.decode_int8(scales, codes, out)
    quantize.decode_int8_add(scales, codes, acc)
    assert np.array_equal(out, expected)
    assert np.array_equal(acc, 1 + expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", SIZES)
def test_a_bad_block_leaves_the_others_alone(size, dtype, stochastic, bits):
    if size < 2:
        return
    encode = int4.encode_int4 if bits == 4 else quantize.encode_int8
    how = (stochastic, np.uint32(1), np.uint32(2), np.uint32(3))
    results = []
    for bad in (None, np.nan, -np.inf):
        x = draw(size, dtype)
        if bad is not None:
            x[-1] = x[-2] = bad
        scales, codes = (
            np.full(-(-size // 128), 7, np.uint16),
            np.full(-(-size * bits // 8), 99, np.int8 if bits == 8 else np.uint8),
        )
        assert encode(x, scales, codes, how) == (0 if bad is None else 2)
        results.append((scales[:-2].tobytes(), codes[: max(0, size // 128 - 1) * 16 * bits].tobytes()))
    assert results[0] == results[1] == results[2]


# Blocks of int4.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [*SIZES, 64, 65, 191, 192, 193])
def test_int4_equals_the_twin(size, dtype):
    """Bytes and decoded values; nothing is written beside the vectors."""
    x = draw(size, dtype)
    scales, packed = np.full(-(-size // 128), 7, np.uint16), np.full((size + 1) // 2, 99, np.uint8)
    assert int4.encode_int4(x, scales, packed, NEAREST) == 0
    assert scales.tobytes() + packed.tobytes() == quantizers.int4_bytes(x)
    assert not int4.holds_no_code(packed)
    out, acc = np.full(size + 2, 9, dtype), np.full(size + 2, 9, dtype)
    int4.decode_int4(scales, packed, out[1:-1])
    int4.decode_int4_add(scales, packed, acc[1:-1])
    expected = quantizers.block_decode(*quantizers.int4_encode(x)).astype(dtype)
    assert np.array_equal(out, np.concatenate([[9], expected, [9]]))
    assert np.array_equal(acc, np.concatenate([[9], 9 + expected, [9]]))


def test_every_byte_that_holds_no_code():
    """A byte whose low or high half is 0, whatever the others are, wherever it is."""
    for byte in range(256):
        for size in (1, 63, 64, 65):
            for place in {0, size // 2, size - 1}:
                packed = np.full(size, 0x88, np.uint8)
                packed[place] = byte
                assert int4.holds_no_code(packed) == (byte % 16 == 0 or byte < 16)


def magnitudes(lowest):
    """Every 8,192th float of some octaves, from the lowest one that has a scale to the largest."""
    largest = np.finfo(np.float32).max
    mantissas = np.linspace(1, 2, 1025)[:-1].astype(np.float32)
    values = [m * np.float32(2.0**e) for e in (lowest, -100, -1, 0, 5, 100, 127) for m in mantissas]
    return [*values, largest, np.nextafter(largest, np.float32(0))]


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_code_of_int8_is_beyond_127(dtype):
    """Nearest rounding needs no clipping: the largest element of a block is 126 or 127, up to the largest float."""
    x, scales, codes = np.empty(256, dtype), np.zeros(2, np.uint16), np.zeros(256, np.int8)
    for value in magnitudes(-119):
        x[:128], x[128:] = value, -value
        assert quantize.encode_int8(x, scales, codes, NEAREST) == 0
        assert 126 <= codes[0] == -codes[255] <= 127
        assert (codes[:128] == codes[0]).all()
        assert (codes[128:] == codes[255]).all()


def test_no_code_of_int4_is_beyond_seven():
    """Nearest rounding clips nothing: the largest element of a block is 7, whatever it is, up to the largest float."""
    for value in magnitudes(-123):
        x = np.array([value, -value], np.float32)
        scales, packed = np.zeros(1, np.uint16), np.zeros(1, np.uint8)
        assert int4.encode_int4(x, scales, packed, NEAREST) == 0
        assert packed[0] == 15 + 16
        assert quantize.MIN_SCALE <= scales[0] <= int4.MAX_SCALE
