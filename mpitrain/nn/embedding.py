"""Token embedding and learned positions.

Shape suffixes: B batch, T time, C channels, V vocabulary, N = B·T flattened, U distinct tokens of the batch.
"""

from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Floats, Ints
from mpitrain.errors import ConfigError
from mpitrain.nn.layer import Context, Layer, Tensors, check_range, no_gradient
from mpitrain.nn.split import WHOLE, TensorSplit
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
    split : TensorSplit
        Cuts V: tokens of other ranks become zeros, so that the sum over the ranks (``split.leave``) is the embedding.
    """

    name: str
    vocabulary: int
    width: int
    split: TensorSplit = WHOLE

    def specs(self) -> list[ParamSpec]:
        """Declare ``weight``."""
        whole = ParamSpec(f"{self.name}.weight", (self.vocabulary, self.width), std=0.02, decay=True)
        return [self.split.shard(whole, 0)]

    def forward(self, params: Tensors, x: Ints, context: Context) -> tuple[Floats, EmbeddingCache]:
        """Map tokens (B, T) to (B, T, C).

        Raises
        ------
        DataError
            A token is negative or at least V.
        """
        check_range("token", x, self.vocabulary)
        weight = params[f"{self.name}.weight"]
        if self.split.size == 1:
            return weight[x], EmbeddingCache(x)
        held, rows = self._held(x)
        y: Floats = np.zeros((*x.shape, self.width), weight.dtype)
        y.reshape(x.size, self.width)[held] = weight[rows]
        return y, EmbeddingCache(x)

    def backward(self, params: Tensors, cache: EmbeddingCache, dy: Floats, grads: Tensors) -> Floats:
        """Add the gradients of equal tokens in the order of the batch (sorted: np.add.at is far slower)."""
        rows_N, dy_NC = cache.tokens.reshape(-1), dy.reshape(cache.tokens.size, self.width)
        if self.split.size > 1:
            held, rows_N = self._held(cache.tokens)
            dy_NC = dy_NC[held]
        order_N = np.argsort(rows_N, kind="stable")
        rows_U, first_U = np.unique(rows_N[order_N], return_index=True)
        grads[f"{self.name}.weight"][rows_U] += np.add.reduceat(dy_NC[order_N], first_U, axis=0)
        return no_gradient(dy)

    def _held(self, tokens: Ints) -> tuple[Ints, Ints]:
        """Find the tokens whose rows are here: where they stand in the flattened batch, and their rows."""
        start, stop = self.split.bounds(self.vocabulary)
        tokens_N = tokens.reshape(-1).astype(np.int64)
        held = np.flatnonzero((tokens_N >= start) & (tokens_N < stop))
        return held, tokens_N[held] - start


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
