"""Values that codecs are measured with, and the bits that no code can do without at a given error.

Of drawn values Shannon's bound is known: ½·log2(σ²/D) for a Gaussian source, and for a Laplacian its lower bound
½·log2(e/π · σ²/D) (Shannon 1959). Of captured gradients it is not: taken instead is the bound of independent Gaussian
values with the second moments of the tensors, by reverse water-filling (Cover and Thomas, theorem 10.3.3). No source
with these moments has a larger R(D), so it is an *upper* bound of what is needed: a code may come to lie below it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from mpitrain.arrays import Floats, aligned_empty


@dataclass(frozen=True)
class Source:
    """What is encoded.

    Attributes
    ----------
    name : str
    values : (size,) float32
        Not changed.
    messages : list of slice
        Parts of ``values`` that are encoded by themselves, each with a header.
    count : int
        Values without the padding between tensors.
    least_bits : callable
        From the mean squared error of a value, not 0, to the least bits of a value.
    told : str
        What the values are, for people.
    """

    name: str
    values: Floats
    messages: list[slice]
    count: int
    least_bits: Callable[[float], float]
    told: str


def _laplacian(rng: np.random.Generator, out: Floats) -> None:
    rng.standard_exponential(dtype=np.float32, out=out)
    signs: Floats = rng.integers(0, 2, out.size, dtype=np.int8).astype(np.float32) * 2 - 1
    np.multiply(out, signs, out=out)


def _gaussian(rng: np.random.Generator, out: Floats) -> None:
    rng.standard_normal(dtype=np.float32, out=out)


DRAWN: dict[str, tuple[Callable[[np.random.Generator, Floats], None], float]] = {
    "gaussian": (_gaussian, 0.0),
    "laplace": (_laplacian, 0.5 * math.log2(math.e / math.pi)),
}
"""How values are drawn, and by how many bits the bound lies above that of a Gaussian of the same variance."""


def draw(name: str, size: int) -> Source:
    """Draw independent values, the same at every call; they travel in one message."""
    fill, above = DRAWN[name]
    x = aligned_empty(size)
    fill(np.random.default_rng(0), x)
    power = mean_square(x)
    return Source(
        name, x, [slice(0, size)], size, lambda noise: 0.5 * math.log2(power / noise) + above, f"{size:,} drawn"
    )


def mean_square(x: Floats) -> float:
    """Return the mean of the squares; 0 of no values."""
    return float(np.mean(np.square(x, dtype=np.float64))) if x.size else 0.0


def water_level(sizes: Sequence[int], powers: Sequence[float], noise: float) -> float:
    """Find the error that reverse water-filling gives to every value which is worth encoding.

    Parameters
    ----------
    sizes : list of int
        Values of each tensor.
    powers : list of float
        Their mean squares.
    noise : float
        Mean squared error of all values together.

    Returns
    -------
    float
        θ with Σ n·min(θ, σ²) = Σ n · ``noise``; the largest σ² where even sending nothing errs less than ``noise``.
    """
    tensors = sorted(zip(powers, sizes, strict=True))
    budget, remaining = noise * sum(sizes), sum(sizes)
    drowned = [0.0, *accumulate(power * size for power, size in tensors)]
    for (power, size), below in zip(tensors, drowned, strict=False):
        level = (budget - below) / remaining
        if level <= power:
            return level
        remaining -= size
    return tensors[-1][0]


def least_bits(sizes: Sequence[int], powers: Sequence[float], noise: float) -> float:
    """Return R(D) of independent Gaussian values, in bits a value; parameters as of `water_level`."""
    level = water_level(sizes, powers, noise)
    bits = (n * 0.5 * math.log2(power / level) for n, power in zip(sizes, powers, strict=True) if power > level)
    return sum(bits) / sum(sizes)
