"""Kernels that are used by more than one wrapper, against plain numpy; and the whole set without the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpitrain.kernels import delta, quantize, reduce
from mpitrain.kernels.rng import noise

ROOT = Path(__file__).resolve().parents[2]
SIZES = [0, 1, 2, 3, 4, 5, 127, 128, 129, 300]
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


def noise_twin(key_a, key_b, index):
    h = (index * 0x9E3779B9 + key_a) % 2**32
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15 ^ key_b) * 0x846CA68B % 2**32
    h ^= h >> 16
    return np.float32(h >> 8) * np.float32(2.0**-24)


def test_noise():
    """The twin in Python's integers; uniform, and unrelated for neighbouring indices and keys."""
    for key_a, key_b, index in [(0, 0, 0), (1, 2, 3), (2**32 - 1, 2**32 - 1, 2**32 - 1), (77, 5, 2**31)]:
        assert noise(np.uint32(key_a), np.uint32(key_b), np.uint32(index)) == noise_twin(key_a, key_b, index)
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
        mask = np.uint32(2**31 - 1)
        assert quantize.encode_int8(x, x.view(np.uint32), mask, scales, codes) == 0
        assert scales[0] == 0 or quantize.MIN_SCALE <= scales[0] <= quantize.MAX_SCALE
        assert (codes[0] >= 125) if scales[0] else not codes.any()


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
