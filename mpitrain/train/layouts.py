"""Every way to divide ranks into data, pipeline and tensor axes, and what a step of each costs; without MPI."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from msgspec import structs

from mpitrain.codecs.registry import CODECS, make_codec
from mpitrain.collectives.predicted import Sent, latencies
from mpitrain.config.codec_names import kind_of
from mpitrain.config.schema import Config, ExchangeConfig
from mpitrain.config.validate import check_consistency, factors, refusal
from mpitrain.data.dataset import Dataset
from mpitrain.data.sampler import Sampler
from mpitrain.errors import ConfigError, DataError
from mpitrain.parallel.prediction import (
    Ranks,
    Replica,
    activation_bytes,
    messages_in_a_row,
    pipeline_sent,
    reference_bytes,
    replicated_sent,
    tensor_sent,
    tied_sent,
)
from mpitrain.parallel.units import Unit
from mpitrain.params import Layout, Params, ParamSpec
from mpitrain.partition import GridShape
from mpitrain.train.buckets import group_of
from mpitrain.train.division import Divider
from mpitrain.train.model import input_dtype, make_model
from mpitrain.train.outer import OUTER_BUFFERS, deal_buckets
from mpitrain.train.predicted import predict_exchange, predict_memories
from mpitrain.train.predicted_servers import predict_orders, predict_served
from mpitrain.train.weights import make_optimizer

FLOAT32 = np.dtype(np.float32)

COMPARED = tuple(name for name in ("raw", "fp16", "int8", "int4", "ecq-2") if kind_of(name) in CODECS)
"""Codecs that are set beside each other: few enough for a table; of any other the configuration tells."""

Held = tuple[Sequence[ParamSpec], Mapping[str, str]]
"""Tensors of a rank, and labels of those that other ranks of its replica hold, too."""


@dataclass(frozen=True)
class AxisCost:
    """What all ranks together send along one axis in a step; where replicas meet after several, on average.

    Attributes
    ----------
    sent : dict of str to Sent or None
        By codec of `COMPARED`; None where it cannot be.
    configured : Sent
        As the configuration says.
    uncompressed : Sent or None
        In the steps of the run in which everything travels raw; None where there are none.
    """

    sent: dict[str, Sent | None]
    configured: Sent
    uncompressed: Sent | None = None


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """What a step costs in one layout.

    Attributes
    ----------
    shape : GridShape
    cuts : list of int
        First units of all pieces of the model but the first.
    axes : dict of str to AxisCost
        ``data``, ``pipeline``, ``tensor``.
    in_a_row : float
        Messages that can only follow each other.
    memory : dict of str to int
        Bytes of the largest rank: ``parameters``, ``gradients``, ``optimizer``, ``memories`` (of codecs, and past
        activations), ``activations``, and with local steps ``outer`` (global weights, their momentum and change).
    """

    shape: GridShape
    cuts: list[int]
    axes: dict[str, AxisCost]
    in_a_row: float
    memory: dict[str, int]

    @property
    def configured(self) -> Sent:
        """What all ranks send in a step along all axes, as the configuration says."""
        return sum((axis.configured for axis in self.axes.values()), Sent())

    @property
    def memory_bytes(self) -> int:
        """Bytes of the largest rank."""
        return sum(self.memory.values())


@dataclass
class Costs:
    """Counts what layouts cost.

    Parameters
    ----------
    config : Config
        With all derived values.
    dataset : Dataset
        Opened; no samples are loaded.
    measure : bool
        Whether cuts follow measured seconds instead of counted multiply-adds.
    """

    config: Config
    dataset: Dataset
    measure: bool = False

    @cached_property
    def divider(self) -> Divider:
        """Cuts the model."""
        build = partial(make_model, self.config, self.dataset)
        return Divider(self.config, build, self.dataset.input_shape, input_dtype(self.dataset), self.measure)

    @property
    def units(self) -> list[Unit]:
        """Units of the whole model."""
        return self.divider.units()

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model; a tied tensor counts once."""
        return sum(spec.size for spec in dict.fromkeys(spec for unit in self.units for spec in unit.specs))

    def of(self, shape: GridShape) -> LayoutCost:
        """Count what a layout costs.

        Raises
        ------
        ConfigError, DataError
            Model or data cannot be divided like this.
        """
        check_consistency(structs.replace(self.config, parallel=self.divider.parallel(shape)))
        shares, seen = self._shares(shape)
        replica = self.divider.replica(shape)
        axes = {
            "data": self._data(replica, shape, len(shares)),
            "pipeline": self._pipeline(replica, shares),
            "tensor": self._tensor(replica, shares),
        }
        in_a_row = messages_in_a_row(replica, max(shares)) + self._exchange_in_a_row(shape, len(shares))
        memory = max(self._memories(replica, shares, seen), key=lambda parts: sum(parts.values()))
        return LayoutCost(shape=shape, cuts=list(replica.cuts), axes=axes, in_a_row=in_a_row, memory=memory)

    @property
    def _steps_a_round(self) -> int:
        """Steps from one exchange of the replicas to the next."""
        exchange = self.config.exchange
        return exchange.h if exchange.when == "local" else 1

    def _exchange_in_a_row(self, shape: GridShape, replicas: int) -> float:
        if self._serves:
            several = shape.servers * shape.pp * shape.tp > 1
            return 2 + several  # push and answer; between them the first server tells the others what to do
        exchange = self.config.exchange
        sums = 2 if factors(exchange) else 1  # the second factors need the first ones
        return sums * latencies(exchange.collective, replicas) / self._steps_a_round

    @property
    def _serves(self) -> bool:
        """Whether servers hold the weights, so that they are no replicas of the model."""
        return self.config.exchange.when == "server"

    def _shares(self, shape: GridShape) -> tuple[list[int], list[int]]:
        """Count what every replica has of the first step's samples, and of all of them; one that serves has none."""
        data, train = self.config.data, self.config.train
        samplers = [
            Sampler(
                self.dataset.train_group_sizes,
                train.batch_size,
                ranks=shape.dp,
                rank=rank,
                placement=data.placement,
                seed=train.seed,
            )
            for rank in range(shape.dp + (0 if self._serves else shape.servers))
        ]
        return [len(sampler.indices(0)) for sampler in samplers], [len(sampler.owned) for sampler in samplers]

    def _data(self, replica: Replica, shape: GridShape, replicas: int) -> AxisCost:
        exchange = self.config.exchange
        places = [(stage, rank) for stage in range(replica.stages) for rank in range(replica.tp)]
        parts = [(replica.specs(*place), replica.holders(*place)) for place in places]
        if exchange.when == "local":
            for specs, held in parts:
                deal_buckets(Layout(specs, group_of(exchange, held)), exchange, held)  # refuses too many fragments

        def sent(codec: str) -> Sent | None:
            if not self._serves and codec != exchange.codec and refusal(exchange.collective, codec, "none"):
                return None
            chosen = structs.replace(exchange, codec=codec)
            if self._serves:
                return _served(parts, chosen, shape)
            once = _total([predict_exchange(specs, chosen, replicas, held) for specs, held in parts])
            return _average(once, self._steps_a_round)

        uncompressed = None
        if exchange.warmup_steps or exchange.raw_last_steps:
            uncompressed = _total(
                [predict_exchange(specs, exchange, replicas, held, raw=True) for specs, held in parts]
            )
        return AxisCost({codec: sent(codec) for codec in COMPARED}, sent(exchange.codec) or Sent(), uncompressed)

    def _pipeline(self, replica: Replica, shares: Sequence[int]) -> AxisCost:
        parallel = self.config.parallel

        def sent(codec: str, back: str) -> Sent:
            memory = "none" if codec == "raw" else parallel.memory
            there_and_back = make_codec(codec), make_codec(back)
            ways = [row for samples in shares for row in pipeline_sent(replica, samples, *there_and_back, memory)]
            return _total([*ways, *tied_sent(replica) * len(shares)])

        configured = sent(parallel.codec, parallel.gradient_codec or parallel.codec)
        return AxisCost({codec: sent(codec, codec) for codec in COMPARED}, configured)

    def _tensor(self, replica: Replica, shares: Sequence[int]) -> AxisCost:
        def sent(codec: str) -> Sent:
            swaps = [row for samples in shares for row in tensor_sent(replica, samples, make_codec(codec))]
            return _total([*swaps, *replicated_sent(replica) * len(shares)])

        return AxisCost({codec: sent(codec) for codec in COMPARED}, sent(self.config.parallel.tensor_codec))

    def _memories(self, replica: Replica, shares: Sequence[int], seen: Sequence[int]) -> Iterator[dict[str, int]]:
        """Yield what every rank keeps; of replicas with equal shares, one."""
        if self._serves:
            yield from self._memories_served(replica, shares, seen)
            return
        exchange = self.config.exchange
        outer = OUTER_BUFFERS if exchange.when == "local" else 0
        for stage, rank in [(stage, rank) for stage in range(replica.stages) for rank in range(replica.tp)]:
            specs, held = replica.specs(stage, rank), replica.holders(stage, rank)
            size = Layout(specs, group_of(exchange, held)).size
            remembered = predict_memories(specs, exchange, len(shares), held)
            for samples, of_all, codecs in sorted({*zip(shares, seen, remembered, strict=True)}):
                memories = codecs + self._references(replica, samples, of_all, stage, rank)
                kept = _kept(size, self._moments(), memories, activation_bytes(replica, samples, stage, rank))
                yield kept | ({"outer": outer * size * FLOAT32.itemsize} if outer else {})

    def _references(self, replica: Replica, samples: int, of_all: int, stage: int, rank: int) -> int:
        """Count the bytes of past activations that a rank keeps."""
        parallel = self.config.parallel
        if parallel.memory != "delta":
            return 0
        return reference_bytes(replica, samples, of_all, int(parallel.reference_mb * 1e6), stage, rank)

    def _memories_served(
        self, replica: Replica, shares: Sequence[int], seen: Sequence[int]
    ) -> Iterator[dict[str, int]]:
        """Yield what workers and servers keep: only these have the optimizer."""
        exchange = self.config.exchange
        squares = exchange.mode == "async" and exchange.delay_compensation == "adaptive"
        for stage, rank in [(stage, rank) for stage in range(replica.stages) for rank in range(replica.tp)]:
            specs, held = replica.specs(stage, rank), replica.holders(stage, rank)
            served = predict_served(specs, exchange, len(shares), held)
            size = Layout(specs, group_of(exchange, held)).size
            for samples, of_all in sorted({*zip(shares, seen, strict=True)}):
                memories = served.worker_elements * FLOAT32.itemsize
                memories += self._references(replica, samples, of_all, stage, rank)
                yield _kept(size, 0, memories, activation_bytes(replica, samples, stage, rank))
            for owned, elements in zip(served.held, served.server_elements, strict=True):
                yield _kept(owned, self._moments() + squares, elements * FLOAT32.itemsize, 0)

    def _moments(self) -> int:
        """Count the buffers of the optimizer."""
        return len(make_optimizer(self.config).init(Params(Layout([]))).buffers)


def shapes(ranks: int, servers: int = 0) -> list[GridShape]:
    """List every way to divide ranks into data, pipeline and tensor axes, beside rows that serve.

    Where these leave no row to train, ``dp`` is 0.
    """
    return [
        GridShape(max(0, ranks // (pp * tp) - servers), pp, tp, servers)
        for pp in range(1, ranks + 1)
        for tp in range(1, ranks + 1)
        if ranks % (pp * tp) == 0
    ]


def compare(costs: Costs, ranks: int) -> tuple[list[LayoutCost], dict[str, list[GridShape]]]:
    """Count what every layout costs.

    Returns
    -------
    possible : list of LayoutCost
        The fewest bytes as the configuration says first; of equal ones, the fewest messages in a row.
    refused : dict of str to list of GridShape
        The others, by reason.
    """
    possible: list[LayoutCost] = []
    refused: dict[str, list[GridShape]] = {}
    for shape in shapes(ranks, costs.config.exchange.servers or 0):
        try:
            GridShape.fit(ranks, None, shape.pp, shape.tp, shape.servers)
            possible.append(costs.of(shape))
        except (ConfigError, DataError) as error:
            refused.setdefault(str(error), []).append(shape)
    return sorted(possible, key=lambda cost: (cost.configured.nbytes, cost.in_a_row)), refused


def _kept(elements: int, moments: int, memories: int, activations: int) -> dict[str, int]:
    parameters = elements * FLOAT32.itemsize
    return {
        "parameters": parameters,
        "gradients": parameters,
        "optimizer": parameters * moments,
        "memories": memories,
        "activations": activations,
    }


def _served(parts: Sequence[Held], exchange: ExchangeConfig, shape: GridShape) -> Sent:
    """Add up what workers and servers of all columns send in a step."""
    columns = [predict_served(specs, exchange, shape.dp, held) for specs, held in parts]
    pushes = sum((column.push * shape.dp for column in columns), Sent())
    replies = sum((reply for column in columns for reply in column.replies), Sent())
    return pushes + replies + predict_orders(exchange, shape.dp, shape.servers * len(parts) - 1)


def _average(sent: Sent, steps: int) -> Sent:
    """Spread what is sent once over some steps, rounded up."""
    return replace(sent, nbytes=-(-sent.nbytes // steps), messages=-(-sent.messages // steps))


def _total(ranks: Ranks) -> Sent:
    return sum((sent for row in ranks for sent in row), Sent())
