"""The training loop: read, forward, backward, exchange, update; decisions only from what all ranks know."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import cast

import numpy as np

from mpitrain.codecs.noise import noise_key
from mpitrain.collectives.base import Event, Traffic
from mpitrain.comm.agreement import NumberGather, gather
from mpitrain.comm.fault import FaultHook
from mpitrain.comm.runtime import Position
from mpitrain.errors import DivergedError
from mpitrain.nn.layer import Context
from mpitrain.optim.clip import clip_by_norm, global_norm
from mpitrain.train.build import Parts
from mpitrain.train.console import Narrator
from mpitrain.train.evaluate import loss_of, score
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
    compute_s: float = 0.0
    progress: Progress = field(default_factory=Progress)


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

    def step(self) -> tuple[Row, bool]:
        """Take one step. Collective over the data axis.

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
        self.events = parts.exchange.reducer.events = []
        stop = bool(self._wish.reason(step))

        lr = parts.schedule(step - 1)
        with np.errstate(all="ignore"):  # what is not finite is found, and the step rejected, by the exchange
            sums = self._gradients(step, stop=stop)
        outcome = parts.exchange.finish()
        loss_sum, weight, metric_sum, stops = sums.wait().sum_in_order()
        with self._event("update"):
            norm = self._update(lr) if outcome.accepted else self._skip(step)

        result = score(parts.config.model.task, loss_sum, weight, metric_sum)
        seconds = time.perf_counter() - begin
        compute_s = seconds - outcome.traffic.encode_s - outcome.traffic.decode_s - outcome.traffic.wait_s
        self.counters.step = step
        self.counters.traffic += outcome.traffic
        self.counters.compute_s += compute_s
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
            **asdict(outcome.traffic),
            "skipped": self.counters.skipped,
        }
        return row, stops > 0

    def _gradients(self, step: int, *, stop: bool) -> NumberGather:
        """Run forward and backward on this rank's samples; buckets leave as they fill.

        Returns the sums over ranks of loss, weight, metric and stop wishes, under way.
        """
        parts, config = self.parts, self.parts.config
        with self._event("read"):
            indices, samples = parts.loader.samples(step - 1)
        total = parts.sampler.global_count(step - 1)
        context = Context(train=True, key=noise_key(config.train.seed, step, DROPOUT_STREAM), samples=indices)
        parts.grads.flat[:] = 0
        with self._event("forward"):
            output, cache = parts.model.forward(parts.params, samples.x, context)
        smoothing, weights = config.model.label_smoothing, parts.class_weights
        loss = loss_of(config.model.task, output, samples, total, label_smoothing=smoothing, class_weights=weights)
        mine = np.array([loss.loss_sum, loss.weight, loss.metric_sum, float(stop)])
        sums = NumberGather(parts.grid.data, mine, timeout_s=config.network.peer_timeout_s)
        parts.exchange.begin(step)
        with self._event("backward"):
            parts.model.backward(parts.params, cache, loss.dout, parts.grads, finished=self._finished(step))
        parts.exchange.finished(self._held_back)
        self._held_back = []
        return sums

    @contextmanager
    def _event(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.events.append((what, begin, time.perf_counter()))

    def _finished(self, step: int) -> Callable[[list[str]], None]:
        def finished(names: list[str]) -> None:
            self._break_gradients(names, step)
            if self.parts.exchange.overlap:
                self.parts.exchange.finished(names)
            else:
                self._held_back += names

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

    def _update(self, lr: float) -> float:
        """Accept the exchange and move the weights; return the norm of the gradient before clipping."""
        parts = self.parts
        parts.exchange.commit()
        limit = parts.config.train.clip_norm
        norm = clip_by_norm(parts.grads, limit)[0] if limit else global_norm(parts.grads)
        parts.optimizer.step(parts.params, parts.grads, parts.optimizer_state, lr)
        self.counters.skipped_in_a_row = 0
        return norm

    def _skip(self, step: int) -> float | None:
        """Reject the exchange: weights, moments and memories stay as they are, on all ranks."""
        self.parts.exchange.rollback()
        self.counters.skipped += 1
        self.counters.skipped_in_a_row += 1
        names = self.parts.exchange.not_finite()
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self._narrator.warn(
                f"step {step} skipped on all ranks: the gradient of {names[0]}{more} is not finite here"
            )
        if self.counters.skipped_in_a_row > self.parts.config.train.max_skips:
            raise self._diverged(step, names)
        return None

    def _diverged(self, step: int, names: list[str]) -> DivergedError:
        """Build the same error on all ranks. Collective over the data axis."""
        found = cast(list[list[str]], gather(self.parts.grid.data, names))
        rank = next((rank for rank, tensors in enumerate(found) if tensors), 0)
        where = f"first in {found[rank][0]} on rank {rank}" if found[rank] else "in the sums"
        error = DivergedError(
            f"step {step}: {self.counters.skipped_in_a_row} steps in a row had gradients that are not finite, {where}; "
            "lower optim.lr, lengthen optim.warmup_steps, or set train.clip_norm"
        )
        error.agreed = True
        return error
