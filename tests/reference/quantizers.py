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


def bf16_nearest(values):
    """Round float32 or float64 to bfloat16, to nearest even and never to infinity; returns the 16 bits.

    The two neighbours of a value are its float32 bits cut to 16 and one step further from zero.
    """
    wide = np.abs(np.asarray(values, np.float64))
    single = wide.astype(np.float32)
    single = np.where(single > wide, np.nextafter(single, np.float32(0)), single)
    low = (single.view(np.uint32) >> 16).astype(np.uint16)
    high = low + np.uint16(1)
    below = wide - from_bf16(low)
    above = np.where(high == 0x7F80, np.inf, from_bf16(np.minimum(high, 0x7F7F)).astype(np.float64) - wide)
    nearest = np.where((above < below) | ((above == below) & (low % 2 == 1)), high, low)
    return (nearest | np.signbit(values).astype(np.uint16) << 15).astype(np.uint16)


def bf16_bytes(x):
    return bf16_nearest(x).tobytes()


def grids(x, block, rows):
    """Cut a vector into blocks; give each as a grid of rows of 32, and how many elements and columns it has."""
    for start in range(0, x.size, block):
        values = x[start : start + block]
        width = -(-values.size // rows)
        grid = np.zeros((rows, 32), x.dtype)
        grid[:, :width] = np.append(values, np.zeros(rows * width - values.size, x.dtype)).reshape(rows, width)
        yield grid, values.size, width


def fold(grid):
    """Sum a grid, each time by adding its second half to the first: first of the rows, then of the values."""
    values = grid.reshape(-1)
    while values.size > 1:
        values = values[: values.size // 2] + values[values.size // 2 :]
    return values[0]


def planar_scale(value):
    scale = bf16_nearest(np.array([value], np.float32))
    return scale if scale[0] >= 0x0080 else np.zeros(1, np.uint16)


def sign_bytes(x):
    """Return the payload of sign: mean magnitudes, then the signs of a column in the bits of a byte."""
    scales, signs = b"", b""
    for grid, size, width in grids(x, 256, 8):
        mean = fold(np.abs(grid.astype(np.float32)) * np.float32(1 / 256))
        with np.errstate(over="ignore"):
            scales += planar_scale(mean * np.float32(256 / size)).tobytes()
        signs += np.packbits(grid < 0, axis=0, bitorder="little")[0, :width].tobytes()
    return scales + signs


def int2_bytes(x):
    """Return the payload of int2: two steps of Lloyd's from 0.8 of the mean magnitude, then codes + 2."""
    scales, packed = b"", b""
    for grid, size, width in grids(x, 128, 4):
        parts = np.abs(grid.astype(np.float32)) * np.float32(1 / 128)
        with np.errstate(over="ignore"):
            threshold = fold(parts) * np.float32(128 / size) * (np.float32(0.8) * np.float32(1 / 128))
            for _ in range(2):
                above = parts > threshold
                mean = fold(np.where(above, parts, np.float32(0))) / np.float32(max(above.sum(), 1))
                threshold = mean * np.float32(0.5)
            scale = planar_scale(mean * np.float32(128))
        limit = from_bf16(scale)[0] * np.float32(0.5) if scale[0] else np.float32(np.inf)
        codes = (2 + (grid > limit) - (grid < -limit)).astype(np.uint8)
        scales += scale.tobytes()
        packed += (codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6)[:width].tobytes()
    return scales + packed


def topk_choice(x, one_in):
    """Return the places of the largest magnitudes, in order; of equal ones the first, and no zeros."""
    magnitudes = np.abs(x)
    order = np.argsort(-magnitudes, kind="stable")[: -(-x.size // one_in)]
    return np.sort(order[magnitudes[order] >= np.finfo(np.float32).tiny])


def rice_bits(values):
    """Code integers in blocks of 128; returns a string of zeros and ones, the first written first."""
    text = ""
    for start in range(0, len(values), 128):
        block = [int(value) for value in values[start : start + 128]]
        shift = min(range(32), key=lambda s: sum((v >> s) + 1 + s for v in block))
        text += f"{shift:05b}"[::-1]
        text += "".join(f"{v % 2**shift:0{shift}b}"[::-1] for v in block if shift)
        text += "".join("0" * (v >> shift) + "1" for v in block)
    return text


def topk_integers(x, one_in):
    """Return gaps, levels and the lowest level."""
    places = topk_choice(x, one_in)
    bits = x[places].astype(np.float32).view(np.uint32)
    levels = (bits & 0x7FFFFFFF) >> 21
    lowest = int(levels.min()) if places.size else 0
    return np.diff(places, prepend=-1) - 1, 2 * (levels - lowest) + (bits >> 31), lowest


def topk_bytes(x, one_in=100):
    if not x.size:
        return b""
    gaps, levels, lowest = topk_integers(x, one_in)
    text = rice_bits(gaps) + rice_bits(levels)
    text += "0" * (-len(text) % 8)
    packed = bytes(int(text[i : i + 8][::-1], 2) for i in range(0, len(text), 8))
    return np.uint32(gaps.size).tobytes() + np.uint16(lowest).tobytes() + packed


def topk_decoded(x, one_in=100):
    """Return what the other end decodes: the middle of each level."""
    out, places = np.zeros_like(x), topk_choice(x, one_in)
    bits = x[places].astype(np.float32).view(np.uint32)
    out[places] = (bits >> 21 << 21 | 1 << 20).astype(np.uint32).view(np.float32)
    return out


def noise(key_a, key_b, index):
    """Draw as ``kernels.rng.noise`` documents it: lowbias32, in Python's integers."""
    h = (index * 0x9E3779B9 + key_a) % 2**32
    h = (h ^ h >> 16) * 0x7FEB352D % 2**32
    h = (h ^ h >> 15 ^ key_b) * 0x846CA68B % 2**32
    return np.float32((h ^ h >> 16) >> 8) * np.float32(2.0**-24)
