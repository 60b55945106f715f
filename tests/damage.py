"""Damaged payloads of every codec: refused, or decoded to what the format allows, and nothing outside is touched.

``NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(mktemp -d) python -m tests.damage 100000`` gives every codec so many of them,
with the indices of all kernels checked: machine code that was compiled without the checks must not be in the folder.
"""

import sys
import time

import numba
import numpy as np

from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.config.codec_names import kind_of
from mpitrain.errors import CodecError

CODED = ("ecq-2", "int8-rans", "int4-rans", "int2-rans")
NAMES = ("raw", "fp16", "bf16", "int8", "int4", "int2", "sign", "topk-8", *CODED)
assert {kind_of(name) for name in NAMES} == set(CODECS)

ANY_BITS = ("raw", "fp16")
"""Here every pattern of bits is a value, even those that are not finite."""

SIZES = (1, 2, 9, 127, 128, 129, 300, 700)
LONGER = (3000,)
"""Of so many values the codes of most kinds are entropy-coded."""
GUARD = 64


class Victim:
    """A codec, good payloads of it, and a vector between two guards."""

    def __init__(self, name, rng, sizes=SIZES):
        sizes = (*sizes, *LONGER) if name in CODED else sizes
        self.name, self.codec = name, make_codec(name)
        self.wires = []
        for size in sizes:
            for scale in (1.0, 1e-3):
                x = (rng.laplace(size=size) * np.where(np.arange(size) % 200 < 100, scale, 1)).astype(np.float32)
                wire = np.zeros(self.codec.max_nbytes(size), np.uint8)
                nbytes, nonfinite = self.codec.encode(x, wire)
                assert nonfinite == 0
                self.wires.append((size, wire[:nbytes]))
        self.room = np.zeros(max(sizes) + 2 * GUARD, np.float32)

    def accepts(self, wire, size, add):
        """Decode a payload; returns whether it was taken, and raises whatever it must not do."""
        self.room[:] = 7
        out = self.room[GUARD : GUARD + size]
        try:
            (self.codec.decode_add if add else self.codec.decode)(wire, out)
        except CodecError:
            return False
        finally:
            assert (self.room[:GUARD] == 7).all(), f"{self.name}: written before the vector"
            assert (self.room[GUARD + size :] == 7).all(), f"{self.name}: written behind the vector"
        if self.codec.wire_id not in ANY_BITS:
            assert np.isfinite(out).all(), f"{self.name}: decoded to what is not finite"
        return True


def damage(wire, other, rng):
    """Replace bytes, cut, lengthen, splice with another payload, or draw all bytes anew."""
    kind = int(rng.integers(0, 10))
    if kind == 0:
        return wire[: rng.integers(0, wire.size + 1)]
    if kind == 1:
        return np.append(wire, rng.integers(0, 256, rng.integers(1, 40), np.uint8))
    if kind == 2:
        return rng.integers(0, 256, wire.size, np.uint8)
    bad = wire.copy()
    if kind == 3:
        cut = int(rng.integers(0, min(wire.size, other.size) + 1))
        bad[cut : other.size] = other[cut : wire.size]
        return bad
    near = min(wire.size, 12 if kind < 7 else wire.size)  # the heads of payloads tell how the rest is read
    places = rng.integers(0, near, rng.integers(1, 5))
    if kind == 4:
        bad[places] ^= np.uint8(1 << int(rng.integers(0, 8)))
    else:
        bad[places] = rng.integers(0, 256, places.size, np.uint8)
    return bad


def mutate(victim, cases, rng):
    """Let a codec decode so many damaged payloads; returns how many it took."""
    taken = 0
    for case in range(cases):
        size, wire = victim.wires[case % len(victim.wires)]
        _, other = victim.wires[rng.integers(0, len(victim.wires))]
        taken += victim.accepts(damage(wire, other, rng), size, add=case % 3 == 0)
    return taken


def main(cases):
    """Damage every codec's payloads, and tell what became of them."""
    for number, name in enumerate(NAMES):
        begin, rng = time.perf_counter(), np.random.default_rng(number)
        taken = mutate(Victim(name, rng), cases, rng)
        checked = "with" if numba.config.BOUNDSCHECK else "WITHOUT"
        seconds = time.perf_counter() - begin
        print(f"{name}: {cases:,} payloads {checked} bounds checks, {taken:,} decoded; {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
