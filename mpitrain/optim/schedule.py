"""Learning-rate schedules: pure functions of the step."""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Linear warm-up, then constant, cosine or linear decay.

    No step is wasted at a rate of 0: step 0 has lr/warmup_steps, step warmup_steps − 1 has lr, and the decay
    would reach min_ratio·lr at step ``total_steps``, the first that is not taken. Later steps stay there.

    Attributes
    ----------
    kind : "constant", "cosine" or "linear"
        Shape of the decay; cosine after Loshchilov and Hutter (2017).
    lr : float
        The highest rate.
    total_steps : int
        Steps of the whole run.
    warmup_steps : int
        Steps of the warm-up, part of the total.
    min_ratio : float
        Where the decay ends, as a share of ``lr``; constant ignores it.
    """

    kind: Literal["constant", "cosine", "linear"]
    lr: float
    total_steps: int
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def __call__(self, step: float) -> float:
        """Return the learning rate of ``step``, counted from 0; a fraction where updates are parts of a step."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        height = (1 + cos(pi * progress)) / 2 if self.kind == "cosine" else 1 - progress
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * height)
