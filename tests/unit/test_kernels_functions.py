"""Exponential, GELU and softmax against their plain twins: all sizes around a block, both types, odd values."""

import numpy as np
import pytest

from mpitrain.kernels import activation
from mpitrain.kernels import softmax as attention
from mpitrain.kernels.exponential import constants, exponential, workspace
from tests.reference import functions

TYPES = [np.dtype(np.float32), np.dtype(np.float64)]
SIZES = [0, 1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129]
LINEAR, CUBIC, SCALE = 1.6, 0.07, 0.3


def exp(values, dtype):
    x = np.array(values, dtype)
    exponential(x, workspace(x.size, dtype), *constants(dtype))
    return x


def draw(shape, dtype, seed=0):
    return 3 * np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# The exponential.


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_exponential_is_right_to_the_last_unit(dtype):
    limit = 87 if dtype == np.float32 else 708
    ladder = np.concatenate([[0.0], np.geomspace(1e-30, limit, 5000)])
    x = np.concatenate([np.linspace(-limit, limit, 20001), ladder, -ladder]).astype(dtype)
    exact = np.exp(x.astype(np.longdouble))
    assert (np.abs(exp(x, dtype) - exact) <= exact * np.finfo(dtype).eps).all()
    assert exp([0.0, -0.0], dtype).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_exponential_of_what_is_too_large_too_small_or_no_number(dtype):
    tiny = float(np.finfo(dtype).tiny)
    assert exp([1e4, np.inf, -1e4, -np.inf, tiny, -tiny], dtype).tolist() == [np.inf, np.inf, 0, 0, 1, 1]
    mixed = exp([0, np.nan, 0], dtype)
    assert mixed[[0, 2]].tolist() == [1, 1]
    assert np.isnan(mixed[1])
    # Between the range of normal numbers and the limits: monotone, without a gap in which other numbers appear.
    low, high = (-89, 90) if dtype == np.float32 else (-710, 711)
    for edge in (np.linspace(low, low + 2, 999), np.linspace(high - 2, high, 999)):
        assert (np.diff(exp(edge, dtype)[np.isfinite(exp(edge, dtype))]) >= 0).all()
        assert (exp(edge, dtype) >= 0).all()
    assert exp([low], dtype) == 0
    assert exp([high], dtype) == np.inf


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_place_of_a_value_does_not_change_its_bits(dtype, size):
    x = draw(size, dtype)
    assert exp(x, dtype).tolist() == [exp([value], dtype)[0] for value in x]


# GELU.


def gelu(x, block=activation.BLOCK):
    y, sigmoid, kind = np.empty_like(x), np.empty_like(x), x.dtype.type
    words = workspace(block, x.dtype)
    activation.gelu(x, y, sigmoid, kind(LINEAR), kind(CUBIC), kind(1), words, *constants(x.dtype))
    return y, sigmoid


def gelu_backward(x, sigmoid, dy):
    dx, kind = np.empty_like(x), x.dtype.type
    activation.gelu_backward(x, sigmoid, dy, dx, kind(LINEAR), kind(3 * CUBIC), kind(1))
    return dx


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, activation.BLOCK - 1, activation.BLOCK, activation.BLOCK + 1])
def test_gelu_equals_its_twin(dtype, size):
    x, dy = draw(size, dtype), draw(size, dtype, 1)
    y, sigmoid = gelu(x)
    expected = functions.gelu(x, LINEAR, CUBIC)
    tolerance = 20 * np.finfo(dtype).eps
    assert np.allclose(y, expected[0], rtol=tolerance, atol=tolerance)
    assert np.allclose(sigmoid, expected[1], rtol=tolerance, atol=tolerance)
    dx = gelu_backward(x, sigmoid, dy)
    assert np.allclose(dx, functions.gelu_backward(x, dy, LINEAR, CUBIC), rtol=tolerance, atol=10 * tolerance)
    assert y.tolist() == gelu(x, block=16)[0].tolist()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_gelu_of_extreme_values(dtype):
    x = np.array([-1e4, -0.0, 0.0, 1e4, np.finfo(dtype).tiny, np.nan], dtype)
    y, sigmoid = gelu(x)
    assert y[:4].tolist() == [0, 0, 0, 1e4]
    assert y[4] == x[4] / 2
    dx = gelu_backward(x, sigmoid, np.ones_like(x))
    assert dx[:4].tolist() == [0, 0.5, 0.5, 1]
    assert np.isnan([y[5], dx[5]]).all()


# Softmax.


def softmax(rows, causal):
    rows, kind = rows.copy(), rows.dtype.type
    lanes, words = np.empty(attention.LANES, rows.dtype), workspace(rows.shape[1], rows.dtype)
    attention.softmax(rows, causal, kind(SCALE), kind(1), lanes, words, *constants(rows.dtype))
    return rows


def softmax_backward(weights, grads, causal):
    grads = grads.copy()
    lanes = np.empty(attention.LANES, grads.dtype)
    attention.softmax_backward(weights, grads, causal, grads.dtype.type(SCALE), lanes)
    return grads


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES[1:])
def test_softmax_equals_its_twin(dtype, size, causal):
    rows, grads = draw((2 * size, size), dtype), draw((2 * size, size), dtype, 1)
    weights = softmax(rows, causal)
    tolerance = 50 * np.finfo(dtype).eps
    assert np.allclose(weights, functions.softmax(rows, SCALE, causal=causal), rtol=tolerance, atol=tolerance)
    back = softmax_backward(weights, grads, causal)
    assert np.allclose(back, functions.softmax_backward(weights, grads, SCALE), rtol=tolerance, atol=10 * tolerance)
    if causal:
        future = np.arange(size) > (np.arange(2 * size) % size)[:, None]
        assert (weights[future] == 0).all()
        assert (back[future] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_of_no_rows(causal):
    assert softmax(np.zeros((0, 5), np.float32), causal).shape == (0, 5)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_softmax_of_huge_and_equal_scores(dtype):
    huge = float(np.finfo(dtype).max) / 4
    rows = np.array([[huge, huge, -huge, 0], [-huge] * 4, [0] * 4, [-np.inf, 0, 0, -np.inf]], dtype)
    assert softmax(rows, False).tolist() == [[0.5, 0.5, 0, 0], [0.25] * 4, [0.25] * 4, [0, 0.5, 0.5, 0]]


@pytest.mark.parametrize("place", [0, 1, 16, 32])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_row_alone(place, value):
    rows = draw((3, 33), np.float32)
    expected = softmax(rows, False)
    rows[1, place] = value
    weights = softmax(rows, False)
    assert np.isnan(weights[1]).all()
    assert weights[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_a_causal_row_does_not_see_what_comes_later():
    rows = draw((33, 33), np.float32)
    expected = softmax(rows, True)
    rows[np.triu_indices(33, 1)] = np.nan
    assert softmax(rows, True).tolist() == expected.tolist()
    grads = draw((33, 33), np.float32, 1)
    back = softmax_backward(expected, grads, True)
    grads[np.triu_indices(33, 1)] = np.nan
    assert softmax_backward(expected, grads, True).tolist() == back.tolist()
