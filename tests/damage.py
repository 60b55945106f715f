"""Damaged payloads of every codec: refused, or decoded to what the format allows, and nothing outside is touched.

``NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(mktemp -d) python -m tests.damage 100000`` gives every codec so many of them,
with the indices of all kernels checked: machine code that was compiled without the checks must not be in the folder.
"""

import sys
import time

import numba
import numpy as np

from mpitrain.codecs.memory import Delta
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.config.codec_names import kind_of
from mpitrain.errors import CodecError

CODED = ("ecq-2", "ecq-20dB", "int8-rans", "int4-rans", "int2-rans")
NAMES = ("raw", "fp16", "bf16", "int8", "int4", "int2", "sign", "topk-8", *CODED)
assert {kind_of(name) for name in NAMES} == set(CODECS)
TYPES = (np.float32, np.float64)

ANY_BITS = ("raw", "fp16")
"""Here every pattern of bits is a value, even those that are not finite."""

SIZES = (1, 2, 9, 127, 128, 129, 300, 700)
LONGER = (3000,)
"""Of so many values the codes of most kinds are entropy-coded."""
GUARD = 64
GUARDS = (0xA5, 0x1E)
"""What lies around a payload, and what when it is decoded again."""


def draw(size, scale, dtype, rng):
    """Return values of which every second hundred is scaled."""
    return (rng.laplace(size=size) * np.where(np.arange(size) % 200 < 100, scale, 1)).astype(dtype)


class Victim:
    """A codec, good payloads of it, and a vector and a wire between guards."""

    def __init__(self, name, rng, sizes=SIZES, dtype=np.float32):
        sizes = (*sizes, *LONGER) if name in CODED else sizes
        self.name, self.codec = f"{name} of {np.dtype(dtype)}", make_codec(name, dtype)
        room = max(sizes) + 2 * GUARD
        self.before = np.resize(rng.normal(size=64), room).astype(dtype)
        self.kept = self.before.tobytes()
        self.start(room)
        self.wires = [(size, self.encode(draw(size, scale, dtype, rng))) for size in sizes for scale in (1.0, 1e-3)]
        self.rooms = [np.empty(room, dtype) for _ in GUARDS]

    def start(self, room):
        """Prepare what is needed beside the codec; nothing."""

    def encode(self, x):
        """Return a good payload."""
        wire = np.zeros(self.codec.max_nbytes(x.size), np.uint8)
        nbytes, nonfinite = self.codec.encode(x, wire)
        assert nonfinite == 0
        return wire[:nbytes]

    def decode(self, wire, out, add):
        """Decode a payload, or add it; raises CodecError."""
        (self.codec.decode_add if add else self.codec.decode)(wire, out)

    def accepts(self, wire, size, add, again=True):
        """Decode a payload; returns whether it was taken, and raises whatever it must not do.

        ``again``: and once more, with other bytes around it. What lies there changes neither result nor message.
        """
        here = slice(GUARD, GUARD + size)
        first = self._try(wire, size, add, self.rooms[0], GUARDS[0])
        if again:
            second = self._try(wire, size, add, self.rooms[1], GUARDS[1])
            assert first == second, f"{self.name}: read outside the payload: {first}, {second}"
            same = self.rooms[0][here].tobytes() == self.rooms[1][here].tobytes()
            assert same, f"{self.name}: read outside the payload"
        if not first and self.codec.wire_id not in ANY_BITS:
            assert np.isfinite(self.rooms[0][here]).all(), f"{self.name}: decoded to what is not finite"
        return not first

    def _try(self, wire, size, add, room, guard):
        """Decode into ``room``; returns the reason of a refusal, or nothing."""
        room[:] = self.before
        around = np.full(wire.size + 2 * GUARD, guard, np.uint8)
        around[GUARD : GUARD + wire.size] = wire
        sent, reason = around.tobytes(), ""
        try:
            self.decode(around[GUARD : GUARD + wire.size], room[GUARD : GUARD + size], add)
        except CodecError as error:
            reason = str(error)
        assert around.tobytes() == sent, f"{self.name}: payload or its surroundings written"
        found, begin, end = room.tobytes(), GUARD * room.itemsize, (GUARD + size) * room.itemsize
        assert found[:begin] == self.kept[:begin], f"{self.name}: written before the vector"
        assert found[end:] == self.kept[end:], f"{self.name}: written behind the vector"
        assert not reason or found == self.kept, f"{self.name}: refused, but the vector was written"
        return reason


class DeltaVictim(Victim):
    """The same behind a memory that predicts; its references lie between guards too."""

    def start(self, room):
        """Let both ends know the same past."""
        self.sender, self.receiver = Delta(self.codec, room), Delta(self.codec, room)
        self.past = np.resize(draw(1000, 1.0, self.codec.dtype, np.random.default_rng(1)), room)
        self.past_kept = self.past.tobytes()
        for end in (self.sender, self.receiver):
            end.reference.current[:] = self.past

    def encode(self, x):
        """Return a good payload of the difference."""
        wire = np.zeros(self.sender.max_nbytes(x.size), np.uint8)
        nbytes, nonfinite = self.sender.encode(x, wire, None, key=0, first=0, at=GUARD)
        assert nonfinite == 0
        self.sender.rollback()
        return wire[:nbytes]

    def decode(self, wire, out, add):
        """Decode by the memory, which keeps its past, and of a refused payload nothing."""
        reference = self.receiver.reference
        reference.next[:] = self.before
        taken = False
        try:
            (self.receiver.decode_add if add else self.receiver.decode)(wire, out, at=GUARD)
            taken = True
        finally:
            found, begin, end = reference.next.tobytes(), GUARD * out.itemsize, (GUARD + out.size) * out.itemsize
            assert reference.written == taken, f"{self.name}: a reference written by a refused payload"
            assert reference.current.tobytes() == self.past_kept, f"{self.name}: the past was written"
            around = found[:begin] == self.kept[:begin] and found[end:] == self.kept[end:]
            assert around, f"{self.name}: a reference written where it must not be"
            assert taken or found == self.kept, f"{self.name}: a reference written by a refused payload"
            self.receiver.rollback()


KINDS = {"": Victim, "delta of ": DeltaVictim}


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
    """Let a codec decode so many damaged payloads, every fifth twice; returns how many it took."""
    taken = 0
    for case in range(cases):
        size, wire = victim.wires[case % len(victim.wires)]
        _, other = victim.wires[rng.integers(0, len(victim.wires))]
        taken += victim.accepts(damage(wire, other, rng), size, add=case % 3 == 0, again=case % 5 == 0)
    return taken


def main(cases):
    """Damage every codec's payloads, a quarter each alone and by difference in both types; tell what became of them."""
    for number, name in enumerate(NAMES):
        begin, rng = time.perf_counter(), np.random.default_rng(number)
        victims = [kind(name, rng, dtype=dtype) for kind in KINDS.values() for dtype in TYPES]
        taken = sum(mutate(victim, cases // len(victims), rng) for victim in victims)
        checked = "with" if numba.config.BOUNDSCHECK else "WITHOUT"
        seconds = time.perf_counter() - begin
        print(f"{name}: {cases:,} payloads {checked} bounds checks, {taken:,} decoded; {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
