"""Delay compensation of a gradient that was computed on older weights (DC-ASGD; Zheng et al., 2017).

The correction is lambda·g·g·(w − backup), the diagonal of g·gᵀ standing in for the Hessian. It is computed as g·f with
f = lambda·g·(w − backup) clipped to −1…1: a correction is never longer than the gradient itself, so it can take an
element down to zero or double it, but never reverse it, and no intermediate value overflows where the gradient's
square would.

All arrays of a call have one length and one type, float32 or float64; scalars come in the same type. Every element is
computed in a fixed order of operations: the same bits on every machine.
"""

from math import sqrt

import numpy as np
import numpy.typing as npt

from mpitrain.kernels.jit import inlined, kernel

Vector = npt.NDArray[np.floating]
Scalar = np.floating


@inlined
def _corrected(g: Scalar, drift: Scalar, strength: Scalar, one: Scalar) -> Scalar:
    factor = strength * (g * drift)
    factor = one if factor > one else factor
    factor = -one if factor < -one else factor  # NaN passes both and stays visible
    return g + g * factor


@kernel
def fixed(grad: Vector, param: Vector, backup: Vector, strength: Scalar, one: Scalar) -> None:
    """Correct ``grad`` in place with the same ``strength`` for all elements.

    Parameters
    ----------
    param, backup : arrays
        The weights now, and those on which the gradient was computed.
    strength : scalar
        lambda.
    one : scalar
        1 in the arrays' type.
    """
    for i in range(grad.size):
        grad[i] = _corrected(grad[i], param[i] - backup[i], strength, one)


@kernel
def adaptive(
    grad: Vector,
    param: Vector,
    backup: Vector,
    mean_square: Vector,
    strength: Scalar,
    decay: Scalar,
    rest: Scalar,
    eps: Scalar,
    one: Scalar,
) -> None:
    """Correct ``grad`` in place with lambda = strength/√(mean_square + eps), element by element.

    Parameters
    ----------
    mean_square : array
        Becomes decay·mean_square + rest·g·g of the uncorrected gradient first. Stays as it was where that would not be
        finite, so that one bad gradient (which stays bad, for the caller to see) does not end the correction for good.
    decay, rest : scalar
        m, and 1 − m subtracted in float64 by the caller.
    """
    for i in range(grad.size):
        g = grad[i]
        mean = decay * mean_square[i] + rest * (g * g)
        mean = mean if np.isfinite(mean) else mean_square[i]
        mean_square[i] = mean
        grad[i] = _corrected(g, param[i] - backup[i], strength / sqrt(mean + eps), one)
