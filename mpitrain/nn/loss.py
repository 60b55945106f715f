"""Losses, as sums over this rank's targets and gradients divided by the total weight of all ranks.

So the sum of the ranks' gradients is the gradient of the mean over all targets, however unequally they are spread.

Shape suffixes: N targets (all leading dims flattened), K classes, ... any shape.
"""

from typing import NamedTuple

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.nn.layer import check_range


class LossResult(NamedTuple):
    """A loss over the targets of one batch.

    Attributes
    ----------
    loss_sum : float
        Weighted sum of the losses, not divided.
    weight : float
        Sum of the weights; the number of targets where none are given.
    metric_sum : float
        Weighted number of correct predictions, or weighted sum of squared errors.
    dout : array
        Gradient by the model's output (its shape and type), divided by ``total_weight``.
    """

    loss_sum: float
    weight: float
    metric_sum: float
    dout: Floats


def cross_entropy(
    logits: Floats,
    targets: Ints,
    *,
    total_weight: float,
    weights: Floats | None = None,
    label_smoothing: float = 0.0,
) -> LossResult:
    """Compare logits with the classes that were right.

    Parameters
    ----------
    logits : (B, K) or (B, T, K) float array
        Unnormalized log-probabilities; untouched.
    targets : (B,) or (B, T) int array
        Right classes. Where the weight is 0 any value is allowed.
    total_weight : float
        Sum of the weights over all ranks and micro-batches of the step; 0 gives a zero gradient.
    weights : array like targets, optional
        Weight of each target, at least 0: a token mask, for example.
    label_smoothing : float
        Share of the target probability that is spread evenly over all classes (Szegedy et al., 2016).

    Raises
    ------
    DataError
        A target of positive weight is not a class.
    """
    classes = logits.shape[-1]
    labels_N, weights_N = _flatten_targets(targets, weights, logits)
    check_range("target", labels_N, classes)
    shifted_NK = logits.reshape(len(labels_N), classes)
    right_N = shifted_NK.argmax(axis=1) == labels_N
    shifted_NK = shifted_NK - shifted_NK.max(axis=1, keepdims=True)
    probability_NK = np.exp(shifted_NK)
    mass_N = probability_NK.sum(axis=1)
    rows_N = np.arange(len(labels_N))
    losses_N = np.log(mass_N) - (1 - label_smoothing) * shifted_NK[rows_N, labels_N]
    if label_smoothing:
        losses_N -= label_smoothing * shifted_NK.mean(axis=1)
    probability_NK /= mass_N[:, None]
    probability_NK[rows_N, labels_N] -= 1 - label_smoothing
    probability_NK -= label_smoothing / classes
    probability_NK *= (weights_N * _reciprocal(total_weight))[:, None]
    return LossResult(
        _exact_sum(losses_N * weights_N),
        _exact_sum(weights_N),
        _exact_sum(right_N * weights_N),
        probability_NK.reshape(logits.shape),
    )


def squared_error(output: Floats, targets: Floats, *, total_weight: float, weights: Floats | None = None) -> LossResult:
    """Compare forecasts with what came.

    Parameters
    ----------
    output, targets : float arrays of one shape
        Every element counts as one target; untouched.
    total_weight : float
        Sum of the weights over all ranks and micro-batches of the step; 0 gives a zero gradient.
    weights : array like targets, optional
        Weight of each target, at least 0. Where it is 0, targets may be NaN: missing values.
    """
    error = output - targets.astype(output.dtype, copy=False)
    if weights is None:
        weight, dout = float(error.size), error
    else:
        weight = _exact_sum(weights)
        error[weights == 0] = 0
        dout = error * weights.astype(error.dtype, copy=False)
    loss = _exact_sum(dout * error)
    return LossResult(loss, weight, loss, dout * (2 * _reciprocal(total_weight)))


def _flatten_targets(targets: Ints, weights: Floats | None, logits: Floats) -> tuple[Ints, Floats]:
    """Return (labels_N, weights_N) in the type of the logits; labels of weight 0 become 0."""
    labels_N = targets.reshape(-1)
    if weights is None:
        return labels_N, np.ones(len(labels_N), logits.dtype)
    weights_N = weights.reshape(-1).astype(logits.dtype, copy=False)
    return np.where(weights_N > 0, labels_N, 0), weights_N


def _reciprocal(total_weight: float) -> float:
    return 1 / float(total_weight) if total_weight > 0 else 0.0


def _exact_sum(values: Floats) -> float:
    """Sum in float64, whatever the type of the values."""
    return float(values.sum(dtype=np.float64))
