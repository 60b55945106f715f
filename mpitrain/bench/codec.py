"""``mpitrain bench codec``: encode and decode-add of one thread, beside memcpy of the same array in the same run."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from mpitrain.arrays import Bytes, Floats, aligned_empty, aligned_zeros
from mpitrain.bench.records import Record, show
from mpitrain.codecs.base import Codec
from mpitrain.codecs.memory import SENDERS, Memory
from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.config.codec_names import rounds_at_random

STOCHASTIC = [name for name in CODECS if rounds_at_random(name)]
GB = 1e9
HEADER_BITS = 128


def main(size: int, repeats: int, path: Path | None) -> int:
    """Measure all codecs; every round runs everything once, so that a drift of the machine meets all alike."""
    x = _gaussian(size)
    copies: Floats = aligned_zeros(size)
    acc: Floats = aligned_zeros(size)
    codecs = {name: make_codec(name) for name in CODECS}
    codecs |= {f"{name} stochastic": make_codec(name, stochastic=True) for name in STOCHASTIC}
    wires = {name: _encoded(codec, x) for name, codec in codecs.items()}
    jobs: dict[str, Callable[[], object]] = {"memcpy": lambda: np.copyto(copies, x)}
    for name, codec in codecs.items():
        jobs |= _jobs(name, codec, x, wires[name], acc)
    streams = {f"{name} + {memory}": (name, memory) for name in STOCHASTIC for memory in ("residual", "delta")}
    for label, (name, memory) in streams.items():
        jobs[f"{label} encode"] = _sender_job(SENDERS[memory](codecs[name], size), x)
    rates = _measure(jobs, size * x.itemsize, repeats)
    records = [_record(name, codec, x, wires[name], rates) for name, codec in codecs.items()]
    records += [{**dict.fromkeys(records[0]), **_timing(label, rates)} for label in streams]
    show(f"{size:,} float32, one thread, median of {repeats}; GB/s of float32, ratios to memcpy", records, path)
    return 0


def _gaussian(size: int) -> Floats:
    x: Floats = aligned_empty(size)
    np.random.default_rng(0).standard_normal(size, dtype=np.float32, out=x)
    return x


def _encoded(codec: Codec, x: Floats) -> Bytes:
    wire: Bytes = aligned_zeros(codec.max_nbytes(x.size), np.uint8)
    nbytes, _ = codec.encode(x, wire)
    return wire[:nbytes]


def _jobs(name: str, codec: Codec, x: Floats, wire: Bytes, acc: Floats) -> dict[str, Callable[[], object]]:
    out: Bytes = aligned_zeros(codec.max_nbytes(x.size), np.uint8)
    return {
        f"{name} encode": lambda: codec.encode(x, out, 1),
        f"{name} decode": lambda: codec.decode_add(wire, acc),
    }


def _sender_job(sender: Memory, x: Floats) -> Callable[[], object]:
    out: Bytes = aligned_zeros(sender.max_nbytes(sender.size), np.uint8)

    def job() -> None:
        sender.encode(x, out, None, key=1, first=0)
        sender.commit()

    return job


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


def _record(name: str, codec: Codec, x: Floats, wire: Bytes, rates: dict[str, float]) -> Record:
    """Measure what the codec loses: signal-to-noise, and the distance from Shannon's bound for a Gaussian source."""
    out = np.empty_like(x)
    codec.decode(wire, out)
    noise = float(np.mean(np.square(out - x, dtype=np.float64)))
    signal = float(np.mean(np.square(x, dtype=np.float64)))
    bits = (8 * wire.size + HEADER_BITS) / x.size
    exact = noise == 0
    return {
        **_timing(name, rates),
        "source": "gaussian",
        "bits_per_value": bits,
        "snr_db": None if exact else 10 * float(np.log10(signal / noise)),
        "shannon_gap_bits": None if exact else bits - 0.5 * float(np.log2(signal / noise)),
        "decode_add_GBps": rates[f"{name} decode"] / GB,
        "decode_add_ratio": rates[f"{name} decode"] / rates["memcpy"],
    }


def _timing(name: str, rates: dict[str, float]) -> Record:
    return {
        "codec": name,
        "memcpy_GBps": rates["memcpy"] / GB,
        "encode_GBps": rates[f"{name} encode"] / GB,
        "encode_ratio": rates[f"{name} encode"] / rates["memcpy"],
    }
