"""When a run ends before its last step: wishes of one rank, and rules about the score that all ranks share."""

import math
import time
from dataclasses import dataclass, field
from statistics import median

from mpitrain.comm.fault import FaultHook
from mpitrain.comm.signals import StopRequest
from mpitrain.config.schema import RunConfig, TrainConfig
from mpitrain.errors import DivergedError
from mpitrain.train.evaluate import Score

RESERVE = 2.0
"""Times the longest save and the longest step that must still fit before the time limit."""


class StopWish:
    """Why this rank wants to stop; the loop adds up the wishes of all ranks.

    Parameters
    ----------
    request : StopRequest
        Signals, and the beginning of the process, from which the time limit counts.
    faults : FaultHook
        A stop on purpose.
    run : RunConfig
        The time limit and its margin.
    """

    def __init__(self, request: StopRequest, faults: FaultHook, run: RunConfig) -> None:
        self._request, self._faults, self._run = request, faults, run
        self._longest_turn_s = self._longest_save_s = 0.0
        self._told = False

    def took(self, *, turn_s: float, save_s: float) -> None:
        """Learn how long a turn of the loop and its save took."""
        self._longest_turn_s = max(self._longest_turn_s, turn_s)
        self._longest_save_s = max(self._longest_save_s, save_s)

    def reason(self, step: int) -> str:
        """Name why this rank wants to stop after ``step``; empty if it does not."""
        if self._request.reason:
            return self._request.reason
        limit = self._run.time_limit_s
        if limit is not None and limit - (time.perf_counter() - self._request.begin) < self._reserve_s():
            return f"run.time_limit_s = {limit:g}"
        self._told |= self._faults.find("stop", step) is not None  # also at the end of the round
        return "a fault on purpose" if self._told else ""

    def _reserve_s(self) -> float:
        """Seconds to keep for the step under way and the save."""
        return max(self._run.time_margin_s, RESERVE * (self._longest_save_s + self._longest_turn_s))


WATCHED = 20
"""Steps whose median loss tells whether a run diverges: an outlier does not count."""

ENOUGH, FEW = 64, 4
"""Samples of the first steps that are needed to know where a loss has begun; up to how many steps are few."""


@dataclass
class LossWatch:
    """Whether the training loss has grown beyond all bounds, though gradients are finite; saved with the run.

    Attributes
    ----------
    first, last : list of float
        Losses of the first steps, until they have had ``ENOUGH`` samples, and of the newest ``WATCHED`` ones.
    samples : float
        Behind the first ones.
    """

    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    samples: float = 0.0

    def diverged(self, loss: float, samples: float, limit: float) -> bool:
        """Take note of a step's loss; return whether the run counts as diverged.

        The loss is that of all ranks, so all ranks decide alike. ``limit`` is ``train.diverge``; 0: never. A loss that
        is not finite does not count: its step was rejected.
        """
        if not math.isfinite(loss):
            return False
        if self.samples < ENOUGH and len(self.first) < WATCHED:
            self.first.append(loss)
            self.samples += samples
        self.last = [*self.last, loss][-WATCHED:]
        return bool(limit) and len(self.last) == WATCHED and median(self.last) > limit * self._at_first

    @property
    def _at_first(self) -> float:
        """What the loss was before the run could diverge: large batches tell with the first step."""
        return min(self.first) if len(self.first) <= FEW else median(self.first)

    def error(self, step: int) -> DivergedError:
        """Say what has happened, the same on all ranks."""
        error = DivergedError(
            f"step {step}: the median training loss of {WATCHED} steps is {median(self.last):.4g}, after "
            f"{self._at_first:.4g} in the first ones: the run diverges; lower optim.lr, lengthen optim.warmup_steps, "
            "or set train.clip_norm (train.diverge sets the bound)"
        )
        error.agreed = True
        return error


@dataclass
class Progress:
    """How the score has developed; saved with the run.

    Attributes
    ----------
    best_loss : float or None
        Lowest test loss so far.
    stale : int
        Evaluations in a row that were not below it.
    """

    best_loss: float | None = None
    stale: int = 0

    def ended_by(self, score: Score, config: TrainConfig) -> str | None:
        """Take note of an evaluation; return the setting of [train] that ends the run with it, if one does.

        The score is that of all ranks, so all ranks decide alike. A loss that is not finite is never the best.
        """
        if math.isfinite(score.loss) and (self.best_loss is None or score.loss < self.best_loss):
            self.best_loss, self.stale = score.loss, 0
        else:
            self.stale += 1
        if config.target is not None and score.reaches(config.target):
            return "target"
        if config.patience is not None and self.stale >= config.patience:
            return "patience"
        return None
