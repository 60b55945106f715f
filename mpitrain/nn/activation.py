"""Activations, element by element; any shape."""

import math
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Floats
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

    Computed as ``x·sigmoid(2u)``, the same function: numpy's exp takes half the time of its tanh.
    """

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, GeluCache]:
        """Apply the activation."""
        work = x * x
        work *= -2 * SLOPE * CUBIC
        work -= 2 * SLOPE
        work *= x
        with np.errstate(over="ignore"):  # infinity is right here: its reciprocal is the 0 that is meant
            np.exp(work, out=work)
        work += 1.0
        sigmoid: Floats = np.divide(1.0, work, out=work)
        return x * sigmoid, GeluCache(x, sigmoid)

    def backward(self, params: Tensors, cache: GeluCache, dy: Floats, grads: Tensors) -> Floats:
        """Scale by ``sigmoid·(1 + x·(1 − sigmoid)·2√(2/π)·(1 + 3·0.044715·x²))``."""
        x, sigmoid = cache.x, cache.sigmoid
        work = x * x
        work *= 6 * SLOPE * CUBIC
        work += 2 * SLOPE
        work *= x
        work *= 1.0 - sigmoid
        work += 1.0
        work *= sigmoid
        work *= dy
        return work


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
