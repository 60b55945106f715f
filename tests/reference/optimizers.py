"""Plain numpy twins of ``mpitrain.kernels.optimizer``: the same operations in the same order, on whole arrays.

Scalars are cast to the type of the arrays first, as the wrappers do, so twins and kernels agree bit for bit.
"""

import math

import numpy as np


def sgd_step(param, grad, buffers, *, lr, momentum, nesterov, weight_decay):
    """Return the new (param, buffers) of one tensor."""
    scalar = param.dtype.type
    param = param * scalar(1 - lr * weight_decay)
    if not momentum:
        return param - scalar(lr) * grad, buffers
    first = scalar(momentum) * buffers[0] + grad
    direction = scalar(momentum) * first + grad if nesterov else first
    return param - scalar(lr) * direction, [first]


def adamw_step(param, grad, buffers, *, lr, step, beta1, beta2, eps, weight_decay):
    """Return the new (param, buffers) of one tensor; ``step`` counts from 1."""
    scalar = param.dtype.type
    first = scalar(beta1) * buffers[0] + scalar(1 - beta1) * grad
    second = scalar(beta2) * buffers[1] + scalar(1 - beta2) * (grad * grad)
    root = np.sqrt(second) * scalar(1 / math.sqrt(1 - beta2**step)) + scalar(eps)
    change = scalar(lr / (1 - beta1**step)) * first / root
    return param * scalar(1 - lr * weight_decay) - change, [first, second]


def outer_step(mean, change, momentum, *, lr, mu):
    """Return the new (weights, momentum) after a round of local steps; ``mean`` is that of the replicas' weights."""
    scalar = mean.dtype.type
    momentum = scalar(mu) * momentum + change
    return mean + (scalar(1 - lr) * change - scalar(lr * mu) * momentum), momentum


def merged(local, params, share):
    """Return what a replica goes on with."""
    scalar = local.dtype.type
    return scalar(share) * local + scalar(1 - share) * params if share else params.copy()
