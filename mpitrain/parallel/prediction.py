"""What a step of a model that is cut over pp x tp ranks sends, keeps and waits for; pure, from its units alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import CACHE_LINE
from mpitrain.codecs.base import Codec
from mpitrain.codecs.raw import Raw
from mpitrain.collectives.predicted import (
    Sent,
    sent_for_gather,
    sent_for_scatter,
    sent_for_sum,
    sent_for_vector,
)
from mpitrain.nn.loss import RowStatistics
from mpitrain.parallel.accounting import Ledger
from mpitrain.parallel.cuts import pieces
from mpitrain.parallel.schedule import Action, Plan, plan, simulate
from mpitrain.parallel.shared import TENSOR, holders
from mpitrain.parallel.units import Swap, Unit
from mpitrain.params import ParamSpec
from mpitrain.partition import bounds, split_sizes

RAW = Raw(np.float32)
ITEM_BYTES = RAW.dtype.itemsize
ALIGNING_BYTES = 2 * CACHE_LINE
"""What `mpitrain.arrays.aligned_empty`, into which messages are decoded, takes beyond the array."""

LATENCIES = {"sum": 2, "gather": 1, "scatter": 1}
"""Messages of a swap that can only follow each other."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A model cut over the pipeline and the tensor axis, and how it works through its share of a batch.

    Attributes
    ----------
    units : list of list of Unit
        Those of every tensor rank.
    cuts : list of int
        First units of all virtual stages but the first.
    stages, chunks : int
        Of the pipeline.
    schedule : str
    micro_batches : int
        Parts of the share, if it has as many samples.
    split_loss : bool
        Whether the tensor ranks hold parts of the logits (task "lm"), one for every step of a sample's first dim.
    """

    units: Sequence[Sequence[Unit]]
    cuts: Sequence[int]
    stages: int
    chunks: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    split_loss: bool = False

    @property
    def tp(self) -> int:
        """Ranks of the tensor axis."""
        return len(self.units)

    def virtual(self, tensor_rank: int) -> list[Sequence[Unit]]:
        """List the units of every virtual stage."""
        return pieces(self.units[tensor_rank], self.cuts)

    def held(self, stage: int, tensor_rank: int) -> list[Sequence[Unit]]:
        """List the units of every chunk of a stage."""
        return self.virtual(tensor_rank)[stage :: self.stages]

    def specs(self, stage: int, tensor_rank: int) -> list[ParamSpec]:
        """List the parameters of a rank, in forward order; tied ones that it holds twice are one."""
        held = self.held(stage, tensor_rank)
        return list(dict.fromkeys(spec for chunk in held for unit in chunk for spec in unit.specs))

    def holders(self, stage: int, tensor_rank: int) -> dict[str, str]:
        """Name the tensors of a rank that others hold, too: see `mpitrain.parallel.shared.holders`."""
        stages = [[spec.name for spec in self.specs(each, tensor_rank)] for each in range(self.stages)]
        return holders(self.specs(stage, tensor_rank), stages, self.tp)

    def parts(self, samples: int) -> list[int]:
        """Cut a share of a batch into micro-batches."""
        return split_sizes(samples, max(1, min(self.micro_batches, samples)))

    def plan(self, samples: int) -> Plan:
        """Order the passes of all stages."""
        return plan(self.schedule, self.stages, len(self.parts(samples)), self.chunks)


Ranks = list[list[Sent]]
"""What the ranks of a replica send: by stage, then by place on the tensor axis."""


def pipeline_sent(replica: Replica, samples: int, codec: Codec, gradient_codec: Codec, memory: str) -> Ranks:
    """Predict what crosses the cuts in a step: every micro-batch once, and its gradient once back.

    Parameters
    ----------
    samples : int
        Of this replica.
    memory : "none" or "delta"
        Of the activations.
    """
    sent = [[Sent()] * replica.tp for _ in range(replica.stages)]
    if replica.stages == 1:
        return sent
    for place in range(replica.tp):
        for cut, piece in enumerate(replica.virtual(place)[:-1]):
            sizes = [part * piece[-1].output_size for part in replica.parts(samples)]
            here, there = cut % replica.stages, (cut + 1) % replica.stages
            sent[here][place] += _messages(codec, memory, sizes)
            sent[there][place] += _messages(gradient_codec, "none", sizes)
    return sent


def _messages(codec: Codec, memory: str, sizes: Iterable[int]) -> Sent:
    return sum((sent_for_vector(codec, memory, size) for size in sizes), Sent())


def tied_sent(replica: Replica) -> Ranks:
    """Predict what keeps tied parameters equal: their gradients are summed, raw, over the stages that hold them."""
    sent = [[Sent()] * replica.tp for _ in range(replica.stages)]
    for place in range(replica.tp):
        labels: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for stage in range(replica.stages):
            held = replica.holders(stage, place)
            for label in dict.fromkeys(held.values()):
                if label != TENSOR:
                    labels.setdefault(label, []).append(stage)
                    sizes[label] = sum(s.size for s in replica.specs(stage, place) if held.get(s.name) == label)
        for label, stages in labels.items():
            sums = sent_for_sum("direct", RAW, "none", sizes[label], len(stages))
            for stage, more in zip(stages, sums, strict=True):
                sent[stage][place] += more
    return sent


def tensor_sent(replica: Replica, samples: int, codec: Codec) -> Ranks:
    """Predict what the tensor axis sends in a step: the swaps within layers, and those of a split loss."""
    result = []
    for stage in range(replica.stages):
        sent = [Sent()] * replica.tp
        for chunk in replica.held(stage, 0):
            for unit in chunk:
                for swap in (*unit.forward_swaps, *unit.backward_swaps):
                    for part in replica.parts(samples):
                        sent = _added(sent, swap_sent(swap, part, codec, replica.tp))
        if replica.split_loss and stage == replica.stages - 1:
            targets = samples * replica.units[0][-1].output_shape[0]
            parts = len(replica.parts(samples))
            sent = [one + _loss_sent(targets, parts, replica.tp) for one in sent]
        result.append(sent)
    return result


def replicated_sent(replica: Replica) -> Ranks:
    """Predict what keeps equal the tensors that the tensor axis does not split: raw sums of their gradients over it."""
    result = []
    for stage in range(replica.stages):
        held = replica.holders(stage, 0)
        size = sum(spec.size for spec in replica.specs(stage, 0) if held.get(spec.name) == TENSOR)
        result.append(sent_for_sum("direct", RAW, "none", size, replica.tp))
    return result


def swap_sent(swap: Swap, samples: int, codec: Codec, ranks: int) -> list[Sent]:
    """Predict what every tensor rank sends for one exchange of a micro-batch."""
    size = swap.size * samples
    if swap.kind == "sum":
        return sent_for_sum("direct", codec, "none", size, ranks)
    step = size // swap.time
    chunks = [(start * step, stop * step) for start, stop in bounds(split_sizes(swap.time, ranks))]
    return {"gather": sent_for_gather, "scatter": sent_for_scatter}[swap.kind](codec, "none", chunks)


def _loss_sent(targets: int, exchanges: int, ranks: int) -> Sent:
    """Statistics of every target, in float64, to all other ranks: see `mpitrain.parallel.loss`."""
    nbytes = targets * len(RowStatistics._fields) * np.dtype(np.float64).itemsize
    return Sent(nbytes, exchanges) * (ranks - 1)


def _added(sent: Iterable[Sent], more: Iterable[Sent]) -> list[Sent]:
    return [one + other for one, other in zip(sent, more, strict=True)]


def messages_in_a_row(replica: Replica, samples: int) -> int:
    """Bound the messages of a step, without the exchange of gradients, that can only follow each other.

    The longest way through the plan of the schedule, every pass with the swaps of the stage that has most.
    """
    virtual = replica.virtual(0)
    forward = max(sum(LATENCIES[swap.kind] for unit in piece for swap in unit.forward_swaps) for piece in virtual)
    backward = max(sum(LATENCIES[swap.kind] for unit in piece for swap in unit.backward_swaps) for piece in virtual)
    way = simulate(replica.plan(samples), forward + replica.split_loss, backward, message_s=1)
    sums = [sent for stage in (*tied_sent(replica), *replicated_sent(replica)) for sent in stage]
    return round(way.makespan_s) + LATENCIES["sum"] * any(sent.messages for sent in sums)


def activation_bytes(replica: Replica, samples: int, stage: int, tensor_rank: int) -> int:
    """Predict the most bytes of activations that a rank keeps at once, as `Pipeline.peak_bytes` counts them."""
    ledger = Ledger()
    parts = replica.parts(samples)
    kept = [_Kept(replica, chunk * replica.stages + stage, tensor_rank) for chunk in range(replica.chunks)]
    for action in replica.plan(samples)[stage]:
        kept[action.chunk].change(ledger, action, parts[action.micro])
    return ledger.peak


class _Kept:
    """What a virtual stage keeps of a micro-batch."""

    def __init__(self, replica: Replica, piece: int, tensor_rank: int) -> None:
        virtual = replica.virtual(tensor_rank)
        self._is_first, self._is_last = piece == 0, piece == len(virtual) - 1
        # An array that arrived is as large as it must be; what it was a view of stayed behind.
        self._arriving = 0 if self._is_first else virtual[piece - 1][-1].output_size
        self._leaving = virtual[piece][-1].output_size
        buffers: dict[int, int] = {}
        for unit in virtual[piece]:
            buffers.update(unit.kept)
        self._keeps_input = buffers.pop(virtual[piece][0].source, None) is not None
        self._inside = sum(buffers.values())
        self._aligning = ALIGNING_BYTES * (replica.stages > 1)

    def change(self, ledger: Ledger, action: Action, samples: int) -> None:
        """Follow a pass as the executor does: what arrives, what is kept beside it, what stays."""
        arrived = 0 if self._is_first else self._arriving * samples * ITEM_BYTES + self._aligning
        back = self._leaving * samples * ITEM_BYTES
        kept = self._inside * samples + arrived * self._keeps_input + back * self._is_last
        if action.kind == "forward":
            dropped = arrived * (not self._keeps_input)
            ledger.change(kept + dropped)
            ledger.change(-dropped)
        else:
            received = 0 if self._is_last else back + self._aligning
            ledger.change(received)
            ledger.change(-received - kept)


def reference_bytes(replica: Replica, samples: int, seen: int, budget_bytes: int, stage: int, tensor_rank: int) -> int:
    """Predict what the ends of the cuts of a rank remember of past activations (memory "delta").

    Parameters
    ----------
    samples, seen : int
        Of this replica: in a step, and different ones in all.
    budget_bytes : int
        Bound for each end of a cut, apart from what a step adds before its commit.
    """
    if replica.stages == 1:
        return 0
    virtual = replica.virtual(tensor_rank)
    ends = 0
    for cut, piece in enumerate(virtual[:-1]):
        of_sample = piece[-1].output_size * ITEM_BYTES
        slots = min(seen, budget_bytes // max(1, of_sample))
        at_an_end = slots * (of_sample + np.dtype(np.int64).itemsize) + min(samples, slots) * of_sample
        ends += at_an_end * [cut % replica.stages, (cut + 1) % replica.stages].count(stage)
    return ends
