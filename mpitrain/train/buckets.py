"""Buckets: which tensors leave together, as what bytes, and what is remembered of them."""

import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats
from mpitrain.codecs.base import Codec
from mpitrain.codecs.memory import DoubleBuffer
from mpitrain.codecs.noise import noise_key
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.base import Bucket, BucketState, Traffic
from mpitrain.collectives.reducer import Pending, Reducer
from mpitrain.config.codec_names import rank_of, rounds_at_random
from mpitrain.config.schema import ExchangeConfig
from mpitrain.errors import ConfigError
from mpitrain.kernels.reduce import count_not_finite
from mpitrain.params import ALIGN, Layout, Params, ParamSpec, Segment
from mpitrain.server.setting import Piece

BUCKETS_A_MODEL = 6
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Summed:
    """What became of the sums of a step: whether they are finite, the same on all ranks, and what they cost here."""

    finite: bool
    traffic: Traffic


def codec_of(spec: ParamSpec, config: ExchangeConfig) -> str:
    """Choose the codec of a tensor: the first rule that matches, else fp16 for small ones, else ``exchange.codec``.

    Small means 1-D or below 1,024 elements: gains and biases lose most by coarse codecs and weigh least. What the
    factors of a rank would not halve travels as these do, or as fp16 where it is small.
    """
    chosen = next((rule.codec for rule in config.rule if fnmatchcase(spec.name, rule.match)), None)
    if rank := rank_of(chosen or config.codec):
        if halved_by(rank, spec):
            return chosen or config.codec
        return "fp16" if spec.small and config.factor_codec != "raw" else config.factor_codec
    return chosen or ("fp16" if spec.small and config.codec != "raw" else config.codec)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """See a tensor as a matrix: its first axis against all others."""
    return shape[0], prod(shape[1:])


def halved_by(rank: int, spec: ParamSpec) -> bool:
    """Tell whether a tensor is a matrix of at least twice the elements of its factors of a rank."""
    if len(spec.shape) < 2 or spec.small:
        return False
    m, n = matrix_shape(spec.shape)
    return m * n > 2 * rank * (m + n)


def check_rules(names: Collection[str], config: ExchangeConfig) -> None:
    """Refuse a rule that no tensor matches: it was meant for one.

    Raises
    ------
    ConfigError
        The pattern, and the names there are.
    """
    for rule in config.rule:
        if not any(fnmatchcase(name, rule.match) for name in names):
            raise ConfigError(
                f"exchange.rule: match = {rule.match!r} fits no tensor; the model has {', '.join(sorted(names))}"
            )


def plan_buckets(layout: Layout, bucket_mb: float | None, shared: Collection[str] = ()) -> list[list[Segment]]:
    """Cut every group of the layout into buckets, in the order in which backward fills them.

    Parameters
    ----------
    bucket_mb : float or None
        Size from which a bucket is full, in 10^6 bytes of float32; None: a sixth of what this rank holds.
    shared : collection of str
        Tensors that other ranks of the replica hold, too. Their groups are not cut: ranks that hold different amounts
        of other tensors must make the same buckets of them.

    Returns
    -------
    list of list of Segment
        Consecutive tensors each, in forward order. A bucket starts where tensors are aligned, so that a codec's blocks
        never span two large ones.
    """
    target = bucket_mb * 1e6 / FLOAT32_BYTES if bucket_mb else layout.size / BUCKETS_A_MODEL
    buckets: list[list[Segment]] = []
    for group in layout.groups:
        current: list[Segment] = []
        for segment in reversed(layout.members(group)):
            current.insert(0, segment)
            full = current[-1].stop - current[0].start >= target and segment.spec.name not in shared
            if full and segment.start % ALIGN == 0:
                buckets.append(current)
                current = []
        if current:
            buckets.append(current)
    return buckets


def stream_of(spec: ParamSpec, config: ExchangeConfig, dtype: npt.DTypeLike) -> tuple[Codec, str]:
    """Choose the codec and the memory of the bucket that begins with a tensor."""
    name = codec_of(spec, config)
    codec = make_codec(name, dtype, stochastic=rounds_at_random(name) and config.rounding == "stochastic")
    return codec, "none" if codec.wire_id == "raw" else str(config.memory)


def travels_raw(config: ExchangeConfig, step: int, steps: int) -> bool:
    """Tell whether everything travels raw in a step (from 1) of a run of ``steps``: at its start, or at its end."""
    return step <= config.warmup_steps or step > steps - config.raw_last_steps


def pieces_of(
    layout: Layout, exchange: ExchangeConfig, held: Collection[str], dtype: npt.DTypeLike = np.float32
) -> list[Piece]:
    """Cut what a column holds into pieces, the same on all its ranks."""
    buckets = plan_buckets(layout, exchange.bucket_mb, held)
    return [
        Piece(index, segments, *stream_of(segments[0].spec, exchange, dtype)) for index, segments in enumerate(buckets)
    ]


class BucketSums:
    """Sums of all tensors of a buffer over an axis, bucket by bucket.

    Parameters
    ----------
    reducer : Reducer
        How; it knows the axis.
    values : Params
        Addends of the layout whose groups are codec names: gradients, or changes of weights. Replaced by their sums.
    config : ExchangeConfig
        What bytes, with which memory; bucket size.
    seed : int
        Of stochastic rounding.
    shared : collection of str
        As in `plan_buckets`.
    chosen : collection of int, optional
        Buckets of the plan that are summed; all of them where left out.
    steps : int, optional
        Length of the run, for what ends raw; without, nothing does.
    first : int
        Number of the first bucket of the plan: no two that are under way at a time share one.
    salt : str
        Tells the noise of these values from that of others of the same names.

    Attributes
    ----------
    ranges : list of (start, stop)
        What the buckets cover of the flat buffer.

    Notes
    -----
    A step is ``begin``, then ``finished`` as tensors become final (or all at once), then ``finish``, then ``commit`` or
    ``rollback``. Collective over the axis.
    """

    def __init__(
        self,
        reducer: Reducer,
        values: Params,
        config: ExchangeConfig,
        *,
        seed: int,
        shared: Collection[str] = (),
        chosen: Collection[int] | None = None,
        steps: int = sys.maxsize,
        first: int = 0,
        salt: str = "",
    ) -> None:
        self.reducer = reducer
        self._seed = seed
        self._values = values
        self._config = config
        plan = list(enumerate(plan_buckets(values.layout, config.bucket_mb, shared)))
        plan = [(number, segments) for number, segments in plan if chosen is None or number in chosen]
        self._segments = [segments for _, segments in plan]
        self.ranges = [(segments[0].start, segments[-1].stop) for segments in self._segments]
        self._steps = steps
        self._states: list[BucketState] = []
        self._uncompressed: list[BucketState] = []
        self._bucket_of: dict[str, int] = {}
        for index, (number, segments) in enumerate(plan):
            codec, memory = stream_of(segments[0].spec, config, values.flat.dtype)
            bucket = Bucket(values.flat[slice(*self.ranges[index])], first + number)
            self._states.append(reducer.open(bucket, codec, memory))
            self._bucket_of.update({segment.spec.name: index for segment in segments})
        self._noise = [salt_of(segments[0].spec, salt) for segments in self._segments]
        self._current = self._states
        self._step = 0
        self._missing: list[int] = []
        self._pending: list[Pending] = []

    def begin(self, step: int) -> None:
        """Expect the tensors of a step."""
        self._step = step
        self._current = self._states_of(step)
        self._missing = [len(segments) for segments in self._segments]
        self._pending = []

    def _states_of(self, step: int) -> list[BucketState]:
        """Choose what carries the buckets in a step; what carries them raw is there only as long as it is needed."""
        if not travels_raw(self._config, step, self._steps):
            self._uncompressed = []
            return self._states
        if not self._uncompressed:
            raw = make_codec("raw", self._values.flat.dtype)
            self._uncompressed = [self.reducer.open(state.bucket, raw, "none") for state in self._states]
        return self._uncompressed

    def finished(self, names: Sequence[str]) -> None:
        """Take note that these tensors are final; start the buckets that are full now."""
        for name in names:
            index = self._bucket_of[name]
            self._missing[index] -= 1
            if not self._missing[index]:
                key = noise_key(self._seed, self._step, self.reducer.axis.rank, self._noise[index])
                self._pending.append(self.reducer.start(self._current[index], key))
        self.poll()

    def start(self, step: int) -> None:
        """Start all sums of a step at once."""
        self.begin(step)
        self.finished(list(self._bucket_of))

    def poll(self) -> None:
        """Advance what is under way without blocking."""
        if self._pending:
            self._pending[0].poll()

    def finish(self) -> Summed:
        """Wait for all sums; raises PeerLostError, ProtocolError, CodecError."""
        if any(self._missing):
            raise RuntimeError(f"{sum(self._missing)} tensors of the step were never reported as finished")
        self.poll()
        hidden = sum(pending.traffic.received_bytes for pending in self._pending)
        traffic = sum((pending.wait() for pending in self._pending), Traffic())
        traffic = replace(traffic, hidden_bytes=hidden, exposed_bytes=traffic.received_bytes - hidden)
        return Summed(not any(pending.nonfinite for pending in self._pending), traffic)

    def commit(self) -> None:
        """Make the memories those of this step."""
        for state in self._states:
            state.commit()
        if self._config.reset_every and self._step % self._config.reset_every == 0:
            for buffer in self.state().values():
                buffer.current[:] = 0

    def rollback(self) -> None:
        """Forget this step: the memories stay those of the last accepted one."""
        for state in self._states:
            state.rollback()

    def lost(self, out: Floats) -> None:
        """Write what the sends of this rank have lost in this step, with memory "residual"; 0 where nothing was sent.

        Parameters
        ----------
        out : array like ``values.flat``, written
            Of all ranks together, these are the sum of the addends minus what came of it.
        """
        out[:] = 0
        for state, (start, stop) in zip(self._states, self.ranges, strict=True):
            state.lost(out[start:stop])

    def references(self) -> list[DoubleBuffer]:
        """List what else is remembered, but no checkpoint needs: nothing."""
        return []

    def not_finite(self) -> list[str]:
        """Name the tensors that are not finite on this rank, after a rejected step."""
        segments = (segment for bucket in self._segments for segment in bucket)
        return [s.spec.name for s in segments if count_not_finite(self._values.flat[s.start : s.stop])]

    def state(self) -> dict[str, DoubleBuffer]:
        """Name every memory of this rank; a checkpoint keeps the current halves."""
        return {
            f"bucket{state.bucket.index}.{name}": buffer
            for state in self._states
            for name, buffer in state.states().items()
        }

    def sizes(self) -> list[int]:
        """List the elements of each bucket."""
        return [state.bucket.values.size for state in self._states]

    def tensors_by_codec(self) -> dict[str, list[str]]:
        """Name the tensors that each codec serves."""
        groups: dict[str, list[str]] = {}
        for spec in self._values.layout.specs:
            groups.setdefault(codec_of(spec, self._config), []).append(spec.name)
        return groups


def group_of(config: ExchangeConfig, holders: Mapping[str, str] | None = None) -> Callable[[ParamSpec], str]:
    """Group tensors for the layout: by the codec that serves them, and by who holds them.

    Parameters
    ----------
    holders : mapping, optional
        A label for every tensor that other ranks of the replica hold, too.
    """
    known = holders or {}
    return lambda spec: " ".join([codec_of(spec, config), *([known[spec.name]] if spec.name in known else [])])


def salt_of(spec: ParamSpec, salt: str = "") -> int:
    """Tell buckets apart by their first tensor, the same on all ranks that hold the same part of it."""
    return zlib.crc32(f"{spec.name} {spec.place.start}{salt}".encode())


def float32_ring_bytes(num_parameters: int, ranks: int) -> int:
    """Bytes that all ranks together would send in an uncompressed ring, without headers: the yardstick of ratios."""
    return 2 * (ranks - 1) * num_parameters * FLOAT32_BYTES
