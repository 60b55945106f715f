"""Plain numpy twins of ``mpitrain.kernels.compensate``: the same operations in the same order, on whole arrays."""

import numpy as np

EPSILON = 1e-7


def compensated(grad, param, backup, mean_square, *, strength, decay):
    """Return the new (grad, mean_square); ``decay`` None is a fixed strength."""
    scalar = grad.dtype.type
    with np.errstate(all="ignore"):
        weight = scalar(strength)
        if decay is not None:
            new = scalar(decay) * mean_square + scalar(1 - decay) * (grad * grad)
            mean_square = np.where(np.isfinite(new), new, mean_square)
            weight = weight / np.sqrt(mean_square + scalar(EPSILON))
        factor = np.clip(weight * (grad * (param - backup)), scalar(-1), scalar(1))
        return grad + grad * factor, mean_square
