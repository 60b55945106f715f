"""The ways to leave the time dim; no parameters.

Shape suffixes: B batch, T time, C channels, F = T·C.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.nn.layer import Context, Layer, Tensors


@dataclass(frozen=True)
class ShapeCache:
    """Shape of the input."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class MeanOverTime(Layer[Floats, ShapeCache]):
    """Average over time: (B, T, C) to (B, C)."""

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, ShapeCache]:
        """Average over dim 1."""
        y: Floats = x.mean(axis=1)
        return y, ShapeCache(x.shape)

    def backward(self, params: Tensors, cache: ShapeCache, dy: Floats, grads: Tensors) -> Floats:
        """Give each time step its share."""
        share = dy * (1 / cache.shape[1])
        return np.broadcast_to(share[:, None], cache.shape)


@dataclass(frozen=True)
class LastStep(Layer[Floats, ShapeCache]):
    """Keep the last time step: (B, T, C) to (B, C)."""

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, ShapeCache]:
        """Keep the last of dim 1."""
        return x[:, -1], ShapeCache(x.shape)

    def backward(self, params: Tensors, cache: ShapeCache, dy: Floats, grads: Tensors) -> Floats:
        """Zero the gradient of the other time steps."""
        dx = np.zeros(cache.shape, dy.dtype)
        dx[:, -1] = dy
        return dx


@dataclass(frozen=True)
class Flatten(Layer[Floats, ShapeCache]):
    """Join all dims but the first: (B, T, C) to (B, T·C); (B, F) stays."""

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, ShapeCache]:
        """View as (B, F)."""
        features = prod(x.shape[1:])
        return x.reshape(len(x), features), ShapeCache(x.shape)

    def backward(self, params: Tensors, cache: ShapeCache, dy: Floats, grads: Tensors) -> Floats:
        """View as the input was; a first linear layer behind it has no gradient to pass on."""
        return dy.reshape(cache.shape) if dy.ndim > 1 else dy
