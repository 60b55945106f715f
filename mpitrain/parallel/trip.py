"""A batch on its way through one stage of the pipeline."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mpitrain.arrays import Floats, Ints
from mpitrain.nn.layer import Chain, ChainCache, Context, Finished, Tensors
from mpitrain.nn.loss import LossResult
from mpitrain.parallel.accounting import Ledger, bases_of, buffers_of, nbytes_of
from mpitrain.parallel.channel import Arrival, Way, Wire
from mpitrain.parallel.schedule import Action
from mpitrain.partition import bounds, split_sizes

POSTED_AHEAD = 2
"""Messages whose receives are posted before they are needed: one for the next action, one for the action after."""

Loss = Callable[[Floats, slice], LossResult]
"""Compares the model's output for a part of the batch with what was right."""


class Sums(NamedTuple):
    """Over the samples of the batch, on the last stage; zeros elsewhere."""

    loss_sum: float = 0.0
    weight: float = 0.0
    metric_sum: float = 0.0


@dataclass
class Stage:
    """What a rank holds of the pipeline.

    Attributes
    ----------
    chunks : tuple of Chain
        Its pieces of the model.
    wire : Wire
        Shared with the channels.
    ledger : Ledger
        Of the activations that training keeps.
    inputs, outputs : dict
        By direction (forward, backward) and chunk: where an array comes from and where the result goes. The first piece
        has no forward input, the last no forward output.
    """

    chunks: tuple[Chain, ...]
    wire: Wire
    ledger: Ledger = field(default_factory=Ledger)
    inputs: dict[tuple[str, int], Way] = field(default_factory=dict)
    outputs: dict[tuple[str, int], Way] = field(default_factory=dict)


class Trip:
    """A batch that goes forward only.

    Parameters
    ----------
    stage : Stage
    params : mapping of arrays
    x : (B, ...) array or None
        Read by the first piece of the model only.
    context : Context
        Of the batch.
    micro_batches : int
        Parts of the batch; more than samples are as many as samples, but at least one.
    loss : callable
        Called by the last piece of the model only.
    """

    def __init__(
        self,
        stage: Stage,
        params: Tensors,
        x: Floats | Ints | None,
        context: Context,
        *,
        micro_batches: int,
        loss: Loss,
    ) -> None:
        self._stage, self._params, self._x, self._loss = stage, params, x, loss
        parts = [slice(*ends) for ends in bounds(split_sizes(len(context.samples), micro_batches))]
        self._parts = parts
        self._contexts = [replace(context, samples=context.samples[part]) for part in parts]
        self._train = context.train
        self.sums = Sums()

    def go(self, order: Sequence[Action]) -> Sums:
        """Take every action in its turn; everything sent has left when this returns."""
        posted: deque[Arrival] = deque()
        coming = deque(action for action in order if self._source(action))
        try:
            for action in order:
                while coming and len(posted) < POSTED_AHEAD:
                    posted.append(self._post(coming.popleft()))
                self._act(action, posted.popleft() if self._source(action) else None)
            self._stage.wire.flush()
        except BaseException:
            for arrival in posted:
                arrival.cancel()
            self._stage.wire.abandon()
            raise
        return self.sums

    def _source(self, action: Action) -> Way | None:
        return self._stage.inputs.get((action.kind, action.chunk))

    def _post(self, action: Action) -> Arrival:
        way = self._stage.inputs[action.kind, action.chunk]
        return way.post(self._contexts[action.micro].samples, train=self._train)

    def _act(self, action: Action, arrival: Arrival | None) -> None:
        self._forward(action, self._input(action, arrival))

    def _input(self, action: Action, arrival: Arrival | None) -> Floats | Ints:
        if arrival is not None:
            return arrival.take()
        if self._x is None:
            raise ValueError("pipeline: the first stage reads the batch, but got none")
        return self._x[self._parts[action.micro]]

    def _forward(self, action: Action, x: Floats | Ints) -> tuple[ChainCache, Floats | None]:
        """Pass through a chunk and send the output on, or compare it; return cache and gradient of the loss."""
        wire, context = self._stage.wire, self._contexts[action.micro]
        way = self._stage.outputs.get((action.kind, action.chunk))
        begin = time.perf_counter()
        y, cache = self._stage.chunks[action.chunk].forward(self._params, x, context)
        dout = None if way else self._compare(y, self._parts[action.micro])
        wire.spent("forward", begin)
        if way:
            way.send(y, context.samples, train=self._train)
        return cache, dout

    def _compare(self, y: Floats, part: slice) -> Floats:
        loss_sum, weight, metric_sum, dout = self._loss(y, part)
        sums = self.sums
        self.sums = Sums(sums.loss_sum + loss_sum, sums.weight + weight, sums.metric_sum + metric_sum)
        return dout


@dataclass(frozen=True)
class Kept:
    """What a forward pass leaves for its backward pass, and the bytes of it."""

    cache: ChainCache
    dout: Floats | None
    nbytes: int


class Training(Trip):
    """A batch that goes forward and back.

    Parameters
    ----------
    grads : mapping of arrays
        Added to.
    finished, forward_done : callable or None
        As `Pipeline.run` says.
    """

    def __init__(
        self,
        stage: Stage,
        params: Tensors,
        grads: Tensors,
        x: Floats | Ints | None,
        context: Context,
        *,
        micro_batches: int,
        loss: Loss,
        finished: Finished | None,
        forward_done: Callable[[Sums], None] | None,
    ) -> None:
        super().__init__(stage, params, x, context, micro_batches=micro_batches, loss=loss)
        self._grads, self._finished, self._forward_done = grads, finished, forward_done
        given = [*params.values(), context.samples]
        self._given = bases_of(given if x is None else [*given, x])
        self._kept: dict[tuple[int, int], Kept] = {}
        self._forward_left = len(stage.chunks) * len(self._parts)
        self._backward_left = [len(self._parts)] * len(stage.chunks)
        # A tied parameter may lie in several chunks; it is finished with the last of them.
        self._holders = Counter(spec.name for chunk in stage.chunks for spec in chunk.specs())

    def _act(self, action: Action, arrival: Arrival | None) -> None:
        if action.kind == "backward":
            self._go_back(action, arrival)
            return
        self._go_forward(action, arrival)
        self._forward_left -= 1
        if not self._forward_left and self._forward_done:
            self._forward_done(self.sums)

    def _go_forward(self, action: Action, arrival: Arrival | None) -> None:
        ledger = self._stage.ledger
        x = self._input(action, arrival)
        came = buffers_of(x, exclude=self._given)
        ledger.change(arrived := sum(came.values()))
        cache, dout = self._forward(action, x)
        left = buffers_of(cache, dout, exclude=self._given)
        ledger.change((together := sum((came | left).values())) - arrived)
        kept = Kept(cache, dout, sum(left.values()))
        ledger.change(kept.nbytes - together)
        self._kept[action.chunk, action.micro] = kept

    def _go_back(self, action: Action, arrival: Arrival | None) -> None:
        stage, chunk = self._stage, action.chunk
        kept = self._kept.pop((chunk, action.micro))
        dy = arrival.take() if arrival else kept.dout
        if dy is None:
            raise RuntimeError("pipeline: a backward pass without a gradient to start from")
        received = nbytes_of(dy, exclude=self._given) if arrival else 0
        stage.ledger.change(received)
        self._backward_left[chunk] -= 1
        finished = None if self._backward_left[chunk] else self._report
        begin = time.perf_counter()
        dx = stage.chunks[chunk].backward(self._params, kept.cache, dy, self._grads, finished=finished)
        stage.wire.spent("backward", begin)
        stage.ledger.change(-kept.nbytes - received)
        if way := stage.outputs.get(("backward", chunk)):
            way.send(dx, self._contexts[action.micro].samples, train=True)

    def _report(self, names: list[str]) -> None:
        self._holders.subtract(names)
        final = [name for name in names if not self._holders[name]]
        if final and self._finished:
            self._finished(final)
