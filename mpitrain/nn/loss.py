"""Losses, as sums over this rank's targets and gradients divided by the total weight of all ranks.

So the sum of the ranks' gradients is the gradient of the mean over all targets, however unequally they are spread.

Shape suffixes: N targets (all leading dims flattened), K classes held here, ... any shape.
"""

from collections.abc import Callable
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


class RowStatistics(NamedTuple):
    """What the cross-entropy needs to know of the logits of each target; (N,) float arrays.

    Attributes
    ----------
    peak : array
        Largest logit; -inf without classes.
    best : array
        Class of the largest logit, the first one of several.
    mass : array
        Sum of ``exp(logit - peak)``.
    right : array
        ``logit - peak`` of the right class; -inf where it is not among these classes.
    total : array
        Sum of ``logit - peak``.
    """

    peak: Floats
    best: Floats
    mass: Floats
    right: Floats
    total: Floats


class ClassSplit(NamedTuple):
    """Classes of which this rank holds a part.

    Attributes
    ----------
    first : int
        The class of the first logit here.
    classes : int
        All of them.
    combine : callable
        Turns the statistics of this rank's classes into those of all.
    """

    first: int
    classes: int
    combine: Callable[[RowStatistics], RowStatistics]


def cross_entropy(
    logits: Floats,
    targets: Ints,
    *,
    total_weight: float,
    weights: Floats | None = None,
    label_smoothing: float = 0.0,
    split: ClassSplit | None = None,
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
    split : ClassSplit, optional
        Where the logits are those of some classes only; the targets are of all.

    Raises
    ------
    DataError
        A target of positive weight is not a class.
    """
    held = logits.shape[-1]
    first, classes, combine = split or ClassSplit(0, held, lambda alone: alone)
    labels_N, weights_N = _flatten_targets(targets, weights, logits)
    check_range("target", labels_N, classes)
    columns_N = labels_N.astype(np.int64) - first
    rows_H = np.flatnonzero((columns_N >= 0) & (columns_N < held))
    columns_H = columns_N[rows_H]
    here, probability_NK = _statistics(logits.reshape(len(labels_N), held), rows_H, columns_H, first)
    whole = combine(here)
    losses_N = np.log(whole.mass) - (1 - label_smoothing) * whole.right
    if label_smoothing:
        losses_N -= label_smoothing * (whole.total / classes)
    if whole is not here:
        probability_NK *= np.exp(here.peak - whole.peak)[:, None]
    probability_NK /= whole.mass[:, None]
    probability_NK[rows_H, columns_H] -= 1 - label_smoothing
    probability_NK -= label_smoothing / classes
    probability_NK *= (weights_N * _reciprocal(total_weight))[:, None]
    return LossResult(
        _exact_sum(losses_N * weights_N),
        _exact_sum(weights_N),
        _exact_sum((whole.best == labels_N) * weights_N),
        probability_NK.reshape(logits.shape),
    )


def _statistics(logits_NK: Floats, rows_H: Ints, columns_H: Ints, first: int) -> tuple[RowStatistics, Floats]:
    """Summarize each row and return ``exp(logit - peak)`` beside it; (rows_H, columns_H) are the right logits."""
    count, held = logits_NK.shape
    peak_N = logits_NK.max(axis=1, initial=-np.inf)
    best_N = logits_NK.argmax(axis=1) + float(first) if held else np.zeros(count)
    shifted_NK = logits_NK - peak_N[:, None]
    right_N = np.full(count, -np.inf, logits_NK.dtype)
    right_N[rows_H] = shifted_NK[rows_H, columns_H]
    total_N = shifted_NK.sum(axis=1)
    mass_NK = np.exp(shifted_NK, out=shifted_NK)
    return RowStatistics(peak_N, best_N, mass_NK.sum(axis=1), right_N, total_N), mass_NK


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
