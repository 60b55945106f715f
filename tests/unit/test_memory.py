"""Memories: both ends stay equal, a rolled-back step never was, and no error accumulates."""

import numpy as np
import pytest

from mpitrain.codecs.memory import RECEIVERS, SENDERS, Delta, DoubleBuffer, ResidualSender
from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.collectives.predicted import payload_nbytes
from mpitrain.errors import CodecError
from mpitrain.kernels import delta as kernels

SIZES = [0, 1, 2, 127, 128, 129, 300]
PAIRS = [(codec, memory) for codec in sorted(CODECS) for memory in SENDERS]


class Stream:
    """A sender and a receiver of the same vectors, and the bytes between them."""

    def __init__(self, codec, memory, size, dtype="f4", *, stochastic=False):
        made = make_codec(codec, dtype, stochastic=stochastic)
        self.sender, self.receiver = SENDERS[memory](made, size), RECEIVERS[memory](made, size)
        self.size, self.dtype, self.steps = size, dtype, 0

    def step(self, x, *, decoded=True, end="commit"):
        """Send a vector; returns (what the sender says was decoded, what was, the bytes)."""
        wire = np.zeros(self.sender.max_nbytes(self.size), np.uint8)
        told = np.full(self.size, np.nan, self.dtype) if decoded else None
        nbytes, nonfinite = self.sender.encode(x, wire, told, key=noise_key(1, self.steps), first=0)
        got = np.full(self.size, np.nan, self.dtype)
        if not nonfinite:
            self.receiver.decode(wire[:nbytes], got)
        for memory in (self.sender, self.receiver):
            getattr(memory, end)()
        self.steps += end == "commit"
        return told, got, wire[:nbytes].tobytes(), nonfinite

    def states(self):
        """Copy every committed state."""
        ends = {"sender": self.sender, "receiver": self.receiver}
        return {f"{end}.{n}": s.current.tobytes() for end, m in ends.items() for n, s in m.states().items()}


def walk(size, steps, dtype="f4", seed=0):
    """A signal that changes slowly."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size)
    for _ in range(steps):
        x = 0.95 * x + 0.1 * rng.standard_normal(size)
        yield x.astype(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("codec", "memory"), PAIRS)
def test_sender_and_receiver_stay_bit_equal(codec, memory, size):
    stream = Stream(codec, memory, size)
    for x in walk(size, 30):
        before = x.tobytes()
        told, got, wire, nonfinite = stream.step(x)
        assert nonfinite == 0
        bounds = [end.max_nbytes(size) for end in (stream.sender, stream.receiver)]
        typical = payload_nbytes(stream.sender.codec, memory, size)
        assert len(wire) == typical or not stream.sender.codec.fixed_size
        assert max(len(wire), typical) <= min(bounds) == max(bounds)
        assert told.tobytes() == got.tobytes()
        assert x.tobytes() == before
    states = stream.states()
    if memory == "delta":
        assert states["sender.reference"] == states["receiver.reference"] == got.tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(("codec", "memory"), PAIRS)
def test_decode_add_and_a_missing_decoded(codec, memory, dtype):
    """The same stream whether the caller wants the decoded vector, and whether the receiver adds."""
    plain, other = Stream(codec, memory, 200, dtype), Stream(codec, memory, 200, dtype)
    for x in walk(200, 5, dtype):
        _, got, wire, _ = plain.step(x)
        buffer = np.zeros(other.sender.max_nbytes(200), np.uint8)
        nbytes, _ = other.sender.encode(x, buffer, None, key=noise_key(1, other.steps), first=0)
        acc = np.ones(200, dtype)
        other.receiver.decode_add(buffer[:nbytes], acc)
        other.sender.commit()
        other.receiver.commit()
        other.steps += 1
        assert buffer[:nbytes].tobytes() == wire
        assert np.array_equal(acc, got + np.ones(200, dtype))
    assert plain.states() == other.states()


@pytest.mark.parametrize(("codec", "memory"), [pair for pair in PAIRS if CODECS[pair[0]].fixed_size])
def test_parts_are_coded_like_the_whole(codec, memory):
    """Cut at pairs of blocks, a vector leaves the same bits on both ends, and the same memories."""
    whole, parted = Stream(codec, memory, 700), Stream(codec, memory, 700)
    for x in walk(700, 5):
        told, got, _, _ = whole.step(x)
        found = np.zeros_like(x)
        for at, stop in ((256, 512), (512, 700), (0, 256)):
            wire, decoded = np.zeros(parted.sender.max_nbytes(stop - at), np.uint8), np.zeros(stop - at, np.float32)
            nbytes, _ = parted.sender.encode(x[at:stop], wire, decoded, key=noise_key(1, 0), first=at, at=at)
            assert decoded.tobytes() == told[at:stop].tobytes()
            parted.receiver.decode_add(wire[:nbytes], found[at:stop], at=at)
        parted.sender.commit()
        parted.receiver.commit()
        assert np.array_equal(found, got)
        assert parted.states() == whole.states()


@pytest.mark.parametrize(("codec", "memory"), [pair for pair in PAIRS if not CODECS[pair[0]].fixed_size])
def test_parts_leave_the_same_memories_on_both_ends(codec, memory):
    """Where a part is coded otherwise than the whole, both ends still agree on it."""
    stream = Stream(codec, memory, 700)
    for x in walk(700, 5):
        told, found = np.zeros_like(x), np.zeros_like(x)
        for at, stop in ((256, 512), (512, 700), (0, 256)):
            wire = np.zeros(stream.sender.max_nbytes(stop - at), np.uint8)
            nbytes, _ = stream.sender.encode(x[at:stop], wire, told[at:stop], key=0, first=at, at=at)
            stream.receiver.decode_add(wire[:nbytes], found[at:stop], at=at)
        stream.sender.commit()
        stream.receiver.commit()
        assert np.array_equal(found, told)
    states = stream.states()
    assert memory != "delta" or states["sender.reference"] == states["receiver.reference"]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(("codec", "memory"), PAIRS)
def test_a_rolled_back_step_never_was(codec, memory, stochastic):
    stochastic = stochastic and codec in ("int8", "int4")
    straight = Stream(codec, memory, 300, stochastic=stochastic)
    disturbed = Stream(codec, memory, 300, stochastic=stochastic)
    rng = np.random.default_rng(3)
    for x in walk(300, 8):
        before = disturbed.states()
        for _ in range(rng.integers(0, 3)):
            disturbed.step(rng.standard_normal(300).astype("f4"), end="rollback")
        assert disturbed.states() == before
        assert disturbed.step(x)[2] == straight.step(x)[2]
        assert disturbed.states() == straight.states()


@pytest.mark.parametrize(("codec", "memory"), PAIRS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_leave_no_trace(codec, memory, bad):
    """The sender reports them; after the rollback (and even after a commit) its states are those of before."""
    stream, twin = Stream(codec, memory, 300), Stream(codec, memory, 300)
    first, poisoned, last = (x.copy() for x in walk(300, 3))
    stream.step(first)
    twin.step(first)
    before = stream.states()
    poisoned[[0, 150, 299]] = bad
    assert stream.step(poisoned, end="rollback")[3] == 3
    assert stream.states() == before
    wire = np.zeros(stream.sender.max_nbytes(300), np.uint8)
    assert stream.sender.encode(poisoned, wire, None, key=0, first=0)[1] == 3
    stream.sender.commit()
    assert stream.states() == before
    assert stream.step(last)[2] == twin.step(last)[2]


def test_double_buffer():
    buffer = DoubleBuffer(3, np.float32)
    first, second = buffer.current, buffer.next
    buffer.commit()  # nothing was written
    assert buffer.current is first
    buffer.next[:] = 1
    buffer.written = True
    buffer.rollback()
    buffer.commit()
    assert buffer.current is first
    buffer.written = True
    buffer.commit()
    buffer.commit()
    assert buffer.current is second
    assert buffer.current.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(("codec", "bound"), [("fp16", 0.002), ("int8", 0.02), ("int4", 0.3)])
def test_residual_loses_nothing(codec, bound, dtype):
    """The sum of what was decoded plus the residual is the sum of what was sent."""
    stream = Stream(codec, "residual", 300, dtype)
    inputs, outputs = np.zeros(300), np.zeros(300)
    for x in walk(300, 200, dtype):
        inputs += x
        outputs += stream.step(x)[1]
    residual = stream.sender.residual.current
    rounding = 200 * 8 * np.finfo(dtype).eps
    assert np.abs(outputs + residual - inputs).max() <= rounding
    assert np.abs(residual).max() <= bound
    assert np.abs(residual).max() > 0


@pytest.mark.parametrize(("codec", "limit"), [("int8", 127), ("int4", 7)])
def test_residual_reaches_what_the_codec_alone_never_sends(codec, limit):
    """A value far below its block's scale is lost each time, but with the residual arrives on average."""
    x = np.zeros(128, np.float32)
    x[0], x[1] = 1.0, 0.127 / limit
    alone, residual = Stream(codec, "none", 128), Stream(codec, "residual", 128)
    lost, kept = (sum(stream.step(x)[1][1] for _ in range(100)) for stream in (alone, residual))
    assert lost == 0
    assert kept == pytest.approx(12.7 / limit, abs=0.51 / limit * (1 + 2**-7))


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_residual_is_what_encoding_lost(codec):
    stream = Stream(codec, "residual", 200)
    x = next(walk(200, 1))
    told, *_ = stream.step(x)
    assert stream.sender.residual.current.tobytes() == (x - told).tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_error_of_delta_does_not_grow(codec, dtype):
    stream = Stream(codec, "delta", 1000, dtype)
    errors = [np.abs(stream.step(x)[1] - x).max() for x in walk(1000, 200, dtype)]
    assert max(errors[100:]) <= 1.2 * max(errors[5:50])


def factors_of(stream, wire):
    factors = np.zeros(-(-stream.size // 128), np.uint8)
    packed_nbytes = (factors.size + 1) // 2
    kernels.unpack_factors(np.frombuffer(wire, np.uint8)[-packed_nbytes:], factors)
    return factors


def test_factor_is_zero_where_the_past_does_not_help():
    rng = np.random.default_rng(5)
    stream = Stream("int8", "delta", 1280)
    factors = []
    for _ in range(50):
        factors.append(factors_of(stream, stream.step(rng.standard_normal(1280).astype("f4"))[2]))
    assert np.mean(factors) <= 1.0  # of 15; noise fits a little by chance
    opposite = Stream("int8", "delta", 256)
    x = rng.standard_normal(256).astype("f4")
    opposite.step(x)
    assert factors_of(opposite, opposite.step(-x)[2]).tolist() == [0, 0]


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_first_factor_is_zero(codec):
    """Without a past the message is the vector itself: a keyframe."""
    stream, plain = Stream(codec, "delta", 300), Stream(codec, "none", 300)
    x = next(walk(300, 1))
    wire = stream.step(x)[2]
    assert wire == plain.step(x)[2] + b"\0\0"


@pytest.mark.parametrize(("codec", "gain"), [("fp16", 20), ("int8", 20), ("int4", 5)])
def test_error_of_delta_shrinks_on_a_constant_signal(codec, gain):
    x = np.random.default_rng(6).standard_normal(512).astype("f4")
    stream = Stream(codec, "delta", 512)
    errors = []
    for _ in range(4):
        _, got, wire, _ = stream.step(x)
        errors.append(np.abs(got - x).max())
    assert (factors_of(stream, wire) >= 14).all()
    assert errors[1] < errors[0] / gain
    assert errors[3] <= errors[1]


def test_factors_survive_values_that_would_overflow():
    """Squares of large float32 fit into float64; of large float64 they do not, and the factor is then 0."""
    for dtype, value in (("f4", 3e38), ("f8", 1e300)):
        factors = np.full(1, 7, np.uint8)
        kernels.fit_factors(np.full(5, value, dtype), np.full(5, value, dtype), factors)
        assert factors[0] == (15 if dtype == "f4" else 0)
    kernels.fit_factors(np.full(5, np.nan, "f4"), np.ones(5, "f4"), factors)
    assert factors[0] == 0


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9])
def test_factors_pack_and_unpack(count):
    factors = np.random.default_rng(count).integers(0, 16, count).astype(np.uint8)
    packed = np.full(-(-count // 2) + 1, 0xEE, np.uint8)
    kernels.pack_factors(factors, packed[:-1])
    padded = np.append(factors, np.zeros(count % 2, np.uint8)).reshape(-1, 2)
    assert packed.tolist() == [*(padded[:, 0] | padded[:, 1] << 4), 0xEE]
    back = np.full(count, 99, np.uint8)
    kernels.unpack_factors(packed[:-1], back)
    assert back.tolist() == factors.tolist()


def test_golden_bytes_of_delta():
    """The codec's payload, then the factors: block 2 i in the low half of byte i."""
    stream = Stream("raw", "delta", 300)
    x = np.zeros(300, np.float32)
    x[[0, 128, 256]] = [15.0, 15.0, 15.0]
    stream.step(x)
    x[128] = 5.0
    x[256] = -1.0
    wire = stream.step(x)[2]
    assert wire[-2:] == bytes([0x5F, 0x00])
    assert np.frombuffer(wire[:-2], np.float32)[[0, 128, 256]] == pytest.approx([0, 0, -1], abs=1e-6)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_short_messages_of_delta_are_refused(codec):
    memory = Delta(make_codec(codec), 300)
    good = memory.max_nbytes(300)
    for size in (0, 1, good - 1, good + 1):
        for decoder in (memory.decode, memory.decode_add):
            with pytest.raises(CodecError, match="expected"):
                decoder(np.zeros(size, np.uint8), np.zeros(300, np.float32))
    memory.rollback()
    assert not memory.reference.current.any()


def test_states_that_a_checkpoint_keeps():
    codec = make_codec("int8")
    assert {name: list(kind(codec, 5).states()) for name, kind in SENDERS.items()} == {
        "none": [],
        "residual": ["residual"],
        "delta": ["reference"],
    }
    assert not RECEIVERS["residual"](codec, 5).states()
    sender = ResidualSender(codec, 5)
    assert (sender.residual.current.size, sender.residual.current.dtype) == (5, np.float32)
