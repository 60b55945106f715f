"""Multi-head self-attention (Vaswani et al., 2017).

Shape suffixes: B batch, T time (S the attended time), C channels, H heads, D channels per head, N = B·H·T flattened.
"""

import math
from dataclasses import dataclass

import numpy as np

from mpitrain.arrays import Floats
from mpitrain.errors import ConfigError
from mpitrain.kernels.exponential import constants, workspace
from mpitrain.kernels.softmax import LANES, softmax, softmax_backward
from mpitrain.nn.layer import Chain, Context, Layer, Tensors
from mpitrain.nn.linear import Linear, row_linear
from mpitrain.nn.split import WHOLE, TensorSplit


@dataclass(frozen=True)
class AttentionCache:
    """Queries, keys and values as given, and the attention weights (B, H, T, S)."""

    qkv: Floats
    weights: Floats


@dataclass(frozen=True)
class Attention(Layer[Floats, AttentionCache]):
    """``softmax(q·kᵀ/√D)·v`` for each head; no parameters.

    The input interleaves (head, one of q k v, channel), so that a contiguous range of it belongs to whole heads: what a
    tensor-parallel rank holds.

    Attributes
    ----------
    heads : int
        H, the heads held here.
    causal : bool
        Whether a time step attends only to itself and the past.
    """

    heads: int
    causal: bool

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, AttentionCache]:
        """Map (B, T, H·3·D) to (B, T, H·D)."""
        batch, time, channels = x.shape
        q, k, v = self._split(x)
        weights_BHTS: Floats = q @ k.swapaxes(-1, -2)
        softmax(
            weights_BHTS.reshape(-1, time),
            self.causal,
            x.dtype.type(1 / math.sqrt(q.shape[-1])),
            x.dtype.type(1),
            np.empty(LANES, x.dtype),
            workspace(time, x.dtype),
            *constants(x.dtype),
        )
        y = np.empty((batch, time, channels // 3), x.dtype)
        np.matmul(weights_BHTS, v, out=self._heads(y))
        return y, AttentionCache(x, weights_BHTS)

    def backward(self, params: Tensors, cache: AttentionCache, dy: Floats, grads: Tensors) -> Floats:
        """Map (B, T, H·D) back to (B, T, H·3·D)."""
        q, k, v = self._split(cache.qkv)
        weights_BHTS = cache.weights
        dx = np.empty_like(cache.qkv)
        dq, dk, dv = self._split(dx)
        dy_BHTD = self._heads(dy)
        np.matmul(weights_BHTS.swapaxes(-1, -2), dy_BHTD, out=dv)
        dscores_BHTS: Floats = dy_BHTD @ v.swapaxes(-1, -2)
        time = dscores_BHTS.shape[-1]
        softmax_backward(
            weights_BHTS.reshape(-1, time),
            dscores_BHTS.reshape(-1, time),
            self.causal,
            dy.dtype.type(1 / math.sqrt(q.shape[-1])),
            np.empty(LANES, dy.dtype),
        )
        np.matmul(dscores_BHTS, k, out=dq)
        np.matmul(dscores_BHTS.swapaxes(-1, -2), q, out=dk)
        return dx

    def _heads(self, x: Floats) -> Floats:
        """View (B, T, H·D) as (B, H, T, D)."""
        batch, time, channels = x.shape
        return x.reshape(batch, time, self.heads, channels // self.heads).swapaxes(1, 2)

    def _split(self, qkv: Floats) -> tuple[Floats, Floats, Floats]:
        """View (B, T, H·3·D) as three (B, H, T, D)."""
        batch, time, channels = qkv.shape
        parts = qkv.reshape(batch, time, self.heads, 3, channels // (3 * self.heads))
        return parts[:, :, :, 0].swapaxes(1, 2), parts[:, :, :, 1].swapaxes(1, 2), parts[:, :, :, 2].swapaxes(1, 2)


class MultiHeadAttention(Chain):
    """Fused query-key-value map, attention, output map: (B, T, C) to (B, T, C).

    A tensor axis splits it by whole heads: the first map by its outputs, the last by its inputs.

    Parameters
    ----------
    name : str
        Prefix of the parameters of ``qkv`` and ``out``.
    width : int
        C, a multiple of ``heads``.
    heads : int
        H.
    causal : bool
        Whether a time step attends only to itself and the past.
    out_std : float
        Standard deviation of the initial output weights.
    split : TensorSplit
        Its ranks must divide ``heads``; checked by the model.
    time : int, optional
        T, where ranks hold slices of it before and behind.

    Raises
    ------
    ConfigError
        ``heads`` does not divide ``width``.
    """

    def __init__(
        self,
        name: str,
        width: int,
        heads: int,
        *,
        causal: bool,
        out_std: float = 0.02,
        split: TensorSplit = WHOLE,
        time: int | None = None,
    ) -> None:
        if width % heads:
            divisors = [d for d in range(1, width + 1) if width % d == 0]
            raise ConfigError(f"model: heads = {heads} does not divide d_model = {width}; set one of {divisors}")
        super().__init__(
            [
                *split.enter(time),
                Linear(f"{name}.qkv", width, 3 * width, parallel="column", split=split),
                Attention(heads // split.size, causal),
                *row_linear(f"{name}.out", width, width, std=out_std, split=split, time=time),
            ]
        )
