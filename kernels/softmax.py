"""Softmax over the rows of attention scores, forward and backward, in place.

A causal row ends at its own position: what lies behind is neither read nor computed, and becomes 0.
"""

import numpy as np
import numpy.typing as npt

from mpitrain.kernels.exponential import Scalars, Words, exponential
from mpitrain.kernels.jit import kernel

Matrix = npt.NDArray[np.floating]
Vector = npt.NDArray[np.floating]
Scalar = np.floating

LANES = 16
"""Interleaved partial sums and maxima, so that the compiler may use vectors without changing the order. Loops run over
this constant, not over the size of an array: unrolled, they take a third of the time."""


@kernel
def softmax(
    rows: Matrix,
    causal: bool,
    scale: Scalar,
    one: Scalar,
    lanes: Vector,
    words: Words,
    reduction: Scalars,
    taylor: Scalars,
    exponent: tuple[int, int],
) -> None:
    """Replace each row by ``softmax(scale·row)``; a row with NaN or infinity becomes NaN.

    Parameters
    ----------
    rows : (N, S) float array
        Where ``causal``, row n stands at time n modulo S.
    scale : scalar > 0
        In the type of the rows.
    lanes : (16,) in the type of the rows
        Workspace.
    words : (>= S,) integers
        Workspace of `exponential`.
    reduction, taylor, exponent : tuple
        Constants of `exponential`.
    """
    columns = rows.shape[1]
    for n in range(rows.shape[0]):
        length = n % columns + 1 if causal else columns
        row = rows[n, :length]
        highest = row[0]
        lanes[:] = highest
        whole = length - length % LANES
        for start in range(0, whole, LANES):
            for j in range(LANES):
                v = row[start + j]
                lanes[j] = v if v > lanes[j] else lanes[j]
        for j in range(whole, length):
            lanes[j - whole] = row[j] if row[j] > lanes[j - whole] else lanes[j - whole]
        for j in range(LANES):
            highest = lanes[j] if lanes[j] > highest else highest
        for j in range(length):
            row[j] = (row[j] - highest) * scale
        exponential(row, words, reduction, taylor, exponent)
        lanes[:] = 0
        for start in range(0, whole, LANES):
            for j in range(LANES):
                lanes[j] += row[start + j]
        for j in range(whole, length):
            lanes[j - whole] += row[j]
        share = one / _fold(lanes)
        for j in range(length):
            row[j] *= share
        rows[n, length:] = 0


@kernel
def softmax_backward(weights: Matrix, grads: Matrix, causal: bool, scale: Scalar, lanes: Vector) -> None:
    """Replace the gradient by the weights by the one by the rows: ``scale·weight·(grad − Σ grad·weight)``."""
    columns = weights.shape[1]
    for n in range(weights.shape[0]):
        length = n % columns + 1 if causal else columns
        row, grad = weights[n, :length], grads[n, :length]
        lanes[:] = 0
        whole = length - length % LANES
        for start in range(0, whole, LANES):
            for j in range(LANES):
                lanes[j] += row[start + j] * grad[start + j]
        for j in range(whole, length):
            lanes[j - whole] += row[j] * grad[j]
        mean = _fold(lanes)
        for j in range(length):
            grad[j] = (grad[j] - mean) * row[j] * scale
        grads[n, length:] = 0


@kernel
def _fold(lanes: Vector) -> float:
    """Add up the lanes pairwise: overwrites them."""
    half = LANES // 2
    while half > 0:
        for j in range(half):
            lanes[j] += lanes[j + half]
        half //= 2
    return lanes[0]  # type: ignore[no-any-return]
