"""Scores on the test samples: each counts once, on any number of ranks."""

from dataclasses import dataclass
from math import sqrt
from typing import cast

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.comm.agreement import NumberGather
from mpitrain.config.schema import Task
from mpitrain.data.dataset import Samples
from mpitrain.nn.layer import EVALUATE
from mpitrain.nn.loss import LossResult, cross_entropy, squared_error
from mpitrain.train.build import Parts

CHUNK = 256
"""Samples that are evaluated at once."""


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

    Class weights have the mean 1 over the training samples, so ``total`` stands for the sum of the weights, too.
    """
    if task == "forecast":
        return squared_error(output, cast(Floats, samples.y), total_weight=total * output.shape[-1])
    labels = cast(Ints, samples.y)
    weights = None if class_weights is None else class_weights[labels]
    return cross_entropy(output, labels, total_weight=total, weights=weights, label_smoothing=label_smoothing)


def score(task: Task, loss_sum: float, weight: float, metric_sum: float) -> Score:
    """Turn sums over all ranks into means."""
    mean = metric_sum / weight if weight else 0.0
    metric, name = (sqrt(mean), "rmse") if task == "forecast" else (mean, "accuracy")
    return Score(loss_sum / weight if weight else 0.0, metric, name)


def evaluate(parts: Parts) -> Score:
    """Score the model on the test samples. Collective over the data axis."""
    sums = np.zeros(3)
    task = parts.config.model.task
    for start in range(0, len(parts.test_part), CHUNK):
        samples = parts.dataset.test(parts.test_part[start : start + CHUNK])
        output, _ = parts.model.forward(parts.params, samples.x, EVALUATE)
        result = loss_of(task, output, samples, 1.0)
        sums += (result.loss_sum, result.weight, result.metric_sum)
    everywhere = NumberGather(parts.grid.data, sums, timeout_s=parts.config.network.peer_timeout_s)
    return score(task, *everywhere.wait().sum_in_order())
