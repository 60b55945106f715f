"""The training loop: read, forward, backward, exchange; decisions only from what all ranks know.

What a replica does between its ranks (stages, parts of layers) is the affair of the pipeline and of the layers, and
what replicas do between each other is that of the exchange; the loop sees one forward and backward, gradients that are
finished, and outcomes.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
from mpitrain.parallel.trip import Sums
from mpitrain.train.build import Parts
from mpitrain.train.console import Narrator
from mpitrain.train.evaluate import score
from mpitrain.train.exchange import Outcome
from mpitrain.train.meeting import Meeting
from mpitrain.train.runfolder import Row
from mpitrain.train.stopping import LossWatch, Progress, StopWish

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
    losses: LossWatch = field(default_factory=LossWatch)

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
    failure : DivergedError or None
        Why the run ends with the last round, the same on all ranks; to be raised once its rows are written.
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
        self._stop = False
        self._sums: list[Sums] = []
        self._meeting: Meeting | None = None
        self._skipped = 0
        self._broken: list[str] = []
        self.failure: DivergedError | None = None
        parts.exchange.loses = lambda step: faults.find("drop", step) is not None

    def round(self) -> tuple[list[Row], bool]:
        """Take the steps up to the next point at which all ranks meet. Collective over the world.

        Returns
        -------
        rows : list of dict
            A line of metrics.jsonl for every step; byte counts and seconds are this rank's.
        stop : bool
            Whether some rank wants the run to end here; the same on all ranks.

        Raises
        ------
        DivergedError
            On all ranks, in the middle of a round after ``train.max_skips`` steps that all of them had to reject.
        """
        exchange = self.parts.exchange
        self.begin_round()
        rows: list[Row] = []
        while not rows or self.counters.step < exchange.last:
            rows.append(self._step(self.counters.step + 1))
        return self._meet(rows)

    def begin_round(self) -> None:
        """Forget the last round, and open the next. Collective over the world."""
        self.parts.exchange.open_round(self.counters.step + 1)
        self._stop, self._sums, self._meeting, self._skipped = False, [], None, 0

    def _step(self, step: int) -> Row:
        """Take one step; the row lacks what only all ranks together know."""
        begin = time.perf_counter()
        parts = self.parts
        self._position.step = step
        self._faults.at_step(step)
        self.events = []
        parts.note_events(self.events)
        self._stop |= bool(self._wish.reason(step))
        parts.exchange.wants_meeting |= self._stop

        with np.errstate(all="ignore"):  # what is not finite is found, and the step rejected, by the exchange
            self._gradients(step)
        outcome = parts.exchange.complete()
        inside = parts.traffic_inside()
        traffic = outcome.traffic + inside
        if step == parts.exchange.last:
            traffic += self._arrive()
        if outcome.norm is None:
            self._skip(step)
        else:
            parts.pipeline.commit()
            self.counters.skipped_in_a_row = 0
        parts.note_events(None)  # evaluations use the same channels, and are no part of a step
        seconds = time.perf_counter() - begin
        compute_s = seconds - traffic.encode_s - traffic.decode_s - traffic.wait_s
        self.counters.count(step, traffic, inside.sent_bytes, parts.fp32_ring_bytes, compute_s)
        if step != parts.exchange.last:
            mine = score(parts.config.model.task, *self._sums[-1])
            loss = f"loss {mine.loss:.4f} (rank 0 alone)  " if self._sums[-1].weight else ""
            self._narrator.step(step, f"{loss}step {seconds:.3f} s")
        return self._row(step, outcome) | {
            "step_s": seconds,
            "compute_s": compute_s,
            **asdict(traffic),
            "replica_bytes": inside.sent_bytes,
            "skipped": self.counters.skipped,
        }

    def _row(self, step: int, outcome: Outcome) -> Row:
        sampler = self.parts.sampler
        row: Row = {
            "step": step,
            "time_s": time.time(),
            "epoch": (step - 1) // sampler.steps_per_epoch,
            "lr": outcome.lr,
            "grad_norm": outcome.norm,
            "samples": sampler.global_count(step - 1),
        }
        return row

    def _gradients(self, step: int) -> None:
        """Run forward and backward on the samples of this replica; gradients leave as the exchange likes."""
        parts, config = self.parts, self.parts.config

        def forward_done(mine: Sums) -> None:
            # All ranks of a tensor axis know the sums; they count once.
            self._sums.append(mine if parts.grid.tensor.rank == 0 else Sums())
            if parts.exchange.unanimous:
                self._start_meeting()

        def loss(output: Floats, part: slice) -> LossResult:
            return parts.loss(output, samples.y[part], total)

        with self._event("read"):
            indices, samples = parts.loader.samples(step - 1)
        total = parts.exchange.total(parts.sampler.global_count(step - 1), len(indices))
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

    def _start_meeting(self) -> None:
        """Tell all ranks what this one has summed up in the round. Where rounds are steps, it goes beside backward."""
        timeout_s = self.parts.config.network.peer_timeout_s
        self._meeting = Meeting(self.parts.grid.world, self._sums, stop=self._stop, timeout_s=timeout_s)

    def _arrive(self) -> Traffic:
        """Wait until all ranks have come to the end of the round, and note how long."""
        if self.parts.exchange.dead:
            self.parts.grid.shrink()
            self._stop = True
        begin = time.perf_counter()
        with self._event("wait"):
            if self._meeting is None:
                self._start_meeting()
            self._sums, self._stop = cast(Meeting, self._meeting).wait()
        return Traffic(wait_s=time.perf_counter() - begin)

    def _meet(self, rows: list[Row]) -> tuple[list[Row], bool]:
        """Complete the rows by what all ranks together know, and end a run that has diverged. Collective."""
        if not self.parts.exchange.unanimous:
            self._agree_on_skips(rows)
        try:
            self.parts.exchange.report(rows)
        except DivergedError as error:
            self.failure = error
        for row, sums in zip(rows, self._sums, strict=True):
            result = score(self.parts.config.model.task, *sums)
            row |= {"loss": result.loss, result.name: result.metric}
            if self.counters.losses.diverged(result.loss, sums.weight, self.parts.config.train.diverge):
                self.failure = self.failure or self.counters.losses.error(int(str(row["step"])))
        self.parts.exchange.wants_meeting = False
        return rows, self._stop

    def _agree_on_skips(self, rows: list[Row]) -> None:
        """Add up the steps that replicas have rejected by themselves, and end the run if one does nothing else."""
        grid, before = self.parts.grid, self.counters.skipped - self._skipped
        counts = grid.pipeline.rank == grid.tensor.rank == 0
        numbers = np.array([self._skipped * counts, self.counters.skipped_in_a_row], np.float64)
        table = NumberGather(grid.world, numbers, timeout_s=self.parts.config.network.peer_timeout_s).wait().table
        self.counters.skipped = before + int(table[:, 0].sum())
        self.counters.skipped_in_a_row = int(table[:, 1].max())
        rows[-1]["skipped"] = self.counters.skipped
        if self.counters.skipped_in_a_row > self.parts.config.train.max_skips:
            self.failure = self._diverged(self.counters.step, self._broken)

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

    def _skip(self, step: int) -> None:
        """Reject what else was remembered of the step, and end a run that does nothing else."""
        exchange, counters = self.parts.exchange, self.counters
        self.parts.pipeline.rollback()
        counters.skipped += 1
        counters.skipped_in_a_row += 1
        self._skipped += 1
        self._broken = self.parts.not_finite()
        where = "all ranks" if exchange.unanimous else "this replica"
        if self._broken:
            more = f" and {len(self._broken) - 1} more" if len(self._broken) > 1 else ""
            self._narrator.warn(
                f"step {step} skipped on {where}: the gradient of {self._broken[0]}{more} is not finite here"
            )
        if counters.skipped_in_a_row > self.parts.config.train.max_skips:
            if exchange.unanimous:
                raise self._diverged(step, self._broken)
            exchange.wants_meeting = True

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
