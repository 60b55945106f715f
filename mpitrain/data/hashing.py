"""Random numbers by position: each value is a hash of its key, so any part can be drawn without the rest.

They depend on integer arithmetic alone, never on the version of numpy: ranks of different machines agree.
"""

import numpy as np
import numpy.typing as npt

from mpitrain.arrays import Ints

Keys = npt.NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def make_key(*parts: int | Ints) -> Keys:
    """Fold integers into keys.

    Parameters
    ----------
    parts : int or (n,) integer array
        What a value depends on: seed, station, sample. Arrays broadcast.

    Returns
    -------
    keys : (n,) uint64
        One key an element; (1,) where all parts are plain integers.
    """
    # Arrays, never scalars: only their uint64 arithmetic wraps around without a warning.
    keys = np.zeros(1, np.uint64)
    for part in parts:
        value = np.array([part & _MASK], np.uint64) if isinstance(part, int) else part.astype(np.uint64)
        keys = _mix(keys ^ _mix(value + _STEP))
    return keys


def draw_uniforms(keys: Keys, count: int) -> npt.NDArray[np.float64]:
    """Draw ``count`` uniform numbers of (0, 1) a key: (n, count) float64."""
    bits = _mix(keys[:, None] + _STEP * np.arange(1, count + 1, dtype=np.uint64))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def draw_normals(keys: Keys, count: int) -> npt.NDArray[np.float64]:
    """Draw ``count`` standard normal numbers a key (Box and Muller, 1958): (n, count) float64."""
    half = -(-count // 2)
    uniforms = draw_uniforms(keys, 2 * half)
    radius = np.sqrt(-2 * np.log(uniforms[:, :half]))
    angle = 2 * np.pi * uniforms[:, half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)[:, :count]


def permute(size: int, key: Keys) -> npt.NDArray[np.int64]:
    """Permute 0 to ``size`` - 1 by one key: (size,) int64."""
    bits = _mix(key + _STEP * np.arange(1, size + 1, dtype=np.uint64))
    return np.argsort(bits, kind="stable").astype(np.int64, copy=False)


def _mix(values: Keys) -> Keys:
    """Scramble bits: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
