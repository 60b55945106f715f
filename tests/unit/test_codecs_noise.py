"""Stochastic rounding: right on average, and a function of its key alone."""

import math

import numpy as np
import pytest

from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import make_codec
from tests.reference import quantizers
from tests.reference.wires import LIMITS, decode, encode


def stochastic_twin(name, x, key, first):
    limit = LIMITS[name]
    scales, _ = quantizers.int4_encode(x) if name == "int4" else quantizers.int8_encode(x)
    inverse = np.float32(1) / np.repeat(quantizers.from_bf16(scales), 128)[: x.size]
    noise = [quantizers.noise(key % 2**32, key >> 32, i % 2**32) for i in range(first, first + x.size)]
    codes = np.clip(np.floor(x * inverse + np.array(noise, np.float32)), -limit, limit).astype(np.int8)
    return scales.tobytes() + (quantizers.int4_pack(codes) if name == "int4" else codes).tobytes()


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
