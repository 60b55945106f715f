"""Sums of a vector over ranks in several ways, timed in turns beside MPI's own."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from mpitrain.arrays import Floats, aligned_zeros
from mpitrain.bench.bound import bound_s
from mpitrain.bench.records import Record
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Bucket, Transport, compile_kernels
from mpitrain.collectives.predicted import owned, sent_between
from mpitrain.collectives.registry import make_reducer
from mpitrain.collectives.segments import segment_elements
from mpitrain.comm.agreement import NumberGather, first_on_node
from mpitrain.comm.grid import Axis
from mpitrain.topology.model import Topology

PEER = "MPI_Allreduce"
"""What a user would call instead; blocking, of raw values."""

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes
    ----------
    collective : str
        `PEER`, or one of the package.
    codec, memory : str
    size : int
        Elements of the vector.
    segment_kb : int
        As of the configuration.
    """

    collective: str
    codec: str
    memory: str
    size: int
    segment_kb: int

    @property
    def segment(self) -> int | None:
        """Elements of a segment."""
        return segment_elements(self.segment_kb)

    @property
    def raw(self) -> "Case":
        """The same sum of raw values."""
        return Case(self.collective, "raw", "none", self.size, self.segment_kb)

    def bound_s(self, topology: Topology, ranks: int) -> float:
        """Bound the seconds from below; those of `PEER` like a direct sum's."""
        collective = "direct" if self.collective == PEER else self.collective
        codec = make_codec(self.codec)
        between = sent_between(collective, codec, self.memory, self.size, ranks, segment=self.segment)
        chunks = owned(collective, self.size, ranks, codec.block, 1)
        return bound_s(topology, collective, between, [r for r, (start, stop) in enumerate(chunks) if stop > start])


def peer_of(size: int) -> Case:
    """Return the case of MPI's own sum."""
    return Case(PEER, "raw", "none", size, 0)


@dataclass(frozen=True)
class Round:
    """One sum: seconds of the slowest rank, and what encoding and decoding took of the busiest; bytes of the busiest.

    Attributes
    ----------
    seconds, encode_s, decode_s : float
    sent_bytes : int
    """

    seconds: float
    encode_s: float
    decode_s: float
    sent_bytes: int


class Rig:
    """The sum of one case. Collective over ``axis``, as ``run`` is."""

    def __init__(self, axis: Axis, case: Case, timeout_s: float) -> None:
        self.case = case
        self._axis = axis
        self._timeout_s = timeout_s
        self._addend: Floats = aligned_zeros(case.size)
        self._addend[:] = np.random.default_rng([axis.rank, case.size]).standard_normal(case.size, dtype=np.float32)
        self._values: Floats = aligned_zeros(case.size)
        self._codec = make_codec(case.codec)
        self._reducer = None
        if case.collective != PEER:
            self._reducer = make_reducer(case.collective, axis, Transport(timeout_s, segment=case.segment))
            self._state = self._reducer.open(Bucket(self._values), self._codec, case.memory)

    def compile(self) -> None:
        """Run every kernel once."""
        compile_kernels(self._codec, self.case.memory)

    def run(self) -> Round:
        """Sum once, all ranks from a common start."""
        self._values[:] = self._addend
        self._gather(0.0)
        begin = time.perf_counter()
        spent = self._sum()
        numbers = self._gather(time.perf_counter() - begin, *spent).max(axis=0)
        seconds, encode_s, decode_s, sent_bytes = numbers.tolist()
        return Round(seconds, encode_s, decode_s, int(sent_bytes))

    def _sum(self) -> tuple[float, float, int]:
        """Return seconds of encoding and decoding, and bytes."""
        if self._reducer is None:
            self._axis.comm.Allreduce(self._addend, self._values)
            return 0.0, 0.0, 0
        traffic = self._reducer.start(self._state).wait()
        self._state.commit()
        return traffic.encode_s, traffic.decode_s, traffic.sent_bytes

    def _gather(self, *values: float) -> Floats:
        return NumberGather(self._axis, np.array(values), timeout_s=self._timeout_s).wait().table


def measure(
    axis: Axis, cases: Sequence[Case], rounds: int, topology: Topology | None = None, *, timeout_s: float = 60.0
) -> list[Record]:
    """Measure all cases after a warm-up of each. Collective over ``axis``; all ranks return the same records.

    Every round runs every case once, so that a drift of the machine or of the network meets all alike.
    """
    rigs = [Rig(axis, case, timeout_s) for case in cases]
    for rig in rigs:
        first_on_node(axis, rig.compile)
        rig.run()
    table = [[rig.run() for rig in rigs] for _ in range(rounds)]
    measured = {case: [row[number] for row in table] for number, case in enumerate(cases)}
    return [record(case, axis.size, measured, topology) for case in cases]


def record(case: Case, ranks: int, measured: dict[Case, list[Round]], topology: Topology | None) -> Record:
    """Sum up the rounds of a case in one flat record: medians, and what they are beside the bound and the peers'.

    ``mpi_ratio`` and ``raw_ratio`` are how many times faster it is than MPI's own sum, and than the same collective
    with raw values.
    """
    rounds = measured[case]
    ms = _ms(rounds)
    bound_ms = 1e3 * case.bound_s(topology, ranks) if topology else None
    return {
        "collective": case.collective,
        "codec": case.codec,
        "memory": case.memory,
        "segment_kb": case.segment_kb if case.collective != PEER else None,
        "ranks": ranks,
        "nbytes": FLOAT32_BYTES * case.size,
        "sent_bytes": rounds[0].sent_bytes if case.collective != PEER else None,
        "ms": ms,
        "fastest_ms": 1e3 * min(each.seconds for each in rounds),
        "slowest_ms": 1e3 * max(each.seconds for each in rounds),
        "encode_ms": 1e3 * median(each.encode_s for each in rounds),
        "decode_ms": 1e3 * median(each.decode_s for each in rounds),
        "bound_ms": bound_ms,
        "of_bound": ms / bound_ms if bound_ms else None,
        "mpi_ratio": _ratio(measured, peer_of(case.size), ms),
        "raw_ratio": _ratio(measured, case.raw, ms),
    }


def _ms(rounds: Sequence[Round]) -> float:
    return 1e3 * median(each.seconds for each in rounds)


def _ratio(measured: dict[Case, list[Round]], peer: Case, ms: float) -> float | None:
    return _ms(measured[peer]) / ms if peer in measured else None


def verdicts(records: Sequence[Record]) -> list[str]:
    """Say for every way to encode whether it pays, beside raw values by the same collective."""
    lines: dict[str, list[str]] = {}
    for row in records:
        if row["codec"] != "raw" and isinstance(ratio := row["raw_ratio"], float):
            times = f"{ratio:.2f} x faster" if ratio >= 1 else f"{1 / ratio:.2f} x slower"
            name = f"{row['codec']}:{row['memory']} by {row['collective']}, segments of {row['segment_kb']} kB"
            lines.setdefault(name, []).append(f"{times} than raw at {int(str(row['nbytes'])) / 1e6:g} MB")
    return [f"{name}: {_pays(parts)}: {', '.join(parts)}" for name, parts in lines.items()]


def _pays(parts: Sequence[str]) -> str:
    better = sum("faster" in part for part in parts)
    return "pays" if better == len(parts) else "pays for some sizes" if better else "does not pay"
