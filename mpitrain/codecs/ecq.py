"""ecq: a uniform quantizer whose codes take as many bits as they are surprising.

Format ``ecq``, little-endian. The first byte says what follows:

0. nothing: all values are zero.
1. the values as bfloat16, where that is shorter.
2. codes: u8 number of models, u16 step (bfloat16), i8 shifts of the reconstruction points of codes 1 and of larger
   ones (256ths of a step, away from zero), the models (``mpitrain.codecs.entropy``), a u8 index of its model for every
   4,096 values (only if there are several models), the u32 states of the eight coders (below 16,384 values only one),
   and their u16 words (``mpitrain.kernels.rans``).
3. the same with escapes: behind the shifts their u32 number, and behind the block indices the values themselves, as
   float32: those that 127 steps do not reach.

A value is (code + shift) · step. One step serves the whole vector, since that spends bits best (reverse
water-filling), and blocks of 4,096 may have different models: what is quieter costs less.

The step is found from a sample, so that the codes' entropy, or the error, is what was asked for. With the dead zone
and the mean of each cell as its value this comes within 0.26 bit of Shannon's bound for Gaussian values (Sullivan
1996), and at low rates closer.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Bytes, Floats, Ints
from mpitrain.codecs.base import Codec, view
from mpitrain.codecs.entropy import (
    LOG2,
    SAMPLE,
    ZERO,
    Model,
    Reader,
    best_model,
    lanes_for,
    read_codes,
    read_model,
    write_codes,
)
from mpitrain.errors import CodecError
from mpitrain.kernels import ecq as kernels
from mpitrain.kernels import rans
from mpitrain.kernels.frequencies import PARTS
from mpitrain.kernels.quantize import count_not_single

ZEROS, PLAIN, CODED, ESCAPED = range(4)
"""First byte of a payload."""

MAX_BITS = 7.0
MIN_SNR_DB, MAX_SNR_DB = 1.0, 40.0
_HEADER = 6
_MEASURED = 16
"""From so many values on for each of 2^bits codes, the entropy of a sample says what the codes will cost."""
_GAUSSIAN = 2.047
"""Bits of a Gaussian variable of variance 1 in steps of 1: 1/2 log2(2 pi e)."""
_OVERFLOWN, _LARGEST_BF16 = 0x7F80, 0x7F7F


class _Step(NamedTuple):
    bits: int
    shifts: tuple[int, int]

    @property
    def value(self) -> np.float32:
        return np.float32(np.array([self.bits << 16], np.uint32).view(np.float32)[0])


class Ecq(Codec):
    """Entropy-coded uniform quantizer.

    Parameters
    ----------
    bits : float, optional
        Bits a value that the codes aim at, above 0 to 7; 4 if nothing is given. Short vectors add some bytes.
    snr_db : float, optional
        Signal-to-noise ratio that the codes aim at instead, from 1 to 40 dB.
    """

    wire_id = "ecq"
    format_number = 8
    fixed_size = False

    def __init__(
        self, dtype: npt.DTypeLike = np.float32, *, bits: float | None = None, snr_db: float | None = None
    ) -> None:
        super().__init__(dtype)
        if bits is not None and snr_db is not None:
            raise ValueError(f"codec ecq: expected bits or snr_db, got both: {bits} and {snr_db}")
        if snr_db is not None and not MIN_SNR_DB <= snr_db <= MAX_SNR_DB:
            raise ValueError(f"codec ecq: expected snr_db from {MIN_SNR_DB} to {MAX_SNR_DB}, got {snr_db}")
        if bits is not None and not 0 < bits <= MAX_BITS:
            raise ValueError(f"codec ecq: expected bits above 0 to {MAX_BITS}, got {bits}")
        self.snr_db = snr_db
        self.bits = (4.0 if bits is None else float(bits)) if snr_db is None else 0.0
        self._typical_bits = self.bits or (snr_db or 0.0) / (20 * math.log10(2)) + 0.25

    def max_nbytes(self, size: int) -> int:
        """Two bytes a value and one."""
        return 2 * size + (size > 0)

    def nbytes(self, size: int) -> int:
        """Return what Gaussian values take, about."""
        overhead = _HEADER + 4 + 4 * lanes_for(size)
        return min(self.max_nbytes(size), math.ceil(self._typical_bits * size / 8) + overhead)

    def encode(self, x: Floats, wire: Bytes, key: int = 0, first: int = 0) -> tuple[int, int]:
        """Find the step, quantize, choose the models, code."""
        self.check_buffers(x, wire)
        if not x.size:
            return 0, 0
        sample, energy = _sample(x)
        if not energy:
            wire[0] = ZEROS
            return 1, 0
        if not np.isfinite(energy):
            return 1, int(count_not_single(x))
        step = self._step(sample, energy)
        codes, classes = np.empty(x.size, np.uint8), np.empty(-(-x.size // rans.BLOCK), np.uint8)
        counts = np.zeros((kernels.CLASSES, PARTS, 256), np.uint32)
        bad = kernels.quantize(x, np.float32(1) / step.value, codes, classes, counts)
        if bad:
            return 1, bad
        nbytes = _write(x, step, codes, classes, counts.sum(axis=1, dtype=np.int64), wire[: self.max_nbytes(x.size)])
        return nbytes or _write_plain(x, wire), 0

    def decode(self, wire: Bytes, out: Floats) -> None:
        """Decode into ``out``, which is as before where the payload is refused."""
        if self._is_zero(wire, out.size):
            out[:] = 0
        elif wire[0] == PLAIN:
            out[:] = _read_plain(wire, out.size)
        else:
            codes, points, escapes = _read(wire, out.size)
            kernels.look_up(codes, points, out)
            if escapes.size:
                kernels.put_escapes(codes, escapes, out)

    def decode_add(self, wire: Bytes, acc: Floats) -> None:
        """Decode and add; ``acc`` is as before where the payload is refused."""
        if self._is_zero(wire, acc.size):
            return
        if wire[0] == PLAIN:
            acc += _read_plain(wire, acc.size)
            return
        codes, points, escapes = _read(wire, acc.size)
        kernels.look_up_add(codes, points, acc)
        if escapes.size:
            kernels.add_escapes(codes, escapes, acc)

    def _is_zero(self, wire: Bytes, size: int) -> bool:
        if not size or not wire.size:
            self.check_size(wire, int(size > 0), size)
            return True
        if wire[0] == ZEROS:
            self.check_size(wire, 1, size)
        if wire[0] > ESCAPED or wire.size > self.max_nbytes(size):
            most = self.max_nbytes(size)
            raise CodecError(f"codec ecq: expected at most {most} bytes of kind 0 to 3, got {wire.size} of {wire[0]}")
        return bool(wire[0] == ZEROS)

    def _step(self, sample: npt.NDArray[np.float32], energy: float) -> _Step:
        counts, sums = np.empty(kernels.LIMIT + 1, np.int64), np.empty(3)
        wanted = self.bits or self._typical_bits
        rms = math.sqrt(energy / sample.size)
        guess = _bf16(min(rms * 2.0 ** (_GAUSSIAN - wanted), 1e38))
        if self.bits and sample.size < _MEASURED * 2.0**self.bits:
            found = min(max(guess, kernels.MIN_STEP), kernels.MAX_STEP)
            kernels.measure_step(sample, _Step(found, (0, 0)).value, counts, sums)
        else:
            noise = energy * 10.0 ** (-(self.snr_db or 0.0) / 10)
            found = kernels.find_step(sample, guess, self.bits, noise, LOG2, counts, sums)
        more = int(counts[2 : kernels.LIMIT].sum())
        return _Step(found, (_shift(sums[1], int(counts[1])), _shift(sums[2], more)))


def _sample(x: Floats) -> tuple[npt.NDArray[np.float32], float]:
    """Return some values, as float32, and their energy: 0 only if all values are zero."""
    sample = np.empty(min(x.size, SAMPLE, max(x.size // 16, SAMPLE // 4)), np.float32)
    energy = float(kernels.draw_sample(x, sample))
    if energy or sample.size == x.size:
        return sample, energy
    found = np.flatnonzero(x)[:SAMPLE]
    sample = np.empty(found.size, np.float32)
    return sample, float(kernels.draw_sample(x[found], sample)) if found.size else 0.0


def _bf16(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


def _shift(total: float, count: int) -> int:
    return min(max(round(256 * total / count), -127), 127) if count else 0


def _choose(classes: Bytes, counts: Ints, escape: int) -> tuple[list[Model], npt.NDArray[np.uint8], int]:
    """Return the models, the index of every block's model, and the bits of symbols, models and indices."""
    model, bits = best_model(counts.sum(axis=0), escape)
    present = np.flatnonzero(np.bincount(classes, minlength=kernels.CLASSES))
    if present.size > 1:
        several = [best_model(counts[kind], escape) for kind in present]
        all_bits = sum(cost for _, cost in several) + 8 * classes.size
        if all_bits < bits:
            return [found for found, _ in several], np.searchsorted(present, classes).astype(np.uint8), all_bits
    return [model], np.zeros(classes.size, np.uint8), bits


def _write(x: Floats, step: _Step, codes: Bytes, classes: Bytes, counts: Ints, wire: Bytes) -> int:
    """Write a coded payload, or zeros; return its bytes, or 0 if it does not fit into ``wire``."""
    number = int(counts[:, 0].sum())
    if int(counts[:, ZERO].sum()) == x.size:
        wire[0] = ZEROS
        return 1
    models, indices, bits = _choose(classes, counts, int(number > 0))
    head = bytes((ESCAPED if number else CODED, len(models))) + np.array([step.bits], "<u2").tobytes()
    head += np.array(step.shifts, np.int8).tobytes()
    head += np.array([number], "<u4").tobytes() if number else b""
    head += b"".join(model.described for model in models)
    head += indices.tobytes() if len(models) > 1 else b""
    lanes = lanes_for(x.size)
    begin = len(head) + 4 * number + 4 * lanes
    if begin + bits // 8 > wire.size + 64 or begin > wire.size:
        return 0
    escapes = np.empty(number, np.float32)
    if number:
        kernels.collect_escapes(x, codes, escapes)
    written, states = write_codes(codes, indices, models, wire[begin:])
    if written < 0:
        return 0
    head += escapes.astype("<f4").tobytes() + states[:lanes].astype("<u4").tobytes()
    wire[:begin] = np.frombuffer(head, np.uint8)
    return begin + written


def _write_plain(x: Floats, wire: Bytes) -> int:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    rounded[rounded & 0x7FFF == _OVERFLOWN] -= 1
    wire[0] = PLAIN
    wire[1 : 2 * x.size + 1] = rounded.astype("<u2").view(np.uint8)
    return 2 * x.size + 1


def _read_plain(wire: Bytes, size: int) -> npt.NDArray[np.float32]:
    if wire.size != 2 * size + 1:
        raise CodecError(f"codec ecq: expected {2 * size + 1} bytes for {size} elements, got {wire.size}")
    bits = view(wire[1:], np.uint16)
    if (bits & _OVERFLOWN == _OVERFLOWN).any():
        raise CodecError("codec ecq: a value that is not finite; the payload is damaged")
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _read(wire: Bytes, size: int) -> tuple[Bytes, npt.NDArray[np.float32], npt.NDArray[Any]]:
    """Decode a coded payload: its symbols, the values of symbols, and the escapes."""
    reader = Reader(wire, "ecq")
    kind, number_of_models = reader.byte(), reader.byte()
    step = _Step(int(view(reader.take(2), "<u2")[0]), tuple(view(reader.take(2), np.int8).tolist()))
    if not kernels.MIN_STEP <= step.bits <= kernels.MAX_STEP:
        raise CodecError(f"codec ecq: a step that no encoder writes, {step.bits:#06x}; the payload is damaged")
    number = int(view(reader.take(4), "<u4")[0]) if kind == ESCAPED else 0
    blocks = -(-size // rans.BLOCK)
    if not 1 <= number_of_models <= min(kernels.CLASSES, blocks) or (kind == ESCAPED) != (number > 0):
        raise CodecError(f"codec ecq: {number_of_models} models and {number} escapes; the payload is damaged")
    models = [read_model(reader, int(number > 0)) for _ in range(number_of_models)]
    indices = reader.take(blocks) if number_of_models > 1 else np.zeros(blocks, np.uint8)
    if indices.max() >= number_of_models:
        raise CodecError(f"codec ecq: expected {number_of_models} models, got one more; the payload is damaged")
    escapes = view(reader.take(4 * number), "<f4")
    if not np.isfinite(escapes).all():
        raise CodecError("codec ecq: an escape that is not finite; the payload is damaged")
    codes = read_codes(reader, size, indices, models)
    if number and kernels.collect_escapes(codes, codes, np.empty(0, np.uint8)) != number:
        raise CodecError("codec ecq: the number of escapes is wrong; the payload is damaged")
    points = np.empty(256, np.float32)
    kernels.fill_points(step.value, *step.shifts, points)
    return codes, points, escapes
