"""``mpitrain bench codec``: what codecs cost and lose, of one thread, beside memcpy of the same array in the same run.

A subject is ``CODEC``, ``CODEC:MEMORY`` or ``CODEC:stochastic``. The distance from Shannon's bound is the bits on the
wire less those that no code can do without at the same mean squared error D: ½·log2(σ²/D) for a Gaussian source, and
for a Laplacian its lower bound ½·log2(e/π · σ²/D) (Shannon 1959). ``gaussian_gap_bits`` takes the first for both.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from mpitrain.arrays import Bytes, Floats, aligned_empty, aligned_zeros
from mpitrain.bench.records import Record, show
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
    *("raw", "bf16", "fp16", "int8", "int4", "int2", "sign", "topk-100", "ecq-1", "ecq-2", "ecq-3", "ecq-4", "ecq-6"),
    *(f"{name}:{way}" for name in ("int8", "int4") for way in WAYS),
)


def _laplacian(rng: np.random.Generator, out: Floats) -> None:
    rng.standard_exponential(dtype=np.float32, out=out)
    signs: Floats = rng.integers(0, 2, out.size, dtype=np.int8).astype(np.float32) * 2 - 1
    np.multiply(out, signs, out=out)


def _gaussian(rng: np.random.Generator, out: Floats) -> None:
    rng.standard_normal(dtype=np.float32, out=out)


SOURCES: dict[str, tuple[Callable[[np.random.Generator, Floats], None], float]] = {
    "gaussian": (_gaussian, 0.0),
    "laplace": (_laplacian, 0.5 * math.log2(math.e / math.pi)),
}
"""How the values are drawn, and by how many bits the bound lies above that of a Gaussian of the same variance."""


@dataclass(frozen=True)
class Subject:
    """What is measured, with both ends of its stream and a message of it.

    Attributes
    ----------
    name : str
    sender, receiver : Memory
        Of the array; with a memory, they have a past.
    wire : array of uint8
    """

    name: str
    sender: Memory
    receiver: Memory
    wire: Bytes


def main(size: int, repeats: int, path: Path | None, names: Sequence[str], sources: Sequence[str]) -> int:
    """Measure; every round runs everything once, so that a drift of the machine meets all alike."""
    try:
        chosen = [parse_subject(name) for name in names] if names else default_subjects()
        wrong = next((source for source in sources if source not in SOURCES), None)
        if wrong is not None:
            raise ConfigError(f"bench: --source: expected one of {', '.join(SOURCES)}, got {wrong!r}")
    except MpitrainError as error:
        print(f"mpitrain: {error}", file=sys.stderr)
        return int(error.exit_code)
    records = [record for source in sources or SOURCES for record in measure(source, dict(chosen), size, repeats)]
    title = f"{size:,} float32, one thread, median of {repeats}; GB/s of float32, ratios to memcpy"
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


def measure(source: str, chosen: dict[str, tuple[Codec, str]], size: int, repeats: int) -> list[Record]:
    """Measure all subjects with values of one source."""
    draw, above = SOURCES[source]
    x, acc, copies = aligned_empty(size), aligned_zeros(size), aligned_zeros(size)
    draw(np.random.default_rng(0), x)
    subjects = [make_subject(name, codec, memory, x) for name, (codec, memory) in chosen.items()]
    room: Bytes = aligned_zeros(max(subject.sender.max_nbytes(size) for subject in subjects), np.uint8)
    jobs: dict[str, Callable[[], object]] = {"memcpy": lambda: np.copyto(copies, x)}
    for subject in subjects:
        jobs |= _jobs(subject, x, room, acc)
    rates = _measure(jobs, x.nbytes, repeats)
    return [
        {"codec": each.name, "source": source, **_quality(each, x, above), **_rates(each, rates)} for each in subjects
    ]


def make_subject(name: str, codec: Codec, memory: str, x: Floats) -> Subject:
    """Let both ends of a stream have seen the array once, and encode it again."""
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
    return Subject(name, sender, receiver, wire[:nbytes].copy())


def _jobs(subject: Subject, x: Floats, room: Bytes, acc: Floats) -> dict[str, Callable[[], object]]:
    def encode() -> None:
        subject.sender.encode(x, room, None, key=1, first=0)
        subject.sender.commit()

    return {
        f"{subject.name} encode": encode,
        f"{subject.name} decode": lambda: subject.receiver.decode_add(subject.wire, acc),
    }


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


def _quality(subject: Subject, x: Floats, above: float) -> Record:
    """Measure what the codec loses; with a memory the next message makes good for it, and it says nothing."""
    bits = (8 * subject.wire.size + HEADER_BITS) / x.size
    nothing: Record = {"bits_per_value": bits, "snr_db": None, "shannon_gap_bits": None, "gaussian_gap_bits": None}
    if subject.sender.name != "none":
        return nothing
    out = np.empty_like(x)
    subject.receiver.decode(subject.wire, out)
    noise = float(np.mean(np.square(out - x, dtype=np.float64)))
    if not noise:
        return nothing
    ratio = float(np.mean(np.square(x, dtype=np.float64))) / noise
    gap = bits - 0.5 * math.log2(ratio)
    return nothing | {"snr_db": 10 * math.log10(ratio), "shannon_gap_bits": gap - above, "gaussian_gap_bits": gap}


def _rates(subject: Subject, rates: dict[str, float]) -> Record:
    memcpy, encode, decode = (rates[name] for name in ("memcpy", f"{subject.name} encode", f"{subject.name} decode"))
    return {
        "encode_GBps": encode / GB,
        "decode_add_GBps": decode / GB,
        "memcpy_GBps": memcpy / GB,
        "encode_ratio": encode / memcpy,
        "decode_add_ratio": decode / memcpy,
    }
