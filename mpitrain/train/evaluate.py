"""Scores on the test samples: each counts once, on any number of ranks."""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.comm.agreement import START_TIMEOUT_S, NumberGather
from mpitrain.config.schema import Task
from mpitrain.data.dataset import Samples
from mpitrain.nn.loss import LossResult
from mpitrain.parallel.trip import Sums
from mpitrain.train.build import Parts

CHUNK_ROWS = 4096
"""Rows (tokens) of the samples that are evaluated at once; the last sample may go beyond."""


@dataclass(frozen=True)
class Score:
    """Means over all targets: the loss, and the metric that people know."""

    loss: float
    metric: float
    name: str

    def reaches(self, target: float) -> bool:
        """Tell whether the metric is as good as ``target``: accuracies grow, errors shrink."""
        return self.metric >= target if self.name == "accuracy" else self.metric <= target


def score(task: Task, loss_sum: float, weight: float, metric_sum: float) -> Score:
    """Turn sums over all ranks into means."""
    loss, mean = (loss_sum / weight, metric_sum / weight) if weight else (0.0, 0.0)
    if task == "lm":
        return Score(loss, loss / log(2), "bits_per_char")
    metric, name = (sqrt(mean), "rmse") if task == "forecast" else (mean, "accuracy")
    return Score(loss, metric, name)


def evaluate(parts: Parts) -> Score:
    """Score the model on the test samples. Collective over the world.

    Activations travel raw, so that the score is that of the model, however it is split.
    """
    sums = np.zeros(3)
    chunk = -(-CHUNK_ROWS // parts.dataset.input_shape[0])
    for start in range(0, len(parts.test_part), chunk):
        sums += _forward(parts, parts.dataset.test(parts.test_part[start : start + chunk]))
    parts.traffic_inside()  # what an evaluation sends is not part of any step
    counted = sums if parts.grid.tensor.rank == 0 else np.zeros(3)
    # Who serves has nothing to score, and waits for the others from the beginning.
    patience_s = max(parts.config.network.peer_timeout_s, START_TIMEOUT_S)
    everywhere = NumberGather(parts.grid.world, counted, timeout_s=patience_s)
    return score(parts.config.model.task, *everywhere.wait().sum_in_order())


def _forward(parts: Parts, samples: Samples) -> Sums:
    def loss(output: Floats, part: slice) -> LossResult:
        return parts.loss(output, samples.y[part], 1.0, train=False)

    with np.errstate(all="ignore"):  # a loss that is not finite is told by the caller
        return parts.pipeline.evaluate(parts.params, samples.x, len(samples), loss=loss)
