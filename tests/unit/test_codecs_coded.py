"""int8, int4 and int2 with an entropy coder: the values of the plain codecs, in fewer bytes."""

import hashlib
import math

import numpy as np
import pytest

from mpitrain.codecs.coded import CODED, PLAIN
from mpitrain.codecs.registry import make_codec
from mpitrain.errors import CodecError
from tests.reference.wires import decode, encode_finite

NAMES = ["int8-rans", "int4-rans", "int2-rans"]
GAPS = {"int8-rans": 0.40, "int4-rans": 0.45, "int2-rans": 0.46}
"""Bits above 1/2 log2(variance / error) for Gaussian values, scales and model included."""


@pytest.mark.parametrize("name", NAMES)
def test_distance_from_the_bound(name):
    x = np.random.default_rng(0).standard_normal(1 << 21).astype(np.float32)
    codec = make_codec(name)
    wire = encode_finite(codec, x)
    noise = np.mean(np.square(decode(codec, wire, x.size) - x, dtype=np.float64))
    bits = 8 * wire.size / x.size
    assert bits - 0.5 * math.log2(np.mean(np.square(x, dtype=np.float64)) / noise) <= GAPS[name]
    assert bits == pytest.approx(8 * codec.nbytes(x.size) / x.size, rel=0.03)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("size", [1, 2, 5, 127, 128, 129, 1000, 20_000, 70_001])
@pytest.mark.parametrize("name", NAMES)
def test_the_values_of_the_plain_codec(name, size, dtype):
    """Of all sizes and scales; never more than one byte above it."""
    plain, codec = make_codec(name.removesuffix("-rans"), dtype), make_codec(name, dtype)
    for source in ("standard_normal", "standard_cauchy"):
        x = getattr(np.random.default_rng(size), source)(size).astype(dtype)
        wire, expected = encode_finite(codec, x), decode(plain, encode_finite(plain, x), size)
        assert wire.size <= plain.max_nbytes(size) + 1
        assert (decode(codec, wire, size) == expected).all()
        acc = np.ones(size, dtype)
        codec.decode_add(wire, acc)
        assert (acc == 1 + expected).all()


@pytest.mark.parametrize("name", NAMES[:2])
def test_rounding_at_random(name):
    x = np.random.default_rng(3).standard_normal(3000).astype(np.float32)
    plain, codec = make_codec(name.removesuffix("-rans"), stochastic=True), make_codec(name, stochastic=True)
    for key, first in ((1, 0), (2, 77)):
        expected = decode(plain, encode_finite(plain, x, key=key, first=first), 3000)
        assert (decode(codec, encode_finite(codec, x, key=key, first=first), 3000) == expected).all()


@pytest.mark.parametrize("name", NAMES)
def test_where_coding_saves_nothing(name):
    """One kind of code costs next to nothing; few values travel as they are."""
    codec = make_codec(name)
    zeros, few = (
        encode_finite(codec, np.zeros(100_000, np.float32)),
        encode_finite(codec, np.linspace(-1, 1, 9).astype(np.float32)),
    )
    assert zeros[-1] == CODED
    assert zeros.size < 2 * -(-100_000 // 128) + 50
    assert few[-1] == PLAIN
    assert few.size == codec.max_nbytes(9)


GOLDEN = {
    "int8-rans": (1173, "dcb14f43f79b8ac67d6a5e1fe73e945c13b889ba64d6cdcb8931c8f1d7ccbec9"),
    "int4-rans": (1186, "b7772788b4e0f1b542bf8e98508fa75769b873c43f1260c696ca9536b89777d0"),
    "int2-rans": (763, "3da80170cabb671cc3459abe36b0bee5b9b247abd7ab9361e2e8c1217a01da22"),
}
"""Length and SHA-256 of a payload; what its bytes mean is tested against a twin in test_codecs.py."""


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes(name):
    """A released format never changes."""
    x = np.round(2 * np.sin(np.arange(3000) ** 2)).astype(np.float32)
    wire = encode_finite(make_codec(name), x)
    assert wire[-1] == CODED
    assert (wire.size, hashlib.sha256(wire.tobytes()).hexdigest()) == GOLDEN[name]


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_told(name):
    codec = make_codec(name)
    x = np.random.default_rng(5).standard_normal(3000).astype(np.float32)
    wire = encode_finite(codec, x)
    assert wire[-1] == CODED
    split = 2 * -(-3000 // 128)
    for place, value, told in [
        (-1, 2, "expected at most .* bytes of kind 0 or 1, got .* of 2"),
        (-1, PLAIN, f"expected {codec.max_nbytes(3000)} bytes for 3000 elements"),
        (split, 3, "expected a model of shape 0 to 2 and code 0 to 127, got 3"),
        (-2, wire[-2] ^ 1, "the codes do not end where they should|a code that no encoder writes"),
        (1, 0x7F, "1 block scales that no encoder writes"),
    ]:
        bad, out = wire.copy(), np.ones(3000, np.float32)
        bad[place] = value
        with pytest.raises(CodecError, match=f"codec {name.removesuffix('-rans')}(-rans)?: .*({told})"):
            codec.decode(bad, out)
        assert (out == 1).all()
    with pytest.raises(CodecError, match=f"codec {name}: expected at least"):
        codec.decode(np.array([1], np.uint8), out)
