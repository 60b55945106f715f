"""Optimizer updates and norms, fused over flat ranges.

All arrays of a call have one length and one type, float32 or float64; scalars come in the same type, so that float32
is never widened. Every element is updated in a fixed order of operations: the same bits on every machine. Moments that
fade away become 0 before they are subnormal.
"""

from math import sqrt

import numpy as np
import numpy.typing as npt

from mpitrain.kernels.jit import kernel
from mpitrain.kernels.reduce import flushed

Vector = npt.NDArray[np.floating]
Scalar = np.floating


@kernel
def sgd(param: Vector, grad: Vector, rate: Scalar, keep: Scalar) -> None:
    """Update ``param`` by plain gradient descent: ``param·keep − rate·grad``."""
    for i in range(param.size):
        param[i] = param[i] * keep - rate * grad[i]


@kernel
def sgd_momentum(param: Vector, grad: Vector, momentum: Vector, rate: Scalar, beta: Scalar, keep: Scalar) -> None:
    """Update ``param`` and ``momentum`` by heavy-ball descent (Polyak, 1964)."""
    for i in range(param.size):
        m = flushed(beta * momentum[i] + grad[i])
        momentum[i] = m
        param[i] = param[i] * keep - rate * m


@kernel
def sgd_nesterov(param: Vector, grad: Vector, momentum: Vector, rate: Scalar, beta: Scalar, keep: Scalar) -> None:
    """Update ``param`` and ``momentum`` with Nesterov's look-ahead, in the form of Sutskever et al. (2013)."""
    for i in range(param.size):
        g = grad[i]
        m = flushed(beta * momentum[i] + g)
        momentum[i] = m
        param[i] = param[i] * keep - rate * (beta * m + g)


@kernel
def adamw(
    param: Vector,
    grad: Vector,
    first: Vector,
    second: Vector,
    rate: Scalar,
    beta1: Scalar,
    rest1: Scalar,
    beta2: Scalar,
    rest2: Scalar,
    root_scale: Scalar,
    eps: Scalar,
    keep: Scalar,
) -> None:
    """Update ``param``, ``first`` and ``second`` (Loshchilov and Hutter, 2019).

    Parameters
    ----------
    rate : scalar
        Learning rate over the first bias correction, lr/(1 − beta1^t).
    rest1, rest2 : scalar
        1 − beta1 and 1 − beta2, subtracted in float64 by the caller.
    root_scale : scalar
        Root of the second bias correction, 1/√(1 − beta2^t).
    keep : scalar
        1 − lr·weight_decay.
    """
    for i in range(param.size):
        g = grad[i]
        m = flushed(beta1 * first[i] + rest1 * g)
        v = flushed(beta2 * second[i] + rest2 * (g * g))
        first[i] = m
        second[i] = v
        param[i] = param[i] * keep - rate * m / (sqrt(v) * root_scale + eps)


@kernel
def momentum_of(grad: Vector, past: Vector, following: Vector, beta: Scalar, share: Scalar) -> None:
    """Write ``beta·past + share·grad`` into ``following``, and into ``grad`` itself."""
    for i in range(grad.size):
        m = flushed(beta * past[i] + share * grad[i])
        following[i] = m
        grad[i] = m


@kernel
def roots_of(second: Vector, roots: Vector, least: Scalar, correction: Scalar) -> None:
    """Write the roots of second moments, none below ``least``, times ``correction``; 1 where that is 0.

    ``roots`` may be ``second``.
    """
    for i in range(second.size):
        root = sqrt(max(second[i], least)) * correction
        roots[i] = root if root > 0 else root + 1


@kernel
def frozen_adamw(
    param: Vector, moment: Vector, first: Vector, root: Vector, rate: Scalar, eps: Scalar, keep: Scalar
) -> None:
    """Update ``param`` by a first moment, which becomes ``first``, over a root of the second one that stays."""
    for i in range(param.size):
        first[i] = moment[i]
        param[i] = param[i] * keep - rate * moment[i] / (root[i] + eps)


@kernel
def outer_nesterov(param: Vector, change: Vector, momentum: Vector, rest: Scalar, beta: Scalar, ahead: Scalar) -> None:
    """Move the mean of the replicas' weights on (DiLoCo: Douillard et al., 2023).

    Parameters
    ----------
    param : (n,) array
        On entry the mean of the replicas' weights, on exit the new global ones.
    change : (n,) array
        The last global weights minus that mean, d.
    momentum : (n,) array
        m becomes beta·m + d.
    rest, ahead : scalar
        1 − rate and rate·beta, computed in float64 by the caller: the result is the last global weights minus
        rate·(d + beta·m), and with rate = 1 and beta = 0 the mean itself, to the bit.
    """
    for i in range(param.size):
        d = change[i]
        m = beta * momentum[i] + d
        momentum[i] = m
        param[i] = param[i] + (rest * d - ahead * m)


@kernel
def blend(x: Vector, other: Vector, share: Scalar, rest: Scalar) -> None:
    """Replace ``x`` by ``share·x + rest·other``."""
    for i in range(x.size):
        x[i] = share * x[i] + rest * other[i]


@kernel
def sum_of_squares(x: Vector, lanes: npt.NDArray[np.float64]) -> float:
    """Add up the squares in float64, in an order that depends on the sizes alone.

    Interleaved partial sums, so that the compiler may use vectors without changing the order, then halved pairwise.

    Parameters
    ----------
    lanes : (2**k,) float64 array
        Workspace for the partial sums, overwritten. Sixty-four are fastest; another number gives other bits.
    """
    lanes[:] = 0.0
    whole = x.size - x.size % lanes.size
    for start in range(0, whole, lanes.size):
        block = x[start : start + lanes.size]
        for j in range(lanes.size):
            lanes[j] += np.float64(block[j]) * np.float64(block[j])
    for i in range(whole, x.size):
        lanes[i - whole] += np.float64(x[i]) * np.float64(x[i])
    half = lanes.size // 2
    while half > 0:
        for j in range(half):
            lanes[j] += lanes[j + half]
        half //= 2
    return lanes[0]  # type: ignore[no-any-return]


@kernel
def scale(x: Vector, factor: Scalar) -> None:
    """Multiply ``x`` by ``factor`` in place."""
    for i in range(x.size):
        x[i] *= factor
