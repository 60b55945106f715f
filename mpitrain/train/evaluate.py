"""Scores on the test samples: each counts once, on any number of ranks."""

from dataclasses import dataclass
from math import log, sqrt
from typing import cast

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.comm.agreement import NumberGather
from mpitrain.config.schema import Task
from mpitrain.data.dataset import NO_TARGET, Samples
from mpitrain.nn.layer import EVALUATE
from mpitrain.nn.loss import LossResult, cross_entropy, squared_error
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


def loss_of(
    task: Task,
    output: Floats,
    samples: Samples,
    total: float,
    *,
    label_smoothing: float = 0.0,
    class_weights: Floats | None = None,
) -> LossResult:
    """Compare outputs with targets; ``total`` is the number of samples of all ranks.

    A sample of tokens counts as many targets as it has steps, so in training none of them may be missing.
    Class weights have the mean 1 over the training samples, so ``total`` stands for the sum of the weights, too.
    """
    if task == "forecast":
        return squared_error(output, cast(Floats, samples.y), total_weight=total * output.shape[-1])
    labels = cast(Ints, samples.y)
    if task == "lm":
        is_target = None if labels.min(initial=0) > NO_TARGET else (labels != NO_TARGET).astype(output.dtype)
        return cross_entropy(output, labels, total_weight=total * output.shape[1], weights=is_target)
    weights = None if class_weights is None else class_weights[labels]
    return cross_entropy(output, labels, total_weight=total, weights=weights, label_smoothing=label_smoothing)


def score(task: Task, loss_sum: float, weight: float, metric_sum: float) -> Score:
    """Turn sums over all ranks into means."""
    loss, mean = (loss_sum / weight, metric_sum / weight) if weight else (0.0, 0.0)
    if task == "lm":
        return Score(loss, loss / log(2), "bits_per_char")
    metric, name = (sqrt(mean), "rmse") if task == "forecast" else (mean, "accuracy")
    return Score(loss, metric, name)


def evaluate(parts: Parts) -> Score:
    """Score the model on the test samples. Collective over the data axis."""
    sums = np.zeros(3)
    task = parts.config.model.task
    chunk = -(-CHUNK_ROWS // parts.dataset.input_shape[0])
    for start in range(0, len(parts.test_part), chunk):
        samples = parts.dataset.test(parts.test_part[start : start + chunk])
        with np.errstate(all="ignore"):  # a loss that is not finite is told by the caller
            output, _ = parts.model.forward(parts.params, samples.x, EVALUATE)
            result = loss_of(task, output, samples, 1.0)
        sums += (result.loss_sum, result.weight, result.metric_sum)
    everywhere = NumberGather(parts.grid.data, sums, timeout_s=parts.config.network.peer_timeout_s)
    return score(task, *everywhere.wait().sum_in_order())
