"""Norms and clipping in fixed-order kernels: BLAS sums in another order on another processor, and ranks would drift."""

from math import isfinite, sqrt

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.errors import ConfigError
from mpitrain.kernels import optimizer as kernels
from mpitrain.params import Params

LANES = 64
"""Partial sums of a norm; part of the result's bits, so never tuned to the machine."""


def sum_of_squares(x: Floats) -> float:
    """Add up the squares of a flat contiguous array in float64; the order depends on its size alone.

    For norms over several buffers or ranks, whose sums are to be added before the root.
    """
    return float(kernels.sum_of_squares(x, np.empty(LANES)))


def global_norm(tensors: Params) -> float:
    """Return the Euclidean norm of all tensors together; the padding is zero and does not count."""
    return sqrt(sum_of_squares(tensors.flat))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that brings ``norm`` down to ``max_norm``: at most 1, and 1 where the norm is not finite.

    Raises
    ------
    ConfigError
        ``max_norm`` is not positive.
    """
    if not max_norm > 0:
        raise ConfigError(f"train: clip_norm = {max_norm}, but it must be positive; leave it out to clip nothing")
    return max_norm / norm if isfinite(norm) and norm > max_norm else 1.0


def scale(tensors: Params, factor: float) -> None:
    """Multiply all tensors by ``factor`` in place."""
    kernels.scale(tensors.flat, tensors.flat.dtype.type(factor))


def clip_by_norm(grads: Params, max_norm: float) -> tuple[float, float]:
    """Scale the gradients down to ``max_norm`` where they are longer (Pascanu et al., 2013).

    Returns
    -------
    norm : float
        Norm before clipping. Where it is not finite nothing is scaled: the caller must skip the step.
    factor : float
        What the gradients were multiplied by.
    """
    norm = global_norm(grads)
    factor = clip_factor(norm, max_norm)
    if factor < 1:
        scale(grads, factor)
    return norm, factor
