"""Losses: values against plain formulas, weights, and shards that add up to one process (field case D04)."""

import math

import numpy as np
import pytest

from mpitrain.errors import DataError
from mpitrain.nn.layer import EVALUATE
from mpitrain.nn.loss import cross_entropy, squared_error
from mpitrain.nn.models import Transformer
from mpitrain.params import Layout, Params


def plain_cross_entropy(logits, targets, weights, smoothing):
    """Add up the weighted losses of (N, K) logits, one target at a time."""
    total = correct = 0.0
    for row, target, weight in zip(logits, targets, weights, strict=True):
        if not weight:
            continue
        log_mass = math.log(math.fsum(math.exp(v) for v in row))
        wanted = [smoothing / len(row) + (1 - smoothing) * (k == target) for k in range(len(row))]
        total += weight * math.fsum(q * (log_mass - v) for q, v in zip(wanted, row, strict=True))
        correct += weight * (max(range(len(row)), key=lambda k: row[k]) == target)
    return total, correct


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), (1, 1)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_values(shape, smoothing, weighted):
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((*shape, 4)), rng.integers(0, 4, shape)
    weights = rng.integers(0, 3, shape).astype(np.float64) if weighted else None
    plain_weights = np.ones(shape) if weights is None else weights
    total, correct = plain_cross_entropy(logits.reshape(-1, 4), targets.ravel(), plain_weights.ravel(), smoothing)
    result = cross_entropy(logits, targets, total_weight=3.0, weights=weights, label_smoothing=smoothing)
    assert result.loss_sum == pytest.approx(total)
    assert result.metric_sum == correct
    assert result.weight == plain_weights.sum()
    assert result.dout.shape == logits.shape


def test_gradients_are_divided_by_the_total_weight():
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((5, 4)), rng.integers(0, 4, 5)
    once, thrice = (cross_entropy(logits, targets, total_weight=w).dout for w in (1.0, 3.0))
    np.testing.assert_allclose(once, 3 * thrice)
    once, thrice = (squared_error(logits, logits[::-1], total_weight=w).dout for w in (1.0, 3.0))
    np.testing.assert_allclose(once, 3 * thrice)


def test_squared_error_values():
    output = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    targets = np.array([[1.0, 0.0], [np.nan, 1.0]])
    result = squared_error(output, targets, total_weight=4.0, weights=np.array([[1, 2], [0, 1]], np.float64))
    assert result.loss_sum == result.metric_sum == 2 * 4 + 9
    assert result.weight == 4
    assert result.dout.tolist() == [[0, 2], [0, 1.5]]
    assert squared_error(output, output, total_weight=4.0).weight == 4


def test_masked_targets_may_be_anything_and_others_may_not():
    logits, weights = np.zeros((2, 3)), np.array([1.0, 0.0])
    assert cross_entropy(logits, np.array([2, -100]), total_weight=1.0, weights=weights).weight == 1
    for target in (-1, 3):
        with pytest.raises(DataError, match="0 to 2"):
            cross_entropy(logits, np.array([target, 0]), total_weight=1.0, weights=weights)


def test_nothing_to_learn_from_gives_a_zero_gradient():
    zero = np.zeros(2)
    result = cross_entropy(np.ones((2, 3)), np.array([0, 1]), total_weight=0.0, weights=zero)
    assert result[:3] == (0, 0, 0)
    assert not result.dout.any()
    assert not squared_error(np.ones((2, 3)), np.ones((2, 3)), total_weight=0.0, weights=np.zeros((2, 3))).dout.any()


def test_types_stay_and_huge_logits_are_harmless():
    logits = np.array([[1e30, -1e30, 0], [1e38, 1e38, -1e38]], np.float32)
    result = cross_entropy(logits, np.array([0, 1]), total_weight=2.0, label_smoothing=0.0)
    assert result.dout.dtype == np.float32
    assert result.loss_sum == pytest.approx(math.log(2))
    mask = np.ones(2, np.float64)
    assert cross_entropy(np.zeros((2, 3), np.float32), np.zeros(2, int), total_weight=2, weights=mask).dout.dtype == (
        np.float32
    )
    output = np.zeros((2, 3), np.float32)
    assert squared_error(output, np.ones((2, 3)), total_weight=np.float64(2), weights=np.ones((2, 3))).dout.dtype == (
        np.float32
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", [(4, 1), (5, 0), (2, 2, 1)])
@pytest.mark.parametrize("task", ["classify", "lm", "forecast"])
def test_shards_of_unequal_size_add_up_to_one_process(task, sizes, masked):
    shape = {"time": 3, "d_model": 4, "blocks": 1, "heads": 2, "d_ff": 8}
    model = Transformer(task=task, features=2, outputs=3, **shape)
    params = Params(Layout(model.specs()), np.float64)
    params.initialize(0)
    rng = np.random.default_rng(1)
    x, whole, parts = rng.standard_normal((5, 3, 2)), params.zeros_like(), params.zeros_like()
    target_shape = {"classify": (5,), "lm": (5, 3), "forecast": (5, 3)}[task]
    targets = rng.standard_normal(target_shape) if task == "forecast" else rng.integers(0, 3, target_shape)
    weights = rng.integers(0, 2, target_shape).astype(float) if masked else np.ones(target_shape)
    loss = squared_error if task == "forecast" else cross_entropy

    def run(part, grads):
        output, cache = model.forward(params, x[part], EVALUATE)
        given = weights[part] if masked else None
        result = loss(output, targets[part], total_weight=weights.sum(), weights=given)
        model.backward(params, cache, result.dout, grads)
        return np.array(result[:3])

    once = run(slice(0, 5), whole)
    ends = np.cumsum(sizes)
    split = sum(run(slice(end - size, end), parts) for size, end in zip(sizes, ends, strict=True))
    np.testing.assert_allclose(split, once, rtol=1e-12)
    np.testing.assert_allclose(parts.flat, whole.flat, rtol=1e-10, atol=1e-15)
