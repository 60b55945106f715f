"""The Gaussian error linear unit, forward and backward, one pass over memory each.

All arrays of a call have one size and one type, float32 or float64; scalars come in the same type.
"""

import numpy as np
import numpy.typing as npt

from mpitrain.kernels.exponential import Scalars, Words, exponential
from mpitrain.kernels.jit import kernel

Vector = npt.NDArray[np.floating]
Scalar = np.floating

BLOCK = 2048
"""Elements that are worked on at once, so that they stay in the first cache."""


@kernel
def gelu(
    x: Vector,
    y: Vector,
    sigmoid: Vector,
    linear: Scalar,
    cubic: Scalar,
    one: Scalar,
    words: Words,
    reduction: Scalars,
    taylor: Scalars,
    exponent: tuple[int, int],
) -> None:
    """Write ``sigmoid(linear·x + cubic·x³)`` and ``y``, its product with ``x``.

    Parameters
    ----------
    words : (m,) integers
        Workspace of `exponential`; m elements are worked on at once.
    reduction, taylor, exponent : tuple
        Constants of `exponential`.
    """
    for start in range(0, x.size, words.size):
        stop = min(start + words.size, x.size)
        xs, ys, gs = x[start:stop], y[start:stop], sigmoid[start:stop]
        for i in range(xs.size):
            gs[i] = -(xs[i] * xs[i] * cubic + linear) * xs[i]
        exponential(gs, words, reduction, taylor, exponent)
        for i in range(xs.size):
            g = one / (one + gs[i])
            gs[i] = g
            ys[i] = xs[i] * g


@kernel
def gelu_backward(
    x: Vector, sigmoid: Vector, dy: Vector, dx: Vector, linear: Scalar, cubic3: Scalar, one: Scalar
) -> None:
    """Write ``dx = dy·sigmoid·(1 + x·(1 − sigmoid)·(linear + cubic3·x²))``; ``cubic3`` is 3·cubic."""
    for i in range(x.size):
        v, g = x[i], sigmoid[i]
        dx[i] = g * (one + v * (one - g) * (v * v * cubic3 + linear)) * dy[i]
