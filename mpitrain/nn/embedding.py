"""Token embedding and learned positions.

Shape suffixes: B batch, T time, C channels, V vocabulary, N = B·T flattened, U distinct tokens of the batch.
"""

from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.errors import ConfigError
from mpitrain.nn.layer import Context, Layer, Tensors, check_range, no_gradient
from mpitrain.params import ParamSpec


@dataclass(frozen=True)
class EmbeddingCache:
    """The tokens (B, T), as given."""

    tokens: Ints


@dataclass(frozen=True)
class Embedding(Layer[Ints, EmbeddingCache]):
    """Look up a row of ``weight`` (V, C) for each token.

    Attributes
    ----------
    name : str
        Prefix of the parameter ``weight``.
    vocabulary, width : int
        V and C.
    """

    name: str
    vocabulary: int
    width: int

    def specs(self) -> list[ParamSpec]:
        """Declare ``weight``."""
        return [ParamSpec(f"{self.name}.weight", (self.vocabulary, self.width), std=0.02, decay=True)]

    def forward(self, params: Tensors, x: Ints, context: Context) -> tuple[Floats, EmbeddingCache]:
        """Map tokens (B, T) to (B, T, C).

        Raises
        ------
        DataError
            A token is negative or at least V.
        """
        check_range("token", x, self.vocabulary)
        return params[f"{self.name}.weight"][x], EmbeddingCache(x)

    def backward(self, params: Tensors, cache: EmbeddingCache, dy: Floats, grads: Tensors) -> Floats:
        """Add the gradients of equal tokens in the order of the batch (sorted: np.add.at is far slower)."""
        tokens_N = cache.tokens.reshape(-1)
        order_N = np.argsort(tokens_N, kind="stable")
        tokens_U, first_U = np.unique(tokens_N[order_N], return_index=True)
        sorted_NC = dy.reshape(len(tokens_N), self.width)[order_N]
        grads[f"{self.name}.weight"][tokens_U] += np.add.reduceat(sorted_NC, first_U, axis=0)
        return no_gradient(dy)


@dataclass(frozen=True)
class PositionsCache:
    """Nothing to remember."""


@dataclass(frozen=True)
class Positions(Layer[Floats, PositionsCache]):
    """Add a learned vector to each time step.

    Attributes
    ----------
    name : str
        Prefix of the parameter ``weight`` (time, width).
    time : int
        The longest sequence; shorter ones use the first positions.
    width : int
        C.
    """

    name: str
    time: int
    width: int

    def specs(self) -> list[ParamSpec]:
        """Declare ``weight``."""
        return [ParamSpec(f"{self.name}.weight", (self.time, self.width), std=0.02)]

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, PositionsCache]:
        """Map (B, T, C) to (B, T, C).

        Raises
        ------
        ConfigError
            The sequence is longer than ``time``.
        """
        if x.shape[1] > self.time:
            raise ConfigError(f"model: a sequence has {x.shape[1]} time steps, but the model was built for {self.time}")
        return x + params[f"{self.name}.weight"][: x.shape[1]], PositionsCache()

    def backward(self, params: Tensors, cache: PositionsCache, dy: Floats, grads: Tensors) -> Floats:
        """Add the gradient summed over the batch; it passes on unchanged."""
        grad = grads[f"{self.name}.weight"][: dy.shape[1]]
        grad += dy.sum(axis=0)
        return dy
