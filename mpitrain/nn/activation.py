"""Activations, element by element; any shape."""

import math
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.kernels.activation import BLOCK, gelu, gelu_backward
from mpitrain.kernels.exponential import constants, workspace
from mpitrain.nn.layer import Context, Layer, Tensors

SLOPE = math.sqrt(2 / math.pi)
CUBIC = 0.044715


@dataclass(frozen=True)
class GeluCache:
    """The input and the sigmoid inside."""

    x: Floats
    sigmoid: Floats


@dataclass(frozen=True)
class Gelu(Layer[Floats, GeluCache]):
    """``x/2·(1 + tanh(u))`` with ``u = √(2/π)·(x + 0.044715·x³)`` (Hendrycks and Gimpel, 2016).

    Computed as ``x·sigmoid(2u)``, the same function.
    """

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, GeluCache]:
        """Apply the activation."""
        kind = x.dtype.type
        y, sigmoid = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype)
        gelu(
            x.reshape(-1),
            y.reshape(-1),
            sigmoid.reshape(-1),
            kind(2 * SLOPE),
            kind(2 * SLOPE * CUBIC),
            kind(1),
            workspace(BLOCK, x.dtype),
            *constants(x.dtype),
        )
        return y, GeluCache(x, sigmoid)

    def backward(self, params: Tensors, cache: GeluCache, dy: Floats, grads: Tensors) -> Floats:
        """Scale by ``sigmoid·(1 + x·(1 − sigmoid)·2√(2/π)·(1 + 3·0.044715·x²))``."""
        x, sigmoid, kind = cache.x.reshape(-1), cache.sigmoid.reshape(-1), dy.dtype.type
        dx = np.empty(dy.shape, dy.dtype)
        gelu_backward(x, sigmoid, dy.reshape(-1), dx.reshape(-1), kind(2 * SLOPE), kind(6 * SLOPE * CUBIC), kind(1))
        return dx


@dataclass(frozen=True)
class ReluCache:
    """The output: its positive elements are those that passed."""

    y: Floats


@dataclass(frozen=True)
class Relu(Layer[Floats, ReluCache]):
    """``max(x, 0)``, with derivative 0 at 0."""

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, ReluCache]:
        """Apply the activation."""
        y: Floats = np.maximum(x, 0.0)
        return y, ReluCache(y)

    def backward(self, params: Tensors, cache: ReluCache, dy: Floats, grads: Tensors) -> Floats:
        """Pass the gradient where the input was positive."""
        return dy * (cache.y > 0)
