"""Plain numpy twins of ``mpitrain.kernels`` exponential, activation and softmax: the textbook formulas, in float64."""

import numpy as np


def gelu(x, linear, cubic):
    """Return (y, sigmoid)."""
    x = x.astype(np.float64)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-(linear * x + cubic * x**3)))
    return x * sigmoid, sigmoid


def gelu_backward(x, dy, linear, cubic):
    """Return dx."""
    x, (_, sigmoid) = x.astype(np.float64), gelu(x, linear, cubic)
    return dy * (sigmoid + x * sigmoid * (1 - sigmoid) * (linear + 3 * cubic * x**2))


def softmax(rows, scale, *, causal):
    """Return the weights of each row; where ``causal``, row n ends at column n modulo S."""
    scores = scale * rows.astype(np.float64)
    if causal:
        count, columns = rows.shape
        scores[np.arange(columns) > (np.arange(count) % columns)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def softmax_backward(weights, grads, scale):
    """Return the gradient by the rows, given the weights and the gradient by them."""
    weights, grads = weights.astype(np.float64), grads.astype(np.float64)
    return scale * weights * (grads - (grads * weights).sum(axis=1, keepdims=True))
