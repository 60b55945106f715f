"""``mpitrain bench codec``: what codecs cost and lose, of one thread, beside memcpy of the same array in the same run.

A subject is ``CODEC``, ``CODEC:MEMORY`` or ``CODEC:stochastic``. ``shannon_gap_bits`` are the bits on the wire, headers
included, less those that no code can do without at the same mean squared error D: of drawn values Shannon's bound, of
captured gradients the bound of Gaussian tensors, which a code may fall below (`mpitrain.bench.sources`).
``gaussian_gap_bits`` takes ½·log2(σ²/D) of one Gaussian for all sources.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from mpitrain.arrays import Bytes, Floats, aligned_zeros
from mpitrain.bench.records import Record, show
from mpitrain.bench.sources import Source, mean_square
from mpitrain.codecs.base import Codec
from mpitrain.codecs.memory import RECEIVERS, SENDERS, Memory
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.config.codec_names import kind_of
from mpitrain.config.validate import refusal
from mpitrain.errors import ConfigError, MpitrainError

GB = 1e9
HEADER_BITS = 128
WAYS = ("stochastic", "residual", "delta")
"""What may follow the name of a codec."""

DEFAULTS = (
    *("raw", "bf16", "fp16", "int8", "int4", "int2", "sign", "topk-100"),
    *("int8-rans", "int4-rans", "int2-rans", "ecq-1", "ecq-2", "ecq-3", "ecq-4", "ecq-6"),
    *(f"{name}:{way}" for name in ("int8", "int4") for way in WAYS),
)


@dataclass(frozen=True)
class Message:
    """A part of an array that is encoded by itself, with both ends of its stream.

    Attributes
    ----------
    part : slice
        Of the array.
    sender, receiver : Memory
        Of the part; with a memory, they have a past.
    wire : array of uint8
        The part, encoded.
    """

    part: slice
    sender: Memory
    receiver: Memory
    wire: Bytes


@dataclass(frozen=True)
class Subject:
    """What is measured, and the messages as which the array travels."""

    name: str
    memory: str
    messages: list[Message]


def main(
    repeats: int,
    path: Path | None,
    codecs: Sequence[str],
    sources: Sequence[str],
    make: Callable[[str], Source],
    check: Callable[[], None],
) -> int:
    """Measure; every round runs everything once, so that a drift of the machine meets all alike.

    Parameters
    ----------
    make : callable
        Makes the source of a name.
    check : callable
        Refuses what was asked for before anything is made.
    """
    records: list[Record] = []
    told: dict[str, None] = {}
    try:
        chosen = [parse_subject(name) for name in codecs] if codecs else default_subjects()
        check()
        for name in sources:
            source = make(name)
            told[source.told] = None
            records += measure(source, dict(chosen), repeats)
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    title = f"float32 values: {'; '.join(told)}. One thread, median of {repeats}; GB/s of float32, ratios to memcpy"
    show(title, records, path)
    return 0


def default_subjects() -> list[tuple[str, tuple[Codec, str]]]:
    """List what is measured where nothing is asked for."""
    return [parse_subject(name) for name in DEFAULTS if kind_of(name.partition(":")[0]) in CODECS]


def parse_subject(text: str) -> tuple[str, tuple[Codec, str]]:
    """Read a subject; return its name, its codec and its memory; raises ConfigError."""
    name, colon, way = text.partition(":")
    if colon and way not in WAYS:
        raise ConfigError(f"bench: --codec {text}: expected CODEC, or one of {', '.join(WAYS)} behind it, got {way!r}")
    memory = "none" if way in ("", "stochastic") else way
    try:
        codec = make_codec(name, stochastic=way == "stochastic")
    except ConfigError as error:
        raise ConfigError(f"bench: --codec {text}: {str(error).removeprefix('codec: ')}") from None
    if reason := refusal("direct", name, memory):
        raise ConfigError(f"bench: --codec {text}: {reason}")
    return text, (codec, memory)


def measure(source: Source, chosen: dict[str, tuple[Codec, str]], repeats: int) -> list[Record]:
    """Measure all subjects with values of one source."""
    x, acc, copies = source.values, aligned_zeros(source.values.size), aligned_zeros(source.values.size)
    subjects = [make_subject(name, codec, memory, source) for name, (codec, memory) in chosen.items()]
    room = max(message.sender.max_nbytes(_size(message)) for subject in subjects for message in subject.messages)
    wire: Bytes = aligned_zeros(room, np.uint8)
    jobs: dict[str, Callable[[], object]] = {"memcpy": lambda: np.copyto(copies, x)}
    for subject in subjects:
        jobs |= _jobs(subject, x, wire, acc)
    rates = _measure(jobs, x.nbytes, repeats)
    return [
        {
            "codec": each.name,
            "source": source.name,
            "values": source.count,
            **_quality(each, source),
            **_rates(each, rates),
        }
        for each in subjects
    ]


def _size(message: Message) -> int:
    return int(message.part.stop - message.part.start)


def make_subject(name: str, codec: Codec, memory: str, source: Source) -> Subject:
    """Let both ends of every stream have seen their part once, and encode it again."""
    return Subject(name, memory, [_make_message(part, codec, memory, source.values[part]) for part in source.messages])


def _make_message(part: slice, codec: Codec, memory: str, x: Floats) -> Message:
    sender, receiver = SENDERS[memory](codec, x.size), RECEIVERS[memory](codec, x.size)
    wire: Bytes = aligned_zeros(sender.max_nbytes(x.size), np.uint8)
    out = np.empty_like(x)
    nbytes, _ = sender.encode(x, wire, None, key=0, first=0)
    if memory != "none":
        receiver.decode(wire[:nbytes], out)
        sender.commit()
        receiver.commit()
        nbytes, _ = sender.encode(x, wire, None, key=0, first=0)
        sender.rollback()
    return Message(part, sender, receiver, wire[:nbytes].copy())


def _jobs(subject: Subject, x: Floats, room: Bytes, acc: Floats) -> dict[str, Callable[[], object]]:
    def encode() -> None:
        for message in subject.messages:
            message.sender.encode(x[message.part], room, None, key=1, first=0)
            message.sender.commit()

    def decode() -> None:
        for message in subject.messages:
            message.receiver.decode_add(message.wire, acc[message.part])

    return {f"{subject.name} encode": encode, f"{subject.name} decode": decode}


def _measure(jobs: dict[str, Callable[[], object]], nbytes: int, repeats: int) -> dict[str, float]:
    """Return the median rate of each job in bytes of float32 a second; one round beforehand compiles and warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for round_number in range(repeats + 1):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            if round_number:
                seconds[name].append(time.perf_counter() - begin)
    return {name: nbytes / median(values) for name, values in seconds.items()}


def _quality(subject: Subject, source: Source) -> Record:
    """Measure what the codec loses; with a memory the next message makes good for it, and it says nothing."""
    bits = sum(8 * message.wire.size + HEADER_BITS for message in subject.messages) / source.count
    nothing: Record = {"bits_per_value": bits, "snr_db": None, "shannon_gap_bits": None, "gaussian_gap_bits": None}
    if subject.memory != "none":
        return nothing
    out: Floats = source.values.copy()  # what lies between messages is lost by none
    for message in subject.messages:
        message.receiver.decode(message.wire, out[message.part])
    power, noise = (mean_square(x) * x.size / source.count for x in (source.values, out - source.values))
    if not noise or not power:
        return nothing
    return nothing | {
        "snr_db": 10 * math.log10(power / noise),
        "shannon_gap_bits": bits - source.least_bits(noise),
        "gaussian_gap_bits": bits - 0.5 * math.log2(power / noise),
    }


def _rates(subject: Subject, rates: dict[str, float]) -> Record:
    memcpy, encode, decode = (rates[name] for name in ("memcpy", f"{subject.name} encode", f"{subject.name} decode"))
    return {
        "encode_GBps": encode / GB,
        "decode_add_GBps": decode / GB,
        "memcpy_GBps": memcpy / GB,
        "encode_ratio": encode / memcpy,
        "decode_add_ratio": decode / memcpy,
    }
