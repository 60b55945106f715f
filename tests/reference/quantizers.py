"""Twins of the codecs: the formats of ``mpitrain/codecs`` written down again, one line of numpy a step."""

import numpy as np

BLOCK = 128


def bf16_up(values):
    """Round positive float32 up to bfloat16; returns the 16 bits."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits.astype(np.uint64) + 0xFFFF) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def block_encode(x, limit, largest_scale):
    """Return (scale bits, codes) of a finite vector, nearest rounding to codes from -limit to limit."""
    scales, codes = [np.zeros(0, np.uint16)], [np.zeros(0, np.int8)]
    for start in range(0, x.size, BLOCK):
        block = x[start : start + BLOCK]
        maximum = np.float32(np.max(np.abs(block)))
        scale = np.minimum(bf16_up([maximum / np.float32(limit)]), largest_scale).astype(np.uint16)
        if scale[0] < 0x0080:
            scale[0] = 0
            inverse = np.float32(0)
        else:
            inverse = np.float32(1) / from_bf16(scale)[0]
        scales.append(scale)
        codes.append(np.clip(np.rint(block * inverse), -limit, limit).astype(np.int8))
    return np.concatenate(scales), np.concatenate(codes)


def block_decode(scales, codes):
    return codes.astype(np.float32) * np.repeat(from_bf16(scales), BLOCK)[: codes.size]


def int8_encode(x):
    return block_encode(x, 127, 0x7C01)


def int8_bytes(x):
    scales, codes = int8_encode(x)
    return scales.tobytes() + codes.tobytes()


def int4_encode(x):
    return block_encode(x, 7, 0x7E12)


def int4_pack(codes):
    """Put codes into the halves of bytes: of each block of n the first ceil(n / 2) low, the others high."""
    parts = [np.zeros(0, np.uint8)]
    for start in range(0, codes.size, BLOCK):
        halves = (codes[start : start + BLOCK] + 8).astype(np.uint8)
        low, high = np.split(halves, [-(-halves.size // 2)])
        high = np.append(high, np.full(low.size - high.size, 8, np.uint8))
        parts.append(low | high << 4)
    return np.concatenate(parts)


def int4_bytes(x):
    scales, codes = int4_encode(x)
    return scales.tobytes() + int4_pack(codes).tobytes()


def half_bytes(x):
    """Return the payload of fp16: numpy's direct cast, with a common exponent where it overflows."""
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16)
    if np.isfinite(halves).all():
        return halves.tobytes()
    largest = 112 if x.dtype == np.float32 else 1008
    exponent = min(int(np.frexp(np.max(np.abs(x)))[1]) - 15, largest)
    scaled = np.clip(x * x.dtype.type(2.0**-exponent), -65504, 65504)
    return scaled.astype(np.float16).tobytes() + np.int16(exponent).tobytes()
