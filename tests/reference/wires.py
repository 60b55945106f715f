"""Encoding and decoding as tests do it, and how coarse codecs are."""

import numpy as np

SPARE = 8
LIMITS = {"int8": 127, "int4": 7}
"""Largest code of the block-scaled codecs without an entropy coder, which can round at random."""
COARSEST = LIMITS | {"int2": 1, "sign": 1, "ecq": 7, "int8-rans": 127, "int4-rans": 7, "int2-rans": 1}
"""The maximum of a small vector divided by its largest error, about; others err less than int8."""


def encode(codec, x, **more):
    """Encode into a longer buffer full of rubbish, and check that nothing beyond the payload was touched."""
    wire = np.full(codec.max_nbytes(x.size) + SPARE, 0xA5, np.uint8)
    before = x.tobytes()
    nbytes, nonfinite = codec.encode(x, wire[:-SPARE], **more)
    assert x.tobytes() == before
    assert (wire[-SPARE:] == 0xA5).all()
    assert nbytes <= codec.max_nbytes(x.size)
    return wire[:nbytes], nonfinite


def encode_finite(codec, x, **more):
    """Encode values that are all finite."""
    wire, nonfinite = encode(codec, x, **more)
    assert nonfinite == 0
    return wire


def decode(codec, wire, size):
    """Decode into a new vector."""
    out = np.full(size, np.nan, codec.dtype)
    codec.decode(wire, out)
    return out
