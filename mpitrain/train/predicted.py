"""What the exchange of gradients will cost and remember, from the parameters' shapes alone."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mpitrain.codecs.base import Codec
from mpitrain.codecs.registry import make_codec
from mpitrain.collectives.predicted import Sent, memory_elements, sent_for_sum
from mpitrain.collectives.segments import segment_elements
from mpitrain.config.schema import ExchangeConfig
from mpitrain.params import Layout, ParamSpec
from mpitrain.train.buckets import group_of, plan_buckets, stream_of
from mpitrain.train.lowrank import divide, left_config, memory_nbytes, right_config

NOBODY: Mapping[str, str] = {}
"""No tensor is held by other ranks of the replica."""


def predict_exchange(
    specs: Sequence[ParamSpec],
    config: ExchangeConfig,
    ranks: int,
    held: Mapping[str, str] = NOBODY,
    dtype: npt.DTypeLike = np.float32,
    *,
    raw: bool = False,
) -> list[Sent]:
    """Predict what every rank of a data axis sends for the sums of all tensors, once.

    Parameters
    ----------
    specs : list of ParamSpec
        What each of them holds.
    config : ExchangeConfig
        With its memory resolved.
    ranks : int
        Of the data axis, with the servers of collective "server".
    held : mapping
        Labels of the tensors that other ranks of the replica hold, too.
    raw : bool
        Whether it is one of the steps in which everything travels raw.
    """
    sent = [Sent()] * ranks
    for (codec, memory), size in _buckets(specs, config, held, dtype, raw=raw):
        bucket = sent_for_sum(
            config.collective,
            codec,
            memory,
            size,
            ranks,
            servers=config.servers or 0,
            segment=segment_elements(config.segment_kb),
        )
        sent = [before + more for before, more in zip(sent, bucket, strict=True)]
    return sent


def predict_memories(
    specs: Sequence[ParamSpec],
    config: ExchangeConfig,
    ranks: int,
    held: Mapping[str, str] = NOBODY,
    dtype: npt.DTypeLike = np.float32,
) -> list[int]:
    """Predict the bytes that every rank of a data axis remembers from step to step; arguments as above."""
    nbytes = [0] * ranks
    for (codec, memory), size in _buckets(specs, config, held, dtype):
        elements = memory_elements(config.collective, memory, size, ranks, codec.block, servers=config.servers or 0)
        nbytes = [total + more * codec.dtype.itemsize for total, more in zip(nbytes, elements, strict=True)]
    layout = Layout(list(specs), group_of(config, held))
    common = memory_nbytes(divide(layout, config, held), config, np.dtype(dtype).itemsize)
    if config.signal == "momentum":
        common += 2 * layout.size * np.dtype(dtype).itemsize  # both halves
    return [total + common for total in nbytes]


def _buckets(
    specs: Sequence[ParamSpec],
    config: ExchangeConfig,
    held: Mapping[str, str],
    dtype: npt.DTypeLike,
    *,
    raw: bool = False,
) -> Iterator[tuple[tuple[Codec, str], int]]:
    """Yield codec and memory, and elements, of the buckets of an exchange, those of factors included."""
    layout = Layout(list(specs), group_of(config, held))
    if raw:
        for segments in plan_buckets(layout, config.bucket_mb, held):
            yield (make_codec("raw", dtype), "none"), segments[-1].stop - segments[0].start
        return
    division = divide(layout, config, held)
    for part, chosen in (
        (layout, config),
        (division.left, left_config(config)),
        (division.right, right_config(config)),
    ):
        for number, segments in enumerate(plan_buckets(part, chosen.bucket_mb, held)):
            if part is not layout or number in division.values:
                yield stream_of(segments[0].spec, chosen, dtype), segments[-1].stop - segments[0].start
