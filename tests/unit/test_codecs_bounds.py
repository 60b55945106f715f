"""Properties of codecs: bounds of the error, payloads nobody wrote, buffers that lie anywhere."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpitrain.codecs.int4 import Int4
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.errors import CodecError
from tests.reference import quantizers
from tests.reference.wires import COARSEST, LIMITS, decode, encode

FAST = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = hnp.arrays(np.float32, st.integers(0, 300), elements=FLOATS)
NAMES = st.sampled_from(sorted(CODECS))


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
