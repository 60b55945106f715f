"""Dropout whose noise is a pure function of (key, layer name, global sample index, element).

A counter-based generator (Salmon et al., 2011, for the idea) instead of a stream: how a batch is split over ranks and
micro-batches does not change which elements are dropped, and nothing has to be saved to repeat a run.

Shape suffixes: B batch, W words of noise for one sample, E elements of one sample.
"""

import zlib
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Floats, Ints
from mpitrain.nn.layer import Context, Layer, Tensors

LEVELS = 1 << 16
"""Noise has 16 bits: each 32-bit hash decides two elements, and a rate is met to 1/65536."""

_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class DropoutCache:
    """0 or 1/(1 − rate) for each element; None where nothing was dropped."""

    keep: Floats | None


@dataclass(frozen=True)
class Dropout(Layer[Floats, DropoutCache]):
    """Zero elements with probability ``rate`` and scale the others by 1/(1 − rate), in training only.

    Attributes
    ----------
    name : str
        Part of the noise: layers of different names drop different elements.
    rate : float
        0 <= rate < 1; rounded to 1/65536.
    first : int
        Index of the first element held here among all of a sample, where a tensor axis splits it: the noise is that of
        one rank.
    """

    name: str
    rate: float
    first: int = 0

    def forward(self, params: Tensors, x: Floats, context: Context) -> tuple[Floats, DropoutCache]:
        """Drop elements of (B, ...); ``context.samples`` must name the B samples."""
        threshold = round(self.rate * LEVELS)
        if not context.train or threshold == 0:
            return x, DropoutCache(None)
        seeds_B = _sample_seeds(context.key, self.name, context.samples)
        noise_BE = _noise(seeds_B, self.first, prod(x.shape[1:]))
        keep: Floats = np.multiply(noise_BE >= threshold, LEVELS / (LEVELS - threshold), dtype=x.dtype)
        keep = keep.reshape(x.shape)
        return x * keep, DropoutCache(keep)

    def backward(self, params: Tensors, cache: DropoutCache, dy: Floats, grads: Tensors) -> Floats:
        """Apply the same mask to the gradient."""
        return dy if cache.keep is None else dy * cache.keep


def _sample_seeds(key: int, name: str, samples_B: Ints) -> npt.NDArray[np.uint64]:
    """Hash (key, name, sample) to 64 bits with the finalizer of splitmix64 (Steele et al., 2014), applied twice."""
    stream = _mix64(np.array([(key + zlib.crc32(name.encode()) * _GOLDEN) & _U64], np.uint64))
    return _mix64(stream + samples_B.astype(np.uint64) * np.uint64(_GOLDEN))


def _mix64(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _noise(seeds_B: npt.NDArray[np.uint64], first: int, elements: int) -> npt.NDArray[np.uint16]:
    """Hash (seed, element) to 16 bits with the finalizer lowbias32 (Wellons, 2018), from element ``first`` on.

    The second half of the seed enters between the two rounds, so that no two samples share a shifted sequence.
    """
    low_B1 = (seeds_B & _U32).astype(np.uint32)[:, None]
    high_B1 = (seeds_B >> 32).astype(np.uint32)[:, None]
    words = np.arange(first // 2, -(-(first + elements) // 2), dtype=np.uint32)
    h_BW = low_B1 + words * np.uint32(_GOLDEN >> 32)
    shifted = h_BW >> 16
    h_BW ^= shifted
    h_BW *= np.uint32(0x7FEB352D)
    h_BW ^= high_B1
    h_BW ^= np.right_shift(h_BW, 15, out=shifted)
    h_BW *= np.uint32(0x846CA68B)
    h_BW ^= np.right_shift(h_BW, 16, out=shifted)
    return h_BW.view(np.uint16)[:, first % 2 :][:, :elements]
