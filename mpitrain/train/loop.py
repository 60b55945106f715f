"""The training loop: read, forward, backward, exchange, update; decisions only from what all ranks know.

What a replica does between its ranks (stages, parts of layers) is the affair of the pipeline and of the layers;
the loop sees one forward and backward, gradients that are finished, and one norm.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import sqrt
from typing import cast

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.codecs.noise import noise_key
from mpitrain.collectives.base import Event, Traffic
from mpitrain.comm.agreement import NumberGather, gather
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.runtime import Position
from mpitrain.errors import DivergedError
from mpitrain.nn.layer import Context
from mpitrain.nn.loss import LossResult
from mpitrain.optim.clip import clip_factor, scale, sum_of_squares
from mpitrain.parallel.trip import Sums
from mpitrain.train.build import Parts
from mpitrain.train.console import Narrator
from mpitrain.train.evaluate import score
from mpitrain.train.runfolder import Row
from mpitrain.train.stopping import Progress, StopWish

DROPOUT_STREAM = 1
"""Sets the noise of dropout apart from that of rounding."""


@dataclass
class Counters:
    """What a run has done so far; saved with it."""

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    replica_bytes: int = 0
    fp32_ring_bytes: float = 0.0
    compute_s: float = 0.0
    progress: Progress = field(default_factory=Progress)

    def count(self, step: int, traffic: Traffic, replica_bytes: int, fp32_ring_bytes: float, compute_s: float) -> None:
        """Count a step that was taken or skipped."""
        self.step = step
        self.traffic += traffic
        self.replica_bytes += replica_bytes
        self.fp32_ring_bytes += fp32_ring_bytes
        self.compute_s += compute_s


class Loop:
    """Takes steps.

    Parameters
    ----------
    parts : Parts
        The objects of the run.
    wish : StopWish
        Whether this rank wants to stop.
    narrator, faults, position
        Where to tell, what to break, and where the step is noted for reports of errors.

    Attributes
    ----------
    events : list of Event
        What this rank did during the last step.
    """

    def __init__(self, parts: Parts, wish: StopWish, narrator: Narrator, faults: FaultHook, position: Position) -> None:
        self.parts = parts
        self.counters = Counters()
        self.events: list[Event] = []
        self._wish = wish
        self._narrator = narrator
        self._faults = faults
        self._position = position
        self._held_back: list[str] = []
        self._waited = Traffic()

    def step(self) -> tuple[Row, bool]:
        """Take one step. Collective over the world.

        Returns
        -------
        row : dict
            A line of metrics.jsonl; byte counts and seconds are this rank's.
        stop : bool
            Whether some rank wants the run to end here; the same on all ranks.

        Raises
        ------
        DivergedError
            On all ranks, after ``train.max_skips`` steps in a row with non-finite gradients.
        """
        begin = time.perf_counter()
        parts, step = self.parts, self.counters.step + 1
        self._position.step = step
        self._faults.at_step(step)
        self.events = []
        parts.note_events(self.events)
        stop = bool(self._wish.reason(step))

        lr = parts.schedule(step - 1)
        with np.errstate(all="ignore"):  # what is not finite is found, and the step rejected, by the exchange
            sums = self._gradients(step, stop=stop)
        outcome = parts.exchange.finish()
        self._waited = Traffic()
        loss_sum, weight, metric_sum, stops = self._sums_of(sums)
        norm = self._agreed_norm(accepted=outcome.accepted)
        with self._event("update"):
            if norm is None:
                self._skip(step)
            else:
                self._update(lr, norm)

        parts.note_events(None)  # evaluations use the same channels, and are no part of a step
        result = score(parts.config.model.task, loss_sum, weight, metric_sum)
        inside = parts.traffic_inside()
        traffic = outcome.traffic + inside + self._waited
        seconds = time.perf_counter() - begin
        compute_s = seconds - traffic.encode_s - traffic.decode_s - traffic.wait_s
        self.counters.count(step, traffic, inside.sent_bytes, parts.fp32_ring_bytes, compute_s)
        row: Row = {
            "step": step,
            "time_s": time.time(),
            "epoch": (step - 1) // parts.sampler.steps_per_epoch,
            "loss": result.loss,
            result.name: result.metric,
            "lr": lr,
            "grad_norm": norm,
            "samples": parts.sampler.global_count(step - 1),
            "step_s": seconds,
            "compute_s": compute_s,
            **asdict(traffic),
            "replica_bytes": inside.sent_bytes,
            "skipped": self.counters.skipped,
        }
        return row, stops > 0

    def _gradients(self, step: int, *, stop: bool) -> NumberGather:
        """Run forward and backward on the samples of this replica; buckets leave as they fill.

        Returns the sums over ranks of loss, weight, metric and stop wishes, under way.
        """
        parts, config = self.parts, self.parts.config
        under_way: list[NumberGather] = []

        def forward_done(mine: Sums) -> None:
            # All ranks of a tensor axis know the sums; they count once.
            counted = mine if parts.grid.tensor.rank == 0 else Sums()
            numbers = np.array([*counted, float(stop)])
            under_way.append(NumberGather(parts.grid.world, numbers, timeout_s=config.network.peer_timeout_s))

        def loss(output: Floats, part: slice) -> LossResult:
            return parts.loss(output, samples.y[part], total)

        with self._event("read"):
            indices, samples = parts.loader.samples(step - 1)
        total = parts.sampler.global_count(step - 1)
        context = Context(train=True, key=noise_key(config.train.seed, step, DROPOUT_STREAM), samples=indices)
        parts.grads.flat[:] = 0
        parts.exchange.begin(step)
        parts.pipeline.run(
            parts.params,
            parts.grads,
            samples.x,
            context,
            loss=loss,
            finished=self._finished(step),
            forward_done=forward_done,
        )
        parts.exchange.finished([*self._held_back, *parts.shared_sums.add()])
        self._held_back = []
        return under_way[0]

    @contextmanager
    def _event(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.events.append((what, begin, time.perf_counter()))

    def _finished(self, step: int) -> Callable[[list[str]], None]:
        def finished(names: list[str]) -> None:
            self._break_gradients(names, step)
            ready = self.parts.shared_sums.hold(names)
            if self.parts.exchange.overlap:
                self.parts.exchange.finished(ready)
            else:
                self._held_back += ready

        return finished

    def _break_gradients(self, names: list[str], step: int) -> None:
        for kind, value in (("nan", np.nan), ("inf", np.inf)):
            fault = self._faults.find(kind, step)
            wanted = fault.tensor or next(iter(self.parts.grads)) if fault else ""
            if wanted in names:
                self.parts.grads[wanted].flat[0] = value
        if fault := self._faults.find("const", step):
            for name in names:
                self.parts.grads[name][...] = fault.value

    def _agreed_norm(self, *, accepted: bool) -> float | None:
        """Return the norm of the whole model's gradient; None where some rank of the replica must reject the step.

        Collective over the replica; the ranks of a data axis know the same already, so all ranks of the world agree.
        """
        parts = self.parts
        squares = sum(sum_of_squares(parts.grads.flat[a:b]) for a, b in parts.counted_ranges) if accepted else 0.0
        mine = np.array([squares, float(not accepted)])
        timeout_s = parts.config.network.peer_timeout_s
        total, rejected = self._sums_of(NumberGather(parts.grid.replica, mine, timeout_s=timeout_s))
        return None if rejected else sqrt(total)

    def _sums_of(self, numbers: NumberGather) -> tuple[float, ...]:
        """Wait for numbers of all ranks, and note how long: a stage that is done early waits here for the others."""
        begin = time.perf_counter()
        with self._event("wait"):
            sums = numbers.wait().sum_in_order()
        self._waited += Traffic(wait_s=time.perf_counter() - begin)
        return sums

    def _update(self, lr: float, norm: float) -> None:
        """Accept the exchange and move the weights; ``norm`` is that of the gradient before clipping."""
        parts = self.parts
        parts.exchange.commit()
        parts.pipeline.commit()
        limit = parts.config.train.clip_norm
        if limit and (factor := clip_factor(norm, limit)) < 1:
            scale(parts.grads, factor)
        parts.optimizer.step(parts.params, parts.grads, parts.optimizer_state, lr)
        self.counters.skipped_in_a_row = 0

    def _skip(self, step: int) -> None:
        """Reject the exchange: weights, moments and memories stay as they are, on all ranks."""
        self.parts.exchange.rollback()
        self.parts.pipeline.rollback()
        self.counters.skipped += 1
        self.counters.skipped_in_a_row += 1
        names = self.parts.not_finite()
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._narrator.warn(
                f"step {step} skipped on all ranks: the gradient of {names[0]}{more} is not finite here"
            )
        if self.counters.skipped_in_a_row > self.parts.config.train.max_skips:
            raise self._diverged(step, names)

    def _diverged(self, step: int, names: list[str]) -> DivergedError:
        """Build the same error on all ranks. Collective over the world."""
        found = cast(list[list[str]], gather(self.parts.grid.world, names))
        rank = next((rank for rank, tensors in enumerate(found) if tensors), 0)
        where = f"first in {found[rank][0]} on rank {rank}" if found[rank] else "in the sums"
        error = DivergedError(
            f"step {step}: {self.counters.skipped_in_a_row} steps in a row had gradients that are not finite, {where}; "
            "lower optim.lr, lengthen optim.warmup_steps, or set train.clip_norm"
        )
        error.agreed = True
        return error
